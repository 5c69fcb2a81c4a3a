"""A tree of drafts: what any method hands to the target for one verification.

    newest known token (row 0)          node   0    1    2    3         parent  -1 -1  0  0
    ├── node 0 (row 1)                         token a    b    c    d
    │   ├── node 2 (row 3)                row r of the target's logits judges the children of row r: row 0 those of
    │   └── node 3 (row 4)                the newest token, row i + 1 those of node i
    └── node 1 (row 2)

A chain is a tree of one branch, and plain decoding a tree without nodes, so that one loop (loop.py) serves every method. A node sees the verified
tokens, its ancestors and itself; its position is the newest token's plus its depth.

Shapes: n nodes, R = n + 1 rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Drafts of one sequence.

    Attributes:
        token_ids: of each node.
        parents: the node that each hangs on, always an earlier one, or `ROOT`.
        num_drafts: the first so many nodes are drafts to be verified; the others only ride along in the target's forward, and their method
            reads what it says about them (the window of Lookahead). None is all of them.
        draft_probs_RV: where the children of each row were sampled, the distribution that they were sampled from; rows without children are not
            read. None where the children are the same whenever the context is (greedy drafts, top-k, n-grams).
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    num_drafts: int | None = None
    draft_probs_RV: Tensor | None = None

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.parents), "a node has a token and a parent"
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), "a parent comes before its children"

    @classmethod
    def chain(cls, token_ids: tuple[int, ...], draft_probs_RV: Tensor | None = None) -> DraftTree:
        """Each node on the one before it."""
        return cls(token_ids, tuple(range(ROOT, len(token_ids) - 1)), draft_probs_RV=draft_probs_RV)

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def children(self) -> dict[int, list[int]]:
        """The drafts that hang on each node or on `ROOT`, in their order; nodes that only ride along are left out."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[: self.num_drafts]):
            children.setdefault(parent, []).append(node)
        return children


@lru_cache(maxsize=64)
def depths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of each row: 0 for the root's, 1 for its children."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return tuple(depths)


@lru_cache(maxsize=64)
def ancestors_of(parents: tuple[int, ...]) -> Tensor:
    """bool [R, R]: which rows each row sees, itself included."""
    sees_RR = np.eye(len(parents) + 1, dtype=bool)
    for node, parent in enumerate(parents):
        sees_RR[node + 1] |= sees_RR[parent + 1]
    return torch.from_numpy(sees_RR)
