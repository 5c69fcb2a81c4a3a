"""Whether `torch.compile` pays in a training step: EAGLE-3's, with parts of it compiled beside the same step as it is.

    .venv/bin/python bench/compile.py                             # a quarter of an hour on two cores; needs a C++ compiler
    .venv/bin/python bench/compile.py --shapes quickstart --parts loss --repeats 1      # a quick look, which writes nothing

In every process, steps with and without compiled parts take turns: a machine that gets slower or faster does so for both. A step is forward,
backward, clipping and AdamW; all states are random; sizes are dynamic, as packs differ in them, and compiling starts from an empty cache. On a GPU
the shapes are those of an 8B target, in bf16. Writes bench/results/compile.json.

    loss        softmax, loss and gradient of the blocks of logits
    pointwise   these; and RMSNorm, SwiGLU and the rotary embedding, written plainly for the compiler to fuse, forward and backward
    layer       these of the loss; and the layer, what stands before its attention and what stands after

It pays where a step takes at most 95% of its time. The pipeline compiles nothing: on two CPU cores no part does.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import tyro
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from bench.measure import about, alternate, spread, write_results
from bench.step_worker import Job, Shape, make_inputs, seconds_of
from bench.training_step import BASE_SHAPE, HAS_GPU, PACKED, build_ours, environment
from train import losses
from train.drafters import llama_layer

NAME = "compile"
Part = Literal["loss", "pointwise", "layer"]
PARTS: tuple[Part, ...] = ("loss", "pointwise", "layer")
PAYS = 0.95
SHAPES = {"training_step": replace(BASE_SHAPE, **PACKED)}
if not HAS_GPU:  # recipes/quickstart.py's
    SHAPES["quickstart"] = replace(SHAPES["training_step"], num_tokens=1024, draft_vocab_size=4096, ttt_steps=2, precision="bf16")
PAIRS = {"training_step": 5, "quickstart": 21}  # steps of a few seconds, or a third of one


def swiglu(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate_TI) * up_TI


def rotated(heads_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    first, second = heads_TND.float().chunk(2, dim=-1)
    return (heads_TND * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D).to(heads_TND.dtype)


def replacements(part: Part) -> list[Any]:
    """Patches that put compiled code in the place of the pipeline's."""
    layer, compiled = llama_layer.LlamaLayer, partial(torch.compile, dynamic=True)
    patches = [patch.object(losses, name, compiled(getattr(losses, name))) for name in ("_loss_and_gradient", "_softmax")]
    if part == "pointwise":
        rotate = compiled(rotated)

        def rotate_at(self: llama_layer.RotaryTable, heads_TND: Tensor, position_T: Tensor) -> Tensor:
            self._rotary.to(heads_TND.device)
            tables = self._rotary(torch.empty((), dtype=torch.float32, device=heads_TND.device), position_T.reshape(1, -1))
            return rotate(heads_TND, *(table.view(*position_T.shape, 1, table.shape[-1]) for table in tables))

        patches += [
            patch.object(llama_layer.RMSNorm, "forward", compiled(LlamaRMSNorm.forward)),
            patch.object(llama_layer._SwiGLU, "apply", compiled(swiglu)),
            patch.object(llama_layer.RotaryTable, "rotate", rotate_at),
        ]
    if part == "layer":
        patches += [patch.object(layer, name, compiled(getattr(layer, name))) for name in ("project", "finish")]
    return patches


def work(part: Part, shape: Shape, num_pairs: int) -> dict[str, Any]:
    """Seconds of steps with and without compiled parts, and how far apart the losses are after the same steps."""
    steps = {name: build_ours(Job("ours", shape, 0)) for name in ("eager", "compiled")}
    patches = replacements(part)

    def take(name: str, num_tokens: int) -> tuple[float, float, float]:
        """(seconds, processor seconds, loss)"""
        at = replace(shape, num_tokens=num_tokens)
        inputs = make_inputs(at)
        with contextlib.ExitStack() as stack:
            for item in patches if name == "compiled" else []:
                stack.enter_context(item)
            started = time.process_time()
            seconds, loss = seconds_of(lambda: steps[name](at, inputs))
            return seconds, time.process_time() - started, loss

    # Another length second: what is dynamic is compiled for every length that may come.
    first = {name: [take(name, num_tokens) for num_tokens in (shape.num_tokens, shape.num_tokens * 3 // 4)] for name in steps}
    pairs = [{name: take(name, shape.num_tokens) for name in steps} for _ in range(num_pairs)]
    kinds = {"seconds": 0, "cpu_seconds": 1}
    return {
        **{name: {kind: [pair[name][place] for pair in pairs] for kind, place in kinds.items()} for name in steps},
        "compile_seconds": sum(compiled[0] - eager[0] for compiled, eager in zip(first["compiled"], first["eager"], strict=True)),
        "loss_difference": abs(pairs[-1]["compiled"][2] / pairs[-1]["eager"][2] - 1),
    }


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over processes, each with the medians of its steps."""

    def medians(name: str, kind: str) -> list[float]:
        return [statistics.median(sample[name][kind]) for sample in samples]

    ratios = {
        kind: spread([compiled / eager for compiled, eager in zip(medians("compiled", kind), medians("eager", kind), strict=True)])
        for kind in ("seconds", "cpu_seconds")
    }
    compile_s = spread([sample["compile_seconds"] for sample in samples])
    saved_s = statistics.median(medians("eager", "seconds")) * (1 - ratios["seconds"]["median"])
    return {
        "compiled_against_eager": ratios,
        "eager_seconds": spread(medians("eager", "seconds")),
        "compile_seconds": compile_s,
        "steps_until_compiling_is_regained": compile_s["median"] / saved_s if saved_s > 0 else None,
        "loss_difference": max(sample["loss_difference"] for sample in samples),
        "pays": ratios["seconds"]["median"] <= PAYS and ratios["cpu_seconds"]["median"] <= PAYS,
        "samples": list(samples),
    }


def main(
    shapes: tuple[Literal["quickstart", "training_step"], ...] = tuple(SHAPES),  # type: ignore[assignment]
    parts: tuple[Part, ...] = PARTS,
    pairs: int | None = None,
    repeats: int = 2,
    job: str | None = None,
) -> None:
    """
    Args:
        shapes: of bench/training_step.py's packs, or the quickstart's.
        parts: what is compiled.
        pairs: timed steps of each kind in a process; None is as many as such steps need.
        repeats: processes of each part.
        job: what a process that this one starts measures, as JSON.
    """
    if job is not None:
        part, name, num_pairs = json.loads(job)
        with tempfile.TemporaryDirectory(prefix="headstart-bench-") as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            print(json.dumps(work(part, SHAPES[name], num_pairs)))
        return
    rows: dict[str, Any] = {}
    for name in shapes:
        commands = {part: [sys.executable, str(Path(__file__).resolve()), "--job", json.dumps([part, name, pairs or PAIRS[name]])] for part in parts}
        found = {part: summary(samples) for part, samples in alternate(commands, repeats, environment()).items()}
        rows[name] = {"shape": vars(SHAPES[name]), "parts": found}
        for part, row in found.items():
            ratio = row["compiled_against_eager"]
            figures = f"{ratio['seconds']['median']:.3f} of its time, {ratio['cpu_seconds']['median']:.3f} of its processor time"
            print(f"{name}, {part}: a step takes {figures}; compiling {row['compile_seconds']['median']:.0f} s; pays: {row['pays']}")
    if (set(shapes), set(parts), pairs) == (set(SHAPES), set(PARTS), None):
        write_results(NAME, {"about": about(("torch", "transformers")), "shapes": rows})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
