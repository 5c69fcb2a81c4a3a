"""Every recipe runs to its end on the same data, from one store of hidden states, whatever the processes and interruptions.

Processes and interruptions in depth are the matter of test_engine.py and test_resume.py, with EAGLE-3; here each algorithm shows that it has nothing
of its own that breaks them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from same_run import assert_same_weights, interrupted_after

from checkpoints.export import validate_export
from eval.evaluation import Evaluation
from train.cli import main

ALGORITHMS = ("eagle3", "eagle1", "medusa1", "medusa2")
# What makes a run a small one, and two ranks equal to one: dropout is drawn by each rank for itself.
SMALL = {
    "eagle3": ["--drafter.draft-vocab-size", "40", "--drafter.ttt-steps", "3"],
    "eagle1": [],
    "medusa1": [],
    "medusa2": ["--drafter.lora-dropout", "0", "--drafter.backbone-warmup-steps", "2", "--drafter.heads-weight", "0.2"],
}


@pytest.fixture(scope="module")
def shared_arguments(tiny_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that every recipe has, and a store for all of them."""
    folder = tmp_path_factory.mktemp("recipes")
    pairs = zip(tiny_arguments[::2], tiny_arguments[1::2], strict=True)
    common = [part for pair in pairs if not pair[0].startswith("--drafter.") for part in pair]
    # Only the last step is measured and exported: the one where differences have had the time to grow.
    common += ["--train.heldout-every", "6"]
    return [*common, "--runs-dir", str(folder / "runs"), "--features.path", str(folder / "store")]


def own_arguments(algorithm: str, arguments: list[str]) -> list[str]:
    """Those of an algorithm: Medusa-2 has no use for a store."""
    store = arguments.index("--features.path")
    rest = [*arguments[:store], *arguments[store + 2 :]] if algorithm == "medusa2" else arguments
    return [*rest, *SMALL[algorithm]]


def run(algorithm: str, arguments: list[str]) -> Path:
    recipe = importlib.import_module(f"recipes.{algorithm}").recipe()
    main(recipe, Evaluation(), own_arguments(algorithm, arguments))
    return Path(arguments[arguments.index("--runs-dir") + 1]) / recipe.name


@pytest.fixture(scope="module")
def runs(shared_arguments: list[str]) -> dict[str, Path]:
    return {algorithm: run(algorithm, shared_arguments) for algorithm in ALGORITHMS}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_recipe_runs_to_its_end(runs: dict[str, Path], algorithm: str) -> None:
    report = json.loads((runs[algorithm] / "report.json").read_text())
    assert report["tau"] >= 1.0
    assert len(report["joint_acceptance"]) == 2
    assert json.loads((runs[algorithm] / "export" / "headstart.json").read_text())["algorithm"] == algorithm
    validate_export(runs[algorithm] / "export")


def test_one_store_serves_every_recipe(runs: dict[str, Path], shared_arguments: list[str]) -> None:
    """EAGLE-3 wrote it, with its auxiliary states and the last one; the others read the last one from it and wrote nothing."""
    store = Path(shared_arguments[-1])
    header = json.loads((store / "index.json").read_text())["header"]
    assert (header["aux_layers"], header["has_last"]) == ([2, 3, 4], True)
    assert [path for path in runs.values() if (path / "features").exists()] == []


def test_a_store_that_lacks_states_is_refused_by_their_name(
    runs: dict[str, Path], shared_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poor = [*shared_arguments, "--features.path", str(tmp_path / "store"), "--train.max-steps", "1"]
    run("medusa1", [*poor, "--name", "poor"])
    with pytest.raises(SystemExit):
        run("eagle3", [*poor, "--name", "rich"])
    message = capsys.readouterr().err
    assert "layers 2, 3, 4 must be extracted" in message
    assert f"`python recipes/eagle3.py --features.path {tmp_path / 'store'}_more --drafter.aux-layers 2 3 4 ...` does it" in message


def test_a_store_of_other_documents_is_refused(runs: dict[str, Path], shared_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("eagle1", [*shared_arguments, "--name", "other", "--data.max-length", "64"])
    assert "holds states of something else: samples" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["eagle1", "medusa1", "medusa2"])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(runs: dict[str, Path], shared_arguments: list[str], algorithm: str) -> None:
    with interrupted_after(4):
        run(algorithm, [*shared_arguments, "--name", "interrupted"])
    torch.manual_seed(12345)  # another process has another random state
    run(algorithm, [*shared_arguments, "--name", "interrupted"])
    assert_same_weights(runs[algorithm].parent / "interrupted", runs[algorithm], tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "how", "overrides"),
    [
        *((algorithm, how, ()) for algorithm in ("eagle1", "medusa1", "medusa2") for how in ("torchrun", "deepspeed")),
        # The other ZeRO stages with the one that trains most: EAGLE-3 has them in tests/test_engine.py.
        ("medusa2", "deepspeed", ("ds_zero1.json",)),
        ("medusa2", "deepspeed", ("ds_zero3.json",)),
    ],
)
def test_two_ranks_end_like_one_process(
    launcher: Any, runs: dict[str, Path], shared_arguments: list[str], algorithm: str, how: str, overrides: tuple[str, ...]
) -> None:
    arguments = [part for option in overrides for part in ("--train.deepspeed-config", str(launcher.checkout / "launch" / option))]
    own = dataclasses.replace(launcher, arguments=own_arguments(algorithm, shared_arguments))
    started = own.command(how, "two", *arguments, "--runs-dir", str(launcher.runs_dir))
    command = [part.replace("eagle3.py", f"{algorithm}.py") for part in started]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    finished = subprocess.run(command, cwd=launcher.runs_dir, env=environment, text=True, capture_output=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert_same_weights(launcher.runs_dir / "two", runs[algorithm], tolerance=1e-5)
