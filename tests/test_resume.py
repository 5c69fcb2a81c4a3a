"""A run that is killed at any moment and started again ends bit for bit like one that was left alone."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train.best as best_module
import train.run as run_module
from checkpoints.resume import (
    begin_checkpoint,
    commit_checkpoint,
    latest_checkpoint,
    load_optimizer,
    load_rng,
    move_aside,
    prune_checkpoints,
    save_optimizer,
    save_rng,
)
from train.engine import TorchEngine
from train.metrics import MetricsLog

STAGES = ("prepare", "answer", "states", "extract", "train", "export", "evaluate")


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock or the machine."""
    of_the_machine = ("tokens_per_s", "wait_share", "peak_rss_bytes")
    return [{name: value for name, value in record.items() if name not in of_the_machine} for record in records(run_dir)]


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Exported weights and newest checkpoint bit for bit; every step once in metrics.jsonl, with the same numbers."""
    for file in ("export/model.safetensors", f"{newest(reference)}/weights.safetensors", f"{newest(reference)}/optimizer.safetensors"):
        if (reference / file).exists():  # DeepSpeed's checkpoints have other files
            tensors, expected = load_file(run_dir / file), load_file(reference / file)
            assert tensors.keys() == expected.keys()
            assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []
    assert without_times(run_dir) == without_times(reference)
    best, expected_best = (json.loads((folder / "best.json").read_text()) for folder in (run_dir, reference))
    assert best == expected_best
    assert not list(run_dir.glob("*.partial")) and not list(run_dir.glob("*.removed"))


def newest(run_dir: Path) -> str:
    checkpoint = latest_checkpoint(run_dir)
    assert checkpoint is not None
    return checkpoint.name


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, launcher_in: Callable[[Path], Any]) -> Any:
    """One runs folder for this file: its finished run `reference` is shared."""
    made = launcher_in(tmp_path_factory.mktemp("resume"))
    made.here("reference")
    return made


@pytest.fixture(scope="module")
def reference(launcher: Any) -> Path:
    return launcher.runs_dir / "reference"


@pytest.fixture
def begun(launcher: Any, reference: Path, tmp_path: Path) -> Path:
    """A run of its own name whose data, answers and features are there and whose training has not begun."""
    folder = launcher.runs_dir / tmp_path.name
    for name in ("data", "answers", "features", "stages", "data_report.json"):
        copy = shutil.copytree if (reference / name).is_dir() else shutil.copy
        folder.mkdir(exist_ok=True)
        copy(reference / name, folder / name)
    for name in STAGES[3:]:
        (folder / "stages" / f"{name}.json").unlink()
    return folder


# --- whole runs -----------------------------------------------------------------------------------------------------------


def test_a_finished_run_started_again_does_nothing(
    launcher: Any, reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = without_times(reference)
    monkeypatch.setattr(TorchEngine, "train_step", lambda *_: pytest.fail("a step was taken"))
    monkeypatch.setattr(run_module, "export_drafter", lambda *_, **__: pytest.fail("exported again"))
    launcher.here("reference")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")] == [f"[{name}] done before" for name in STAGES]
    assert without_times(reference) == before


class DiskOperations:
    """Counts what changes the disk while a run trains and exports, and kills the run at the `fatal`-th such call, before or after it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: int | None = None) -> None:
        self.names: list[str] = []
        self._fatal = fatal
        for owner, name in (
            (Path, "replace"),
            (Path, "rename"),
            (Path, "unlink"),
            (Path, "write_text"),
            (Path, "mkdir"),
            (shutil, "rmtree"),
            (best_module, "save_file"),
            (TorchEngine, "save"),
            (MetricsLog, "step"),
            (MetricsLog, "heldout"),
        ):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name), name))

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._tick(f"before {name}")
            result = function(*arguments, **options)
            self._tick(f"after {name}")
            return result

        return call

    def _tick(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) == self._fatal:
            raise Killed


def kill_at(launcher: Any, name: str, moments: list[int]) -> None:
    """Starts the run again and again, killed at the given moments, and then once to its end."""
    for moment in moments:
        with pytest.MonkeyPatch.context() as patch:
            DiskOperations(patch, fatal=moment)
            try:
                launcher.here(name)
            except Killed:
                continue
            break
    launcher.here(name)


