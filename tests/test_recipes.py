"""Every recipe runs to its end on the same data, and one store of hidden states serves them all."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from checkpoints.export import validate_export
from eval.evaluation import Evaluation
from train.cli import main

ALGORITHMS = ("eagle3", "eagle1", "medusa1")


@pytest.fixture(scope="module")
def shared_arguments(tiny_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that every recipe has, and a store for all of them."""
    folder = tmp_path_factory.mktemp("recipes")
    pairs = zip(tiny_arguments[::2], tiny_arguments[1::2], strict=True)
    common = [part for pair in pairs if not pair[0].startswith("--drafter.") for part in pair]
    return [*common, "--runs-dir", str(folder / "runs"), "--features.path", str(folder / "store")]


def run(algorithm: str, arguments: list[str]) -> Path:
    recipe = importlib.import_module(f"recipes.{algorithm}").recipe()
    small = ["--drafter.draft-vocab-size", "40", "--drafter.ttt-steps", "3"] if algorithm == "eagle3" else []
    main(recipe, Evaluation(), [*arguments, *small])
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
    assert "layers 2, 3, 4 must be extracted" in capsys.readouterr().err


def test_a_store_of_other_documents_is_refused(runs: dict[str, Path], shared_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("eagle1", [*shared_arguments, "--name", "other", "--data.max-length", "64"])
    assert "holds states of something else: samples" in capsys.readouterr().err
