"""The run as a whole: the same drafter from stored and from online states, and only those stages again whose inputs have changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

REPORT_KEYS = {
    "tau",
    "tau_untrained",
    "joint_acceptance",
    "conditional_acceptance",
    "num_prompts",
    "num_tokens",
    "draft_length",
    "speedup_reference_decoder",
    "train_seconds",
    "total_seconds",
    "num_train_tokens",
}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, launcher_in: Callable[[Path], Any]) -> Any:
    made = launcher_in(tmp_path_factory.mktemp("runs"))
    made.here("offline")
    return made


@pytest.fixture
def copied(launcher: Any, tmp_path: Path) -> str:
    """The finished run under another name."""
    shutil.copytree(launcher.runs_dir / "offline", launcher.runs_dir / tmp_path.name)
    return tmp_path.name


def stages_run(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The stages that were not skipped."""
    return [line.strip("[]") for line in capsys.readouterr().out.splitlines() if line.startswith("[") and line.endswith("]") and " " not in line]


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["event"] == "train"]


def test_a_run_leaves_every_promised_file(launcher: Any) -> None:
    run_dir = launcher.runs_dir / "offline"
    for name in ("config.json", "data_report.json", "metrics.jsonl", "best.json", "report.json", "report.html", "export/config.json"):
        assert (run_dir / name).is_file(), name
    report = json.loads((run_dir / "report.json").read_text())
    assert report.keys() >= REPORT_KEYS
    steps = [record for record in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if record["event"] == "train"]
    assert report["num_train_tokens"] == sum(step["num_tokens"] for step in steps)
    assert [path.name for path in sorted(run_dir.glob("step_*"))] == ["step_4", "step_6"]


def test_online_states_train_the_same_drafter_as_stored_ones(launcher: Any) -> None:
    offline, online = launcher.runs_dir / "offline", launcher.runs_dir / "online"
    launcher.here("online", "--features.mode", "online")
    assert not (online / "features").exists()
    np.testing.assert_allclose(losses(online), losses(offline), rtol=0, atol=1e-5)
    tensors, expected = (load_file(folder / "export" / "model.safetensors") for folder in (online, offline))
    for name in expected:
        torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=1e-5, msg=name)


def test_states_in_eight_bits_train_nearly_the_same_drafter(launcher: Any) -> None:
    """Without "drop": whether the argmax of a target with random weights can be drafted is a matter of the last bit."""
    for storage in ("lossless", "int8"):
        launcher.here(storage, "--drafter.outside-vocabulary", "renormalise", "--features.storage", storage)
    eight, lossless = losses(launcher.runs_dir / "int8"), losses(launcher.runs_dir / "lossless")
    np.testing.assert_allclose(eight, lossless, rtol=1e-3, atol=0)
    assert eight != lossless


def test_the_targets_own_answers_can_be_trained_on(launcher: Any) -> None:
    launcher.here("own", "--answers.source", "target", "--answers.max-new-tokens", "24")
    assert (launcher.runs_dir / "own" / "regenerated").is_dir()
    assert len(losses(launcher.runs_dir / "own")) == 6


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["--eval.draft-length", "3"], ["evaluate"]),
        (["--train.log-every", "5", "--train.save-every", "3", "--log.wandb", "--log.wandb-project", "other"], []),
        (["--optim.learning-rate", "1e-3"], ["train", "export", "evaluate"]),
        (["--features.storage", "int8"], ["extract", "train", "export", "evaluate"]),
        (["--drafter.aux-layers", "1", "3", "6"], ["states", "extract", "train", "export", "evaluate"]),
        (["--data.seed", "1"], ["prepare", "answer", "states", "extract", "train", "export", "evaluate"]),
    ],
)
def test_only_stages_with_changed_inputs_run_again(
    launcher: Any, copied: str, overrides: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.here(copied, *overrides)
    assert stages_run(capsys) == expected


def test_a_changed_source_file_is_prepared_again(launcher: Any, copied: str, sharegpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = sharegpt.stat().st_atime_ns, sharegpt.stat().st_mtime_ns
    os.utime(sharegpt, ns=(1, 1))
    try:
        launcher.here(copied)
    finally:
        os.utime(sharegpt, ns=times)
    assert stages_run(capsys)[0] == "prepare"


def test_a_shared_store_serves_a_second_run_and_refuses_other_states(launcher: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ("--features.path", str(tmp_path / "store"))
    launcher.here("first", *store)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("shard_*")}
    launcher.here("second", *store, "--optim.learning-rate", "1e-3")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("shard_*")} == written
    assert losses(launcher.runs_dir / "first") == losses(launcher.runs_dir / "offline")
    launcher.here("8 bits wanted", *store, "--features.storage", "int8")
    assert losses(launcher.runs_dir / "8 bits wanted") == losses(launcher.runs_dir / "offline")
    assert "holds lossless states already: they are read instead" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        launcher.here("third", *store, "--drafter.aux-layers", "1", "3", "6")
    assert "into a store of its own that this recipe can then read" in capsys.readouterr().err
