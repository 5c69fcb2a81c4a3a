"""EAGLE-1's tree (arXiv 2401.15077, section 3.1): the same shape at every verification, drafted level by level.

    read                 newest -> guesses at depth 1          one forward of the drafter a level, over the nodes that have children;
    extend   00 01 ..    depth 1 -> guesses at depth 2         each sees the verified positions, its ancestors and itself
    extend   000 ..      depth 2 -> ...

Greedily, the children of a node are the drafter's best guesses. With sampling they are drawn from its distribution q one after the other, each from
what the ones before it left of q, so that the verifier can accept each with min(1, p / q) and decoding stays lossless (appendix B of the paper, and
`verify.first_accepted`).

Shapes: B sequences, n nodes of a level, m expanded nodes so far, R = 1 + nodes of the tree, W draft vocabulary, V target vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.decode.drafter import DrafterMethod, check_goes_on, draft_probabilities, target_ids
from eval.decode.loop import Seen
from eval.decode.tree import ROOT, DraftTree, ancestors_of
from eval.decode.tree_shape import EAGLE_TREE, TreeShape
from eval.decode.verify import Chance, Sampling
from train.drafters.base import Drafter


class StaticTree(DrafterMethod):
    """A fixed tree over the ranks of the drafter's guesses."""

    def __init__(self, drafter: Drafter, tree: TreeShape | None = None, sampling: Sampling | None = None, chance: Chance | None = None) -> None:
        """
        Args:
            drafter: on the target's device; one that can go on from its drafts.
            tree: None takes `EAGLE_TREE`.
            sampling: how siblings are sampled; None takes the best guesses. Rank r is then the r-th draw.
            chance: what samples them; needed with `sampling`.

        Raises:
            ValueError: if the drafter cannot go on from its drafts.
        """
        check_goes_on(drafter)
        assert (sampling is None) == (chance is None), "sampled drafts need a source of chance, greedy ones have none"
        self._tree = tree or EAGLE_TREE
        super().__init__(drafter, longest_path=self._tree.depth, most_nodes=self._tree.num_nodes)
        self._levels = _levels(self._tree)
        self._sampling, self._chance = sampling, chance

    @torch.no_grad()
    def draft(self, seen: Seen) -> list[DraftTree]:
        guess = self._drafter.read(self._cache, seen.states, 1)
        ids: list[Tensor] = []
        probs_by_row: dict[int, Tensor] = {}
        for level in self._levels:
            if self._sampling is None:
                ids_Bn = self._best(level, guess.logits_BnW)
            else:
                probs_BnV = self._probabilities(guess.logits_BnW, self._sampling)
                probs_by_row |= {parent + 1: probs_BnV[:, slot] for slot, parent in enumerate(level.parents)}
                ids_Bn = self._drawn(level, probs_BnV)
            ids.append(ids_Bn)
            if level.expanded:
                hidden_BnH = guess.hidden_BnH[:, [level.slots[place] for place in level.expanded]]
                sees_Bnm = level.sees_nm.to(ids_Bn.device).expand(len(ids_Bn), -1, -1)
                guess = self._drafter.extend(self._cache, hidden_BnH, ids_Bn[:, level.expanded], sees_Bnm)
        drafts = torch.cat(ids, dim=1).tolist()
        if self._sampling is None:
            return [DraftTree(tuple(ids_n), self._tree.parents) for ids_n in drafts]
        nothing_BV = torch.zeros_like(probs_by_row[0])
        probs_BRV = torch.stack([probs_by_row.get(row, nothing_BV) for row in range(1 + self._tree.num_nodes)], dim=1)
        return [DraftTree(tuple(ids_n), self._tree.parents, draft_probs_RV=probs_RV) for ids_n, probs_RV in zip(drafts, probs_BRV, strict=True)]

    def _best(self, level: _Level, logits_BnW: Tensor) -> Tensor:
        """int64 [B, n] target ids of a level, from the logits of the nodes above it."""
        num_ranks = max(level.ranks) + 1
        if num_ranks > logits_BnW.shape[-1]:
            raise ValueError(f"the tree wants {num_ranks} guesses of a drafter that knows {logits_BnW.shape[-1]} tokens: take a narrower one")
        best_Bnk = logits_BnW.topk(num_ranks).indices
        return target_ids(self._drafter, best_Bnk[:, level.slots, level.ranks])

    def _drawn(self, level: _Level, probs_BnV: Tensor) -> Tensor:
        """int64 [B, n] the same, sampled from the distributions of the nodes above it."""
        assert self._chance is not None
        counts = [level.slots.count(slot) for slot in range(len(level.parents))]
        drawn = [
            [token for probs_V, count in zip(probs_nV, counts, strict=True) for token in without_replacement(probs_V, count, self._chance)]
            for probs_nV in probs_BnV
        ]
        return torch.tensor(drawn, device=probs_BnV.device)

    def _probabilities(self, logits_BnW: Tensor, sampling: Sampling) -> Tensor:
        return draft_probabilities(self._drafter, logits_BnW.flatten(0, 1), sampling).unflatten(0, logits_BnW.shape[:2])


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth.

    Attributes:
        parents: nodes above that have children, in the order in which the drafter was given them.
        slots: of each node, the place of its parent in `parents`.
        ranks: of each node.
        expanded: places of the nodes that have children.
        sees_nm: bool, which expanded nodes, of all levels down to this one, each expanded node of this level sees.
    """

    parents: list[int]
    slots: list[int]
    ranks: list[int]
    expanded: list[int]
    sees_nm: Tensor


def _levels(tree: TreeShape) -> list[_Level]:
    expanded_row = torch.tensor(sorted(set(tree.parents) - {ROOT}), dtype=torch.int64) + 1
    levels, parents, num_expanded = [], [ROOT], 0
    for depth in range(1, tree.depth + 1):
        nodes = [node for node, path in enumerate(tree.paths) if len(path) == depth]
        expanded = [place for place, node in enumerate(nodes) if node in tree.parents]
        first, num_expanded = num_expanded, num_expanded + len(expanded)
        sees_nm = ancestors_of(tree.parents)[expanded_row[first:num_expanded]][:, expanded_row[:num_expanded]]
        slots = [parents.index(tree.parents[node]) for node in nodes]
        levels.append(_Level(parents, slots, [tree.paths[node][-1] for node in nodes], expanded, sees_nm))
        parents = [nodes[place] for place in expanded]
    return levels


def without_replacement(probs_V: Tensor, count: int, chance: Chance) -> list[int]:
    """Draws different tokens, each from what the ones before it left of the distribution.

    Where nothing is left the last one is repeated: the shape wants a node there, and the verifier takes no notice of a repetition.
    """
    left_V = probs_V.clone()
    drawn: list[int] = []
    for _ in range(count):
        mass = left_V.sum()
        drawn.append(chance.sample(left_V / mass) if mass > 0 else drawn[-1])
        left_V[drawn[-1]] = 0
    return drawn
