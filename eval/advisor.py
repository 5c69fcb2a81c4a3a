"""Which method to deploy, with how many speculative tokens, and why; or that the measurement does not say.

Place in the flow: a `Comparison` of eval/measurement.py -> `advise` -> compare.json and eval/compare_report.py. Pure functions of what was measured:
only methods that leave the target's outputs as they are get recommended, and plain decoding is one of the choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from eval.acceptance import Acceptance
from eval.deploy import deploy_commands
from eval.draft_length import DraftLengthChoice, best_draft_length, has_draft_length, share_of_best_measured, timed_length
from eval.measurement import Comparison, Kind, MethodResult, Speed

# A bootstrap over fewer prompts than this resamples the same few again and again, and its interval comes out too narrow to be believed.
MIN_PROMPTS = 8
# Speed is proportional to tau: an interval of a sixth to either side no longer tells methods apart that differ as the published ones do (1.6 to 1.9).
MAX_HALF_WIDTH = 0.15
# What the same call differs by when it is timed again on a machine that does other things too. Nearer speeds are equal, to plain decoding as well.
SPEED_NOISE = 0.05
# A verification costs a few percent more than a plain forward, in any decoder: less than this is never earned back.
MIN_GAIN = 0.05
# Where weights and cache fill the memory, an engine's own reserve is what is left: vLLM leaves 8 to 10% of the GPU for everything else.
LIGHT_MEMORY_SHARE = 0.03
REPETITIVE_DOMAINS = ("code", "summarisation")
# Of two equally fast methods that hold the same memory, the one that is named first here.
SIMPLEST_FIRST: tuple[Kind, ...] = ("plain", "n-gram", "lookahead", "draft model", "chain", "medusa tree", "static tree", "dynamic tree")

_ORDINALS = ("zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class Advice:
    """What to do in one scenario.

    Attributes:
        scenario: what it is for.
        method: the one to deploy; "" where none is recommended.
        num_speculative_tokens: K of a chain, levels of a tree; 0 where none is recommended.
        reason: in sentences, with the numbers.
        vllm, sglang: shell commands; "" where there is none, and `reason` says why.
    """

    scenario: str
    method: str
    num_speculative_tokens: int
    reason: str
    vllm: str
    sglang: str

    def to_json(self) -> dict[str, str]:
        """All as text, the number "" where none is recommended: what eval/compare_report.py shows."""
        number = str(self.num_speculative_tokens) if self.method else ""
        return {
            "scenario": self.scenario,
            "method": self.method,
            "num_speculative_tokens": number,
            "reason": self.reason,
            "vllm": self.vllm,
            "sglang": self.sglang,
        }


@dataclass(frozen=True)
class Candidate:
    """One method as one scenario sees it.

    Attributes:
        method: all of its measurement.
        comparison: it was measured in.
        batch: sequences decoded together.
        acceptance: of the prompts that the scenario looks at.
        timed_ratio: speed over plain decoding there, as the method was set.
        is_all_prompts: false where only some domains are looked at.
    """

    method: MethodResult
    comparison: Comparison
    batch: int
    acceptance: Acceptance
    timed_ratio: float
    is_all_prompts: bool = True

    @cached_property
    def choice(self) -> DraftLengthChoice | None:
        """Of the draft length, where there is one to choose."""
        if not has_draft_length(self.method):
            return None
        return best_draft_length(self.method, self.comparison, self.batch, None if self.is_all_prompts else self.acceptance)

    @cached_property
    def num_drafts(self) -> int:
        """K of a chain, levels of a tree: what the cost model takes, unless measurement clearly says otherwise."""
        if self.choice is None:
            return self.acceptance.draft_length
        share, measured = share_of_best_measured(self.choice), self.choice.measured
        is_bad = share is not None and share < 1 - SPEED_NOISE
        return max(measured, key=lambda length: measured[length]) if is_bad else self.choice.num_drafts

    @cached_property
    def ratio(self) -> float:
        """Measured speed over plain decoding: as the method was set, times what `num_drafts` gained over that where both were timed.

        Lengths may be timed on fewer prompts than the methods are, so that their own ratios do not compare with other methods'.
        """
        set_to = timed_length(self.method)
        if self.choice is None or not {set_to, self.num_drafts} <= self.choice.measured.keys():
            return self.timed_ratio
        return self.timed_ratio * self.choice.measured[self.num_drafts] / self.choice.measured[set_to]

    @cached_property
    def interval(self) -> tuple[float, float]:
        return self.acceptance.tau_interval()

    @property
    def half_width(self) -> float:
        """Of the interval, as a share of tau."""
        low, high = self.interval
        return (high - low) / 2 / self.acceptance.tau

    @property
    def num_prompts(self) -> int:
        """Those with something to draft."""
        return sum(prompt.num_verifications > 0 for prompt in self.acceptance.prompts)

    @property
    def is_useless(self) -> bool:
        """Whether what it accepts cannot be told from nothing, or is not worth a verification."""
        return self.interval[0] <= 1.0 or self.acceptance.tau - 1 < MIN_GAIN

    @property
    def num_changed_outputs(self) -> int:
        """Outputs that differ from plain decoding's without a near tie: a defect, whatever the method promises."""
        found = self.method.lossless
        return 0 if found is None else found.num_outputs - found.num_identical - found.num_near_ties

    @property
    def tau_text(self) -> str:
        text = f"tau {self.acceptance.tau:.2f}, interval {self.interval[0]:.2f} to {self.interval[1]:.2f}"
        return text if self.num_drafts == self.acceptance.draft_length else f"{text} with {self.acceptance.draft_length} drafts"


