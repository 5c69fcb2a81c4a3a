"""One sequence on the frozen target: a key/value cache that can be rolled back, and the states that a drafter asks for.

Place in the flow: both reference decoders (plain.py, chain.py) run the target through this, so that their speeds differ by the
method alone.

Shapes: n new tokens, X = A * H concatenated auxiliary states, H hidden size, V vocabulary, k last positions whose logits are
wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from data.target import Target
from train.drafters.base import FeatureRequest

NOTHING = FeatureRequest(aux_layers=(), last=False)


@dataclass(frozen=True)
class StepOutput:
    """What the target says about n new tokens.

    Attributes:
        logits_kV: at the last k of them.
        aux_nX: concatenated auxiliary states, or None where none were requested.
        last_nH: post-norm last hidden states, or None likewise.
    """

    logits_kV: Tensor
    aux_nX: Tensor | None
    last_nH: Tensor | None


class TargetSession:
    """The target's cache for one sequence (batch 1)."""

    def __init__(self, target: Target, request: FeatureRequest = NOTHING) -> None:
        self._target = target
        self._base: Any = target.model.get_decoder()
        self._request = request
        # Without a config every layer keeps all positions, sliding-window layers too: those could not be rolled back.
        self._cache = DynamicCache()

    @property
    def num_tokens(self) -> int:
        """Positions in the cache."""
        return self._cache.get_seq_length()

    @torch.no_grad()
    def forward(self, token_ids: Sequence[int], num_logits: int) -> StepOutput:
        """Appends tokens and returns the target's logits at the last `num_logits` of them, with the requested states of all."""
        captured: dict[int, Tensor] = {}
        layers = self._target.layers
        # HF hidden_states[k] is the output of the k-th layer; k = L is taken before the final norm, as engines do.
        hooks = [layers[layer - 1].register_forward_hook(_keep(captured, layer)) for layer in self._request.aux_layers]
        try:
            ids_1n = torch.tensor([list(token_ids)], device=self._target.device)
            last_nH = self._base(input_ids=ids_1n, cache=self._cache, use_cache=True).last_hidden_state[0]
        finally:
            for hook in hooks:
                hook.remove()
        return StepOutput(
            logits_kV=self._target.logits(last_nH[-num_logits:]),
            aux_nX=torch.cat([captured[layer] for layer in self._request.aux_layers], dim=-1) if captured else None,
            last_nH=last_nH if self._request.last else None,
        )

    def rollback(self, num_tokens: int) -> None:
        """Forgets every position from `num_tokens` on."""
        surplus = self.num_tokens - num_tokens
        assert surplus >= 0, f"the cache holds {self.num_tokens} positions and cannot be rolled back to {num_tokens}"
        self._cache.crop(-surplus)


def _keep(captured: dict[int, Tensor], layer: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        captured[layer] = (output if isinstance(output, Tensor) else output[0])[0]

    return hook
