"""How many tokens to draft: a cost model of one verification, and how far it is from what was measured.

Place in the flow: a `MethodResult` and the target's forward times of eval/measurement.py -> `best_draft_length` -> eval/advisor.py. A verification
of K drafts emits tau(K) = 1 + the sum of the first K joint acceptances (algorithms.md section 7) and takes draft(K) + forward(1 + K) seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.acceptance import Acceptance
from eval.measurement import Comparison, MethodResult


@dataclass(frozen=True)
class DraftingCost:
    """Seconds of drafting for one verification: `fixed_s`, and `per_draft_s` more for each draft."""

    fixed_s: float
    per_draft_s: float

    def seconds(self, num_drafts: int) -> float:
        return self.fixed_s + self.per_draft_s * num_drafts


@dataclass(frozen=True)
class DraftLengthChoice:
    """A draft length, and what it rests on.

    Attributes:
        num_drafts: K with the highest predicted speed; the shortest of equals.
        predicted: tokens/s by K; 0 is plain decoding.
        measured: tokens/s by K, where it was timed under the same conditions: ratio to plain decoding, times its tokens/s.
        relative_error: of the prediction, by K, where it was timed: 0.1 is predicted a tenth too fast.
        marginal_s: by K, the seconds that the K-th draft adds to a verification.
    """

    num_drafts: int
    predicted: Mapping[int, float]
    measured: Mapping[int, float]
    relative_error: Mapping[int, float]
    marginal_s: Mapping[int, float]


def has_draft_length(method: MethodResult) -> bool:
    """Whether the method drafts one branch, whose length can be chosen."""
    return method.kind in ("chain", "n-gram", "draft model")


def drafts_one_by_one(method: MethodResult) -> bool:
    """Whether each draft costs a forward of the drafter. Medusa's heads all run at once, and an n-gram is looked up whole."""
    return method.kind == "draft model" or (method.kind == "chain" and method.algorithm not in ("medusa1", "medusa2"))


def seconds_of_forward(forward_s: Mapping[int, float], num_tokens: float) -> float:
    """Linear between the measured numbers of tokens, and on beyond them with the slope at that end.

    More tokens are never cheaper: a forward that was timed faster than a narrower one is taken to last as long as that one.

    Raises:
        ValueError: if fewer than two were measured.
    """
    if len(forward_s) < 2:
        raise ValueError(f"a forward was timed for {sorted(forward_s)} tokens, expected at least two different numbers: compare the methods again")
    counts = sorted(forward_s)
    right = min(max(int(np.searchsorted(counts, num_tokens)), 1), len(counts) - 1)
    low, high = counts[right - 1], counts[right]
    low_s, high_s = (max(forward_s[count] for count in counts if count <= limit) for limit in (low, high))
    return low_s + (high_s - low_s) / (high - low) * (num_tokens - low)


def predicted_speed(
    joint_acceptance: Sequence[float], forward_s: Mapping[int, float], drafting: DraftingCost, num_drafts: int, nodes_per_draft: float = 1.0
) -> float:
    """Tokens/s of each sequence with chains of `num_drafts`.

    Args:
        joint_acceptance: by position, at least `num_drafts` of them.
        forward_s: the target's seconds by tokens of each sequence.
        drafting: seconds of drafting.
        num_drafts: K; 0 is plain decoding.
        nodes_per_draft: share of the K drafts that are there to be verified: less than 1 where an n-gram is not always found.
    """
    assert num_drafts <= len(joint_acceptance), "acceptance is known only as far as it was measured"
    tau = 1 + sum(joint_acceptance[:num_drafts])
    drafting_s = drafting.seconds(num_drafts) if num_drafts else 0.0
    return tau / (drafting_s + seconds_of_forward(forward_s, 1 + num_drafts * nodes_per_draft))


def timed_length(method: MethodResult) -> int:
    """The draft length that the method's own speed was timed with; the longest, where its settings name none."""
    return int(method.settings.get("draft_length", method.acceptance.draft_length))


