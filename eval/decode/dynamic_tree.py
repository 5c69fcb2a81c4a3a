"""EAGLE-2's tree (arXiv 2406.16858): it grows where the drafter is confident, from the weights of EAGLE-1 or EAGLE-3.

    expansion (section 4.1)    the root's k best children are the first frontier. `depth` times: the drafter runs on the k nodes of the frontier,
                               the k best children of each are candidates, and the best k of these k^2 are the next frontier
    reranking (section 4.2)    of all k + depth k^2 candidates the best total_tokens - 1 are verified

The score of a node is the product of the drafter's probabilities along its path, an estimate of the chance that the node is accepted. A child scores
no more than its parent, so the best candidates make a tree. Where the child's probability rounds to 1 they are equal, and the earlier candidate is
the better one: a node is never chosen without its parent.

The children of a node are the same whenever the context is: lossless under `verify.Greedy` and `verify.Sampled` alike.

Shapes: B sequences, k nodes of the frontier or children of a node, m frontier nodes so far, c candidates, n nodes of the tree, W draft vocabulary,
H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eval.decode.drafter import DrafterMethod, check_goes_on, target_ids
from eval.decode.loop import Seen
from eval.decode.tree import ROOT, DraftTree
from train.drafters.base import Drafter, Guess


class DynamicTree(DrafterMethod):
    """The candidates that the drafter itself thinks the likeliest."""

    def __init__(self, drafter: Drafter, total_tokens: int = 60, depth: int = 6, top_k: int = 10) -> None:
        """
        Args:
            drafter: on the target's device; one that can go on from its drafts.
            total_tokens: rows of the target at a verification, the newest token's included; at least 2.
            depth: rounds of expansion; the deepest node lies at depth + 1.
            top_k: k, at least 1.

        Raises:
            ValueError: if a number is too small, or the drafter cannot go on from its drafts.
        """
        check_goes_on(drafter)
        for name, value, least in (("total_tokens", total_tokens, 2), ("depth", depth, 0), ("top_k", top_k, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        most_nodes = min(total_tokens - 1, top_k + depth * top_k**2)
        # The drafter holds its frontiers, which can be more nodes than are verified.
        super().__init__(drafter, longest_path=min(most_nodes, depth + 1), most_nodes=most_nodes, num_spare_columns=depth * top_k)
        self._depth, self._top_k = depth, top_k

    @torch.no_grad()
    def draft(self, seen: Seen) -> list[DraftTree]:
        ids_Bc, parent_Bc, score_Bc = self._expand(seen)
        # In the order in which they were made: by depth, siblings from the likeliest on.
        kept_Bn = _best(score_Bc, self.most_nodes).sort(dim=1).values
        columns = (values_Bc.gather(1, kept_Bn).tolist() for values_Bc in (ids_Bc, parent_Bc))
        trees = []
        for kept, ids, parents in zip(kept_Bn.tolist(), *columns, strict=True):
            node_of = {candidate: node for node, candidate in enumerate(kept)} | {ROOT: ROOT}
            trees.append(DraftTree(tuple(ids), tuple(node_of[parent] for parent in parents)))
        return trees

    def _expand(self, seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, parents (indices of candidates, or `ROOT`) and scores of all candidates, each [B, c]."""
        guess = self._drafter.read(self._cache, seen.states, 1)
        num_sequences, device = len(guess.logits_BnW), guess.logits_BnW.device
        children_Bk, score_Bk = self._children(guess, torch.zeros(num_sequences, 1, device=device))
        ids, parents, scores = [children_Bk], [torch.full_like(children_Bk, ROOT)], [score_Bk]
        width = children_Bk.shape[1]  # k, or the draft vocabulary where that is smaller
        itself_Bkk = torch.eye(width, dtype=torch.bool, device=device).expand(num_sequences, -1, -1)
        frontier_Bk = torch.arange(width, device=device).expand(num_sequences, -1)
        hidden_BkH, sees_Bkm = guess.hidden_BnH.expand(-1, width, -1), itself_Bkk
        for _ in range(self._depth):
            guess = self._drafter.extend(self._cache, hidden_BkH, children_Bk, sees_Bkm)
            ids_Bc, score_Bc = self._children(guess, score_Bk)
            first = sum(made_Bc.shape[1] for made_Bc in ids)
            ids.append(ids_Bc)
            parents.append(frontier_Bk.repeat_interleave(width, dim=1))
            scores.append(score_Bc)
            best_Bk = _best(score_Bc, width)
            frontier_Bk, children_Bk, score_Bk = first + best_Bk, ids_Bc.gather(1, best_Bk), score_Bc.gather(1, best_Bk)
            above_Bk1 = (best_Bk // width)[:, :, None]  # which node of the frontier each hangs on
            hidden_BkH = guess.hidden_BnH.gather(1, above_Bk1.expand(-1, -1, guess.hidden_BnH.shape[-1]))
            sees_Bkm = torch.cat([sees_Bkm.gather(1, above_Bk1.expand(-1, -1, sees_Bkm.shape[-1])), itself_Bkk], dim=2)
        return torch.cat(ids, dim=1), torch.cat(parents, dim=1), torch.cat(scores, dim=1)

    def _children(self, guess: Guess, score_Bk: Tensor) -> tuple[Tensor, Tensor]:
        """Target ids and scores [B, k * k] of the best children of each frontier node."""
        log_probs_BkW = guess.logits_BnW.float().log_softmax(-1)
        best = log_probs_BkW.topk(min(self._top_k, log_probs_BkW.shape[-1]))
        return target_ids(self._drafter, best.indices).flatten(1), (score_Bk[:, :, None] + best.values).flatten(1)


def _best(score_Bc: Tensor, count: int) -> Tensor:
    """int64 [B, count] indices of the highest scores; of equal ones the earlier first, which `topk` does not promise."""
    return score_Bc.sort(dim=1, descending=True, stable=True).indices[:, :count]
