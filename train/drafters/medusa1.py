"""Medusa-1 (arXiv 2401.10774): K extra heads on the frozen target, each for a token further ahead.

    p_k(x_{t+k+1}) = softmax(W_k (h_t + SiLU(B_k h_t + b_k)))      k = 1 .. K                              section 2.1.1
    loss           = sum_k 0.8^k CE_k                                                                       section 2.2.1

h is the target's last hidden state after its final norm. B_k and b_k start at zero and W_k as the target's head, so every head starts as the target's
own prediction one token early. Only h_t is read: no head sees the tokens between, not even x_{t+1}, which is known when the heads are used. That is
what the method gives up against EAGLE, and what makes it cheap: K drafts in one step, without attention or cache.

In the terms of data/batch.py, where draft s (0-based) of pair i predicts x_{i+2+s}, head k = s + 1 makes draft s from h_i:

    pair i = t               known: x_{i+1}, chosen by h_i     drafts:  s = 0    1        2        ...  K-1
                                                               head     k = 1    2        3             K
                                                               token    x_{i+2}  x_{i+3}  x_{i+4}  ...  x_{i+1+K}
                                                               judged by the target's row  i+1  i+2  i+3 ...  (soft labels)

Head k is trained at i where x_{i+1} .. x_{i+1+k} are all the assistant's: one turn, never across the user's.

Parameter names are those of the serving contract, section 5 (indices from 0: blocks.{k-1}, lm_heads.{k-1}).

Shapes: T packed tokens, R supervised rows, K heads, H hidden size, V vocabulary, n new positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from data.batch import DrafterBatch
from data.target import TargetHeads
from data.vocab import DraftVocabulary
from train.drafters.base import DistillingHead, DistillingHeads, Drafter, DrafterConfig, FeatureRequest, Guess, LossOutput, VerifiedStates
from train.losses import DistillationSums, Labels, Teacher, distillation_loss

_LOGIT_ROWS = 1024


@dataclass(frozen=True)
class Medusa1Config(DrafterConfig):
    """Settings of Medusa-1 heads.

    Attributes:
        num_heads: K, the longest chain of drafts.
        num_layers: residual blocks of a head, each with weights of its own.
        labels: "hard" trains on the token that came next, "soft" on the target's distribution of it. On the target's own greedy answers they
            come to the same (SmolLM2, 60 steps: tau 1.216 hard, 1.214 soft), and a step with soft labels takes about a tenth longer (8 to 14%). They
            hold all K heads at once, hard ones one: gathered in ZeRO-3, else a copy in the training precision.
        head_decay: weight of head k is head_decay^k.
        shared_lm_head: all heads go through the target's own head, frozen; only the blocks are trained. Spares K * V * H parameters.
    """

    algorithm: ClassVar[str] = "medusa1"

    num_heads: int = 5
    num_layers: int = 1
    labels: Literal["hard", "soft"] = "hard"
    head_decay: float = 0.8
    shared_lm_head: bool = False

    def __post_init__(self) -> None:
        for name, value in (("num_heads", self.num_heads), ("num_layers", self.num_layers)):
            if value < 1:
                raise ValueError(f"drafter.{name} is {value}, expected at least 1")
        if not 0 < self.head_decay <= 1:
            raise ValueError(f"drafter.head_decay is {self.head_decay}, expected a number in (0, 1]")

    def longest_chain(self) -> int:
        return self.num_heads


class ResidualBlocks(nn.Module):
    """x + SiLU(W x + b), num_layers times; the identity at initialisation."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(num_layers)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_TH = hidden_TH + nn.functional.silu(layer(hidden_TH))
        return hidden_TH


