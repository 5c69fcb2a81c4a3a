"""What a user types is checked before anything is done, and every mistake ends in one line and exit code 2."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig

import train.cli as cli_module
from data.storage import bytes_per_state
from eval.evaluation import Evaluation
from recipes.eagle3 import recipe
from train.cli import main, strip_launcher_flags
from train.config import FeaturesConfig
from train.drafters.base import algorithms, load_drafter_class
from train.plan import num_parameters


@pytest.fixture
def stopped(tmp_path: Path, tiny_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line with overrides, expects it to stop with exit code 2, and returns what it said on stderr."""

    def start(*overrides: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(recipe(), Evaluation(), ["--name", "run", "--runs-dir", str(tmp_path / "runs"), *tiny_arguments, *overrides])
        assert stop.value.code == 2
        output = capsys.readouterr()
        assert "Traceback" not in output.out + output.err
        return output.err

    return start


def the_line(stderr: str) -> str:
    """The one error line; nothing else but progress bars and warnings may be there."""
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    assert stderr.rstrip().endswith(lines[0])
    return lines[0]


# --- the four recipes -----------------------------------------------------------------------------------------------------


def test_every_recipe_is_in_the_help_and_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(recipe(), Evaluation(), ["--help"])
    help_text, readme = capsys.readouterr().out, (Path(__file__).parent.parent / "README.md").read_text()
    assert set(cli_module.RECIPES) == set(algorithms())
    for name in algorithms():
        assert f"{name}: " in help_text
        assert f"`recipes/{name}.py`" in readme


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "medusa1", "medusa2"])
def test_what_the_help_says_a_recipe_costs_is_so(name: str) -> None:
    """For the shapes of Llama-3.1-8B, built without memory."""
    target = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    config = importlib.import_module(f"recipes.{name}").recipe().drafter
    num_trained, _ = num_parameters(config, target)
    request = load_drafter_class(name).feature_request_of(config, target)
    stored = bytes_per_state(FeaturesConfig().storage, 4096, torch.bfloat16) * (len(request.aux_layers) + request.last)
    expected = f"{num_trained / 1e9:.2f} B; {f'{stored / 1e3:.1f} kB' if stored else 'nothing stored'}; {16 * num_trained / 1e9:.1f} GB"
    assert cli_module.RECIPES[name].startswith(expected)
    if name == "medusa1":
        shared, _ = num_parameters(dataclasses.replace(config, shared_lm_head=True), target)
        assert f"({shared / 1e9:.2f} B and {16 * shared / 1e9:.1f} GB with" in cli_module.RECIPES[name]


