"""What a run says while it trains: progress lines, metrics.jsonl, and the trackers that are asked for.

The drafters report sums; here they become ratios, each with its unit in its name. metrics.jsonl is always written, one JSON object a line, flushed,
and cut back to the resumed step when a run goes on, so no step appears twice. The trackers (train/trackers.py) are told the same records.
"""

from __future__ import annotations

import json
import time
from typing import Any

from checkpoints.metrics import read_metrics
from train.config import RunConfig
from train.engine import StepOutput
from train.peak_memory import peak_memory
from train.trackers import Trackers


def ratios(metrics: dict[str, float]) -> dict[str, Any]:
    """`hits_s` / `rows_s` sums as accuracies by TTT step or head, parts of the loss (`loss_*`), and the share outside the draft vocabulary."""
    steps = sorted(int(name.removeprefix("rows_")) for name in metrics if name.startswith("rows_"))
    result: dict[str, Any] = {"accuracy": [round(metrics[f"hits_{step}"] / max(1.0, metrics[f"rows_{step}"]), 4) for step in steps]}
    result |= {name: round(value / max(1.0, metrics["rows_0"]), 4) for name, value in metrics.items() if name.startswith("loss_")}
    if "outside_vocabulary" in metrics and steps:
        result["outside_vocabulary_share"] = round(metrics["outside_vocabulary"] / max(1.0, metrics["rows_0"]), 4)
    return result


class MetricsLog:
    """metrics.jsonl, progress on the console, and the trackers; rank 0 only."""

    def __init__(self, config: RunConfig, num_steps: int, first_step: int, trackers: Trackers) -> None:
        self._path = config.run_dir / "metrics.jsonl"
        self._num_steps = num_steps
        self._log_every = config.train.log_every
        self._batch_tokens = config.train.batch_tokens
        self._first_step = first_step
        self._started = time.monotonic()
        self._tokens = 0
        self._waited_s = 0.0
        self._trackers = trackers
        kept = self._cut_back(first_step)
        self._file = self._path.open("a")
        trackers.open(kept)

    def _cut_back(self, first_step: int) -> list[dict[str, Any]]:
        """Drops what a killed run wrote after its last checkpoint, and a last line cut in the middle; returns what stays."""
        found = read_metrics(self._path)
        kept = [record for record in found.records if record["step"] <= first_step]
        if found.num_damaged:
            print(f"{self._path}: left out {found.num_damaged} damaged lines", flush=True)
        if len(kept) < len(found.records) or found.num_damaged:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(f"{json.dumps(record)}\n" for record in kept))
            temporary.replace(self._path)
        return kept

    def step(self, step: int, output: StepOutput, rate: float, waited_s: float) -> None:
        """Records optimizer step `step` (1-based count of steps done)."""
        self._tokens += output.num_tokens
        self._waited_s += waited_s
        elapsed_s = time.monotonic() - self._started
        memory = peak_memory()
        record = {
            "event": "train",
            "step": step,
            "loss": round(output.loss, 8),
            "learning_rate": rate,
            "grad_norm": round(output.grad_norm, 6),
            "num_tokens": output.num_tokens,
            "supervised_share": round(output.num_supervised / max(1, output.num_tokens), 4),
            "packing_share": round(output.num_tokens / self._batch_tokens, 4),
            "tokens_per_s": round(self._tokens / elapsed_s, 1),
            "wait_share": round(self._waited_s / elapsed_s, 4),
            **memory,
            **ratios(output.metrics),
        }
        self._write(record)
        if step % self._log_every == 0 or step == self._num_steps:
            done = step - self._first_step
            left_s = elapsed_s / done * (self._num_steps - step)
            accuracy = " ".join(f"{value:.3f}" for value in record["accuracy"])
            peak_bytes = memory["peak_gpu_bytes"] if "peak_gpu_bytes" in memory else memory["peak_rss_bytes"]
            print(
                f"step {step}/{self._num_steps}  loss {output.loss:.3f}  accuracy {accuracy}  rate {rate:.2e}  "
                f"{record['tokens_per_s']:,.0f} tokens/s  {peak_bytes / 1e9:.1f} GB  {left_s / 60:.1f} min left",
                flush=True,
            )

    def heldout(self, step: int, tau: float, joint_acceptance: list[float], is_best: bool) -> None:
        """Records a measurement of held-out acceptance."""
        self._write({"event": "heldout", "step": step, "tau": round(tau, 4), "joint_acceptance": [round(p, 4) for p in joint_acceptance]})
        acceptance = " ".join(f"{value:.3f}" for value in joint_acceptance)
        print(f"held-out at step {step}: tau {tau:.3f}  joint acceptance {acceptance}{'  (best)' if is_best else ''}", flush=True)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._trackers.record(record)

    def close(self) -> None:
        """The trackers stay open: the run's results are to come."""
        self._file.close()
