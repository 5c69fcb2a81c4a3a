"""A chain of drafts from a draft head: what vLLM runs, for EAGLE-1, EAGLE-3 and Medusa alike.

The drafter reads the *target's* states of the positions that were verified, never its own from drafting, and then drafts K tokens one after the
other: greedily, or sampled from its own distribution (arXiv 2211.17192), which the verifier needs then.

    cache           ... newest | d0 d1 d2 d3         K = 4; d0 d1 accepted, d2 is not what the target says (t)
    target              d0    d1 t  .  .
    emitted             d0 d1 t                      the newest token is t
    next pairs      (h_newest, d0) (h_d0, d1) (h_d1, t)

Shapes: B sequences, K drafts, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eval.decode.loop import Method, Seen
from eval.decode.tree import DraftTree
from eval.decode.verify import Chance, Sampling
from train.drafters.base import Drafter, VerifiedStates


class Chain(Method):
    """K drafts, each after the one before it."""

    def __init__(self, drafter: Drafter, draft_length: int, sampling: Sampling | None = None, chance: Chance | None = None) -> None:
        """
        Args:
            drafter: on the target's device.
            draft_length: K, at least 1.
            sampling: how drafts are sampled; None drafts greedily.
            chance: what samples them; needed with `sampling`.

        Raises:
            ValueError: if the drafter makes no chain of this length.
        """
        check_draft_length(drafter, draft_length)
        assert (sampling is None) == (chance is None), "sampled drafts need a source of chance, greedy ones have none"
        self.longest_path = self.most_nodes = draft_length
        self.request = drafter.feature_request()
        self._drafter, self._sampling, self._chance = drafter, sampling, chance
        self._cache = DrafterCache(drafter)

    def start(self, num_sequences: int, capacity: int) -> None:
        self._cache.start(num_sequences, capacity)

    def keep(self, rows: Sequence[int]) -> None:
        self._cache.keep(rows)

    @torch.no_grad()
    def draft(self, seen: Seen) -> list[DraftTree]:
        if self._sampling is None:
            ids_BK = draft_chain(self._drafter, self._cache.cache, seen.states, self.longest_path, self._most_likely)
            return [DraftTree.chain(tuple(ids)) for ids in ids_BK.tolist()]
        self._probs_BV: list[Tensor] = []
        ids_BK = draft_chain(self._drafter, self._cache.cache, seen.states, self.longest_path, self._sampled)
        # The last draft has no children.
        probs_BRV = torch.stack([*self._probs_BV, torch.zeros_like(self._probs_BV[0])], dim=1)
        return [DraftTree.chain(tuple(ids), probs_RV) for ids, probs_RV in zip(ids_BK.tolist(), probs_BRV, strict=True)]

    def _most_likely(self, logits_BW: Tensor) -> Tensor:
        return target_ids(self._drafter, logits_BW.argmax(-1))

    def _sampled(self, logits_BW: Tensor) -> Tensor:
        assert self._chance is not None and self._sampling is not None
        probs_BV = draft_probabilities(self._drafter, logits_BW, self._sampling)
        self._probs_BV.append(probs_BV)
        return torch.tensor([self._chance.sample(probs_V) for probs_V in probs_BV], device=logits_BW.device)

    @property
    def weights_bytes(self) -> int:
        return self._cache.weights_bytes

    @property
    def cache_bytes(self) -> int:
        return self._cache.cache_bytes


class DrafterCache:
    """A drafter's drafting cache for the batch that is being decoded, and what drafter and cache take of memory."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._capacity = 0
        self.cache: Any = None

    def start(self, num_sequences: int, capacity: int) -> None:
        self._capacity = capacity
        self.cache = self._drafter.new_cache(num_sequences, capacity)

    def keep(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.keep(torch.tensor(list(rows), device=self.cache.length_B.device))

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._drafter.state_dict().values())

    @property
    def cache_bytes(self) -> int:
        return 0 if self.cache is None else self.cache.num_bytes * self._capacity


def draft_chain(drafter: Drafter, cache: Any, states: VerifiedStates, num_drafts: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """int64 [B, K] target ids; `choose` turns the logits [B, W] of a draft into its token [B]."""
    guess = drafter.read(cache, states, num_drafts)
    num_at_once = guess.logits_BnW.shape[1]
    tokens = [choose(guess.logits_BnW[:, step]) for step in range(min(num_drafts, num_at_once))]
    for num_nodes in range(1, num_drafts - num_at_once + 1):
        sees_B1m = torch.ones(len(tokens[-1]), 1, num_nodes, dtype=torch.bool, device=tokens[-1].device)
        guess = drafter.extend(cache, guess.hidden_BnH, tokens[-1][:, None], sees_B1m)
        tokens.append(choose(guess.logits_BnW[:, 0]))
    return torch.stack(tokens, dim=1)


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