@dataclass(frozen=True)
class Scenario:
    """What a user wants.

    Attributes:
        name: for the reader.
        where: completes "1.42x ...".
        candidates: the methods that come into question, as measured for it.
        lacking: the advice where there are none.
    """

    name: str
    where: str
    candidates: Sequence[Candidate]
    lacking: str


def advise(comparison: Comparison) -> tuple[Advice, ...]:
    """One piece of advice for each scenario."""
    return tuple(_decide(scenario, comparison) for scenario in _scenarios(comparison))


def _scenarios(comparison: Comparison) -> list[Scenario]:
    single = [_at_batch(method, comparison, 1) for method in comparison.methods]
    batch = max((batch for method in comparison.methods for batch in method.speed_by_batch), default=1)
    batched = [_at_batch(method, comparison, batch) for method in comparison.methods if batch in method.speed_by_batch] if batch > 1 else []
    bound_bytes = LIGHT_MEMORY_SHARE * comparison.weights_bytes
    bound = f"at most {LIGHT_MEMORY_SHARE:.0%} of the target's weights ({_size(bound_bytes)})"
    light = [one for one in single if one.method.memory.total_bytes <= bound_bytes]
    domains = [domain for domain in REPETITIVE_DOMAINS if domain in comparison.domains]
    repetitive = [candidate for method in comparison.methods if (candidate := _in_domains(method, comparison, domains)) is not None]
    untrained = [one for one in single if one.method.kind in ("n-gram", "lookahead", "draft model")]
    name = "repetitive text such as code and summaries"
    return [
        Scenario("single request, low latency", "at batch 1", single, "No advice: no method was measured."),
        Scenario("high batch throughput", f"at batch {batch}", batched, "No advice: only batch 1 was measured. Measure larger batches."),
        Scenario("no memory to spare", f"at batch 1, of those that hold {bound}", light, f"Do not speculate: no measured method holds {bound}."),
        Scenario(name, f"at batch 1 in {' and '.join(domains)}", repetitive, f"No advice: no {' and '.join(REPETITIVE_DOMAINS)} was measured."),
        Scenario("own fine-tuned model, quick start", "at batch 1, untrained", untrained, "No advice: nothing that needs no training was measured."),
    ]


