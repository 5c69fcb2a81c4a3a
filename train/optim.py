"""The optimizer and its learning rate: AdamW, linear warm-up, cosine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from train.drafters.base import Drafter
from train.losses import cosine_schedule


@dataclass(frozen=True)
class OptimConfig:
    """AdamW settings.

    Attributes:
        learning_rate: peak.
        betas: AdamW's.
        weight_decay: applied to matrices, never to norms and biases.
        warmup_share: share of the steps over which the rate rises from 0.
        final_share: the rate at the end, as a share of the peak.
        max_grad_norm: gradients are clipped to this global norm.
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_share: float = 0.02
    final_share: float = 0.0
    max_grad_norm: float = 0.5

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"optim.learning_rate is {self.learning_rate}, expected a positive number")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"optim.warmup_share is {self.warmup_share}, expected a share in [0, 1)")
        if self.max_grad_norm <= 0:
            raise ValueError(f"optim.max_grad_norm is {self.max_grad_norm}, expected a positive number")

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of a step (0-based)."""
        num_warmup_steps = round(self.warmup_share * num_steps)
        return self.learning_rate * cosine_schedule(step, num_steps, num_warmup_steps, self.final_share)


def build_optimizer(drafter: Drafter, config: OptimConfig, is_fused: bool) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: of each part of the drafter, matrices and the rest in two groups."""
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in drafter.trained():
        groups.setdefault((drafter.part_of(name), parameter.ndim >= 2), []).append(parameter)
    settings = [
        {"params": parameters, "weight_decay": config.weight_decay if is_matrix else 0.0, "part": part}
        for (part, is_matrix), parameters in groups.items()
    ]
    return torch.optim.AdamW(settings, lr=config.learning_rate, betas=config.betas, fused=is_fused)


def set_rates(optimizer: torch.optim.Optimizer, rate: float, factors: Mapping[str, float]) -> None:
    """Sets the learning rate of every group: `rate` times the factor of the part that it belongs to."""
    for group in optimizer.param_groups:
        group["lr"] = rate * factors[group["part"]]
