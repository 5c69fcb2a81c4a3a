"""bench/compile.py compiles the same step, and says that it pays only where it does."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench import compile as bench
from bench.step_worker import Job, make_inputs
from bench.training_step import build_ours
from train import losses
from train.drafters import llama_layer

TINY = replace(
    bench.SHAPES["training_step"],
    num_tokens=48,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=96,
    draft_vocab_size=40,
    ttt_steps=2,
    document_tokens=24,
)


@pytest.mark.parametrize("part", bench.PARTS)
def test_what_is_compiled_is_the_step_that_the_pipeline_takes(part: bench.Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plain code, that is: with the compiler left out."""
    asked: list[str] = []

    def left_out(function: Any, dynamic: bool) -> Any:
        def called(*arguments: Any) -> Any:
            asked.append(function.__qualname__)
            return function(*arguments)

        return called

    monkeypatch.setattr(torch, "compile", left_out)
    patches = bench.replacements(part)
    inputs, found = make_inputs(TINY), {}
    for name, applied in {"plain": patches, "ours": []}.items():
        step = build_ours(Job("ours", TINY, 0))
        with contextlib.ExitStack() as stack:
            for item in applied:
                stack.enter_context(item)
            found[name] = [step(TINY, inputs) for _ in range(5)]
    assert found["plain"] == pytest.approx(found["ours"], rel=1e-5)
    assert found["ours"][-1] < found["ours"][0]  # the weights have moved, by both alike
    expected = {"pointwise": {"LlamaRMSNorm.forward", "swiglu", "rotated"}, "layer": {"LlamaLayer.project", "LlamaLayer.finish"}}
    assert set(asked) == {"_loss_and_gradient", "_softmax"} | expected.get(part, set())


def test_nothing_stays_replaced() -> None:
    before = (losses._softmax, llama_layer.RMSNorm.forward, llama_layer.RotaryTable.rotate, llama_layer.LlamaLayer.finish)
    for part in bench.PARTS:
        with contextlib.ExitStack() as stack:
            for item in bench.replacements(part):
                stack.enter_context(item)
    assert before == (losses._softmax, llama_layer.RMSNorm.forward, llama_layer.RotaryTable.rotate, llama_layer.LlamaLayer.finish)


@pytest.mark.parametrize(("compiled_s", "compiled_cpu_s", "pays"), [(1.8, 3.6, True), (1.8, 3.9, False), (1.96, 3.6, False), (2.2, 4.4, False)])
def test_compiling_pays_where_both_clocks_save_a_twentieth(compiled_s: float, compiled_cpu_s: float, pays: bool) -> None:
    sample = {
        "eager": {"seconds": [2.0, 1.0, 9.0], "cpu_seconds": [4.0, 4.0, 4.0]},
        "compiled": {"seconds": [compiled_s] * 3, "cpu_seconds": [compiled_cpu_s] * 3},
        "compile_seconds": 10.0,
        "loss_difference": 1e-7,
    }
    row = bench.summary([sample, sample])
    assert row["pays"] == pays
    assert row["compiled_against_eager"]["seconds"]["median"] == pytest.approx(compiled_s / 2)
    steps = row["steps_until_compiling_is_regained"]
    assert steps == (None if compiled_s > 2 else pytest.approx(10 / (2 - compiled_s)))