def _at_batch(method: MethodResult, comparison: Comparison, batch: int) -> Candidate:
    return Candidate(method, comparison, batch, method.acceptance, method.speed_by_batch[batch].ratio)


def _in_domains(method: MethodResult, comparison: Comparison, domains: Sequence[str]) -> Candidate | None:
    """Several domains as one text: the tokens of all over the seconds of all."""
    measured = [domain for domain in domains if domain in method.speed_by_domain and domain in method.acceptance_by_domain]
    if not measured:
        return None
    acceptance = method.acceptance_by_domain[measured[0]]
    for domain in measured[1:]:
        acceptance = acceptance + method.acceptance_by_domain[domain]

    def seconds(rate: Callable[[Speed], float]) -> float:
        return sum(method.acceptance_by_domain[domain].num_tokens / rate(method.speed_by_domain[domain]) for domain in measured)

    drafted_s = seconds(lambda speed: speed.tokens_per_s)
    ratio = seconds(lambda speed: speed.tokens_per_s_plain) / drafted_s if drafted_s else 0.0
    return Candidate(method, comparison, 1, acceptance, ratio, is_all_prompts=False)


# --- the decision -----------------------------------------------------------------------------------------------------


def _decide(scenario: Scenario, comparison: Comparison) -> Advice:
    if not scenario.candidates:
        return _none(scenario, scenario.lacking)
    refusal = _too_few_prompts(scenario.candidates)
    if refusal:
        return _none(scenario, refusal)
    lossless = [one for one in scenario.candidates if one.method.is_lossless and not one.num_changed_outputs]
    useful = [one for one in lossless if not one.is_useless]
    fast = [one for one in useful if one.ratio > 1 + SPEED_NOISE]
    if not fast:
        return _none(scenario, _do_not_speculate(scenario, useful) + _not_recommended(scenario.candidates))
    fastest = max(fast, key=lambda one: one.ratio)
    if fastest.half_width > MAX_HALF_WIDTH:
        return _none(scenario, _too_wide(fastest))
    equals = [one for one in fast if one.ratio >= fastest.ratio * (1 - SPEED_NOISE) and one.half_width <= MAX_HALF_WIDTH]
    chosen = min(equals, key=lambda one: (one.method.memory.total_bytes, SIMPLEST_FIRST.index(one.method.kind), -one.ratio))
    return _recommend(scenario, comparison, chosen, fastest, fast)


def _none(scenario: Scenario, reason: str) -> Advice:
    return Advice(scenario.name, "", 0, reason, "", "")


def _too_few_prompts(candidates: Sequence[Candidate]) -> str:
    """A refusal, or "" where the prompts suffice."""
    fewest = min(candidates, key=lambda one: one.num_prompts)
    if fewest.num_prompts >= MIN_PROMPTS:
        return ""
    if fewest.num_prompts == 0:
        return f"Not enough samples: 0 prompts with an answer to draft for ({fewest.method.name}); measure at least {MIN_PROMPTS}."
    low, high = fewest.interval
    return (
        f"Not enough samples: {fewest.num_prompts} prompts, interval from {low:.2f} to {high:.2f} around tau {fewest.acceptance.tau:.2f} "
        f"({fewest.method.name}); measure at least {MIN_PROMPTS}."
    )


def _too_wide(candidate: Candidate) -> str:
    """A refusal. An interval narrows with the square root of the number of prompts."""
    low, high = candidate.interval
    needed = math.ceil(candidate.num_prompts * (candidate.half_width / MAX_HALF_WIDTH) ** 2)
    return (
        f"Not enough samples: {candidate.num_prompts} prompts, interval from {low:.2f} to {high:.2f} around tau {candidate.acceptance.tau:.2f} "
        f"of what looks fastest ({candidate.method.name}); measure at least {needed}."
    )


