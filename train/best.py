"""The best step of a run: measured on the way, its weights kept, so that a run that overtrains still exports its best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from train.drafters.base import Drafter
from train.evaluator import Acceptance
from train.metrics import MetricsLog


class BestStep:
    """Measures held-out acceptance on rank 0 and keeps the weights of the best step."""

    def __init__(self, run_dir: Path, drafter: Drafter, measure: Callable[[Drafter], Acceptance], log: MetricsLog) -> None:
        """
        Args:
            run_dir: the run's folder.
            drafter: a drafter of its own, to load the weights into: the engine may have sharded or cast the trained one.
            measure: held-out acceptance of a drafter.
            log: is told of every measurement.
        """
        self._run_dir = run_dir
        self._log = log
        self._drafter = drafter.eval()
        self._measure = measure
        path = self._run_dir / "best.json"
        self._best: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"step": -1, "tau": 0.0}

    def measure(self, step: int, state: dict[str, Tensor]) -> None:
        """Measures `state` and keeps it if it is the best so far."""
        self._drafter.load_trained(state)
        acceptance = self._measure(self._drafter)
        is_best = acceptance.tau > self._best["tau"] or step == self._best["step"]
        if is_best:
            self._keep(step, acceptance.tau, state)
        self._log.heldout(step, acceptance.tau, acceptance.joint_acceptance, is_best)

    def _keep(self, step: int, tau: float, state: dict[str, Tensor]) -> None:
        """Weights first, then best.json that points to them, then the earlier best goes."""
        weights = self._run_dir / f"best_{step}.safetensors"
        temporary = self._run_dir / "best.partial"
        save_file(state, temporary)
        temporary.replace(weights)
        self._best = {"step": step, "tau": tau, "weights": weights.name}
        (self._run_dir / "best.json.tmp").write_text(json.dumps(self._best))
        (self._run_dir / "best.json.tmp").replace(self._run_dir / "best.json")
        for path in self._run_dir.glob("best_*.safetensors"):
            if path != weights:
                path.unlink()


def best_weights(run_dir: Path) -> Path:
    """The weights of the best step."""
    return run_dir / json.loads((run_dir / "best.json").read_text())["weights"]
