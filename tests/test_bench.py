"""What the training-step bench compares is the same computation, and what it concludes follows from its samples."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.measure import alternate
from bench.naive_eagle3 import naive_loss
from bench.products import recorded
from bench.step_worker import Job, Shape, make_inputs, target_parts
from bench.training_step import (
    batch_of,
    build_naive,
    build_ours,
    build_products,
    claims,
    fixed_bytes,
    length_row,
    most_against,
    ours,
    ratios,
    summary,
)

TINY = Shape(
    num_tokens=48,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=96,
    draft_vocab_size=40,
    ttt_steps=3,
    document_tokens=20,
)


@pytest.mark.parametrize("outside", ["renormalise", "drop"])
def test_the_naive_step_has_our_loss_and_our_gradients(outside: str) -> None:
    shape = Shape(**{**vars(TINY), "outside": outside})
    drafter, inputs = ours(shape), make_inputs(shape)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += torch.randn_like(parameter) * 0.3
    loss = drafter(batch_of(shape, inputs)).loss_sum
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    expected = naive_loss(dict(drafter.named_parameters()), target_parts(shape), inputs, shape)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    for name, parameter in drafter.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()  # type: ignore[union-attr, operator]
        assert error < 1e-4, name


def test_both_take_a_step_and_report_the_same_first_loss() -> None:
    job = Job("", TINY, TINY.num_tokens)
    losses = [build(job)(TINY, make_inputs(TINY)) for build in (build_ours, build_naive)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_products_are_those_of_the_steps_linear_layers_and_of_its_loss() -> None:
    shape = Shape(**{**vars(TINY), "document_tokens": None, "num_tokens": 400, "draft_vocab_size": 88})
    hidden, width, tokens = shape.hidden_size, shape.head_dim, shape.num_tokens
    # q, k, v and o; MLP; head. Each forward, and twice as much backward; fc needs no gradient of the states, and the target's logits none at all.
    layer = 2 * hidden * width * (shape.num_heads + 2 * shape.num_kv_heads) + shape.num_heads * width * hidden + 3 * hidden * shape.intermediate_size
    whole = 2 * tokens * (3 * shape.ttt_steps * (layer + hidden * shape.draft_vocab_size) + 2 * 3 * hidden * hidden + hidden * shape.draft_vocab_size)
    measured = build_products(Job("products", shape, tokens))(shape, make_inputs(shape))
    assert measured == pytest.approx(whole, rel=0.02) and measured <= whole  # a document's last rows have no next tokens to be judged by


def test_replayed_products_take_as_many_operations_as_the_ones_they_were_recorded_from() -> None:
    weights, rows = torch.randn(24, 40, requires_grad=True), torch.randn(7, 40)

    def step() -> None:
        (rows @ weights.T).square().sum().backward()

    products = recorded(step)
    with FlopCounterMode(display=False) as counter:
        products.replay()
    assert products.num_operations == counter.get_total_flops() == 2 * 2 * 7 * 24 * 40


def test_the_most_that_is_possible_is_the_others_time_over_the_bare_products() -> None:
    rows = {"products": summary([sample(2, 300)], 10), "ours": summary([sample(3, 300)], 10), "speculators": summary([sample(9, 600)], 10)}
    assert most_against(rows) == {"ours": 1.5, "speculators": 4.5}
    row = {"tokens": 10, "pack": "packed", "ours_against": ratios(rows, "ours"), "most_against": most_against(rows)}
    assert [claim.get("at_most") for claim in claims({"step": {"rows": [row]}})] == [4.5, None]


def test_a_job_survives_the_command_line() -> None:
    job = Job("ours", TINY, 16, times_base=True)
    assert Job.from_json(job.to_json()) == job


def test_fixed_bytes_are_those_of_the_drafters_parameters() -> None:
    num_trained = sum(parameter.numel() for parameter in ours(TINY).parameters())
    assert fixed_bytes(TINY) == 4 * (4 * num_trained + TINY.vocab_size * TINY.hidden_size)


# --- figures ---------------------------------------------------------------------------------------------------------------


def sample(seconds: float, peak: int, start: int = 100) -> dict[str, Any]:
    return {"seconds": [seconds], "cpu_seconds": 2 * seconds, "peak_bytes": peak, "start_bytes": start}


def test_ratios_are_of_medians_and_memory_is_judged_by_the_worse_of_two() -> None:
    mine = [sample(1, 300), sample(2, 400), sample(9, 500)]
    other = [sample(30, 1300), sample(20, 1300), sample(10, 1300)]
    rows = {"ours": summary(mine, 10), "naive": summary(other, 10)}
    assert rows["ours"]["tokens_per_s"] == {"median": 5, "min": 10 / 9, "max": 10}
    ratio = ratios(rows, "ours")["naive"]
    assert ratio["speed"] == ratio["processor_time"] == 10
    assert (ratio["memory_of_the_process"], ratio["memory_above_start"]) == (400 / 1300, 300 / 1200)
    assert ratio["memory"] == 400 / 1300


def test_a_variant_that_does_not_fit_is_said_and_claims_nothing() -> None:
    rows = {"ours": summary([sample(1, 300)], 10), "naive": summary([{"out_of_memory": True}], 10), "speculators": summary([sample(9, 600)], 10)}
    against = ratios(rows, "ours")
    assert against["naive"] == {"out_of_memory": ["naive"]}
    found = claims({"step": {"rows": [{"tokens": 10, "pack": "packed", "ours_against": against}]}})
    assert [(claim["figure"], claim["holds"]) for claim in found] == [(9, False), (0.5, False)]


def timed(seconds: float, base: float) -> dict[str, Any]:
    return {"seconds": [seconds], "cpu_seconds": seconds, "base_attention_s": base, "base_attention_cpu_s": base}


def test_linear_time_is_judged_without_the_base_attention() -> None:
    rows = [
        length_row(1000, [timed(1.5, 0.5)]),
        length_row(2000, [timed(4.2, 2.0)]),
    ]
    [claim] = claims({"length": {"rows": rows}})
    assert claim["figure"] == pytest.approx(1.1) and claim["holds"]
    rows.append(length_row(4000, [timed(12.8, 8.0)]))
    [claim] = claims({"length": {"rows": rows}})
    assert claim["figure"] == pytest.approx(1.2) and not claim["holds"]


def test_growth_in_the_vocabulary_is_compared_with_one_ttt_step() -> None:
    part = {"growth_bytes": {"draft_vocabulary": 50, "whole_vocabulary": 150}, "ttt_step_bytes": 100.0}
    assert [(claim["figure"], claim["holds"]) for claim in claims({"vocabulary": part})] == [(0.5, True), (1.5, False)]


# --- processes -------------------------------------------------------------------------------------------------------------


def test_variants_alternate_in_processes_of_their_own(tmp_path: Path) -> None:
    script = "import json, os, sys; open(sys.argv[1], 'a').write(sys.argv[2]); print('log'); print(json.dumps({'pid': os.getpid()}))"
    order = tmp_path / "order"
    found = alternate({name: [sys.executable, "-c", script, str(order), name] for name in "ab"}, repeats=2)
    assert order.read_text() == "abab"
    assert len({sample["pid"] for samples in found.values() for sample in samples}) == 4


def test_a_failing_variant_is_named_with_the_end_of_its_output() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)broken failed with exit code 3.*no such kernel"):
        alternate({"broken": [sys.executable, "-c", "import sys; print('no such kernel'); sys.exit(3)"]}, repeats=1)