@pytest.fixture(scope="module")
def moments(launcher: Any, reference: Path) -> list[str]:
    """What a run from the start of its training to its end does to the disk: the moments at which it can be killed."""
    folder = launcher.runs_dir / "counted"
    shutil.copytree(reference, folder)
    for name in STAGES[3:]:
        (folder / "stages" / f"{name}.json").unlink()
    move_aside(folder)
    with pytest.MonkeyPatch.context() as patch:
        operations = DiskOperations(patch)
        launcher.here("counted")
    assert operations.names.count("after save") == 3
    return operations.names


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments_it_ends_as_if_left_alone(launcher: Any, reference: Path, begun: Path, moments: list[str], seed: int) -> None:
    rng = random.Random(seed)
    # The first time between the first and the last checkpoint, so that the second start has one to go on from.
    first = rng.randrange(moments.index("after save"), len(moments) - moments[::-1].index("before save"))
    kill_at(launcher, begun.name, [first, rng.randrange(1, 60), rng.randrange(1, 60)])
    assert_same_end(begun, reference)


@pytest.mark.slow
def test_killed_at_every_fourth_moment_it_ends_as_if_left_alone(launcher: Any, reference: Path, begun: Path, moments: list[str]) -> None:
    for moment in range(1, len(moments), 4):
        folder = launcher.runs_dir / f"moment_{moment}"
        shutil.copytree(begun, folder)
        kill_at(launcher, folder.name, [moment])
        assert_same_end(folder, reference)
        shutil.rmtree(folder)


