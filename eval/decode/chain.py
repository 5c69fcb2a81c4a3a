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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eval.decode.drafter import DrafterMethod, check_draft_length, draft_probabilities, target_ids
from eval.decode.loop import Seen
from eval.decode.tree import DraftTree
from eval.decode.verify import Chance, Sampling
from train.drafters.base import Drafter, VerifiedStates


class Chain(DrafterMethod):
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
        super().__init__(drafter, longest_path=draft_length, most_nodes=draft_length)
        self._sampling, self._chance = sampling, chance

    @torch.no_grad()
    def draft(self, seen: Seen) -> list[DraftTree]:
        if self._sampling is None:
            ids_BK = draft_chain(self._drafter, self._cache, seen.states, self.longest_path, self._most_likely)
            return [DraftTree.chain(tuple(ids)) for ids in ids_BK.tolist()]
        self._probs_BV: list[Tensor] = []
        ids_BK = draft_chain(self._drafter, self._cache, seen.states, self.longest_path, self._sampled)
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
