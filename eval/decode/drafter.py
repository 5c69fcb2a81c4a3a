"""What the methods that draft with a trained drafter share: its cache, its memory, and its draft vocabulary.

Place in the flow: chain.py, static_tree.py, dynamic_tree.py and medusa_tree.py are `DrafterMethod`s; each says only how it drafts.

Shapes: B sequences, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eval.decode.loop import Method
from eval.decode.verify import Sampling
from train.drafters.base import Drafter


class DrafterMethod(Method):
    """A method with a drafter, and the drafter's cache for the batch that is being decoded."""

    def __init__(self, drafter: Drafter, longest_path: int, most_nodes: int, num_spare_columns: int = 0) -> None:
        """
        Args:
            drafter: on the target's device.
            longest_path, most_nodes: as in `Method`.
            num_spare_columns: columns of the drafter's cache for nodes that it reads beyond those that are verified.
        """
        self.longest_path, self.most_nodes = longest_path, most_nodes
        self.request = drafter.feature_request()
        self._drafter, self._num_spare_columns = drafter, num_spare_columns
        self._capacity = 0
        self._cache: Any = None

    def start(self, num_sequences: int, capacity: int) -> None:
        self._capacity = capacity + self._num_spare_columns
        self._cache = self._drafter.new_cache(num_sequences, self._capacity)

    def keep(self, rows: Sequence[int]) -> None:
        if self._cache is not None:
            self._cache.keep(torch.tensor(list(rows), device=self._cache.length_B.device))

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._drafter.state_dict().values())

    @property
    def cache_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.num_bytes * self._capacity


def target_ids(drafter: Drafter, index: Tensor) -> Tensor:
    """Target token ids of places in the draft vocabulary."""
    return index if drafter.draft_ids_W is None else drafter.draft_ids_W[index]


def draft_probabilities(drafter: Drafter, logits_BW: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] the drafter's distribution over the target's vocabulary, under the same temperature and cut-offs as the target's."""
    probs_BW = sampling.probabilities(logits_BW)
    if drafter.draft_ids_W is None:
        return probs_BW
    probs_BV = probs_BW.new_zeros(len(probs_BW), drafter.heads.lm_head_VH.shape[0])
    return probs_BV.index_copy(1, drafter.draft_ids_W, probs_BW)


def check_draft_length(drafter: Drafter, draft_length: int) -> None:
    """Raises ValueError where the drafter makes no chain of this length."""
    longest = drafter.config.longest_chain()
    if draft_length < 1 or (longest is not None and draft_length > longest):
        raise ValueError(f"a chain of {draft_length} drafts is wanted of {drafter.config.algorithm}, which drafts 1 to {longest or 'any number'}")


def check_goes_on(drafter: Drafter) -> None:
    """Raises ValueError where the drafter says all its drafts at once, and no tree can be grown from them."""
    if drafter.config.longest_chain() is not None:
        raise ValueError(f"{drafter.config.algorithm} says all its drafts at once and cannot go on from them: draft its tree with MedusaTree")