class Medusa1(Drafter):
    """Medusa heads."""

    config_class: ClassVar[type[Medusa1Config]] = Medusa1Config

    def __init__(self, config: Medusa1Config, target: PretrainedConfig, heads: TargetHeads, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(config, target, heads, vocabulary)
        assert vocabulary is None, "Medusa heads cover the target's whole vocabulary"
        vocab_size, hidden_size = heads.lm_head_VH.shape
        self.hidden_size = hidden_size
        self.blocks = nn.ModuleList([ResidualBlocks(hidden_size, config.num_layers) for _ in range(config.num_heads)])
        num_own_heads = 0 if config.shared_lm_head else config.num_heads
        lm_heads = [DistillingHead(hidden_size, vocab_size, bias=False) for _ in range(num_own_heads)]
        with torch.no_grad():
            for lm_head in lm_heads:
                lm_head.weight.copy_(heads.lm_head_VH)
        self.lm_heads = DistillingHeads(lm_heads) if config.labels == "soft" else nn.ModuleList(lm_heads)

    @classmethod
    def feature_request_of(cls, config: Medusa1Config, target: PretrainedConfig) -> FeatureRequest:
        return FeatureRequest(aux_layers=(), last=True)

    def num_supervised(self, batch: DrafterBatch) -> int:
        return int(batch.supervised(0).sum())

    # --- checkpoint -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_export(cls, export_config: dict[str, Any], tensors: dict[str, Tensor], target: PretrainedConfig, heads: TargetHeads) -> Medusa1:
        config = cls.config_class(
            num_heads=export_config["num_heads"],
            num_layers=export_config["num_hidden_layers"],
            shared_lm_head=export_config["original_lm_head"],
        )
        if config.shared_lm_head:  # An engine takes it from the file, not from the target.
            heads = dataclasses.replace(heads, lm_head_VH=tensors.pop("lm_head.weight").to(heads.lm_head_VH))
        drafter = cls(config, target, heads, None)
        drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return drafter

    def export_tensors(self) -> dict[str, Tensor]:
        shared = {"lm_head.weight": self.heads.lm_head_VH} if self.config.shared_lm_head else {}
        return {**self.state_dict(), **shared}

    def export_dimensions(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "num_heads": self.config.num_heads,
            "num_hidden_layers": self.config.num_layers,
            "original_lm_head": self.config.shared_lm_head,
        }

    # --- training -------------------------------------------------------------------------------------------------------

    def forward(self, batch: DrafterBatch) -> LossOutput:
        return self.heads_loss(batch, _last(batch))

    def heads_loss(self, batch: DrafterBatch, last_TH: Tensor) -> LossOutput:
        """Sum over heads k and supervised positions of decay^k * cross entropy."""
        sums = self._soft_loss(batch, last_TH) if self.config.labels == "soft" else self._hard_loss(batch, last_TH)
        metrics = {f"hits_{step}": hits for step, hits in enumerate(sums.hits_K)}
        return LossOutput(sums.loss_sum, metrics | {f"rows_{step}": rows for step, rows in enumerate(sums.rows_K)})

    def _hard_loss(self, batch: DrafterBatch, last_TH: Tensor) -> DistillationSums:
        """One head after the other: nothing is shared, and of the heads' weights one at a time is in use."""
        found = []
        for step, is_supervised_T in enumerate(self._supervised(batch)):
            hidden_1RH = self.blocks[step](self._cast(last_TH[is_supervised_T]))[None]
            weight_1R = torch.full(hidden_1RH.shape[:2], self._weight(step), device=last_TH.device)
            labels = Labels(batch.predicted_tokens(step)[is_supervised_T][None])
            if self.config.shared_lm_head:
                found.append(distillation_loss(hidden_1RH, self.heads.lm_head_VH, labels, weight_1R, "ce", self.heads.softcap))
            else:
                found.append(self.lm_heads[step](hidden_1RH, labels, weight_1R))
        loss_sums, *counts = zip(*found, strict=True)
        return DistillationSums(torch.stack(loss_sums).sum(), *(torch.cat(count) for count in counts))

    def _soft_loss(self, batch: DrafterBatch, last_TH: Tensor) -> DistillationSums:
        """All heads at once, aligned by the target's rows that judge them: row j judges head s + 1 on pair j-1-s."""
        weight_KT = torch.zeros(self.config.num_heads, batch.num_tokens, device=last_TH.device)
        for step, is_supervised_T in enumerate(self._supervised(batch)):
            weight_KT[step, batch.teacher_rows(step)[is_supervised_T]] = self._weight(step)
        rows_R = weight_KT.any(0).nonzero()[:, 0]
        states_TH = self._cast(last_TH)
        # A pair before the first weighs nothing: any row may stand for it.
        student_KRH = torch.stack([block(states_TH[(rows_R - 1 - step).clamp(min=0)]) for step, block in enumerate(self.blocks)])
        teacher = Teacher(last_TH.detach()[rows_R], self.heads.lm_head_VH, draft_ids_W=None, drops_outside=False, softcap=self.heads.softcap)
        if self.config.shared_lm_head:
            return distillation_loss(student_KRH, self.heads.lm_head_VH, teacher, weight_KT[:, rows_R], "ce", self.heads.softcap)
        return self.lm_heads(student_KRH, teacher, weight_KT[:, rows_R])

    def _weight(self, step: int) -> float:
        return self.config.head_decay ** (step + 1)

    def _supervised(self, batch: DrafterBatch) -> Iterator[Tensor]:
        """bool [T] for each head: everything from the known token to the predicted one is the assistant's."""
        is_supervised_T = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.position_T.device)
        for step in range(self.config.num_heads):
            is_supervised_T = is_supervised_T & batch.supervised(step)
            yield is_supervised_T

    def _cast(self, hidden_TH: Tensor) -> Tensor:
        return hidden_TH.to(next(self.blocks.parameters()).dtype)

    # --- drafting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        return self._drafts(_last(batch), num_drafts)

    def new_cache(self, num_sequences: int, capacity: int) -> None:
        """Heads remember nothing."""
        return None

    @torch.no_grad()
    def read(self, cache: None, verified: VerifiedStates, num_drafts: int) -> Guess:
        assert verified.last_BnH is not None, "Medusa asks for the last hidden state"
        self._check(num_drafts)
        hidden_B1H = self._cast(verified.newest(verified.last_BnH))
        logits = [self._logits(step, self.blocks[step](hidden_B1H)) for step in range(num_drafts)]
        return Guess(torch.cat(logits, dim=1), hidden_B1H)

    def _drafts(self, last_TH: Tensor, num_drafts: int) -> Tensor:
        """int64 [num_drafts, T], logits computed a block of rows at a time."""
        self._check(num_drafts)
        hidden_TH = self._cast(last_TH)
        return torch.stack([self._greedy(step, self.blocks[step](hidden_TH)) for step in range(num_drafts)])

    def _check(self, num_drafts: int) -> None:
        if num_drafts > self.config.num_heads:
            raise ValueError(f"{num_drafts} drafts are wanted of {self.config.num_heads} Medusa heads, but a head makes one: train more heads")

    def _greedy(self, step: int, hidden_TH: Tensor) -> Tensor:
        """int64 [T] most likely ids by the head of this draft."""
        return torch.cat([self._logits(step, block).argmax(-1) for block in hidden_TH.split(_LOGIT_ROWS)])

    def _logits(self, step: int, hidden_TH: Tensor) -> Tensor:
        if self.config.shared_lm_head:
            return hidden_TH.to(self.heads.lm_head_VH.dtype) @ self.heads.lm_head_VH.T
        return self.lm_heads[step](hidden_TH)


def _last(batch: DrafterBatch) -> Tensor:
    """[T, H] post-norm last hidden states of the target."""
    assert batch.features.last_TH is not None, "Medusa asks for the last hidden state"
    return batch.features.last_TH