def _do_not_speculate(scenario: Scenario, useful: Sequence[Candidate]) -> str:
    if not useful:
        return "Do not speculate: no lossless method has drafts accepted often enough to matter."
    best = max(useful, key=lambda one: one.ratio)
    verdict = "is slower than plain decoding" if best.ratio <= 1 else f"lies within {SPEED_NOISE:.0%} of plain decoding, which is simpler"
    return f"Do not speculate: the best, {best.method.name}, {verdict}: {best.ratio:.2f}x {scenario.where} ({best.tau_text})."


def _not_recommended(candidates: Sequence[Candidate]) -> str:
    """Sentences about the methods that must not be taken, however fast they look."""
    sentences = ""
    for one in candidates:
        if one.is_useless:
            sentences += f" Do not use {one.method.name}: its drafts are hardly ever accepted ({one.tau_text})."
        elif not one.method.is_lossless:
            sentences += f" {one.method.name} ({one.ratio:.2f}x) is lossy: its outputs are not the target's."
        elif one.num_changed_outputs:
            sentences += f" Do not use {one.method.name}: it changed {one.num_changed_outputs} outputs without a near tie, which is a defect."
    return sentences


def _recommend(scenario: Scenario, comparison: Comparison, chosen: Candidate, fastest: Candidate, fast: Sequence[Candidate]) -> Advice:
    method = chosen.method
    reason = f"{method.name}: {chosen.ratio:.2f}x {scenario.where} ({chosen.tau_text}){_about_length(chosen)}."
    if chosen is not fastest:
        more = fastest.method.memory.total_bytes - method.memory.total_bytes
        cheaper = f"which holds {_size(more)} more" if more else "which is more complex"
        reason += f" {fastest.method.name}, {cheaper}, is as fast within {SPEED_NOISE:.0%} ({fastest.ratio:.2f}x)."
    deployment = deploy_commands(method, chosen.num_drafts, comparison.target)
    reason += "".join(f" {text}." for text in (deployment.vllm_reason, deployment.sglang_reason) if text)
    if not deployment.vllm and not deployment.sglang:
        reason += _nearest_served(chosen, fast, comparison)
    reason += _not_recommended(scenario.candidates)
    return Advice(scenario.name, method.name, chosen.num_drafts, reason, deployment.vllm, deployment.sglang)


def _nearest_served(chosen: Candidate, fast: Sequence[Candidate], comparison: Comparison) -> str:
    for one in sorted(fast, key=lambda one: -one.ratio):
        found = deploy_commands(one.method, one.num_drafts, comparison.target)
        if one is not chosen and (found.vllm or found.sglang):
            return f" Of what an engine serves, {one.method.name} is the fastest ({one.ratio:.2f}x)."
    return " Nothing that an engine serves is faster than plain decoding."


# --- the number of speculative tokens ---------------------------------------------------------------------------------


def _about_length(chosen: Candidate) -> str:
    """What to say of the number of speculative tokens."""
    choice, length = chosen.choice, chosen.num_drafts
    if choice is None:
        return ", as it was measured"
    if length != choice.num_drafts:
        return f"; {length} speculative token{'s' * (length > 1)} measured fastest, where the cost model takes {choice.num_drafts}"
    text = ""
    if length not in choice.measured:
        predicted = choice.predicted[length] / choice.predicted[0]
        text = f"; timed with {timed_length(chosen.method)} speculative tokens, predicted {predicted:.2f}x with {length}"
    joint = chosen.acceptance.joint_acceptance
    if length < len(joint):
        later = f"a {_ordinal(length + 1)} draft would be accepted in {_percent(joint[length])} of verifications"
        return f"{text}; {later} and costs {_milliseconds(choice.marginal_s[length + 1])}"
    last = f"the {_ordinal(length)} draft is accepted in {_percent(joint[-1])} of verifications and costs {_milliseconds(choice.marginal_s[length])}"
    return f"{text}; {last}, longer chains were not measured"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _ordinal(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else f"{number}th"


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"
