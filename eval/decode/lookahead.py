"""Lookahead decoding (arXiv 2402.02057): the target guesses many positions at once by Jacobi iteration, and verifies what it guessed before.

**W is the window size** (positions ahead that are guessed in parallel), **N the n-gram size** (a trajectory of N - 1 guesses and a new one), **G the
number of candidates** verified per step. Some articles swap N and W; these are the paper's.

One forward holds two branches. The *window* has N - 1 rows of W columns, row l being guessed l steps after row 0; the newest token is column 0 of
row 0. W = 4, N = 4; the number is the position beyond the newest token:

    row 0    newest ─ 1 ─── 2 ─── 3       row 0 is a chain;
    row 1      1      2     3     4       a guess of row l sees row 0 up to its column and the rows above it in its column,
    row 2      2      3     4     5       so it hangs on the guess above it, and the whole window is a tree.
    argmax     3      4     5     6       what the target says of the last row: the new guesses

Each column with its new guess is an n-gram of N tokens, kept in a pool by its first token. Then the rows move up by one and the new guesses become
the last row. The *candidates* are the n-grams of the pool that start with the newest token, at most G: branches from the root, and the only drafts
(`DraftTree.num_drafts`); the window rides along. N-grams that begin alike share their nodes: the target says the same of equal paths, so that nothing
is lost and rows are saved, while G still counts n-grams.

Row 0 starts as random tokens of the text; the first N - 2 steps fill the other rows. All guesses are functions of the tokens seen and of a seed, so
that verification as point masses is lossless when sampling too (algorithms.md section 6).

Where several tokens were accepted, the window moves on by as many, so that every guess stays at the position that it was made for, and random tokens
begin the columns at its far end. The original moves by one whatever was accepted (its ALWAYS_FWD_ONE, on by default), and its guesses fall behind
the text. Correctness never depends on this, for the target judges every candidate; acceptance could, but no difference was measured: tau 1.34 either
way, with seeds between 1.29 and 1.38 (SmolLM2-135M, W = 5, N = 4, G = 5, six prompts of 64 tokens, three seeds).

Shapes: B sequences, C columns, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from random import Random

import torch
from torch import Tensor

from eval.decode.loop import Method, Seen
from eval.decode.tree import ROOT, DraftTree

NGramTokens = tuple[int, ...]


class Lookahead(Method):
    """Candidates from a pool of n-grams, and the window that fills it."""

    def __init__(self, window: int = 15, ngram: int = 5, guesses: int = 15, has_prompt_pool: bool = False, seed: int = 0) -> None:
        """
        Args:
            window: W, at least 1.
            ngram: N, at least 2.
            guesses: G, at least 1.
            has_prompt_pool: whether the n-grams of the prompt are in the pool from the start, and the answer's as they appear.
            seed: of the random tokens that the window is filled with; every sequence draws its own from it.

        Raises:
            ValueError: if one of them is out of range.
        """
        if window < 1 or ngram < 2 or guesses < 1:
            raise ValueError(f"window W is {window}, n-gram N {ngram}, guesses G {guesses}, expected at least 1, 2 and 1")
        self._window, self._ngram, self._guesses, self._has_prompt_pool, self._seed = window, ngram, guesses, has_prompt_pool, seed
        self.longest_path = ngram - 1
        # While the window fills it has fewer rows, but wider ones (`_Lane`).
        widths = range(window, window + ngram - 1)
        self.most_nodes = guesses * (ngram - 1) + max(width * num_rows - 1 for num_rows, width in zip(range(ngram - 1, 0, -1), widths, strict=True))
        self._lanes: list[_Lane] = []
        self._pool_bytes = 0

    def start(self, num_sequences: int, capacity: int) -> None:
        self._pool_bytes = 0
        self._lanes = [
            _Lane(self._window, self._ngram, NGramPool(self._guesses), Random(self._seed), self._has_prompt_pool) for _ in range(num_sequences)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self._pool_bytes = self.pool_bytes
        self._lanes = [self._lanes[row] for row in rows]

    def draft(self, seen: Seen) -> list[DraftTree]:
        for lane, context in zip(self._lanes, seen.contexts, strict=True):
            lane.move_to(context)
        return [lane.tree() for lane in self._lanes]

    def observe(self, logits_BRV: Tensor) -> None:
        row_BC = torch.tensor([lane.last_rows for lane in self._lanes], device=logits_BRV.device)
        batch_B1 = torch.arange(len(row_BC), device=row_BC.device)[:, None]
        for lane, guesses in zip(self._lanes, logits_BRV[batch_B1, row_BC].argmax(-1).tolist(), strict=True):
            lane.take(guesses)

    @property
    def pool_bytes(self) -> int:
        """Measured on the objects of the pool, which only grows."""
        return max([self._pool_bytes, *(lane.pool.num_bytes for lane in self._lanes)])


class NGramPool:
    """The latest n-grams of each first token, at most G of them: the longest unused one makes room."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._continuations: dict[int, dict[NGramTokens, None]] = {}  # a dict keeps the order in which they came

    def add(self, ngram: NGramTokens) -> None:
        latest = self._continuations.setdefault(ngram[0], {})
        latest.pop(ngram[1:], None)
        latest[ngram[1:]] = None
        if len(latest) > self._guesses:
            del latest[next(iter(latest))]

    def starting_with(self, token: int) -> list[NGramTokens]:
        """What follows the token in each of its n-grams, the latest first."""
        return list(reversed(self._continuations.get(token, {})))

    @property
    def num_bytes(self) -> int:
        """Of the dicts, the tuples, and the integers in them."""
        integer = sys.getsizeof(2**20)
        containers = sys.getsizeof(self._continuations) + sum(integer + sys.getsizeof(latest) for latest in self._continuations.values())
        return containers + sum(sys.getsizeof(rest) + len(rest) * integer for latest in self._continuations.values() for rest in latest)


