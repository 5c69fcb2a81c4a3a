"""Plain greedy decoding, one token a forward: what speculative decoding must reproduce and is timed against."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from data.target import Target
from eval.acceptance import Acceptance, PromptCount
from eval.decode.cache import TargetSession


@dataclass(frozen=True)
class DecodeResult:
    """One decoded answer and what it took.

    Attributes:
        token_ids: the answer, its end token included where it was reached.
        num_verifications: target forwards after the prefill.
        accepted_at: for each draft position p, verifications that accepted drafts 0..p; empty for plain decoding.
        num_verified_tokens: tokens that verifications emitted, those past the end of the answer included (as engines count).
        total_s: wall time of the whole call.
        prefill_s, drafting_s, verification_s: its parts.
    """

    token_ids: tuple[int, ...]
    num_verifications: int
    accepted_at: tuple[int, ...]
    num_verified_tokens: int
    total_s: float
    prefill_s: float
    drafting_s: float
    verification_s: float

    @property
    def acceptance(self) -> Acceptance:
        """The counters as an `Acceptance` of one prompt; results add up."""
        return Acceptance(self.accepted_at, (PromptCount(self.num_verified_tokens, self.num_verifications),))


class PhaseTimer:
    """Seconds since the previous reading. Read it only when the phase's result is on the host, so that a GPU has finished it."""

    def __init__(self) -> None:
        self._started = self._previous = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._previous = now - self._previous, now
        return elapsed

    def total(self) -> float:
        return time.perf_counter() - self._started


def decode_plain(target: Target, prompt_ids: Sequence[int], max_new_tokens: int, end_ids: Collection[int]) -> DecodeResult:
    """Greedy decoding with a key/value cache, batch 1.

    Args:
        target: the frozen target.
        prompt_ids: at least one token.
        max_new_tokens: longest answer, at least 1.
        end_ids: tokens that end an answer.
    """
    timer = PhaseTimer()
    session = TargetSession(target)
    tokens = [int(session.forward(prompt_ids, 1).logits_kV.argmax())]
    prefill_s = timer.lap()
    while len(tokens) < max_new_tokens and tokens[-1] not in end_ids:
        tokens.append(int(session.forward(tokens[-1:], 1).logits_kV.argmax()))
    return DecodeResult(
        token_ids=tuple(tokens),
        num_verifications=len(tokens) - 1,
        accepted_at=(),
        num_verified_tokens=len(tokens) - 1,
        total_s=timer.total(),
        prefill_s=prefill_s,
        drafting_s=0.0,
        verification_s=timer.lap(),
    )


def top_two_gap(target: Target, prompt_ids: Sequence[int], answer_ids: Sequence[int], index: int) -> float:
    """Difference of the two best logits where plain decoding chose `answer_ids[index]`, decoded one token a forward as it was.

    Logits are what plain decoding saw, in the target's dtype; no unit.
    """
    session = TargetSession(target)
    step = session.forward(prompt_ids, 1)
    for token in answer_ids[:index]:
        step = session.forward([token], 1)
    best, second = step.logits_kV[0].float().topk(2).values.tolist()
    return best - second
