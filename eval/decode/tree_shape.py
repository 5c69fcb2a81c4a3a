"""The shape of a tree that is the same at every verification: which ranks of the drafter's guesses are tried, and after which.

A node is named by its path of ranks: (0, 2) is the third best guess after the best one.

    (0,) (1,)                the two best guesses of the next token            levels of EAGLE_TREE     4
    (0, 0) (0, 1) (1, 0)     two after the best of them, one after the other                            8
                                                                                                        8
Nodes lie level by level, siblings together and in the order of their ranks.                            3
                                                                                                        2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from eval.decode.tree import ROOT


@dataclass(frozen=True)
class TreeShape:
    """A static tree.

    Attributes:
        paths: ranks from the root to each node; by depth, then by rank.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        for path in self.paths:
            if not path or min(path) < 0:
                raise ValueError(f"the tree has the node {path}, expected one or more ranks, counted from 0")
            if path[:-1] not in known:
                raise ValueError(f"the tree has the node {path} but not {path[:-1]}, on which it hangs: add that one")
        if not self.paths or len(known) != 1 + len(self.paths):
            raise ValueError(f"the tree has {len(self.paths)} nodes, {len(known) - 1} of them different: expected at least one, and each once")
        assert list(self.paths) == sorted(self.paths, key=_place), "TreeShape.of puts nodes in their order"

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> TreeShape:
        """From paths in any order.

        Raises:
            ValueError: if a node is there twice, or hangs on one that is not there.
        """
        return cls(tuple(sorted((tuple(path) for path in paths), key=_place)))

    @property
    def num_nodes(self) -> int:
        """Without the root."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def num_ranks(self) -> int:
        """How many of the best guesses are asked for, at most."""
        return 1 + max(path[-1] for path in self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The node that each hangs on, or `ROOT`."""
        node_of = {path: node for node, path in enumerate(self.paths)} | {(): ROOT}
        return tuple(node_of[path[:-1]] for path in self.paths)


def _place(path: Sequence[int]) -> tuple[int, Sequence[int]]:
    return len(path), path


# As many nodes a level as the tree that EAGLE-1's repository decodes with: 25, which makes 26 rows of the target with the newest token's.
EAGLE_TREE = TreeShape.of(
    tuple(map(int, ranks))
    for ranks in (
        "0 1 2 3",
        "00 01 02 10 11 20 21 30",
        "000 001 002 010 011 020 100 110",
        "0000 0001 0010",
        "00000 00001",
    )
    for ranks in ranks.split()
)
