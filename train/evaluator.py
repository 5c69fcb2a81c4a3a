"""What training asks of the measuring side. A recipe hands in the implementation (eval/evaluation.py): training does not depend on eval/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from datasets import Dataset

from checkpoints.provenance import TrainingFacts
from data.heldout import EvalConfig
from data.target import TargetConfig
from train.drafters.base import Drafter, FeatureRequest


class Acceptance(Protocol):
    """What training needs of a measurement."""

    @property
    def tau(self) -> float: ...

    @property
    def joint_acceptance(self) -> list[float]: ...


class Evaluator(Protocol):
    """The measuring side of a run."""

    def answer(self, answers_dir: Path, target: TargetConfig, settings: EvalConfig, device: torch.device, heldout: Dataset) -> None:
        """Lets the target answer the held-out prompts."""

    def states(self, answers_dir: Path, target: TargetConfig, settings: EvalConfig, device: torch.device, request: FeatureRequest) -> None:
        """Stores the target's hidden states of the answers beside them."""

    def heldout(self, answers_dir: Path, settings: EvalConfig, device: torch.device) -> Callable[[Drafter], Acceptance]:
        """A function that measures a drafter on the prompts that choose the best step."""

    def compare_targets(
        self,
        run_dir: Path,
        original: TargetConfig,
        trained: TargetConfig,
        settings: EvalConfig,
        device: torch.device,
        heldout: Dataset,
        max_perplexity_increase: float,
    ) -> None:
        """Measures what training did to the target and writes backbone.json.

        Raises:
            ValueError: if its perplexity rose by a larger share than `max_perplexity_increase`.
        """

    def report(
        self,
        run_dir: Path,
        answers_dir: Path,
        target: TargetConfig,
        settings: EvalConfig,
        device: torch.device,
        dataset: tuple[str, ...],
        untrained: Drafter,
        training: TrainingFacts,
    ) -> None:
        """Measures the exported checkpoint and writes report.json and report.html."""
