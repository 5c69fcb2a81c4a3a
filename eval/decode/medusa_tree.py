"""Medusa's tree (arXiv 2401.10774, section 2.1.2): the best guesses of all heads at once, combined along a static tree.

    head 1    the   a    one          every token of depth d is a guess of head d; no head knows what the others guess, so the children of
    head 2    cat   dog               "the" and of "a" are the same tokens
    tree      the cat, the dog, a cat, one

Which combinations are worth a row of the target (appendix C of the paper): the chance that a path is right is estimated by the product over its nodes
of how often head d's guess of that rank was right on calibration prompts, and the tree takes in the node with the greatest product until it is full.

With `verify.Greedy` and `verify.Sampled` this is lossless; the paper's own acceptance at a temperature is `verify.Typical`, which is not.

Shapes: B sequences, K heads, k ranks, P calibration positions, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from data.batch import drafter_batch
from eval.acceptance import TrajectoryPack
from eval.decode.drafter import DrafterMethod, check_draft_length
from eval.decode.loop import Seen
from eval.decode.tree import DraftTree
from eval.decode.tree_shape import TreeShape
from train.drafters.base import Drafter, VerifiedStates

_POSITIONS = 64


class MedusaTree(DrafterMethod):
    """A fixed tree over the ranks of each head's guesses."""

    def __init__(self, drafter: Drafter, tree: TreeShape) -> None:
        """
        Args:
            drafter: Medusa-1 or Medusa-2 heads, on the target's device.
            tree: at most as deep as there are heads.

        Raises:
            ValueError: if the tree is deeper, or the drafter is another one.
        """
        _num_heads(drafter)
        check_draft_length(drafter, tree.depth)
        super().__init__(drafter, longest_path=tree.depth, most_nodes=tree.num_nodes)
        self._tree = tree
        self._heads = [len(path) - 1 for path in tree.paths]
        self._ranks = [path[-1] for path in tree.paths]

    @torch.no_grad()
    def draft(self, seen: Seen) -> list[DraftTree]:
        guess = self._drafter.read(self._cache, seen.states, self._tree.depth)
        best_BKk = guess.logits_BnW.topk(self._tree.num_ranks).indices
        return [DraftTree(tuple(ids), self._tree.parents) for ids in best_BKk[:, self._heads, self._ranks].tolist()]


def calibrate_medusa_tree(accuracies_Kk: Tensor, num_nodes: int = 63, max_children: int = 10) -> TreeShape:
    """The tree that takes in the node with the greatest product of accuracies, one after the other; of equal ones the shallower, of lower ranks.

    Args:
        accuracies_Kk: float, how often head K's guess of rank k is right; from `measure_head_accuracies`.
        num_nodes: without the root, at least 1; fewer where the heads have no more combinations.
        max_children: of a node.
    """
    if num_nodes < 1 or max_children < 1:
        raise ValueError(f"num_nodes is {num_nodes} and max_children {max_children}, expected at least 1 of each")
    accuracies = accuracies_Kk[:, :max_children].double().tolist()
    paths: list[tuple[int, ...]] = []
    open_nodes: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]  # minus the product, depth, path
    while open_nodes and len(paths) <= num_nodes:
        negative_product, depth, path = heapq.heappop(open_nodes)
        paths.append(path)
        if depth < len(accuracies):
            for rank, accuracy in enumerate(accuracies[depth]):
                heapq.heappush(open_nodes, (negative_product * accuracy, depth + 1, (*path, rank)))
    return TreeShape.of(paths[1:])  # the root is no node


@torch.no_grad()
def measure_head_accuracies(drafter: Drafter, packs: Sequence[TrajectoryPack], max_rank: int = 10) -> Tensor:
    """How often each head's guess of each rank is the token that came, over the positions of the answers at which a verification can begin.

    Args:
        drafter: the heads; packs are moved to their device one at a time.
        packs: calibration trajectories, from `eval.acceptance.trajectory_features` with the last state.
        max_rank: ranks that are counted.

    Returns:
        float64 [K, max_rank] on the CPU; a row sums to at most 1.

    Raises:
        ValueError: if a head has no position to be measured at, or the drafter has no heads.
    """
    num_heads = _num_heads(drafter)
    hits_Kk, positions_K = torch.zeros(num_heads, max_rank, dtype=torch.float64), torch.zeros(num_heads, dtype=torch.int64)
    for pack in packs:
        batch = drafter_batch(pack.features.to(next(drafter.parameters()).device))
        last_TH = batch.features.last_TH
        assert last_TH is not None, "Medusa asks for the last hidden state"
        came_KT = torch.stack([batch.predicted_tokens(step) for step in range(num_heads)])
        has_come_KT = torch.stack([batch.remaining_T >= 2 + step for step in range(num_heads)])
        first_pairs = [(span.start + span.first_pair, span.num_answer_tokens - 1) for span in pack.spans]
        positions_P = torch.cat([torch.arange(first, first + count) for first, count in first_pairs]).to(last_TH.device)
        for position_P in positions_P.split(_POSITIONS):
            one_P = torch.ones_like(position_P)
            states = VerifiedStates(None, last_TH[position_P][:, None], came_KT[:1, position_P].T, one_P)
            best_PKk = drafter.read(None, states, num_heads).logits_BnW.topk(max_rank).indices
            is_hit_PKk = (best_PKk == came_KT[:, position_P].T[:, :, None]) & has_come_KT[:, position_P].T[:, :, None]
            hits_Kk += is_hit_PKk.sum(0).cpu()
            positions_K += has_come_KT[:, position_P].sum(1).cpu()
    if bool((positions_K == 0).any()):
        raise ValueError(f"{num_heads} Medusa heads look {num_heads + 1} tokens ahead, but no calibration answer is that long: take longer answers")
    return hits_Kk / positions_K[:, None]


def _num_heads(drafter: Drafter) -> int:
    num_heads = drafter.config.longest_chain()
    if num_heads is None:
        raise ValueError(f"{drafter.config.algorithm} has no heads that guess several tokens at once: draft its tree with StaticTree or DynamicTree")
    return num_heads
