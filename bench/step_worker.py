"""What the process of one variant of bench/training_step.py does: random inputs, steps, seconds and peak memory, printed as one JSON object.

It imports torch and bench/measure.py only, because the peer's process runs in an environment of its own, without headstart's dependencies.

Shapes: T packed tokens, X = 3 H concatenated auxiliary states, H hidden size, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.measure import peak_memory, reset_peak_memory, resident_memory

NUM_AUX_LAYERS, ROPE_THETA, RMS_NORM_EPS, NUM_TARGET_LAYERS = 3, 1e5, 1e-5, 30
STEP_DECAY, LEARNING_RATE, MAX_GRAD_NORM = 0.8, 1e-4, 0.5


@dataclass(frozen=True)
class Shape:
    """One training step.

    Attributes:
        num_tokens: T.
        document_tokens: tokens of each document, or None for a single one.
        supervised_share: the end of each document that is the assistant's.
        is_tied: whether the target's embedding is its head.
        precision: "fp32", or "bf16" autocast over fp32 weights.
        outside: Eagle3Config.outside_vocabulary, of ours and the naive variant; the peer renormalises.
    """

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    draft_vocab_size: int
    ttt_steps: int = 7
    document_tokens: int | None = None
    supervised_share: float = 1.0
    is_tied: bool = True
    precision: str = "fp32"
    outside: str = "renormalise"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def document_lengths(self) -> tuple[int, ...]:
        length = self.document_tokens or self.num_tokens
        full, rest = divmod(self.num_tokens, length)
        return (length,) * full + ((rest,) if rest else ())


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        variant: which code takes the step.
        warm_up_tokens: T of the untimed first step.
        num_steps: timed steps of `shape.num_tokens`.
        verifier: the peer's verifier, a folder; "" for the others.
        attention: the peer's attention implementation; "" for the others.
        times_base: whether the base attention is timed by itself (ours only).
    """

    variant: str
    shape: Shape
    warm_up_tokens: int
    num_steps: int = 1
    verifier: str = ""
    attention: str = ""
    times_base: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


class TargetParts(NamedTuple):
    """The frozen parts of the target that drafters use, in the training precision; where tied, lm_head_VH is embed_VH."""

    embed_VH: Tensor
    lm_head_VH: Tensor
    norm_H: Tensor
    draft_ids_W: Tensor


class Inputs(NamedTuple):
    """A pack of random documents with random states: int64, bool, and states in the training precision."""

    input_ids_T: Tensor
    loss_mask_T: Tensor
    aux_TX: Tensor
    last_TH: Tensor


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(shape: Shape) -> torch.dtype:
    """Of states and the target's frozen parts; trained weights are fp32."""
    return torch.bfloat16 if shape.precision == "bf16" else torch.float32


def target_parts(shape: Shape) -> TargetParts:
    """The same for every variant."""
    generator = torch.Generator().manual_seed(0)

    def matrix() -> Tensor:
        return (torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) * 0.05).to(device(), dtype_of(shape))

    embed_VH = matrix()
    lm_head_VH = embed_VH if shape.is_tied else matrix()
    ids_W = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    return TargetParts(embed_VH, lm_head_VH, torch.ones(shape.hidden_size, device=device(), dtype=dtype_of(shape)), ids_W)


def make_inputs(shape: Shape) -> Inputs:
    """The same for every variant. The last states have an RMS of 1, as after a norm: the peer, which applies the norm itself, sees the same."""
    generator = torch.Generator().manual_seed(1)
    ids_T = torch.randint(0, shape.vocab_size, (shape.num_tokens,), generator=generator)
    aux_TX = torch.randn(shape.num_tokens, NUM_AUX_LAYERS * shape.hidden_size, generator=generator)
    last_TH = torch.randn(shape.num_tokens, shape.hidden_size, generator=generator)
    last_TH = last_TH / last_TH.pow(2).mean(-1, keepdim=True).sqrt()
    place = {"device": device(), "dtype": dtype_of(shape)}
    mask_T = torch.cat([torch.arange(length) >= round((1 - shape.supervised_share) * length) for length in shape.document_lengths])
    return Inputs(ids_T.to(device()), mask_T.to(device()), aux_TX.to(**place), last_TH.to(**place))


def run_job(job: Job, build: Callable[[Job], Callable[[Shape, Inputs], float]]) -> dict[str, Any]:
    """Builds a variant and takes its steps.

    Args:
        job: what is measured.
        build: makes the model and its optimizer; returns what takes one step, optimizer included, and returns the loss.

    Returns:
        seconds of each timed step; cpu_seconds, processor time of one, which other processes on the machine change little; peak_bytes of the
        process from the built model on; start_bytes, what it held before the model was built; or out_of_memory where a GPU's memory is too small.
    """
    start_bytes = resident_memory()
    try:
        step = build(job)
        reset_peak_memory()
        _steps(step, replace(job.shape, num_tokens=job.warm_up_tokens), 1)
        started_cpu = time.process_time()
        seconds, loss = _steps(step, job.shape, job.num_steps)
        cpu_seconds = (time.process_time() - started_cpu) / job.num_steps
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": True, "error": str(error).splitlines()[0]}
    memory = {"peak_bytes": peak_memory(), "start_bytes": start_bytes}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, **memory, "loss": loss, "num_threads": torch.get_num_threads()}


def _steps(step: Callable[[Shape, Inputs], float], shape: Shape, num_steps: int) -> tuple[list[float], float]:
    """(seconds of each step, loss of the first)."""
    inputs = make_inputs(shape)
    timed = [seconds_of(lambda: step(shape, inputs)) for _ in range(num_steps)]
    return [seconds for seconds, _ in timed], timed[0][1]


def seconds_of(function: Callable[[], float]) -> tuple[float, float]:
    """(seconds, what it returned), a GPU's queue emptied before and after."""
    synchronize()
    started = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - started, result


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
