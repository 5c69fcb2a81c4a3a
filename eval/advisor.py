"""Which method to deploy, with how many speculative tokens, and why; or that the measurement does not say.

Place in the flow: a `Comparison` of eval/measurement.py -> `advise` -> compare.json and eval/compare_report.py. Pure functions of what was measured:
only methods that leave the target's outputs as they are get recommended, and plain decoding is one of the choices. A method with a target of its own
(Medusa-2) is one only where nothing else is faster than plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from eval.acceptance import Acceptance
from eval.deploy import deploy_commands
from eval.draft_length import DraftLengthChoice, best_draft_length, has_draft_length, share_of_best_measured, timed_length
from eval.measurement import Comparison, Kind, MethodResult, Speed, size_text

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
        if not has_draft_length(self.method) or not self.acceptance.num_verifications:
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
        """Speed over plain decoding with `num_drafts`: as the method was set, times what that number gained over it where both were timed.

        Lengths may be timed on fewer prompts than the methods are, so that their own ratios do not compare with other methods'. Where the number was
        not timed (`is_predicted`), its gain is the cost model's, and no more than the model promises over plain decoding: one timing that came out
        well by chance must not make a speed-up of a length that nobody has tried.
        """
        if self.choice is None or self.num_drafts == self.set_to:
            return self.timed_ratio
        rates = self.choice.predicted if self.is_predicted else self.choice.measured
        scaled = self.timed_ratio * rates[self.num_drafts] / rates[self.set_to]
        return min(scaled, rates[self.num_drafts] / rates[0]) if self.is_predicted else scaled

    @property
    def measured_ratio(self) -> float:
        """`ratio`, or as the method was set where that is a prediction."""
        return self.timed_ratio if self.is_predicted else self.ratio

    @property
    def set_to(self) -> int:
        """The number of drafts that `timed_ratio` was timed with."""
        return min(timed_length(self.method), self.acceptance.draft_length)

    @property
    def is_predicted(self) -> bool:
        """Whether `num_drafts` was not timed in this setting, so that `ratio` rests on the cost model."""
        return self.choice is not None and self.num_drafts != self.set_to and not {self.set_to, self.num_drafts} <= self.choice.measured.keys()

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

    @cached_property
    def is_useless(self) -> bool:
        return is_useless(self.acceptance)

    @property
    def is_fast(self) -> bool:
        """Whether it is clearly faster than plain decoding, and for its drafts."""
        return not self.is_useless and self.ratio > 1 + SPEED_NOISE

    @property
    def ratio_text(self) -> str:
        return f"{self.ratio:.2f}x{', predicted' * self.is_predicted}"

    @property
    def tau_text(self) -> str:
        if not self.acceptance.num_verifications:
            return "nothing to draft"
        text = f"tau {self.acceptance.tau:.2f}, interval {self.interval[0]:.2f} to {self.interval[1]:.2f}"
        return text if self.num_drafts == self.acceptance.draft_length else f"{text} with {self.acceptance.draft_length} drafts"


def is_useless(acceptance: Acceptance) -> bool:
    """Whether what is accepted cannot be told from nothing, or is not worth a verification."""
    return not acceptance.num_verifications or acceptance.tau_interval()[0] <= 1.0 or acceptance.tau - 1 < MIN_GAIN


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


@dataclass(frozen=True)
class Decision:
    """What the measurement says, before it is put into words.

    Attributes:
        chosen: the method to deploy, or None.
        fast: those that are clearly faster than plain decoding and compete with it; the fastest first.
        kept: the methods that keep the target's outputs, whether fast or not.
        refusal: why the samples do not carry advice; "" where they do.
    """

    chosen: Candidate | None
    fast: tuple[Candidate, ...]
    kept: tuple[Candidate, ...]
    refusal: str


def advise(comparison: Comparison) -> tuple[Advice, ...]:
    """One piece of advice for each scenario."""
    return tuple(_decide(scenario, comparison) for scenario in _scenarios(comparison))


def _scenarios(comparison: Comparison) -> list[Scenario]:
    single = candidates_at_batch(comparison, 1)
    batch = max((batch for method in comparison.methods for batch in method.speed_by_batch), default=1)
    batched = candidates_at_batch(comparison, batch) if batch > 1 else []
    bound_bytes = LIGHT_MEMORY_SHARE * comparison.weights_bytes
    bound = f"at most {LIGHT_MEMORY_SHARE:.0%} of the target's weights ({size_text(bound_bytes)})"
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


def candidates_at_batch(comparison: Comparison, batch: int) -> list[Candidate]:
    """Every method that was timed with so many sequences, on all prompts."""
    timed = [(method, method.speed_by_batch[batch]) for method in comparison.methods if batch in method.speed_by_batch]
    return [Candidate(method, comparison, batch, method.acceptance, speed.ratio) for method, speed in timed]


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


def decide(candidates: Sequence[Candidate]) -> Decision:
    """Which of them to deploy, if any: the leanest of the fastest that keep the target's outputs, on enough samples."""
    kept = tuple(one for one in candidates if one.method.keeps_output)
    own = [one for one in candidates if one.method.has_own_target and one.method.is_lossless and not one.method.num_changed_outputs]
    fast = [one for one in kept if one.is_fast]
    if not fast and kept and (refusal := _too_few_prompts(kept)):
        return Decision(None, (), kept, refusal)
    fast = sorted(fast or (one for one in own if one.is_fast), key=lambda one: -one.ratio)
    if not fast:
        return Decision(None, (), kept, _too_few_prompts(kept or candidates))
    refusal = _too_few_prompts(fast[:1]) or _too_wide(fast[0])
    if refusal:
        # On few samples, a target of its own is not recommended; what is known of the others stands.
        is_about_kept = not kept or fast[0].method.keeps_output
        return Decision(None, tuple(fast), kept, refusal if is_about_kept else "")
    equals = [one for one in fast if one.ratio >= fast[0].ratio * (1 - SPEED_NOISE) and not _too_few_prompts([one]) and not _too_wide(one)]
    chosen = min(equals, key=lambda one: (one.method.memory.total_bytes, SIMPLEST_FIRST.index(one.method.kind), -one.ratio))
    return Decision(chosen, tuple(fast), kept, "")


