"""How much faster a method is than plain decoding in the same loop, and whether it wrote the same tokens.

Place in the flow: the evaluate stage of a run -> `speedup_reference_decoder` in report.json. Every prompt is decoded plainly and
speculatively in turn (A B A B), so that a machine that gets slower or faster meanwhile slows both; tokens are counted as ids on
both sides, prefill included in both times.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data.target import Target
from eval.acceptance import Acceptance, Trajectory
from eval.decode.loop import Decoded, Method, Plain, decode
from eval.decode.session import TargetSession
from eval.decode.tree import DraftTree
from eval.decode.verify import Greedy

# Below this gap of the two best logits, a forward over several tokens and one over a single token may round to different
# argmaxes. Logits of language models reach about 20 to 30, where bfloat16 has a spacing of 0.125 and float16 of 0.016; the
# rounding of the hidden states adds several such spacings.
_NEAR_TIE_GAP = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.75}
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Speedup:
    """The timed comparison.

    Attributes:
        dtype: of the target while it was timed.
        ratio: median over prompts and rounds of speculative tokens/s over plain tokens/s.
        ratio_range: smallest and largest of them.
        tokens_per_s, tokens_per_s_plain: of all timed calls together.
        drafting_share: drafting's share of the speculative time.
        acceptance: the speculative decoder's own counters, each prompt once.
        num_outputs: prompts compared.
        num_identical: speculative output equal to plain output, token by token.
        num_near_ties: outputs that differ first at a near tie of the plain run's two best logits; the others are identical.
        largest_tie_gap: largest such gap; 0 where there is none.
    """

    dtype: str
    ratio: float
    ratio_range: tuple[float, float]
    tokens_per_s: float
    tokens_per_s_plain: float
    drafting_share: float
    acceptance: Acceptance
    num_outputs: int
    num_identical: int
    num_near_ties: int
    largest_tie_gap: float

    def to_json(self) -> dict[str, Any]:
        """The numbers that reports carry."""
        return {
            "dtype": self.dtype,
            "speedup_reference_decoder": self.ratio,
            "speedup_range": list(self.ratio_range),
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_plain": self.tokens_per_s_plain,
            "drafting_share": self.drafting_share,
            "tau": self.acceptance.tau if self.acceptance.num_verifications else None,
            "num_outputs": self.num_outputs,
            "num_identical_outputs": self.num_identical,
            "num_near_ties": self.num_near_ties,
            "largest_tie_gap": self.largest_tie_gap,
        }


def measure_speedup(
    target: Target, method: Method, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_ids: Collection[int], num_rounds: int = 2
) -> Speedup:
    """Decodes every prompt plainly and speculatively `num_rounds` times each, alternating, after a few tokens to warm up.

    Raises:
        ValueError: if there is no prompt, or the two outputs of a prompt differ where the target's two best logits are no near
            tie: then the method is not lossless, and its speed means nothing.
    """
    if not prompts:
        raise ValueError("the speed-up is measured on held-out prompts, but there is none")
    timed: dict[str, list[Decoded]] = {"plain": [], "method": []}
    ways: dict[str, Method] = {"plain": Plain(), "method": method}
    for way in ways.values():
        decode(target, way, prompts[:1], Greedy(), min(max_new_tokens, _WARM_UP_TOKENS), end_ids)
    for prompt in prompts:
        for _ in range(num_rounds):
            for name, way in ways.items():
                timed[name].append(decode(target, way, [prompt], Greedy(), max_new_tokens, end_ids))
    first = {name: decoded[::num_rounds] for name, decoded in timed.items()}
    gaps = [
        difference_gap(target, index, prompt, plain.answers[0].token_ids, drafted.answers[0].token_ids)
        for index, (prompt, plain, drafted) in enumerate(zip(prompts, first["plain"], first["method"], strict=True))
    ]
    return _summary(str(target.dtype).removeprefix("torch."), timed["plain"], timed["method"], first["method"], gaps)


def _summary(
    dtype: str, plain: Sequence[Decoded], drafted: Sequence[Decoded], first_rounds: Sequence[Decoded], gaps: Sequence[float | None]
) -> Speedup:
    """`plain` and `drafted` are the timed calls in the same order; `first_rounds` and `gaps` have one entry a prompt."""
    ratios = [_rate(fast) / _rate(slow) for fast, slow in zip(drafted, plain, strict=True)]
    drafted_s = sum(result.total_s for result in drafted)
    return Speedup(
        dtype=dtype,
        ratio=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        tokens_per_s=sum(result.num_tokens for result in drafted) / drafted_s,
        tokens_per_s_plain=sum(result.num_tokens for result in plain) / sum(result.total_s for result in plain),
        drafting_share=sum(result.drafting_s for result in drafted) / drafted_s,
        acceptance=sum((result.acceptance for result in first_rounds[1:]), first_rounds[0].acceptance),
        num_outputs=len(gaps),
        num_identical=sum(gap is None for gap in gaps),
        num_near_ties=sum(gap is not None for gap in gaps),
        largest_tie_gap=max((gap for gap in gaps if gap is not None), default=0.0),
    )


def check_lossless(
    target: Target, method: Method, trajectories: Sequence[Trajectory], max_new_tokens: int, end_ids: Collection[int]
) -> dict[str, Any]:
    """Decodes prompts speculatively, as one batch, and compares with the answers that the target gave without a drafter, in the same dtype.

    Returns:
        dtype, num_outputs, num_identical_outputs, num_near_ties (the outputs that differ, each first at a near tie).

    Raises:
        ValueError: if an output differs where the target's two best logits are no near tie.
    """
    decoded = decode(target, method, [trajectory.prompt_ids for trajectory in trajectories], Greedy(), max_new_tokens, end_ids)
    gaps = [
        difference_gap(target, index, trajectory.prompt_ids, trajectory.answer_ids, answer.token_ids)
        for index, (trajectory, answer) in enumerate(zip(trajectories, decoded.answers, strict=True))
    ]
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "num_outputs": len(gaps),
        "num_identical_outputs": sum(gap is None for gap in gaps),
        "num_near_ties": sum(gap is not None for gap in gaps),
    }


def _rate(result: Decoded) -> float:
    return result.num_tokens / result.total_s


def difference_gap(target: Target, index: int, prompt: Sequence[int], plain_ids: Sequence[int], other_ids: Sequence[int]) -> float | None:
    """The gap of the plain run's two best logits where the outputs of prompt `index` first differ; None where they are identical.

    Raises:
        ValueError: if that is no near tie.
    """
    if tuple(plain_ids) == tuple(other_ids):
        return None
    shorter = min(len(plain_ids), len(other_ids))
    differing = (place for place in range(shorter) if plain_ids[place] != other_ids[place])
    place = next(differing, shorter)
    gap = top_two_gap(target, prompt, plain_ids, min(place, len(plain_ids) - 1))
    limit = _NEAR_TIE_GAP[target.dtype]
    if gap > limit:
        raise ValueError(
            f"prompt {index}: speculative decoding differs from plain decoding at token {place}, where the target's two best "
            f"logits are {gap:.4f} apart (a near tie in {target.dtype} is at most {limit}): the decoder is not lossless, "
            "report this as a bug"
        )
    return gap


def top_two_gap(target: Target, prompt_ids: Sequence[int], answer_ids: Sequence[int], index: int) -> float:
    """Difference of the two best logits where plain decoding chose `answer_ids[index]`, decoded one token a forward as it was.

    Logits are what plain decoding saw, in the target's dtype; no unit.
    """
    session = TargetSession(target, 1, len(prompt_ids) + index + 1)
    rows = session.prefill([prompt_ids])
    for token in answer_ids[:index]:
        rows = session.forward([token], [DraftTree()])
        session.accept([()])
    best, second = rows.logits_BRV[0, 0].float().topk(2).values.tolist()
    return best - second