# --- mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--target.model", "/no/such/model"], "target.model '/no/such/model' "),
        (["--data.sources", "no_such_file.json"], "no file or folder 'no_such_file.json'"),
        (["--data.sources", "package:no-such-package"], "package 'no-such-package', which is not installed"),
        (["--drafter.draft-vocab-size", "259"], "drafter.draft_vocab_size is 259, but the target has 258 tokens"),
        (["--drafter.draft-vocab-size", "0"], "drafter.draft_vocab_size is 0"),
        (["--drafter.aux-layers", "2", "9"], "auxiliary layers are (2, 9), expected ascending indices from 1 to the target's 7"),
        (["--eval.num-prompts", "50"], "the held-out split has 12 different prompts"),
        (["--data.num-heldout", "60"], "too few to hold out 60"),
        (["--train.engine", "deepspeed", "--train.deepspeed-config", "nowhere.json"], "train.deepspeed_config nowhere.json cannot be read"),
        (["--optim.learning-rate", "1e30"], "lower optim.learning_rate"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(stopped: Any, overrides: list[str], expected: str) -> None:
    assert expected in the_line(stopped(*overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--train.max-stepz", "3"], "--train.max-steps"),
        (["--drafter.ttt-step", "3"], "--drafter.ttt-steps"),
        (["--train.max-steps", "many"], "--train.max-steps"),
        (["--features.mode", "online", "--features.path", "x"], "features.path has no effect with features.mode online"),
        (["--answers.max-conversations", "3"], "answers.max_conversations has no effect with answers.source dataset"),
        (["--train.deepspeed-config", "x.json"], "train.deepspeed_config has no effect with train.engine torch"),
        (["--drafter.draft-vocab-size", "None", "--drafter.outside-vocabulary", "renormalise"], "drafter.outside_vocabulary has no effect"),
        (["--train.engine", "deepspeed"], "train.engine deepspeed needs train.deepspeed_config"),
        (["--train.batch-tokens", "500"], "no multiple of train.pack_tokens"),
        (["--data.max-length", "4096"], "a pack must hold a document"),
        (["--train.num-epochs", "0"], "train.num_epochs is 0"),
        (["--name", "a/b"], "expected a folder name"),
        (["--name", "my-eagle-1"], "vLLM takes any path with 'eagle-' in it for EAGLE-1"),
    ],
)
def test_a_mistyped_or_useless_option_is_named_with_the_nearest_one(stopped: Any, overrides: list[str], expected: str) -> None:
    boxed = stopped(*overrides)
    unwrapped = " ".join(boxed.replace("│", " ").split())
    assert expected in unwrapped


def test_packs_that_the_ranks_cannot_share_are_an_error_before_any_work(stopped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for flags in ([], ["--dry-run"]):
        assert "a step has 4 packs" in the_line(stopped(*flags))
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_that_cannot_be_written_is_one_line(stopped: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory" in the_line(stopped("--runs-dir", str(tmp_path / "file" / "runs")))


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing past this size fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("num_bytes", "stage"),
    [
        pytest.param(1_000, "", marks=pytest.mark.slow),
        (6_000, "prepare"),
        pytest.param(30_000, "prepare", marks=pytest.mark.slow),
        pytest.param(100_000, "states", marks=pytest.mark.slow),
        (135_000, "train"),
    ],
)
def test_a_full_disk_is_one_line_in_any_stage_and_the_run_goes_on_when_there_is_room(
    stopped: Any, tmp_path: Path, tiny_arguments: list[str], num_bytes: int, stage: str
) -> None:
    with largest_file(num_bytes):
        assert "large" in the_line(stopped("--features.mode", "online"))
    begun = [path.stem for path in (tmp_path / "runs" / "run" / "stages").glob("*.json") if json.loads(path.read_text())["seconds"] is None]
    assert begun == ([stage] if stage else [])
    main(recipe(), Evaluation(), ["--name", "run", "--runs-dir", str(tmp_path / "runs"), *tiny_arguments, "--features.mode", "online"])
    assert (tmp_path / "runs" / "run" / "report.json").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left"), ValueError("two\n  lines")])
def test_errors_of_every_layer_are_one_line(stopped: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(cli_module, "run", fail)
    assert the_line(stopped()).removeprefix("error: ") == " ".join(str(error).split())


def test_a_bug_of_ours_keeps_its_traceback(tmp_path: Path, tiny_arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(cli_module, "run", fail)
    with pytest.raises(KeyError):
        main(recipe(), Evaluation(), ["--runs-dir", str(tmp_path), *tiny_arguments])


# --- looking without running ----------------------------------------------------------------------------------------------


def test_help_names_every_setting_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(recipe(), Evaluation(), ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--dry-run", "--target.model", "--data.sources", "--drafter.ttt-steps", "--train.deepspeed-config", "--eval.draft-length"):
        assert option in text
    assert list(tmp_path.iterdir()) == []


def dry_run(tmp_path: Path, tiny_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    main(recipe(), Evaluation(), ["--dry-run", "--name", "run", "--runs-dir", str(tmp_path), *tiny_arguments])
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_dry_run_prints_the_plan_before_and_after_the_data_are_there(
    tmp_path: Path, tiny_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = dry_run(tmp_path, tiny_arguments, capsys)
    assert "about 48 conversations" in plan and "about 6 of 512 tokens (4 packs)" in plan
    assert list(tmp_path.iterdir()) == []
    # fc 3H*H; q 2H*H, k and v 2H*H/2 each, o H*H; three MLP matrices; four norms; the head's 128 rows.
    assert f"drafter parameters {32 * 32 * (3 + 2 + 1 + 1 + 1) + 3 * 32 * 48 + 4 * 32 + 128 * 32:,}" in plan
    main(recipe(), Evaluation(), ["--name", "run", "--runs-dir", str(tmp_path), *tiny_arguments])
    plan = dry_run(tmp_path, tiny_arguments, capsys)
    assert "train split 48 conversations" in plan and "about 48" not in plan and "steps 6 of 512 tokens" in plan


def test_a_dry_run_of_many_ranks_prints_once(
    tmp_path: Path, tiny_arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert dry_run(tmp_path, tiny_arguments, capsys) == ""
    monkeypatch.setenv("RANK", "0")
    assert "drafter parameters" in dry_run(tmp_path, tiny_arguments, capsys)


def test_launcher_flags_are_stripped() -> None:
    assert strip_launcher_flags(["--local_rank=1", "--name", "x", "--local-rank=0"]) == ["--name", "x"]


# --- several ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun", "deepspeed"])
def test_an_error_on_rank_0_ends_every_rank_with_one_line(launcher: Any, how: str) -> None:
    started = time.monotonic()
    code, output = launcher(how, "run", "--data.sources", "no_such_file.json", timeout_s=120)
    assert code != 0
    assert [line for line in output.splitlines() if "error: " in line and "no_such_file" in line] != []
    assert output.count("error: there is no file or folder 'no_such_file.json'") == 1
    assert "[rank" not in output, "a rank has left a traceback"
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_the_same_mistake_on_every_rank_is_said_once(launcher: Any) -> None:
    code, output = launcher("torchrun", "run", "--target.model", "/no/such/model", timeout_s=120)
    assert code != 0
    assert output.count("error: target.model '/no/such/model' ") == 1


@pytest.mark.slow
def test_help_and_typing_mistakes_are_printed_once_under_a_launcher(launcher: Any) -> None:
    code, output = launcher("torchrun", "run", "--train.max-stepz", "3", timeout_s=120)
    assert code != 0 and output.count("Perhaps you meant") == 1
    assert os.environ.get("RANK") is None
