"""Which drafts the target accepts, and the token after them: the step that makes a decoder lossless.

The target ran once over a tree of drafts (tree.py); a verifier reads its logits and gives, for each sequence, the accepted path and one more
token. Row 0 of the logits judges the root's children, row i + 1 those of node i; a tree without nodes gives just the next token, which is plain
decoding and the token after the prefill. Lossless means: whatever the drafts are, the emitted tokens are distributed as the target's own
(`Sampled`) or are the target's own (`Greedy`). Randomness comes in through `Chance`, so that a test can enumerate every outcome.

Legend: B sequences, R rows of logits, V target vocabulary, N any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eval.decode.tree import ROOT, DraftTree, depths_of


@dataclass(frozen=True)
class Verdict:
    """What one sequence gains from one forward of the target.

    Attributes:
        path: accepted nodes of the tree, from the root downwards.
        next_token: the token after them: a correction where a draft was rejected, a bonus where none was left.
    """

    path: tuple[int, ...]
    next_token: int


class Chance(Protocol):
    """Where the random decisions of a verifier come from."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""

    def sample(self, probs_V: Tensor) -> int:
        """A token drawn from this distribution, which sums to one."""


class RandomChance:
    """Decisions drawn from one seeded stream."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def accept(self, probability: float) -> bool:
        return torch.rand((), dtype=torch.float64, generator=self._generator).item() < probability

    def sample(self, probs_V: Tensor) -> int:
        return int(torch.multinomial(probs_V.cpu(), 1, generator=self._generator))


class Verifier(Protocol):
    """Judges the drafts of a batch of sequences."""

    is_lossless: ClassVar[bool]

    def verify(self, trees: Sequence[DraftTree], logits_BRV: Tensor) -> list[Verdict]:
        """One verdict a tree, from the target's logits [B, R, V] in any float dtype; rows beyond a tree's own are padding and not read."""


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become the distribution that is decoded: temperature, then top-k, then top-p, as in transformers' `generate`.

    Attributes:
        temperature: above 0; greedy decoding is `Greedy`, not a temperature.
        top_k: keep the so many likeliest tokens, None for all.
        top_p: keep the likeliest tokens up to this probability together, inside (0, 1), None for all.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}, expected a finite number above 0: for greedy decoding use the verifier Greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, expected at least 1: None keeps every token")
        if self.top_p is not None and not 0 < self.top_p < 1:
            raise ValueError(f"top_p is {self.top_p}, expected a number between 0 and 1, both excluded: None keeps every token")

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        """float64 [N, V]. In double precision, because residuals are differences of these."""
        no_ids = torch.LongTensor()  # asked for by every warper, read by none of these
        warped_NV = TemperatureLogitsWarper(float(self.temperature))(no_ids, logits_NV.double())
        if self.top_k is not None:
            warped_NV = TopKLogitsWarper(self.top_k)(no_ids, warped_NV)
        if self.top_p is not None:
            warped_NV = TopPLogitsWarper(self.top_p)(no_ids, warped_NV)
        return warped_NV.softmax(-1)

    def probabilities_after(self, node: int, logits_RV: Tensor) -> Tensor:
        """float64 [V] of the row that judges a node's children. Row by row, because a walk visits few rows of a tree and top-p sorts each."""
        return self.probabilities(logits_RV[node + 1 : node + 2])[0]


def greedy_verdict(tree: DraftTree, argmax_R: Sequence[int]) -> Verdict:
    """The path of drafts that are the target's argmax, and the argmax after it."""
    children = tree.children()
    path: list[int] = []
    node = ROOT
    while True:
        wanted = argmax_R[node + 1]
        match = next((child for child in children.get(node, ()) if tree.token_ids[child] == wanted), None)
        if match is None:
            return Verdict(tuple(path), wanted)
        path.append(match)
        node = match