class _Lane:
    """Window and pool of one sequence.

    rows: of guesses; row 0 without the newest token, so one shorter than the others. While there are fewer than N - 1 rows, row 0 moves up alone and
    loses a column each step, so it starts with N - 2 columns more.
    """

    def __init__(self, window: int, ngram: int, pool: NGramPool, chance: Random, has_prompt_pool: bool) -> None:
        self._window, self._ngram, self._chance, self._has_prompt_pool = window, ngram, chance, has_prompt_pool
        self.pool = pool
        self.rows: list[list[int]] = []
        self._newest = 0
        self._num_seen = 0
        self._num_candidate_nodes = 0

    @property
    def _width(self) -> int:
        return len(self.rows[0]) + 1

    def move_to(self, context: Sequence[int]) -> None:
        """Takes in the tokens that are new since the last step; `take` has already moved the window by one of them."""
        num_new = len(context) - self._num_seen
        if not self.rows:
            self.rows = [self._chance.choices(context, k=self._window + self._ngram - 3)]
        else:
            self._move(num_new - 1, context)
        if self._has_prompt_pool:
            for end in range(max(self._num_seen + 1, self._ngram), len(context) + 1):
                self.pool.add(tuple(context[end - self._ngram : end]))
        self._newest, self._num_seen = context[-1], len(context)

    def _move(self, num_columns: int, context: Sequence[int]) -> None:
        """Drops the columns that now lie in the past, and begins as many at the far end."""
        self.rows = [(row + self._chance.choices(context, k=num_columns))[num_columns:] for row in self.rows]

    def tree(self) -> DraftTree:
        """Candidates, then the window row by row."""
        token_ids, parents = _merged(self.pool.starting_with(self._newest))
        self._num_candidate_nodes = len(token_ids)
        for level, row in enumerate(self.rows):
            token_ids += row
            first = 1 if level == 0 else 0
            parents += [self._node(level, column - 1) if level == 0 else self._node(level - 1, column) for column in range(first, self._width)]
        return DraftTree(tuple(token_ids), tuple(parents), num_drafts=self._num_candidate_nodes)

    def _node(self, level: int, column: int) -> int:
        """Number of a guess in the tree; the newest token is the root."""
        return ROOT if level == column == 0 else self._num_candidate_nodes + level * self._width + column - 1

    @property
    def last_rows(self) -> list[int]:
        """Rows of the logits that judge the last row of the window."""
        return [self._node(len(self.rows) - 1, column) + 1 for column in range(self._width)]

    def take(self, guesses: Sequence[int]) -> None:
        """The new guess of each column completes an n-gram and becomes the last row; the window moves on by one token."""
        if len(self.rows) == self._ngram - 1:
            for ngram in zip([self._newest, *self.rows[0]], *self.rows[1:], guesses, strict=True):
                self.pool.add(ngram)
            self.rows = [*self.rows[1:], list(guesses)]
            self.rows[0] = self.rows[0][1:]  # its first column is the newest token's now
        else:
            self.rows = [row[1:] for row in (*self.rows, list(guesses))]


def _merged(paths: Iterable[NGramTokens]) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree of these paths from the root, equal beginnings once."""
    nodes: dict[NGramTokens, int] = {(): ROOT}
    token_ids: list[int] = []
    parents: list[int] = []
    for path in paths:
        for length in range(1, len(path) + 1):
            if path[:length] not in nodes:
                nodes[path[:length]] = len(token_ids)
                token_ids.append(path[length - 1])
                parents.append(nodes[path[: length - 1]])
    return token_ids, parents
