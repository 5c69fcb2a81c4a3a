"""What a run says while it trains: progress lines, metrics.jsonl, and Weights & Biases when asked.

The drafters report sums; here they become ratios, each with its unit in its name. metrics.jsonl is always written, one JSON object a line, flushed,
and cut back to the resumed step when a run goes on, so no step appears twice. A tracker that fails never ends a run.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from train.config import LogConfig, RunConfig, to_json
from train.engine import StepOutput


def ratios(metrics: dict[str, float]) -> dict[str, Any]:
    """`hits_s` / `rows_s` sums as accuracies by TTT step or head, parts of the loss (`loss_*`), and the share outside the draft vocabulary."""
    steps = sorted(int(name.removeprefix("rows_")) for name in metrics if name.startswith("rows_"))
    result: dict[str, Any] = {"accuracy": [round(metrics[f"hits_{step}"] / max(1.0, metrics[f"rows_{step}"]), 4) for step in steps]}
    result |= {name: round(value / max(1.0, metrics["rows_0"]), 4) for name, value in metrics.items() if name.startswith("loss_")}
    if "outside_vocabulary" in metrics and steps:
        result["outside_vocabulary_share"] = round(metrics["outside_vocabulary"] / max(1.0, metrics["rows_0"]), 4)
    return result


class MetricsLog:
    """metrics.jsonl, progress on the console and, when asked, wandb; rank 0 only."""

    def __init__(self, config: RunConfig, num_steps: int, first_step: int) -> None:
        self._path = config.run_dir / "metrics.jsonl"
        self._num_steps = num_steps
        self._log_every = config.train.log_every
        self._batch_tokens = config.train.batch_tokens
        self._first_step = first_step
        self._started = time.monotonic()
        self._tokens = 0
        self._waited_s = 0.0
        self._cut_back(first_step)
        self._file = self._path.open("a")
        self._tracker = Tracker(config) if config.log.wandb else None

    def _cut_back(self, first_step: int) -> None:
        """Drops lines that a killed run wrote after its last checkpoint, and a last line cut in the middle."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["step"] <= first_step:
                kept.append(line)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(self._path)

    def step(self, step: int, output: StepOutput, rate: float, waited_s: float) -> None:
        """Records optimizer step `step` (1-based count of steps done)."""
        self._tokens += output.num_tokens
        self._waited_s += waited_s
        elapsed_s = time.monotonic() - self._started
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
            **ratios(output.metrics),
        }
        self._write(record)
        if step % self._log_every == 0 or step == self._num_steps:
            done = step - self._first_step
            left_s = elapsed_s / done * (self._num_steps - step)
            accuracy = " ".join(f"{value:.3f}" for value in record["accuracy"])
            print(
                f"step {step}/{self._num_steps}  loss {output.loss:.3f}  accuracy {accuracy}  rate {rate:.2e}  "
                f"{record['tokens_per_s']:,.0f} tokens/s  {left_s / 60:.1f} min left",
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
        if self._tracker is not None:
            self._tracker.log(record)

    def close(self) -> None:
        self._file.close()
        if self._tracker is not None:
            self._tracker.close()


class Tracker:
    """The wandb run of a training: the same one when a training goes on, another when it starts afresh. Its failures never end a run."""

    def __init__(self, config: RunConfig) -> None:
        path = config.run_dir / "wandb_id"
        if not path.exists():
            path.write_text(f"{config.name}-{secrets.token_hex(4)}")
        self._run = start_wandb(config.log, config, path.read_text())

    def log(self, record: dict[str, Any]) -> None:
        """Sends one record of metrics.jsonl: its numbers, and its lists as a series an entry."""
        flat = {name: value for name, value in record.items() if isinstance(value, (int, float)) and name != "step"}
        lists = {f"{name}/{index}": item for name, value in record.items() if isinstance(value, list) for index, item in enumerate(value)}
        values = {f"{record['event']}/{name}": value for name, value in (flat | lists).items()}
        self._try(lambda run: run.log(values, step=record["step"]))

    def close(self) -> None:
        """Waits until everything is sent or stored."""
        self._try(lambda run: run.finish())
        self._run = None

    def _try(self, action: Callable[[Any], object]) -> None:
        """Acts on the wandb run as long as there is one; drops it at its first error."""
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._run = None
            print(f"wandb failed ({type(error).__name__}: {error}); the run goes on without it, metrics are in metrics.jsonl", flush=True)


def start_wandb(log: LogConfig, config: RunConfig, run_id: str) -> Any:
    """A wandb run that goes on under its id; offline when there is no key or the server does not answer.

    Returns None, with a printed reason, where wandb cannot even start offline: losing a tracker never ends a run.
    """
    run_dir = config.run_dir
    try:
        import wandb
    except ImportError as error:
        print(f"wandb could not start ({error}); the run goes on, metrics are in {run_dir}/metrics.jsonl", flush=True)
        return None
    arguments: dict[str, Any] = {
        "project": log.wandb_project,
        "name": config.name,
        "id": run_id,
        "resume": "allow",
        "dir": str(run_dir),
        "config": to_json(config),
    }
    is_offline = os.environ.get("WANDB_MODE") in {"offline", "disabled", "dryrun"}
    if not is_offline:
        settings = wandb.Settings(init_timeout=8, x_graphql_retry_max=1, x_graphql_timeout_seconds=5)
        try:
            return wandb.init(**arguments, settings=settings)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            print(f"wandb is not reachable ({reason}); logging offline to {run_dir}/wandb: `wandb sync` it later", flush=True)
    try:
        return wandb.init(**arguments, mode="disabled" if os.environ.get("WANDB_MODE") == "disabled" else "offline")
    except Exception as error:
        print(f"wandb could not start ({error}); the run goes on, metrics are in {run_dir}/metrics.jsonl", flush=True)
        return None