def test_a_changed_learning_rate_moves_the_old_steps_aside_and_the_old_one_gives_the_old_weights_again(
    launcher: Any, reference: Path, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.here(begun.name)
    launcher.here(begun.name, "--optim.learning-rate", "1e-3")
    assert "[train] stale: optim.learning_rate: 0.003 -> 0.001" in capsys.readouterr().out
    aside = begun / "superseded_1"
    assert {path.name for path in aside.iterdir()} >= {"step_6", "step_4", "best.json", "metrics.jsonl", "draft_vocab.json"}
    assert without_times(aside) == without_times(reference)
    steps = [record for record in records(begun) if record["event"] == "train"]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert max(record["learning_rate"] for record in steps) == 1e-3
    launcher.here(begun.name)
    assert (begun / "superseded_2").exists()
    assert_same_end(begun, reference)


@pytest.mark.parametrize("other", [("--drafter.draft-vocab-size", "64"), ("--optim.learning-rate", "0.5")])
def test_what_a_killed_run_of_other_settings_left_is_not_taken_over(
    launcher: Any, reference: Path, begun: Path, other: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint, but after its draft vocabulary and its first measurement."""
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "step", lambda self, step, *_: None if step < 4 else kill())
        with pytest.raises(Killed):
            launcher.here(begun.name, *other, "--train.save-every", "100")
    assert (begun / "best.json").exists() and not list(begun.glob("step_*"))
    launcher.here(begun.name)
    assert_same_end(begun, reference)


def kill() -> None:
    raise Killed


def test_settings_tried_and_killed_do_not_pass_for_done_when_the_old_ones_return(
    launcher: Any, reference: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.here(begun.name)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "step", lambda self, step, *_: None if step < 4 else kill())
        with pytest.raises(Killed):
            launcher.here(begun.name, "--optim.learning-rate", "0.5")
    launcher.here(begun.name)
    assert_same_end(begun, reference)


def test_random_numbers_go_on_where_they_were(launcher: Any, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    plain_step = TorchEngine.train_step

    def step_that_draws(self: TorchEngine, *arguments: Any) -> Any:
        drawn.append(torch.rand(()).item())
        if len(drawn) == 5:
            raise Killed
        return plain_step(self, *arguments)

    monkeypatch.setattr(TorchEngine, "train_step", step_that_draws)
    with pytest.raises(Killed):
        launcher.here(begun.name)
    drawn.append(0.0)  # no longer five
    launcher.here(begun.name)
    killed_at_step_5, resumed_at_step_5 = drawn[4], drawn[6]
    assert resumed_at_step_5 == killed_at_step_5


def test_time_of_earlier_starts_counts(launcher: Any, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_step(self: MetricsLog, step: int, *_: Any) -> None:
        time.sleep(0.3)
        if step == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "step", slow_step)
        with pytest.raises(Killed):
            launcher.here(begun.name)
    launcher.here(begun.name)
    assert json.loads((begun / "report.json").read_text())["train_seconds"] > 1.2


# --- kill -9 --------------------------------------------------------------------------------------------------------------


def run_until_killed(launcher: Any, how: str, name: str, delay_s: float, *overrides: str) -> bool:
    """Starts a real command and kills all its processes `delay_s` after its first training step; False if it had ended before."""
    process = launcher.start(how, name, *overrides)
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith("rank 0: steps"):
            break
    else:
        assert process.wait() == 0, "".join(output)
    try:
        process.wait(timeout=delay_s)
        return False
    except Exception:
        return True
    finally:
        launcher.kill(process)


KILLED = ("--train.max-steps", "40", "--train.save-every", "1", "--train.heldout-every", "5", "--drafter.ttt-steps", "2")


def test_kill_9_in_training_and_the_same_command_again(launcher: Any) -> None:
    launcher.here("alone", *KILLED)
    assert run_until_killed(launcher, "python", "killed", 0.7, *KILLED)
    launcher.here("killed", *KILLED)
    assert_same_end(launcher.runs_dir / "killed", launcher.runs_dir / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "num_kills"), [("torchrun", 4), ("deepspeed", 2)])
def test_many_kills_9_of_two_ranks(launcher: Any, how: str, num_kills: int) -> None:
    code, output = launcher(how, f"{how}_alone", *KILLED)
    assert code == 0, output
    rng = random.Random(0)
    for _ in range(num_kills):
        run_until_killed(launcher, how, f"{how}_killed", rng.uniform(0, 4), *KILLED)
    code, output = launcher(how, f"{how}_killed", *KILLED)
    assert code == 0, output
    assert_same_end(launcher.runs_dir / f"{how}_killed", launcher.runs_dir / f"{how}_alone")


# --- checkpoints ----------------------------------------------------------------------------------------------------------


def write(run_dir: Path, step: int) -> Path:
    partial = begin_checkpoint(run_dir, step)
    (partial / "file").write_text(str(step))
    return partial


def test_an_unfinished_checkpoint_is_never_the_newest(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    commit_checkpoint(write(tmp_path, 9))
    commit_checkpoint(write(tmp_path, 10))
    write(tmp_path, 11)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_10"
    prune_checkpoints(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_10"]


def test_a_removal_cut_short_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        commit_checkpoint(write(tmp_path, step))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_: kill())
        with pytest.raises(Killed):
            prune_checkpoints(tmp_path, 1)
    assert not (tmp_path / "step_1").exists()
    prune_checkpoints(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_moving_aside_takes_what_training_wrote_and_nothing_else(tmp_path: Path) -> None:
    assert move_aside(tmp_path) is None
    (tmp_path / "superseded_4").mkdir()
    (tmp_path / "data").mkdir()
    commit_checkpoint(write(tmp_path, 3))
    for name in ("best.json", "best_3.safetensors", "metrics.jsonl", "draft_vocab.json", "wandb_id", "trackers.json", "config.json"):
        (tmp_path / name).write_text("")
    aside = move_aside(tmp_path)
    assert aside == tmp_path / "superseded_5"
    moved = {"step_3", "best.json", "best_3.safetensors", "metrics.jsonl", "draft_vocab.json", "wandb_id", "trackers.json"}
    assert {path.name for path in aside.iterdir()} == moved
    assert {path.name for path in tmp_path.iterdir()} == {"superseded_4", "superseded_5", "data", "config.json"}


def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        module(torch.tensor([1.0, 2.0, 3.0])).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    module, optimizer = make()
    step(module, optimizer)
    save_optimizer(tmp_path / "optimizer.safetensors", module, optimizer)
    resumed, resumed_optimizer = make()
    resumed.load_state_dict(module.state_dict())
    load_optimizer(tmp_path / "optimizer.safetensors", resumed, resumed_optimizer)
    step(module, optimizer)
    step(resumed, resumed_optimizer)
    assert torch.equal(module.weight, resumed.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="belongs to another run"):
        load_optimizer(tmp_path / "optimizer.safetensors", torch.nn.Sequential(module), optimizer)


def test_random_state_goes_on_and_a_rank_without_one_is_an_error(tmp_path: Path) -> None:
    save_rng(tmp_path, 0)
    expected = torch.rand(3)
    load_rng(tmp_path, 0)
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(ValueError, match="was written by 1 ranks and this is rank 1: resume with 1 processes"):
        load_rng(tmp_path, 1)
