"""metrics.jsonl holds every step once, with what it took, and is read back whatever a kill has left of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints.metrics import read_metrics
from recipes.eagle3 import recipe
from train.config import RunConfig
from train.engine import StepOutput
from train.metrics import MetricsLog, ratios
from train.peak_memory import peak_memory
from train.trackers import Trackers

ROOT = Path(__file__).resolve().parent.parent


def config(tmp_path: Path) -> RunConfig:
    run = replace(recipe(), name="run", runs_dir=tmp_path)
    run.run_dir.mkdir(exist_ok=True)
    return run


def log_from(tmp_path: Path, first_step: int) -> MetricsLog:
    run = config(tmp_path)
    return MetricsLog(run, num_steps=5, first_step=first_step, trackers=Trackers(run, is_main=True))


def output(loss: float = 1.5) -> StepOutput:
    sums = {"hits_0": 5.0, "rows_0": 10.0, "hits_1": 1.0, "rows_1": 8.0, "outside_vocabulary": 2.0}
    return StepOutput(loss=loss, num_supervised=10, num_tokens=40, grad_norm=0.5, metrics=sums)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_sums_become_ratios() -> None:
    assert ratios(output().metrics) == {"accuracy": [0.5, 0.125], "outside_vocabulary_share": 0.2}
    assert ratios({"hits_0": 0.0, "rows_0": 0.0}) == {"accuracy": [0.0]}


def test_a_resumed_log_is_cut_back_to_the_resumed_step_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_from(tmp_path, 0)
    for step in (1, 2, 3):
        log.step(step, output(), 0.1, 0.0)
        log.heldout(step, 1.25, [0.25], True)
    log.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "ste')
    log = log_from(tmp_path, 2)
    log.step(3, output(9.0), 0.1, 0.0)
    log.close()
    assert [(record["event"], record["step"]) for record in lines(tmp_path)] == [
        ("train", 1),
        ("heldout", 1),
        ("train", 2),
        ("heldout", 2),
        ("train", 3),
    ]
    assert "left out 1 damaged lines" in capsys.readouterr().out
    assert lines(tmp_path)[-1]["loss"] == 9.0
    assert lines(tmp_path)[0]["supervised_share"] == 0.25
    assert lines(tmp_path)[0]["packing_share"] == round(40 / recipe().train.batch_tokens, 4)


def test_memory_of_the_process_is_in_every_step_and_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_from(tmp_path, 4)
    log.step(5, output(), 0.1, 0.0)
    log.close()
    (record,) = lines(tmp_path)
    assert record["peak_rss_bytes"] == pytest.approx(peak_memory()["peak_rss_bytes"], rel=0.1)
    assert f"{record['peak_rss_bytes'] / 1e9:.1f} GB" in capsys.readouterr().out


def test_peak_memory_is_this_process_own_and_stays_after_it_is_freed() -> None:
    """A child begins small, whatever the process that started it holds, and remembers 300 MB that it gave back."""
    held = bytearray(b"x" * 500_000_000)
    code = (
        "from train.peak_memory import peak_memory as peak\n"
        "before = peak()['peak_rss_bytes']; held = bytearray(b'x' * 300_000_000); del held; print(before, peak()['peak_rss_bytes'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    before, after = map(int, shown.split())
    assert len(held) == 500_000_000 and before < peak_memory()["peak_rss_bytes"] - 300_000_000
    assert after >= before + 250_000_000


@pytest.mark.parametrize(
    "line", ["", "{", "[1]", '{"step": 1}', '{"event": "train"}', '{"event": "train", "step": "1"}', '{"event": 1, "step": 1}', "[" * 9999]
)
def test_a_line_that_is_no_record_is_counted_and_left_out(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"event": "train", "step": 3, "loss": NaN}}\n')
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert found.num_damaged == (line != "")
    assert [record["step"] for record in found.of("train")] == [3] and found.of("heldout") == [] and found.last_step == 3


def test_metrics_that_are_not_there_hold_nothing(tmp_path: Path) -> None:
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert (found.records, found.num_damaged, found.last_step) == ([], 0, 0)
