"""Packed target states and the batch a drafter trains on: the only place where tokens are shifted.

Place in the flow: `TokenizedSample` -> `Features` (read from a store or computed online) -> `DrafterBatch` -> `drafter.loss`.

Documents are laid end to end without padding. Position i of the pack holds token x_i and the target's state h_i, and the
drafter's *pair* i joins h_i with later tokens of the same document (serving-contract.md section 2). For one document of five
tokens and TTT step s:

    i                                 0     1     2     3     4
    token x_i                         x0    x1    x2    x3    x4
    known token at s=0,  x_{i+1}      x1    x2    x3    x4    -
    predicted at s=0,    x_{i+2}      x2    x3    x4    -     -
    known token at s=1,  x_{i+2}      x2    x3    x4    -     -
    predicted at s=1,    x_{i+3}      x3    x4    -     -     -

A dash is outside the document: the token id there is 0 and the position is never supervised. Pair i at step s is judged against
the target's distribution at position i+1+s, the one that chooses x_{i+2+s}.

Shapes: T packed tokens, D documents, X = A * H concatenated auxiliary states, H target hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Features:
    """What the target says about packed documents; the same type from a store and from an online forward.

    Attributes:
        input_ids_T: int64 token ids.
        loss_mask_T: bool, true where the token belongs to an assistant turn, its end token included.
        document_lengths: number of tokens of each document, in pack order; they sum to T.
        aux_TX: intermediate states, concatenated in ascending layer order, or None where the drafter needs none.
        last_TH: last hidden state after the final norm, or None where the drafter needs none.
    """

    input_ids_T: Tensor
    loss_mask_T: Tensor
    document_lengths: tuple[int, ...]
    aux_TX: Tensor | None
    last_TH: Tensor | None

    def __post_init__(self) -> None:
        num_tokens = self.input_ids_T.shape[0]
        if sum(self.document_lengths) != num_tokens:
            raise ValueError(f"document lengths sum to {sum(self.document_lengths)}, but the pack holds {num_tokens} tokens")
        for name, tensor in (("loss_mask_T", self.loss_mask_T), ("aux_TX", self.aux_TX), ("last_TH", self.last_TH)):
            if tensor is not None and tensor.shape[0] != num_tokens:
                raise ValueError(f"{name} has {tensor.shape[0]} rows, expected {num_tokens}")

    def to(self, device: torch.device | str) -> Features:
        """The same features on another device."""
        return replace(
            self,
            input_ids_T=self.input_ids_T.to(device, non_blocking=True),
            loss_mask_T=self.loss_mask_T.to(device, non_blocking=True),
            aux_TX=None if self.aux_TX is None else self.aux_TX.to(device, non_blocking=True),
            last_TH=None if self.last_TH is None else self.last_TH.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class DrafterBatch:
    """One packed micro-batch with the indices that every drafter needs.

    Attributes:
        features: the packed target states.
        position_T: int64, position of each token in its own document (the target's RoPE position).
        remaining_T: int64, number of tokens of the same document after this one.
    """

    features: Features
    position_T: Tensor
    remaining_T: Tensor

    @property
    def num_tokens(self) -> int:
        return self.position_T.shape[0]

    @property
    def document_lengths(self) -> tuple[int, ...]:
        return self.features.document_lengths

    def to(self, device: torch.device | str) -> DrafterBatch:
        """The same batch on another device."""
        position_T, remaining_T = (tensor.to(device, non_blocking=True) for tensor in (self.position_T, self.remaining_T))
        return DrafterBatch(self.features.to(device), position_T, remaining_T)

    def shift(self, values_T: Tensor, distance: int) -> Tensor:
        """values_T[i + distance] where that position is in the same document, else zero (False)."""
        shifted_T = torch.zeros_like(values_T)
        if distance < self.num_tokens:
            shifted_T[: self.num_tokens - distance] = values_T[distance:]
        return shifted_T.masked_fill(self.remaining_T < distance, 0)

    def known_tokens(self, step: int) -> Tensor:
        """int64 [T]: x_{i+1+step}, the last token that the drafter knows at this step."""
        return self.shift(self.features.input_ids_T, 1 + step)

    def predicted_tokens(self, step: int) -> Tensor:
        """int64 [T]: x_{i+2+step}, the token that the drafter predicts at this step."""
        return self.shift(self.features.input_ids_T, 2 + step)

    def supervised(self, step: int) -> Tensor:
        """bool [T]: both the last known and the predicted token are the assistant's (algorithms.md section 3, choice 2)."""
        mask_T = self.features.loss_mask_T
        return self.shift(mask_T, 1 + step) & self.shift(mask_T, 2 + step)

    def answered(self) -> Tensor:
        """bool [T]: the next token, x_{i+1}, is the assistant's: where a language model is supervised."""
        return self.shift(self.features.loss_mask_T, 1)

    def teacher_rows(self, step: int) -> Tensor:
        """int64 [T]: i+1+step, the row of the target's distribution that chooses the predicted token.

        Valid only where `supervised(step)` holds.
        """
        return torch.arange(self.num_tokens, device=self.position_T.device) + 1 + step


def drafter_batch(features: Features) -> DrafterBatch:
    """Adds positions and document ends to packed features."""
    device = features.input_ids_T.device
    position_T = torch.cat([torch.arange(length) for length in features.document_lengths]).to(device)
    remaining_T = torch.cat([torch.arange(length - 1, -1, -1) for length in features.document_lengths]).to(device)
    return DrafterBatch(features=features, position_T=position_T, remaining_T=remaining_T)