def fit_drafting(method: MethodResult, batch: int) -> DraftingCost:
    """Drafting's cost from all lengths timed at batch 1; for another batch, scaled by what the one length timed there took."""
    timed = {timed_length(method): method.speed.drafting_s} | {length: speed.drafting_s for length, speed in method.speed_by_draft_length.items()}
    cost = _fit(timed, drafts_one_by_one(method))
    if batch == 1:
        return cost
    length, drafting_s = timed_length(method), method.speed_by_batch[batch].drafting_s
    if cost.seconds(length) == 0:
        return DraftingCost(drafting_s, 0.0)
    factor = drafting_s / cost.seconds(length)
    return DraftingCost(factor * cost.fixed_s, factor * cost.per_draft_s)


def _fit(timed: Mapping[int, float], is_linear: bool) -> DraftingCost:
    """Least squares; a negative part, which only noise can give, is none."""
    lengths, seconds = np.array(list(timed), dtype=float), np.array(list(timed.values()))
    if not is_linear:
        return DraftingCost(float(seconds.mean()), 0.0)
    if len(timed) > 1:
        slope, intercept = np.polyfit(lengths, seconds, 1)
        if slope < 0:
            return DraftingCost(float(seconds.mean()), 0.0)
        if intercept >= 0:
            return DraftingCost(float(intercept), float(slope))
    return DraftingCost(0.0, float(lengths @ seconds / (lengths @ lengths)))


def best_draft_length(method: MethodResult, comparison: Comparison, batch: int, acceptance: Acceptance | None = None) -> DraftLengthChoice:
    """The draft length with the highest predicted speed, among those that acceptance was measured for.

    Args:
        method: one whose length can be chosen (`has_draft_length`).
        comparison: it was measured in.
        batch: sequences decoded together; the method and the target's forward were timed with it.
        acceptance: of some of the prompts, such as one domain's; None is all, and only then there are measured speeds to compare with.

    Raises:
        ValueError: if the target's forward was not timed with this batch.
    """
    assert has_draft_length(method), f"{method.kind} has no draft length to choose"
    if batch not in comparison.forward_s:
        raise ValueError(f"the target's forward was timed for batches {sorted(comparison.forward_s)}, expected {batch}: compare the methods again")
    forward_s, drafting = comparison.forward_s[batch], fit_drafting(method, batch)
    nodes_per_draft = min(method.nodes_per_verification / timed_length(method), 1.0) if method.kind == "n-gram" else 1.0
    joint = (acceptance or method.acceptance).joint_acceptance
    lengths = range(1, len(joint) + 1)
    predicted = {length: batch * predicted_speed(joint, forward_s, drafting, length, nodes_per_draft) for length in (0, *lengths)}
    measured = _measured(method, comparison, batch) if acceptance is None else {}
    marginal_s = {
        length: drafting.per_draft_s
        + seconds_of_forward(forward_s, 1 + length * nodes_per_draft)
        - seconds_of_forward(forward_s, 1 + (length - 1) * nodes_per_draft)
        for length in lengths
    }
    return DraftLengthChoice(
        num_drafts=max(lengths, key=lambda length: predicted[length]),
        predicted=predicted,
        measured=measured,
        relative_error={length: predicted[length] / rate - 1 for length, rate in measured.items()},
        marginal_s=marginal_s,
    )


def _measured(method: MethodResult, comparison: Comparison, batch: int) -> dict[int, float]:
    """By ratio to plain decoding, which was timed in alternation: a machine that got slower meanwhile does not count against a length."""
    ratios = {timed_length(method): method.speed_by_batch[batch].ratio}
    if batch == 1:
        ratios |= {length: speed.ratio for length, speed in method.speed_by_draft_length.items()}
    plain = comparison.plain_tokens_per_s[batch]
    return {length: ratio * plain for length, ratio in sorted(ratios.items()) if length <= method.acceptance.draft_length}


def share_of_best_measured(choice: DraftLengthChoice) -> float | None:
    """Measured speed at the chosen length over the best measured one; linear between the timed lengths.

    None where fewer than two lengths were timed, or the choice lies outside of them: there is nothing to judge it against.
    """
    lengths = sorted(choice.measured)
    if len(lengths) < 2 or not lengths[0] <= choice.num_drafts <= lengths[-1]:
        return None
    rates = [choice.measured[length] for length in lengths]
    return float(np.interp(choice.num_drafts, lengths, rates)) / max(rates)
