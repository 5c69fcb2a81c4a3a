"""The draft vocabulary: which target tokens a drafter can propose, chosen once and kept with the run.

Place in the flow: counts of supervised tokens of the train split -> `DraftVocabulary` -> EAGLE-3's `lm_head` rows, `d2t`, `t2d`. It is saved with
the run and never rebuilt silently: another order of the same ids would scramble a trained head.

Shapes: W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """The W target ids that the drafter's head covers.

    Attributes:
        ids: ascending target token ids.
        target_vocab_size: V.
        coverage: share of the supervised training tokens that are among them, 0 to 1.
    """

    ids: tuple[int, ...]
    target_vocab_size: int
    coverage: float

    def __post_init__(self) -> None:
        if any(later <= earlier for earlier, later in zip(self.ids, self.ids[1:], strict=False)):
            raise ValueError("draft vocabulary ids must ascend without repetition")
        if not self.ids or self.ids[0] < 0 or self.ids[-1] >= self.target_vocab_size:
            raise ValueError(f"draft vocabulary ids must lie in 0..{self.target_vocab_size - 1}, found {self.ids[:1]}..{self.ids[-1:]}")

    @property
    def ids_W(self) -> Tensor:
        return torch.tensor(self.ids, dtype=torch.int64)

    @property
    def d2t_W(self) -> Tensor:
        """int64 [W] offsets: target id = j + d2t[j]."""
        return self.ids_W - torch.arange(len(self.ids))

    @property
    def t2d_V(self) -> Tensor:
        """bool [V]: whether a target id can be drafted."""
        mask_V = torch.zeros(self.target_vocab_size, dtype=torch.bool)
        mask_V[self.ids_W] = True
        return mask_V

    def save(self, path: Path) -> None:
        """Writes JSON, atomically."""
        temporary = path.with_suffix(".tmp")
        document = {"target_vocab_size": self.target_vocab_size, "coverage": self.coverage, "ids": list(self.ids)}
        temporary.write_text(json.dumps(document))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> DraftVocabulary:
        """Reads what `save` wrote."""
        fields = json.loads(path.read_text())
        return cls(ids=tuple(fields["ids"]), target_vocab_size=fields["target_vocab_size"], coverage=fields["coverage"])


def count_supervised_tokens(samples: Iterable[tuple[np.ndarray, np.ndarray]], target_vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each token is supervised; `samples` yields (input_ids, loss_mask) pairs."""
    counts_V = np.zeros(target_vocab_size, dtype=np.int64)
    for input_ids_T, loss_mask_T in samples:
        counts_V += np.bincount(input_ids_T[loss_mask_T], minlength=target_vocab_size)
    return counts_V


def choose_draft_vocabulary(counts_V: np.ndarray, size: int) -> DraftVocabulary:
    """The `size` most frequent supervised tokens; ties go to the lower id, so the choice is deterministic.

    Raises:
        ValueError: if `size` is not in 1..V, or no token is supervised at all.
    """
    if not 1 <= size <= len(counts_V):
        raise ValueError(f"draft vocabulary size is {size}, expected 1 to the target's {len(counts_V)}")
    if counts_V.sum() == 0:
        raise ValueError("the train split has no supervised token to choose a draft vocabulary from: look at data_report.json")
    chosen = np.sort(np.argsort(-counts_V, kind="stable")[:size])
    coverage = float(counts_V[chosen].sum() / counts_V.sum())
    return DraftVocabulary(ids=tuple(int(i) for i in chosen), target_vocab_size=len(counts_V), coverage=coverage)