@dataclass(frozen=True)
class Greedy:
    """Accepts a draft where it is the target's argmax (algorithms.md section 6).

    Lossless: every emitted token, accepted or next, is the argmax after the verified tokens before it. Token for token plain greedy decoding, up
    to the numerics of a forward over several rows instead of one.
    """

    is_lossless: ClassVar[bool] = True

    def verify(self, trees: Sequence[DraftTree], logits_BRV: Tensor) -> list[Verdict]:
        argmax_BR = logits_BRV.argmax(-1).tolist()  # one transfer for the batch
        return [greedy_verdict(tree, argmax_R) for tree, argmax_R in zip(trees, argmax_BR, strict=True)]


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(p - q, 0)): what the target still wants once a draft from q was rejected (arXiv 2211.17192, section 2.3; 2302.01318).

    Where rounding leaves nothing, p and q are equal, a rejection had no probability, and p itself is a faithful answer.
    """
    left_V = (p_V - q_V).clamp(min=0)
    mass = left_V.sum()
    return left_V / mass if mass > 0 else p_V


def first_accepted(token_ids: Sequence[int], p_V: Tensor, q_V: Tensor | None, chance: Chance) -> tuple[int | None, Tensor]:
    """Tries siblings in their order: the index of the accepted one, or None, and what is left of p.

    Each is accepted with min(1, p(x) / q(x)), and each rejection takes max(p - q, 0) as the new p. That keeps "x accepted, or else a draw from
    the new p" distributed as p, so that the next sibling starts over with the new p: multi-candidate speculative sampling (SpecInfer, arXiv
    2305.09781; EAGLE, arXiv 2401.15077).

    Args:
        token_ids: the siblings.
        p_V: float64, the target's distribution.
        q_V: what the siblings were drawn from, in this order, with or without replacement. None where they were chosen otherwise (greedy drafts,
            top-k, n-grams): each is then its own point mass, accepted with p(x), and a rejection takes x out of p.
    """
    untried_V = None if q_V is None else q_V.to(p_V, copy=True)
    for index, token in enumerate(token_ids):
        if untried_V is None:
            draft_V = torch.zeros_like(p_V)
            draft_V[token] = 1
        elif untried_V[token] == 0:
            continue  # a repetition, or q had run out of tokens: not a draw from the untried rest of q, so that leaving it out costs nothing
        else:
            draft_V = untried_V / untried_V.sum()
        ratio = (p_V[token] / draft_V[token]).item()
        assert ratio >= 0, f"p / q of token {token} is {ratio}, expected a number: are these the rows of logits and of draft_probs_RV?"
        if chance.accept(min(1.0, ratio)):
            return index, p_V
        p_V = residual(p_V, draft_V)
        if untried_V is not None:
            untried_V[token] = 0
    return None, p_V


def sampled_verdict(tree: DraftTree, logits_RV: Tensor, settings: Sampling, chance: Chance) -> Verdict:
    """The path of accepted siblings, and a draw from what is left of the target's distribution after it."""
    children = tree.children()
    path: list[int] = []
    node = ROOT
    while True:
        siblings = children.get(node, [])
        q_V = None if tree.draft_probs_RV is None or not siblings else tree.draft_probs_RV[node + 1]
        p_V = settings.probabilities_after(node, logits_RV)
        accepted, left_V = first_accepted([tree.token_ids[sibling] for sibling in siblings], p_V, q_V, chance)
        if accepted is None:
            return Verdict(tuple(path), chance.sample(left_V))
        node = siblings[accepted]
        path.append(node)


@dataclass(frozen=True)
class Sampled:
    """Speculative sampling over chains and trees (arXiv 2211.17192 and 2302.01318 for chains, 2305.09781 for trees).

    Lossless at each node by `first_accepted`, whatever q is, as long as the siblings were drawn from it as the tree claims; and along a path
    because each node is judged by the target's distribution after that very path. That distribution is the logits warped by `settings`, which
    happens before the verification, never after.
    """

    settings: Sampling
    chance: Chance
    is_lossless: ClassVar[bool] = True

    def verify(self, trees: Sequence[DraftTree], logits_BRV: Tensor) -> list[Verdict]:
        return [sampled_verdict(tree, logits_RV, self.settings, self.chance) for tree, logits_RV in zip(trees, logits_BRV, strict=True)]


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1). LOSSY: its output is not distributed as the target's.

    A draft x is accepted, without chance, where p(x) > min(epsilon, delta * exp(-H(p))), and the longest accepted path wins, of equally long
    ones the likeliest. So a token that is merely likely enough replaces a draw from p: faster, and never to be reported as lossless.

    Attributes:
        temperature: of p, above 0.
        chance: draws the next token.
        epsilon: probability that always suffices, in (0, 1].
        delta: share of exp(-H(p)) that suffices where p is flat, above 0.
    """

    temperature: float
    chance: Chance
    epsilon: float = 0.09
    delta: float = 0.3
    is_lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Sampling(self.temperature)  # raises where it is none
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}, expected a probability above 0 and at most 1")
        if not self.delta > 0:
            raise ValueError(f"delta is {self.delta}, expected a number above 0")

    def verify(self, trees: Sequence[DraftTree], logits_BRV: Tensor) -> list[Verdict]:
        return [self._verdict(tree, logits_RV) for tree, logits_RV in zip(trees, logits_BRV, strict=True)]

    def _verdict(self, tree: DraftTree, logits_RV: Tensor) -> Verdict:
        settings = Sampling(self.temperature)
        log_prob = {ROOT: 0.0}  # of the path down to each accepted node
        for parent, siblings in tree.children().items():  # a parent's own parent is always met before it
            if parent not in log_prob:
                continue
            p_V = settings.probabilities_after(parent, logits_RV)
            threshold = min(self.epsilon, self.delta * math.exp(-torch.special.entr(p_V).sum().item()))
            for sibling in siblings:
                probability = p_V[tree.token_ids[sibling]].item()
                if probability > threshold:
                    log_prob[sibling] = log_prob[parent] + math.log(probability)
        depths = depths_of(tree.parents)
        last = max(log_prob, key=lambda node: (depths[node + 1], log_prob[node]))
        next_token = self.chance.sample(settings.probabilities_after(last, logits_RV))
        path: list[int] = []
        while last != ROOT:
            path.insert(0, last)
            last = tree.parents[last]
        return Verdict(tuple(path), next_token)