def _decide(scenario: Scenario, comparison: Comparison) -> Advice:
    if not scenario.candidates:
        return _none(scenario, scenario.lacking)
    decision = decide(scenario.candidates)
    if decision.refusal:
        return _none(scenario, decision.refusal)
    if decision.chosen is None:
        return _none(scenario, _do_not_speculate(scenario, decision.kept) + _not_recommended(scenario.candidates))
    return _recommend(scenario, comparison, decision.chosen, decision.fast)


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
    """A refusal, or "" where the interval is narrow enough. It narrows with the square root of the number of prompts."""
    if candidate.half_width <= MAX_HALF_WIDTH:
        return ""
    low, high = candidate.interval
    needed = math.ceil(candidate.num_prompts * (candidate.half_width / MAX_HALF_WIDTH) ** 2)
    return (
        f"Not enough samples: {candidate.num_prompts} prompts, interval from {low:.2f} to {high:.2f} around tau {candidate.acceptance.tau:.2f} "
        f"of what looks fastest ({candidate.method.name}); measure at least {needed}."
    )


def _do_not_speculate(scenario: Scenario, kept: Sequence[Candidate]) -> str:
    useful = [one for one in kept if not one.is_useless]
    if not useful:
        return "Do not speculate: no lossless method has drafts accepted often enough to matter."
    best = max(useful, key=lambda one: one.ratio)
    verdict = "is slower than plain decoding" if best.ratio <= 1 else f"lies within {SPEED_NOISE:.0%} of plain decoding, which is simpler"
    numbers = f"{best.ratio:.2f}x {scenario.where} ({best.tau_text}){_about_prediction(best)}"
    return f"Do not speculate: the best, {best.method.name}, {verdict}: {numbers}."


