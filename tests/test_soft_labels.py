"""Medusa's soft labels in whole runs: the heads are judged together, under ZeRO-3 and across interruptions too."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from same_run import assert_same_weights, interrupted_after

from eval.evaluation import Evaluation
from recipes.medusa1 import recipe
from train.cli import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def soft_arguments(tiny_arguments: list[str]) -> list[str]:
    pairs = zip(tiny_arguments[::2], tiny_arguments[1::2], strict=True)
    common = [part for pair in pairs if not pair[0].startswith("--drafter.") for part in pair]
    return [*common, "--drafter.labels", "soft", "--drafter.num-heads", "3", "--train.heldout-every", "6"]


@pytest.fixture(scope="module")
def reference(soft_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that one process takes."""
    runs_dir = tmp_path_factory.mktemp("soft")
    torch.set_num_threads(1)
    main(recipe(), Evaluation(), ["--runs-dir", str(runs_dir), *soft_arguments])
    return runs_dir / recipe().name


def test_a_run_that_was_interrupted_ends_with_the_same_bits(reference: Path, soft_arguments: list[str], tmp_path: Path) -> None:
    arguments = ["--runs-dir", str(tmp_path), "--features.path", str(reference / "features"), *soft_arguments]
    with interrupted_after(4):
        main(recipe(), Evaluation(), arguments)
    main(recipe(), Evaluation(), arguments)
    assert_same_weights(tmp_path / recipe().name, reference, tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["ds_zero2.json", "ds_zero3.json", "ds_zero3_offload.json"])
def test_two_ranks_under_deepspeed_end_like_one_process(launcher: Any, reference: Path, soft_arguments: list[str], tmp_path: Path, file: str) -> None:
    """Under ZeRO-3 every weight is divided, however small, so that the heads have to be gathered where they are judged."""
    config = json.loads((ROOT / "launch" / file).read_text())
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (tmp_path / "ds.json").write_text(json.dumps(config))
    own = dataclasses.replace(launcher, arguments=soft_arguments)
    started = own.command("deepspeed", "two", "--train.deepspeed-config", str(tmp_path / "ds.json"), "--features.path", str(reference / "features"))
    command = [part.replace("eagle3.py", "medusa1.py") for part in started]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert_same_weights(launcher.runs_dir / "two", reference, tolerance=1e-5)
