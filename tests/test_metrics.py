"""metrics.jsonl holds every step once, and a tracker that fails never ends a run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.eagle3 import recipe
from train.config import LogConfig, RunConfig
from train.engine import StepOutput
from train.metrics import MetricsLog, ratios


def config(tmp_path: Path, wandb: bool = False) -> RunConfig:
    run = replace(recipe(), name="run", runs_dir=tmp_path, log=LogConfig(wandb=wandb))
    run.run_dir.mkdir(exist_ok=True)
    return run


def output(loss: float = 1.5) -> StepOutput:
    sums = {"hits_0": 5.0, "rows_0": 10.0, "hits_1": 1.0, "rows_1": 8.0, "outside_vocabulary": 2.0}
    return StepOutput(loss=loss, num_supervised=10, num_tokens=40, grad_norm=0.5, metrics=sums)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_sums_become_ratios() -> None:
    assert ratios(output().metrics) == {"accuracy": [0.5, 0.125], "outside_vocabulary_share": 0.2}
    assert ratios({"hits_0": 0.0, "rows_0": 0.0}) == {"accuracy": [0.0]}


def test_a_resumed_log_is_cut_back_to_the_resumed_step_and_mended(tmp_path: Path) -> None:
    log = MetricsLog(config(tmp_path), num_steps=5, first_step=0)
    for step in (1, 2, 3):
        log.step(step, output(), 0.1, 0.0)
        log.heldout(step, 1.25, [0.25], True)
    log.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "ste')
    log = MetricsLog(config(tmp_path), num_steps=5, first_step=2)
    log.step(3, output(9.0), 0.1, 0.0)
    log.close()
    assert [(record["event"], record["step"]) for record in lines(tmp_path)] == [
        ("train", 1),
        ("heldout", 1),
        ("train", 2),
        ("heldout", 2),
        ("train", 3),
    ]
    assert lines(tmp_path)[-1]["loss"] == 9.0
    assert lines(tmp_path)[0]["supervised_share"] == 0.25
    assert lines(tmp_path)[0]["packing_share"] == round(40 / recipe().train.batch_tokens, 4)


# --- wandb ----------------------------------------------------------------------------------------------------------------


class FakeWandb:
    """Stands for the package: records its calls, and fails where it is told to."""

    def __init__(self, fails_in: tuple[str, ...] = ()) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.num_finished = 0
        self._fails_in = fails_in
        self.Settings = SimpleNamespace

    def _check(self, name: str) -> None:
        if name in self._fails_in:
            raise RuntimeError(f"{name} failed")

    def init(self, **arguments: Any) -> FakeWandb:
        self.inits.append(arguments)
        self._check("offline" if arguments.get("mode") == "offline" else "online")
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self._check("log")
        self.logged.append((values, step))

    def finish(self) -> None:
        self.num_finished += 1
        self._check("finish")


def logged_with(fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_step: int = 0) -> None:
    """Three steps with wandb asked for."""
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log = MetricsLog(config(tmp_path, wandb=True), num_steps=first_step + 3, first_step=first_step)
    for step in range(first_step + 1, first_step + 4):
        log.step(step, output(), 0.1, 0.0)
    log.close()


def test_wandb_gets_the_numbers_of_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    logged_with(fake, tmp_path, monkeypatch)
    assert [step for _, step in fake.logged] == [1, 2, 3] and fake.num_finished == 1
    values = fake.logged[0][0]
    assert values["train/loss"] == 1.5 and values["train/accuracy/1"] == 0.125 and "train/step" not in values
    assert fake.inits[0]["config"]["optim"]["learning_rate"] == 1e-4


def test_a_resumed_training_goes_on_in_the_same_wandb_run_and_a_fresh_one_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    logged_with(fake, tmp_path, monkeypatch)
    logged_with(fake, tmp_path, monkeypatch, first_step=3)
    (tmp_path / "run" / "wandb_id").unlink()  # as when the earlier steps are moved aside
    logged_with(fake, tmp_path, monkeypatch)
    first, resumed, fresh = (arguments["id"] for arguments in fake.inits)
    assert first == resumed != fresh
    assert all(arguments["resume"] == "allow" for arguments in fake.inits)


@pytest.mark.parametrize(
    ("fails_in", "num_logged"), [(("online",), 3), (("online", "offline"), 0), (("log",), 0), (("finish",), 3), (("log", "finish"), 0)]
)
def test_a_failing_wandb_never_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails_in: tuple[str, ...], num_logged: int
) -> None:
    fake = FakeWandb(fails_in)
    logged_with(fake, tmp_path, monkeypatch)
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3]
    assert len(fake.logged) == num_logged
    assert any(line.startswith("wandb") for line in capsys.readouterr().out.splitlines())


def test_no_wandb_is_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    log = MetricsLog(config(tmp_path), num_steps=1, first_step=0)
    log.step(1, output(), 0.1, 0.0)
    log.close()
    assert len(lines(tmp_path)) == 1


def test_a_missing_wandb_is_said_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = MetricsLog(config(tmp_path, wandb=True), num_steps=1, first_step=0)
    log.step(1, output(), 0.1, 0.0)
    log.close()
    assert len(lines(tmp_path)) == 1
    assert "wandb could not start" in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_wandb_logs_offline_and_goes_on_under_the_same_id(launcher: Any) -> None:
    flags, offline = ("--log.wandb", "--train.max-steps", "40", "--train.save-every", "1"), {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    process = launcher.start("python", "run", *flags, **offline)
    assert process.stdout is not None
    assert any(line.startswith("step 5/") for line in process.stdout)
    launcher.kill(process)
    code, text = launcher("python", "run", *flags, **offline)
    assert code == 0, text
    folders = list((launcher.runs_dir / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith((launcher.runs_dir / "run" / "wandb_id").read_text()) for folder in folders)


@pytest.mark.slow
def test_a_dead_server_costs_some_twenty_seconds_and_the_run_goes_on_offline(launcher: Any) -> None:
    settings = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    started = time.monotonic()
    code, text = launcher("python", "run", "--log.wandb", **settings)
    assert code == 0, text
    assert "wandb is not reachable" in text
    assert list((launcher.runs_dir / "run" / "wandb").glob("offline-run-*"))
    assert (launcher.runs_dir / "run" / "report.json").exists()
    assert time.monotonic() - started < 60, "includes the run itself"