def _not_recommended(candidates: Sequence[Candidate], is_own_target_known: bool = False) -> str:
    """Sentences about the methods that must not be taken, however fast they look; or only as what they are, if that is not known yet."""
    sentences = ""
    for one in candidates:
        if one.is_useless:
            sentences += f" Do not use {one.method.name}: its drafts are hardly ever accepted ({one.tau_text})."
        elif not one.method.is_lossless:
            sentences += f" {one.method.name} ({one.ratio_text}) is lossy: its outputs are not the target's."
        elif one.method.num_changed_outputs:
            sentences += f" Do not use {one.method.name}: it changed {one.method.num_changed_outputs} outputs without a near tie, which is a defect."
        elif one.method.has_own_target and not is_own_target_known:
            sentences += f" {one.method.name} ({one.ratio_text}) serves a target of its own, trained with it: its outputs are not this target's."
    return sentences


def _recommend(scenario: Scenario, comparison: Comparison, chosen: Candidate, fast: Sequence[Candidate]) -> Advice:
    """Of `fast`, the fastest first, the chosen one."""
    method, fastest = chosen.method, fast[0]
    reason = f"{method.name}: {chosen.ratio:.2f}x {scenario.where} ({chosen.tau_text}){_about_prediction(chosen)}{_about_length(chosen)}."
    if method.has_own_target:
        reason += (
            " No method that keeps the target's outputs is faster than plain decoding. This one serves a target of its own, trained with it: "
            f"it is lossless against that one, whose answers can differ from those of {comparison.target}."
        )
    if chosen is not fastest:
        more = fastest.method.memory.total_bytes - method.memory.total_bytes
        cheaper = f"which holds {size_text(more)} more" if more else "which is more complex"
        reason += f" {fastest.method.name}, {cheaper}, is as fast within {SPEED_NOISE:.0%} ({fastest.ratio_text})."
    deployment = deploy_commands(method, chosen.num_drafts, comparison.target, comparison.revision)
    reason += "".join(f" {text}." for text in (deployment.vllm_reason, deployment.sglang_reason) if text)
    if not deployment.vllm and not deployment.sglang:
        reason += _nearest_served(chosen, fast, comparison)
    reason += _not_recommended(scenario.candidates, is_own_target_known=method.has_own_target)
    return Advice(scenario.name, method.name, chosen.num_drafts, reason, deployment.vllm, deployment.sglang)


def _nearest_served(chosen: Candidate, fast: Sequence[Candidate], comparison: Comparison) -> str:
    for one in fast:
        found = deploy_commands(one.method, one.num_drafts, comparison.target)
        if one is not chosen and (found.vllm or found.sglang):
            return f" Of what an engine serves, {one.method.name} is the fastest ({one.ratio_text})."
    return " Nothing that an engine serves is faster than plain decoding."


# --- the number of speculative tokens ---------------------------------------------------------------------------------


def _about_prediction(candidate: Candidate) -> str:
    """That a speed was not measured, what it was made from, and what would measure it."""
    if not candidate.is_predicted:
        return ""
    return (
        f" with {drafts_text(candidate.num_drafts)}, predicted, not measured: {drafts_text(candidate.set_to)} measured {candidate.timed_ratio:.2f}x "
        f"there; --methods.draft-length {candidate.num_drafts} measures it"
    )


def drafts_text(count: int) -> str:
    """For people: 1 speculative token, 3 speculative tokens."""
    return "1 speculative token" if count == 1 else f"{count} speculative tokens"


def _about_length(chosen: Candidate) -> str:
    """What to say of the number of speculative tokens."""
    choice, length = chosen.choice, chosen.num_drafts
    if choice is None:
        return ", as it was measured"
    if length != choice.num_drafts:
        return f"; {drafts_text(length)} measured fastest, where the cost model takes {choice.num_drafts}"
    joint = chosen.acceptance.joint_acceptance
    if length < len(joint):
        later = f"a {_ordinal(length + 1)} draft would be accepted in {_percent(joint[length])} of verifications"
        return f"; {later} and costs {_milliseconds(choice.marginal_s[length + 1])}"
    last = f"the {_ordinal(length)} draft is accepted in {_percent(joint[-1])} of verifications and costs {_milliseconds(choice.marginal_s[length])}"
    return f"; {last}, longer chains were not measured"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _ordinal(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else f"{number}th"
