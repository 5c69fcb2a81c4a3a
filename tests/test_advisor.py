"""Advice follows from what was measured: each rule on a made-up comparison, the cost model by hand, and no claim that the samples do not carry."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from eval.acceptance import Acceptance
from eval.advisor import LIGHT_MEMORY_SHARE, MIN_PROMPTS, Advice, advise
from eval.draft_length import DraftingCost, best_draft_length, fit_drafting, predicted_speed, seconds_of_forward, share_of_best_measured
from eval.measurement import Comparison, Kind, Lossless, Memory, MethodResult, Speed

SINGLE, BATCH, LIGHT, REPETITIVE, QUICK = range(5)
WEIGHTS_BYTES = 10_000_000
PLAIN = 10.0  # tokens/s at batch 1
# One token takes 100 ms, and each further one 1 ms.
FORWARD_S = {1: {1: 0.100, 2: 0.101, 4: 0.103, 8: 0.107}, 4: {1: 0.120, 2: 0.150, 4: 0.210, 8: 0.330}}


def accepted(walk: Sequence[int], draft_length: int = 3, num_prompts: int = 12) -> Acceptance:
    """Prompts that are all alike: an interval of width 0."""
    return Acceptance.from_walks([walk] * num_prompts, draft_length)


def speed(ratio: float, drafting_s: float = 0.01, plain: float = PLAIN) -> Speed:
    return Speed(ratio, (ratio, ratio), ratio * plain, plain, drafting_s, 0.1)


def method(name: str, ratio: float = 1.5, kind: Kind = "chain", **changes: Any) -> MethodResult:
    """Half of the first drafts accepted, a quarter of the second, none of the third: tau 1.75; 2 drafts, the best, as fast as the 3 it is set to."""
    is_untrained = kind in ("n-gram", "lookahead", "draft model")
    fields: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "algorithm": None if is_untrained else "eagle3",
        "drafter": None if kind in ("n-gram", "lookahead") else f"the {name}",
        "settings": {"draft_length": 3, "top_k": 2, "total_tokens": 8, "min_n": 1, "max_n": 3},
        "is_lossless": True,
        "nodes_per_verification": 3.0,
        "acceptance": accepted([2, 1, 0, 0]),
        "acceptance_by_domain": {},
        "speed_by_domain": {},
        "speed_by_batch": {1: speed(ratio)},
        "speed_by_draft_length": {},
        "memory": Memory(1_000_000, 0, 0, 0),
        "lossless": Lossless("float32", 12, 12, 0, 0.0),
        "tau_predicted": None,
    }
    fields |= changes
    if "speed_by_draft_length" not in changes:
        as_set = fields["speed_by_batch"][1]
        fields["speed_by_draft_length"] = {2: speed(as_set.ratio, as_set.drafting_s * (1 if kind == "n-gram" else 2 / 3))}
    return MethodResult(**fields)


def comparison(*methods: MethodResult, domains: Sequence[str] = ("chat",), **changes: Any) -> Comparison:
    fields: dict[str, Any] = {
        "target": "the target",
        "domains": dict.fromkeys(domains, 12),
        "about": {},
        "plain_tokens_per_s": {1: PLAIN, 4: 4 * PLAIN},
        "forward_s": FORWARD_S,
        "methods": methods,
        "weights_bytes": WEIGHTS_BYTES,
    }
    return Comparison(**(fields | changes))


def advice(scenario: int, *methods: MethodResult, **changes: Any) -> Advice:
    return advise(comparison(*methods, **changes))[scenario]


# --- which method -----------------------------------------------------------------------------------------------------


def test_the_fastest_lossless_method_is_recommended_with_numbers_and_commands() -> None:
    found = advice(SINGLE, method("slower", 1.2), method("faster", 1.6))
    assert found.method == "faster"
    assert "1.60x at batch 1 (tau 1.75, interval 1.75 to 1.75" in found.reason
    assert json.loads(shlex.split(found.vllm)[4])["num_speculative_tokens"] == found.num_speculative_tokens
    assert "EAGLE3" in found.sglang and "the target" in found.vllm


def test_the_reason_says_what_a_further_draft_brings_and_costs() -> None:
    """The third draft is accepted in 0 of 4 verifications; it costs 10 ms / 3 of drafting and 1 ms of the forward."""
    found = advice(SINGLE, method("one", 1.6))
    assert found.num_speculative_tokens == 2
    assert "a third draft would be accepted in 0% of verifications and costs 4.3 ms" in found.reason


def test_a_lossy_method_is_never_recommended_but_named_as_such() -> None:
    lossy = method("typical", 3.0, is_lossless=False, lossless=None)
    for found in advise(comparison(lossy, method("exact", 1.3))):
        assert found.method in ("exact", "")
    assert "typical (3.00x) is lossy" in advice(SINGLE, lossy, method("exact", 1.3)).reason
    alone = advice(SINGLE, lossy)
    assert alone.method == "" and alone.reason.startswith("Do not speculate") and "typical (3.00x) is lossy" in alone.reason


def test_a_method_that_changed_outputs_is_defective_whatever_it_promises() -> None:
    broken = method("broken", 3.0, lossless=Lossless("float32", 12, 10, 1, 1e-4))
    found = advice(SINGLE, broken, method("sound", 1.3))
    assert found.method == "sound" and "broken: it changed 1 outputs" in found.reason
    near_tie = method("tied", 3.0, lossless=Lossless("float32", 12, 11, 1, 1e-4))
    assert advice(SINGLE, near_tie, method("sound", 1.3)).method == "tied"


@pytest.mark.parametrize(("ratio", "said"), [(0.8, "is slower than plain decoding: 0.80x"), (1.03, "within 5% of plain decoding")])
def test_what_is_not_faster_than_plain_decoding_is_not_recommended(ratio: float, said: str) -> None:
    found = advice(SINGLE, method("one", ratio))
    assert (found.method, found.num_speculative_tokens, found.vllm, found.sglang) == ("", 0, "", "")
    assert found.reason.startswith("Do not speculate") and said in found.reason


def test_a_random_drafter_is_not_to_be_used_however_fast_it_looks() -> None:
    """tau 1.0, and then tau 1.02 with an interval that does not reach down to 1."""
    for walk in ([0, 0, 0], [1] + [0] * 49):
        found = advice(SINGLE, method("random", 1.4, acceptance=accepted(walk)))
        assert found.method == "" and found.reason.startswith("Do not speculate")
        assert "Do not use random: its drafts are hardly ever accepted" in found.reason


def test_a_tau_whose_interval_reaches_one_is_not_to_be_used() -> None:
    """One of 20 prompts is copied whole, the others not at all: tau 1.15, and more than a third of the resamples lack that prompt."""
    lucky = Acceptance.from_walks([[3] * 4] + [[0] * 4] * 19, 3)
    assert lucky.tau == pytest.approx(1.15)
    found = advice(SINGLE, method("lucky", 1.4, acceptance=lucky))
    assert found.method == "" and "Do not use lucky" in found.reason


def test_of_equally_fast_methods_the_one_that_holds_less_is_taken_and_the_other_named() -> None:
    heavy, lean = method("heavy", 1.52), method("lean", 1.50, memory=Memory(1000, 0, 0, 0))
    found = advice(SINGLE, heavy, lean)
    assert found.method == "lean" and "heavy, which holds 976 KiB more, is as fast within 5% (1.52x)" in found.reason
    assert advice(SINGLE, method("heavy", 1.70), lean).method == "heavy"


def test_of_methods_that_hold_the_same_the_simpler_is_taken() -> None:
    tree = method("tree", 1.52, kind="dynamic tree")
    found = advice(SINGLE, tree, method("chain", 1.50))
    assert found.method == "chain" and "tree, which is more complex, is as fast within 5%" in found.reason


def test_a_method_without_an_engine_comes_with_the_fastest_that_has_one() -> None:
    found = advice(SINGLE, method("Lookahead", 2.0, kind="lookahead"), method("chain", 1.5))
    assert (found.method, found.vllm, found.sglang) == ("Lookahead", "", "")
    assert "vLLM 0.32.0 does not support Lookahead" in found.reason and "Of what an engine serves, chain is the fastest (1.50x)" in found.reason
    alone = advice(SINGLE, method("Lookahead", 2.0, kind="lookahead"))
    assert "Nothing that an engine serves is faster" in alone.reason


def test_commands_pin_the_revision_that_was_measured() -> None:
    found = advice(SINGLE, method("one", 1.6), revision="v1.1")
    assert found.vllm.endswith(" --revision v1.1") and found.sglang.endswith(" --revision v1.1")


# --- scenarios --------------------------------------------------------------------------------------------------------


def test_high_throughput_looks_at_the_largest_batch() -> None:
    small = method("good alone", 2.0, speed_by_batch={1: speed(2.0), 2: speed(1.9), 4: speed(0.8, plain=40.0)})
    large = method("good together", 1.3, kind="static tree", speed_by_batch={1: speed(1.3), 4: speed(1.2, plain=40.0)})
    found = advice(BATCH, small, large, method("only alone", 3.0))
    assert found.method == "good together" and "1.20x at batch 4" in found.reason
    none = advice(BATCH, small)
    # 30 ms a further token: 1.5 / 0.1533 with one draft against 1.75 / 0.22 with the three that were timed.
    assert none.method == "" and "0.98x at batch 4" in none.reason and "predicted, not measured" in none.reason
    assert "only batch 1 was measured" in advice(BATCH, method("alone", 3.0)).reason


def test_without_memory_to_spare_the_bound_is_kept_and_said() -> None:
    bound = int(LIGHT_MEMORY_SHARE * WEIGHTS_BYTES)
    within, beyond = method("within", 1.2, memory=Memory(0, bound, 0, 0)), method("beyond", 2.0, memory=Memory(0, bound, 1, 0))
    found = advice(LIGHT, within, beyond)
    assert found.method == "within" and "at most 3% of the target's weights (293 KiB)" in found.reason
    none = advice(LIGHT, beyond)
    assert none.method == "" and none.reason.startswith("Do not speculate") and "3%" in none.reason


def in_domains(name: str, ratios: Mapping[str, float], kind: Kind = "chain", num_prompts: int = 12) -> MethodResult:
    return method(
        name,
        1.1,
        kind,
        acceptance_by_domain={domain: accepted([2, 1, 0, 0], num_prompts=num_prompts) for domain in ratios},
        speed_by_domain={domain: speed(ratio) for domain, ratio in ratios.items()},
    )


def test_repetitive_text_is_code_and_summaries_and_nothing_else() -> None:
    """Equal numbers of tokens at 20 and 13.3 tokens/s are 16 tokens/s together, against 10."""
    copier = in_domains("copier", {"chat": 0.5, "code": 2.0, "summarisation": 4 / 3}, kind="static tree")
    talker = in_domains("talker", {"chat": 3.0, "code": 1.2, "summarisation": 1.2}, kind="static tree")
    found = advice(REPETITIVE, copier, talker, domains=("chat", "code", "summarisation"))
    assert found.method == "copier" and "1.60x at batch 1 in code and summarisation" in found.reason
    assert "no code and summarisation was measured" in advice(REPETITIVE, in_domains("talker", {"chat": 3.0})).reason


def test_the_prompts_of_a_scenario_are_counted_not_all_prompts() -> None:
    """12 prompts in all, and 3 + 4 of code and summaries."""
    one = in_domains("one", {"code": 2.0, "summarisation": 2.0})
    few = {"code": accepted([2, 1, 0, 0], num_prompts=3), "summarisation": accepted([2, 1, 0, 0], num_prompts=4)}
    one = MethodResult(**(vars(one) | {"acceptance_by_domain": few}))
    found = advise(comparison(one, domains=("code", "summarisation")))
    assert found[SINGLE].method == "one"
    assert found[REPETITIVE].method == "" and "Not enough samples: 7 prompts" in found[REPETITIVE].reason


def test_the_quick_start_needs_no_training() -> None:
    found = advice(QUICK, method("EAGLE-3", 2.0), method("n-gram", 1.2, kind="n-gram"), method("small model", 1.4, kind="draft model"))
    assert found.method == "small model" and "draft_model" in found.vllm
    assert "nothing that needs no training was measured" in advice(QUICK, method("EAGLE-3", 2.0)).reason


CHEAP_PAIRS = FORWARD_S | {4: {1: 0.1, 2: 0.12, 3: 0.2, 4: 0.25}}


def test_a_length_that_was_not_timed_in_the_scenario_is_judged_by_prediction_and_said_to_be() -> None:
    """Batch 4, timed with 3 drafts only: one draft is predicted 12.16 / 6.73 times as fast, and 1.22 times as fast as plain decoding."""
    one = method("one", 1.5, speed_by_batch={1: speed(1.5), 4: speed(0.65, plain=40.0)})
    found = advice(BATCH, one, forward_s=CHEAP_PAIRS)
    assert (found.method, found.num_speculative_tokens) == ("one", 1)
    assert "1.17x at batch 4" in found.reason and "predicted, not measured" in found.reason
    assert "3 speculative tokens measured 0.65x there" in found.reason and "--methods.draft-length 1" in found.reason


def test_a_lucky_timing_promises_no_more_than_the_cost_model() -> None:
    """Timed with 3 drafts at 0.90x, where the model says 0.67x: one draft would be 1.63x by that measure, and is 1.22x by the model."""
    found = advice(BATCH, method("one", 1.5, speed_by_batch={1: speed(1.5), 4: speed(0.9, plain=40.0)}), forward_s=CHEAP_PAIRS)
    assert "1.22x at batch 4" in found.reason
    # Here the model sees no gain: 1.5 / 0.1533 against 1 / 0.1.
    no_gain = FORWARD_S | {4: {1: 0.1, 2: 0.15, 4: 0.21}}
    assert advice(BATCH, method("one", 1.5, speed_by_batch={1: speed(1.5), 4: speed(0.9, plain=40.0)}), forward_s=no_gain).method == ""


def test_with_the_length_that_was_timed_there_is_nothing_to_predict() -> None:
    timed = method("one", 1.5, speed_by_batch={1: speed(1.5), 4: speed(1.2, plain=40.0)}, acceptance=accepted([3, 3, 3]))
    found = advice(BATCH, timed, forward_s=FORWARD_S | {4: FORWARD_S[1]})
    assert found.num_speculative_tokens == 3 and "1.20x at batch 4" in found.reason and "predicted" not in found.reason


def test_a_length_for_some_domains_is_predicted_from_what_was_timed_there() -> None:
    """Of code every first draft is accepted and no other: 2 / 0.10433 with one draft against 2 / 0.113 with three."""
    code = {"acceptance_by_domain": {"code": accepted([1, 1, 1])}, "speed_by_domain": {"code": speed(1.3)}}
    found = advice(REPETITIVE, method("one", **code), domains=("code",))
    assert found.num_speculative_tokens == 1 and "1.41x at batch 1 in code" in found.reason
    assert "predicted, not measured" in found.reason and "3 speculative tokens measured 1.30x there" in found.reason


# --- a target of its own ----------------------------------------------------------------------------------------------


def test_a_method_with_a_target_of_its_own_is_not_preferred_to_one_that_keeps_the_outputs() -> None:
    own = method("Medusa-2 chain", 3.0, algorithm="medusa2")
    found = advice(SINGLE, own, method("EAGLE-3", 1.3))
    assert found.method == "EAGLE-3" and "Medusa-2 chain (3.00x) serves a target of its own" in found.reason


@pytest.mark.parametrize("drafter", ["heads", "eagle3-and-medusa"])
def test_where_nothing_else_is_fast_a_target_of_its_own_is_recommended_as_such(drafter: str) -> None:
    """Once, and also where the engine has no command for the drafter and tells its own reason instead."""
    own = method("Medusa-2 chain", 3.0, algorithm="medusa2", drafter=drafter)
    found = advice(SINGLE, own, method("EAGLE-3", 0.9))
    assert found.method == "Medusa-2 chain"
    assert found.reason.count("target of its own") == 1 and "No method that keeps the target's outputs is faster" in found.reason


# --- refusing ---------------------------------------------------------------------------------------------------------


def test_few_prompts_are_refused_with_their_number_interval_and_what_is_needed() -> None:
    few = Acceptance.from_walks([[2, 1, 0, 0]] * 3 + [[1, 1, 1, 0]] * 4, 3)
    low, high = few.tau_interval()
    for found in advise(comparison(method("one", 2.0, acceptance=few)))[:1]:
        assert found.method == "" and (found.vllm, found.sglang) == ("", "")
        assert f"Not enough samples: 7 prompts, interval from {low:.2f} to {high:.2f}" in found.reason
        assert f"measure at least {MIN_PROMPTS}" in found.reason
    assert advice(SINGLE, method("one", 2.0, acceptance=accepted([2, 1, 0, 0], num_prompts=MIN_PROMPTS))).method == "one"


def test_few_samples_of_what_is_not_recommended_anyway_do_not_matter() -> None:
    few = accepted([2, 1, 0, 0], num_prompts=MIN_PROMPTS - 1)
    lossy = method("typical", 3.0, is_lossless=False, lossless=None, acceptance=few)
    silent = method("silent", 3.0, is_lossless=False, lossless=None, acceptance=Acceptance.from_walks([[]] * 20, 3))
    broken = method("broken", 3.0, lossless=Lossless("float32", 12, 10, 1, 1e-4), acceptance=few)
    own = method("Medusa-2", 3.0, algorithm="medusa2", acceptance=few)
    assert advice(SINGLE, lossy, silent, broken, own, method("exact", 1.3)).method == "exact"
    assert advice(SINGLE, method("slower", 1.2, acceptance=few), method("exact", 1.6)).method == "exact"
    # Of the one that would be recommended they do, and of all where none is.
    assert "Not enough samples: 7 prompts" in advice(SINGLE, method("slower", 1.2), method("few", 1.6, acceptance=few)).reason
    assert "Not enough samples: 7 prompts" in advice(SINGLE, method("slow", 0.9), method("few", 0.8, acceptance=few), own).reason
    assert "Not enough samples" in advice(SINGLE, lossy).reason
    assert advice(SINGLE, own, method("slow", 0.9)).reason.startswith("Do not speculate: the best, slow, is slower")


def test_a_leaner_method_on_few_samples_is_not_taken_for_an_equal() -> None:
    lean = method("lean", 1.5, memory=Memory(0, 0, 0, 0), acceptance=accepted([2, 1, 0, 0], num_prompts=MIN_PROMPTS - 1))
    assert advice(SINGLE, method("heavy", 1.52), lean).method == "heavy"


def test_answers_with_nothing_to_draft_are_no_samples() -> None:
    assert "0 prompts with an answer" in advice(SINGLE, method("one", 2.0, acceptance=Acceptance.from_walks([[]] * 20, 3))).reason


def test_a_wide_interval_is_refused_with_the_number_that_would_narrow_it() -> None:
    """Half of 10 prompts are copied whole and half not at all."""
    spread = Acceptance.from_walks([[3] * 4, [0] * 4] * 5, 3)
    low, high = spread.tau_interval()
    assert low > 1 and (high - low) / 2 / spread.tau > 0.15
    found = advice(SINGLE, method("spread", 2.0, acceptance=spread), method("steady", 1.3))
    assert found.method == "" and f"10 prompts, interval from {low:.2f} to {high:.2f}" in found.reason
    needed = int(found.reason.rsplit("at least ", 1)[1].rstrip("."))
    assert needed == pytest.approx(10 * ((high - low) / 2 / spread.tau / 0.15) ** 2, abs=1) and needed > 10
    # A cheaper method that is nearly as fast is not taken on such samples, and a slower one's do not matter.
    assert advice(SINGLE, method("spread", 1.98, acceptance=spread, memory=Memory(0, 0, 0, 0)), method("steady", 2.0)).method == "steady"
    assert advice(SINGLE, method("spread", 1.2, acceptance=spread), method("steady", 1.6)).method == "steady"


def test_nothing_measured_is_no_advice() -> None:
    for found in advise(comparison()):
        assert found.method == "" and found.reason


def test_advice_as_json_is_text_and_the_number_only_beside_a_method() -> None:
    for found in (advice(SINGLE, method("one", 1.5)), advice(SINGLE, method("one", 0.5))):
        row = found.to_json()
        assert list(row) == ["scenario", "method", "num_speculative_tokens", "reason", "vllm", "sglang"]
        assert all(isinstance(value, str) for value in row.values())
        assert row["num_speculative_tokens"] == ("2" if found.method else "")


# --- how many drafts --------------------------------------------------------------------------------------------------


def test_a_forward_is_linear_between_what_was_measured_and_beyond() -> None:
    forward_s = {1: 1.0, 3: 2.0, 5: 6.0}
    expected = {1: 1.0, 2: 1.5, 3: 2.0, 4: 4.0, 5: 6.0, 7: 10.0, 0.5: 0.75}
    assert {num: seconds_of_forward(forward_s, num) for num in expected} == pytest.approx(expected)
    with pytest.raises(ValueError, match="expected at least two"):
        seconds_of_forward({1: 1.0}, 2)


def test_a_forward_over_more_tokens_is_never_cheaper() -> None:
    """Timings are not monotone: 4 tokens took less than 3."""
    forward_s = {1: 0.100, 3: 0.108, 4: 0.102, 8: 0.112}
    expected = {3: 0.108, 3.5: 0.108, 4: 0.108, 6: 0.110}
    assert {num: seconds_of_forward(forward_s, num) for num in expected} == pytest.approx(expected)
    one = method("n-gram", kind="n-gram")
    assert all(cost_s >= 0 for cost_s in best_draft_length(one, comparison(one, forward_s={1: forward_s}), 1).marginal_s.values())


def test_predicted_speed_by_hand() -> None:
    """tau(2) = 1 + 0.8 + 0.5; drafting 0.5 + 2 * 0.25 s, a forward over 3 tokens 2 s; plain decoding drafts nothing."""
    forward_s, drafting = {1: 1.0, 3: 2.0}, DraftingCost(0.5, 0.25)
    assert predicted_speed([0.8, 0.5, 0.1], forward_s, drafting, 2) == pytest.approx(2.3 / 3.0)
    assert predicted_speed([0.8, 0.5, 0.1], forward_s, drafting, 0) == pytest.approx(1.0)
    # An n-gram is found half of the time: a forward over 2 tokens in the mean.
    assert predicted_speed([0.4, 0.3], forward_s, drafting, 2, nodes_per_draft=0.5) == pytest.approx(1.7 / 2.5)


def test_drafting_is_linear_for_an_autoregressive_drafter_and_constant_otherwise() -> None:
    timed = {1: speed(1.2, 0.03), 3: speed(1.5, 0.07)}
    assert vars(fit_drafting(method("chain", speed_by_draft_length=timed), 1)) == pytest.approx({"fixed_s": 0.01, "per_draft_s": 0.02})
    # Its own speed alone: 3 drafts in 10 ms.
    assert vars(fit_drafting(method("chain", speed_by_draft_length={}), 1)) == pytest.approx({"fixed_s": 0.0, "per_draft_s": 0.01 / 3})
    for one in (method("medusa", algorithm="medusa1", speed_by_draft_length=timed), method("n-gram", kind="n-gram", speed_by_draft_length=timed)):
        assert vars(fit_drafting(one, 1)) == pytest.approx({"fixed_s": 0.05, "per_draft_s": 0.0})


def test_drafting_for_a_batch_is_scaled_by_what_it_took_there() -> None:
    timed = {1: speed(1.2, 0.03), 3: speed(1.5, 0.07)}
    one = method("chain", speed_by_draft_length=timed, speed_by_batch={1: speed(1.5, 0.07), 4: speed(1.1, 0.14)})
    assert vars(fit_drafting(one, 4)) == pytest.approx({"fixed_s": 0.02, "per_draft_s": 0.04})


@pytest.mark.parametrize("drafting_s", [{1: 0.05, 3: 0.02}, {1: 0.01, 3: 0.09}])
def test_noise_never_makes_drafting_cost_less_than_nothing(drafting_s: Mapping[int, float]) -> None:
    cost = fit_drafting(method("chain", speed_by_draft_length={length: speed(1.5, seconds) for length, seconds in drafting_s.items()}), 1)
    assert cost.fixed_s >= 0 and cost.per_draft_s >= 0


def test_the_best_draft_length_by_hand() -> None:
    """Acceptance 0.5, 0.25, 0; a draft takes 10 ms, further tokens of a forward 1 ms: 1.5 / 0.111, 1.75 / 0.122, 1.75 / 0.133 tokens/s."""
    timed = {1: speed(1.3, 0.01), 3: speed(1.35, 0.03)}
    one = method("chain", speed_by_draft_length=timed, speed_by_batch={1: timed[3]})
    choice = best_draft_length(one, comparison(one), 1)
    assert choice.num_drafts == 2
    assert choice.predicted == pytest.approx({0: 10.0, 1: 1.5 / 0.111, 2: 1.75 / 0.122, 3: 1.75 / 0.133})
    assert choice.measured == pytest.approx({1: 13.0, 3: 13.5})
    assert choice.relative_error == pytest.approx({1: 1.5 / 0.111 / 13 - 1, 3: 1.75 / 0.133 / 13.5 - 1})
    assert choice.marginal_s == pytest.approx({1: 0.011, 2: 0.011, 3: 0.011})
    assert share_of_best_measured(choice) == pytest.approx(13.25 / 13.5)


def test_the_reason_tells_the_cost_of_that_very_draft() -> None:
    """The fourth token of a forward starts another tile: 20 ms."""
    found = advice(SINGLE, method("one", 1.6), forward_s={1: {1: 0.100, 2: 0.101, 3: 0.102, 4: 0.122, 5: 0.123}})
    assert found.num_speculative_tokens == 2 and "costs 23.3 ms" in found.reason


def test_a_draft_that_is_not_found_is_not_verified() -> None:
    """An n-gram of 3 tokens that is found half of the time: 1.5 further tokens in the mean. It is looked up whole, in 10 ms."""
    one = method("n-gram", kind="n-gram", nodes_per_verification=1.5)
    choice = best_draft_length(one, comparison(one), 1)
    assert choice.predicted[2] == pytest.approx(1.75 / 0.111) and choice.marginal_s[2] == pytest.approx(0.0005)


def test_the_length_for_some_domains_is_that_of_their_own_acceptance() -> None:
    """All prompts want 2 drafts, code is always accepted; and speeds by length, which are of all prompts, say nothing about code."""
    timed = {1: speed(1.8, 0.01), 2: speed(1.4, 0.02), 3: speed(1.0, 0.03)}
    code = {"acceptance_by_domain": {"code": accepted([3, 3, 3])}, "speed_by_domain": {"code": speed(2.5)}}
    found = advice(REPETITIVE, method("one", speed_by_draft_length=timed, **code), domains=("code",))
    assert found.num_speculative_tokens == 3 and "2.50x" in found.reason


def test_lengths_timed_on_other_prompts_count_only_against_each_other() -> None:
    """2 drafts are a tenth faster than 3 on easy prompts; on all prompts 3 drafts gave 1.5x, so 2 are taken to give 1.65x."""
    timed = {1: speed(2.0, 0.01), 2: speed(2.2, 0.02), 3: speed(2.0, 0.03)}
    found = advice(SINGLE, method("one", 1.5, speed_by_draft_length=timed), method("other", 1.8, kind="dynamic tree"))
    assert found.method == "other"
    assert "1.65x" in advice(SINGLE, method("one", 1.5, speed_by_draft_length=timed)).reason


def test_a_batch_that_fills_the_machine_wants_shorter_chains() -> None:
    """30 ms a further token: 4 * 1.5 / 0.16 against 4 * 1.75 / 0.22."""
    one = method("chain", speed_by_batch={1: speed(1.5), 4: speed(1.1, plain=40.0)})
    choice = best_draft_length(one, comparison(one), 4)
    assert choice.num_drafts == 1 and best_draft_length(one, comparison(one), 1).num_drafts == 2
    assert choice.predicted[1] == pytest.approx(4 * 1.5 / (0.01 / 3 + 0.150))
    with pytest.raises(ValueError, match="expected 2"):
        best_draft_length(method("chain", speed_by_batch={1: speed(1.5), 2: speed(1.5)}), comparison(), 2)


def test_a_drafter_that_is_always_right_and_free_is_asked_for_its_longest_chain() -> None:
    """The target drafts for itself: tau is K + 1. As it costs what the target costs, it is never recommended."""
    always = accepted([3, 3, 3])
    assert always.tau == 4.0
    free = method("oracle", 3.5, kind="draft model", acceptance=always, speed_by_batch={1: speed(3.5, 0.0)})
    found = advice(SINGLE, free)
    assert (found.method, found.num_speculative_tokens) == ("oracle", 3)
    assert "tau 4.00" in found.reason and "the third draft is accepted in 100% of verifications" in found.reason
    itself = method("itself", 0.98, kind="draft model", acceptance=always, speed_by_batch={1: speed(0.98, 0.3)})
    assert advice(SINGLE, itself).method == ""
    assert best_draft_length(itself, comparison(itself), 1).predicted[3] == pytest.approx(4 / 0.403)


def test_measurement_overrules_a_cost_model_that_is_clearly_wrong() -> None:
    """The model takes 2 drafts, as above; but 1 was measured a fifth faster than everything else."""
    timed = {1: speed(1.8, 0.01), 2: speed(1.4, 0.02), 3: speed(1.5, 0.03)}
    one = method("chain", speed_by_draft_length=timed, speed_by_batch={1: timed[3]})
    choice = best_draft_length(one, comparison(one), 1)
    assert choice.num_drafts == 2 and share_of_best_measured(choice) == pytest.approx(1.4 / 1.8)
    found = advice(SINGLE, one)
    assert found.num_speculative_tokens == 1 and "1.80x" in found.reason
    assert "1 speculative token measured fastest, where the cost model takes 2" in found.reason


def test_a_choice_outside_of_what_was_timed_is_not_judged() -> None:
    one = method("chain", speed_by_draft_length={})
    assert share_of_best_measured(best_draft_length(one, comparison(one), 1)) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_length_is_within_a_twentieth_of_the_best_measured_one(seed: int) -> None:
    """A machine with prefill, overhead in each verification and 2% noise in every timing, none of which the model knows."""
    noise = random.Random(seed)
    alpha, draft_s = noise.uniform(0.3, 0.9), noise.uniform(0.002, 0.03)
    walk = []
    for _ in range(200):
        count = 0
        while count < 7 and noise.random() < alpha:
            count += 1
        walk.append(count)
    acceptance = Acceptance.from_walks([walk[start::12] for start in range(12)], 7)
    joint = acceptance.joint_acceptance

    def timed(length: int) -> Speed:
        seconds = 0.004 + draft_s * length + 0.1 + 0.001 * length
        tokens = 100.0
        rate = tokens / (0.2 + tokens / (1 + sum(joint[:length])) * seconds) * noise.uniform(0.98, 1.02)
        return Speed(rate / PLAIN, (1.0, 2.0), rate, PLAIN, draft_s * length * noise.uniform(0.98, 1.02), 0.1)

    by_length = {length: timed(length) for length in range(1, 8)}
    one = method("chain", acceptance=acceptance, settings={"draft_length": 7}, speed_by_batch={1: by_length[7]}, speed_by_draft_length=by_length)
    share = share_of_best_measured(best_draft_length(one, comparison(one), 1))
    assert share is not None and share > 0.95
