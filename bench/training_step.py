"""What one EAGLE-3 training step costs: ours beside a naive one and beside `speculators`, its time in T, and its memory in the vocabulary.

    make peers                                                    # once: the peer's environment
    .venv/bin/python bench/training_step.py                       # everything; under 15 minutes on two cores that do nothing else
    .venv/bin/python bench/training_step.py --parts step          # or length, vocabulary; --tokens 512 for a quick look, which writes nothing

A step is what a trainer does with one pack: forward, backward, clipping, AdamW; all states are random. Every variant runs in fresh, alternating
processes with the same threads. On a CPU the shapes are those of the quickstart's target (SmolLM2-135M, fp32), on a GPU those of an 8B target (bf16
autocast). A pack is one document that is supervised everywhere, which spares us nothing, or documents of which a part is the user's, as
conversations are. Writes bench/results/training_step.json.

    step        ours       Eagle3 and TorchEngine.train_step, renormalising over the draft vocabulary, as the peer does
                ours_drop  the same with Eagle3Config's default: a position whose target token cannot be drafted carries no loss, and to find them
                           takes the logits of the target's whole vocabulary
                naive      bench/naive_eagle3.py: the same loss from explicit masks and full logits
                products   the matrix products of our step and nothing else (bench/products.py): the peer's time over theirs is the most that
                           any step which forms them can be ahead
                speculators_*  its Eagle3DraftModel and the step of its trainer (bench/peer_speculators.py) with each attention that trains on
                           this device: on a CPU eager and sdpa, on a GPU flex; it does not train the head, ours does
    length      ours at several T: seconds a token, with and without the causal attention over the step-0 keys, which is quadratic in T
    vocabulary  ours at several target vocabularies V: peak memory without weights, gradients and optimizer state
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import tyro
from transformers import LlamaConfig

from bench.measure import RESULTS, about, alternate, spread, write_results
from bench.naive_eagle3 import naive_loss
from bench.products import recorded
from bench.step_worker import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NUM_TARGET_LAYERS,
    RMS_NORM_EPS,
    ROPE_THETA,
    STEP_DECAY,
    Inputs,
    Job,
    Shape,
    device,
    dtype_of,
    make_inputs,
    run_job,
    seconds_of,
    target_parts,
)
from data.batch import DrafterBatch, Features, drafter_batch
from data.target import TargetHeads
from data.vocab import DraftVocabulary
from train.attention import ttt_attention
from train.drafters.eagle3 import Eagle3, Eagle3Config
from train.engine import Processes, StepRates, TorchEngine
from train.optim import OptimConfig

Part = Literal["step", "length", "vocabulary"]
NAME = "training_step"
PEER = "speculators"
PEER_VERSION = "0.9.0"
HAS_GPU = torch.cuda.is_available()
CPU_SHAPE = Shape(
    num_tokens=2048, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, vocab_size=49152, draft_vocab_size=8192
)
GPU_SHAPE = Shape(
    num_tokens=4096,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    draft_vocab_size=32000,
    is_tied=False,
    precision="bf16",
)
BASE_SHAPE = GPU_SHAPE if HAS_GPU else CPU_SHAPE
# Documents and the assistant's share of them as in ShareGPT's conversations.
PACKED = {"document_tokens": 512, "supervised_share": 0.7}
# On a CPU flex attention has no backward.
PEER_ATTENTIONS = ("simple_flex_attention",) if HAS_GPU else ("eager", "sdpa")
STEP_TOKENS = (4096, 8192, 16384) if HAS_GPU else (2048,)
LENGTHS = (1024, 2048, 4096, 8192)
VOCABULARIES = (8192, 32768, 131072)
WARM_UP_TOKENS = 256


# --- the variants, each in a process of its own -----------------------------------------------------------------------------


def ours(shape: Shape) -> Eagle3:
    """A drafter of this shape, started as runs start theirs."""
    target = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=NUM_TARGET_LAYERS,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=RMS_NORM_EPS,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    parts = target_parts(shape)
    heads = TargetHeads(parts.embed_VH, parts.lm_head_VH, parts.norm_H, RMS_NORM_EPS)
    has_draft_vocabulary = shape.draft_vocab_size < shape.vocab_size
    vocabulary = DraftVocabulary(tuple(parts.draft_ids_W.tolist()), shape.vocab_size, 1.0) if has_draft_vocabulary else None
    config = Eagle3Config(
        draft_vocab_size=shape.draft_vocab_size if has_draft_vocabulary else None,
        ttt_steps=shape.ttt_steps,
        step_decay=STEP_DECAY,
        outside_vocabulary=shape.outside if has_draft_vocabulary else "drop",  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    return Eagle3(config, target, heads, vocabulary)


def batch_of(shape: Shape, inputs: Inputs) -> DrafterBatch:
    """The pack as our loader gives it."""
    return drafter_batch(Features(inputs.input_ids_T, inputs.loss_mask_T, shape.document_lengths, inputs.aux_TX, inputs.last_TH))


def build_ours(job: Job) -> Callable[[Shape, Inputs], float]:
    """The step that `train.run` takes."""
    optim = OptimConfig(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
    engine = TorchEngine(ours(job.shape), optim, job.shape.precision, Processes("torch"))  # type: ignore[arg-type]

    def step(shape: Shape, inputs: Inputs) -> float:
        return engine.train_step([batch_of(shape, inputs)], StepRates(LEARNING_RATE, {"drafter": 1.0})).loss

    return step


def build_naive(job: Job) -> Callable[[Shape, Inputs], float]:
    """The same weights and loss, with torch's AdamW as it comes."""
    drafter = ours(job.shape).to(device())
    parts = target_parts(job.shape)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=LEARNING_RATE)

    def step(shape: Shape, inputs: Inputs) -> float:
        num_supervised = drafter.num_supervised(batch_of(shape, inputs))
        with torch.autocast(device().type, dtype=torch.bfloat16, enabled=shape.precision == "bf16"):
            loss = naive_loss(dict(drafter.named_parameters()), parts, inputs, shape) / num_supervised
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return float(loss.detach())

    return step


def build_products(job: Job) -> Callable[[Shape, Inputs], float]:
    """The products of one of our steps of the job's shape, whatever shape is asked for: they only depend on it."""
    products = recorded(partial(build_ours(job), job.shape, make_inputs(job.shape)))

    def replay(shape: Shape, inputs: Inputs) -> float:
        products.replay()
        return float(products.num_operations)

    return replay


def base_attention_seconds(shape: Shape, repeats: int = 2) -> dict[str, float]:
    """Seconds, and processor time, of the causal attention over the step-0 keys in one training step: forward and backward once a TTT step."""
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    tensors = [
        torch.randn(shape.num_tokens, count, shape.head_dim, device=device(), dtype=dtype_of(shape), requires_grad=True) for count in counts
    ]

    def once() -> float:
        ttt_attention(*tensors, [], shape.document_lengths).sum().backward()
        return 0.0

    once()
    started_cpu = time.process_time()
    seconds = statistics.median(seconds_of(once)[0] for _ in range(repeats))
    cpu_seconds = (time.process_time() - started_cpu) / repeats
    return {"base_attention_s": shape.ttt_steps * seconds, "base_attention_cpu_s": shape.ttt_steps * cpu_seconds}


def work(job: Job) -> dict[str, Any]:
    """One process of a variant that is not the peer's."""
    found = run_job(job, {"naive": build_naive, "products": build_products}.get(job.variant, build_ours))
    if job.times_base:
        found |= base_attention_seconds(job.shape)
    return found


# --- what is measured with them ---------------------------------------------------------------------------------------------


def peer_python() -> Path:
    """The interpreter of the peer's environment: HEADSTART_SPECULATORS_PYTHON, or the one that `make peers` installs.

    Raises:
        FileNotFoundError: if it is not there.
    """
    chosen = os.environ.get("HEADSTART_SPECULATORS_PYTHON")
    python = Path(chosen) if chosen else Path.home() / ".cache" / "headstart" / f"speculators-{PEER_VERSION}" / "bin" / "python"
    if not python.is_file():
        raise FileNotFoundError(f"no speculators at {python}: `make peers` installs it; `--parts length vocabulary` does without")
    return python


def command_of(job: Job) -> list[str]:
    """What runs a job in a process of its own."""
    if job.variant == PEER:
        return [str(peer_python()), str(ROOT / "bench" / "peer_speculators.py"), job.to_json()]
    return [sys.executable, __file__, "--job", job.to_json()]


def environment() -> dict[str, str]:
    """Of every process: one thread a core. Passive, because spinning threads starve each other where anything else runs."""
    defaults = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "OMP_WAIT_POLICY": "PASSIVE"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def run(jobs: Mapping[str, Job], repeats: int, **more_env: str) -> dict[str, list[dict[str, Any]]]:
    """The samples of every job, alternating."""
    return alternate({name: command_of(job) for name, job in jobs.items()}, repeats, environment() | more_env)


def summary(samples: Sequence[Mapping[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Medians and ranges of one variant, a process's seconds being the median of its steps."""
    if any(sample.get("out_of_memory") for sample in samples):
        return {"out_of_memory": True, "samples": list(samples)}
    seconds = [statistics.median(sample["seconds"]) for sample in samples]
    return {
        "seconds": spread(seconds),
        "cpu_seconds": spread([sample["cpu_seconds"] for sample in samples]),
        "tokens_per_s": spread([num_tokens / value for value in seconds]),
        "peak_bytes": spread([sample["peak_bytes"] for sample in samples]),
        "peak_bytes_above_start": spread([sample["peak_bytes"] - sample["start_bytes"] for sample in samples]),
        "samples": list(samples),
    }


def ratios(rows: Mapping[str, Mapping[str, Any]], reference: str) -> dict[str, dict[str, Any]]:
    """Of each other variant to the reference one: how many times its tokens/s ours has, and which share of its peak memory ours takes.

    The ratio of processor time stands beside it, which says whether a busy machine has favoured one of them (nothing on a GPU). Memory is compared as
    the whole process's and without what was there before the model; `memory` is the worse of the two for us.
    """
    mine, found = rows[reference], {}
    for name, row in rows.items():
        if name in (reference, "products"):
            continue
        if row.get("out_of_memory") or mine.get("out_of_memory"):
            found[name] = {"out_of_memory": [key for key in (reference, name) if rows[key].get("out_of_memory")]}
            continue
        whole, above = (mine[key]["median"] / row[key]["median"] for key in ("peak_bytes", "peak_bytes_above_start"))
        found[name] = {
            "speed": row["seconds"]["median"] / mine["seconds"]["median"],
            "processor_time": row["cpu_seconds"]["median"] / mine["cpu_seconds"]["median"],
            "memory_of_the_process": whole,
            "memory_above_start": above,
            "memory": max(whole, above),
        }
    return found


def most_against(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How many times the others' tokens/s the bare matrix products of our step have: more is out of reach whatever is done with the rest."""
    fits = {name: row["seconds"]["median"] for name, row in rows.items() if not row.get("out_of_memory")}
    return {name: seconds / fits["products"] for name, seconds in fits.items() if "products" in fits and name != "products"}


def measure_step(shape: Shape, tokens: Sequence[int], repeats: int) -> dict[str, Any]:
    """The variants at each T, on one document and on packed ones."""
    with tempfile.TemporaryDirectory(prefix="headstart-bench-") as verifier:
        job = Job(PEER, shape, 1)
        subprocess.run([str(peer_python()), str(ROOT / "bench" / "peer_speculators.py"), "verifier", verifier, job.to_json()], check=True)
        rows = []
        for num_tokens in tokens:
            for pack, documents in {"one document": {}, "packed": PACKED}.items():
                jobs = step_jobs(replace(shape, num_tokens=num_tokens, **documents), verifier)
                found = {name: summary(samples, num_tokens) for name, samples in run(jobs, repeats).items()}
                against = {"ours_against": ratios(found, "ours"), "most_against": most_against(found)}
                rows.append({"tokens": num_tokens, "pack": pack, "variants": found, **against})
    return {"shape": vars(shape), "packed": PACKED, "peer": f"{PEER} {PEER_VERSION}", "rows": rows}


def step_jobs(shape: Shape, verifier: str) -> dict[str, Job]:
    """One process of each variant."""
    # Compilation depends on T; where nothing is compiled a step of any length warms up, and one slow step is long enough to be timed.
    warm_up, fast, slow = (shape.num_tokens, 5, 5) if HAS_GPU else (WARM_UP_TOKENS, 2, 1)
    peers = {f"{PEER}_{attention}": Job(PEER, shape, warm_up, slow, verifier, attention) for attention in PEER_ATTENTIONS}
    return {
        "ours": Job("ours", shape, warm_up, fast),
        "naive": Job("naive", shape, warm_up, slow),
        "products": Job("products", shape, warm_up, fast),
        **peers,
        "ours_drop": Job("ours", replace(shape, outside="drop"), warm_up, slow),
    }


def measure_length(shape: Shape, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Seconds a token of ours at each T, as one document."""
    num_steps = 5 if HAS_GPU else 1
    jobs = {str(length): Job("ours", replace(shape, num_tokens=length), WARM_UP_TOKENS, num_steps, times_base=True) for length in lengths}
    return {"shape": vars(shape), "rows": [length_row(int(name), samples) for name, samples in run(jobs, repeats).items()]}


def length_row(num_tokens: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds a token of the whole step, and without the base attention, which the same process timed by itself."""
    whole = [statistics.median(sample["seconds"]) for sample in samples]
    rest = [seconds - sample["base_attention_s"] for seconds, sample in zip(whole, samples, strict=True)]
    cpu = [sample["cpu_seconds"] - sample["base_attention_cpu_s"] for sample in samples]
    return {
        "tokens": num_tokens,
        "seconds_per_token": spread([value / num_tokens for value in whole]),
        "cpu_seconds_per_token_without_base_attention": spread([value / num_tokens for value in cpu]),
        "seconds_per_token_without_base_attention": spread([value / num_tokens for value in rest]),
        "samples": list(samples),
    }


def measure_vocabulary(shape: Shape, vocabularies: Sequence[int]) -> dict[str, Any]:
    """Peak memory of ours beyond weights, gradients, optimizer state and the target's parts, in V; and what one TTT step adds to it.

    Two series: the draft vocabulary is the smallest of these throughout, or the whole vocabulary. Memory does not vary between processes: each
    runs once.
    """
    small, large = shape.ttt_steps - 4, shape.ttt_steps
    series = {"draft_vocabulary": vocabularies[0], "whole_vocabulary": None}
    jobs = {}
    for name, width in series.items():
        for size in vocabularies:
            at = replace(shape, vocab_size=size, draft_vocab_size=width or size, outside="drop")
            jobs[f"{name} {size}"] = Job("ours", at, 64)
    drop = replace(shape, outside="drop")
    jobs |= {f"steps {count}": Job("ours", replace(drop, ttt_steps=count), 64) for count in (small, large)}
    # Memory that is freed goes back at once, so that the peak is what was held.
    samples = {name: found[0] for name, found in run(jobs, 1, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="0").items()}
    beyond = {name: sample["peak_bytes"] - sample["start_bytes"] - fixed_bytes(jobs[name].shape) for name, sample in samples.items()}
    rows = {name: {size: beyond[f"{name} {size}"] for size in vocabularies} for name in series}
    return {
        "shape": vars(shape),
        "bytes_beyond_state": rows,
        "growth_bytes": {name: row[vocabularies[-1]] - row[vocabularies[0]] for name, row in rows.items()},
        "ttt_step_bytes": (beyond[f"steps {large}"] - beyond[f"steps {small}"]) / (large - small),
        "samples": samples,
    }


def fixed_bytes(shape: Shape) -> int:
    """Weights, gradients and both moments of AdamW, and the target's frozen parts."""
    with torch.device("meta"):
        heads = TargetHeads(torch.empty(1, shape.hidden_size), torch.empty(shape.vocab_size, shape.hidden_size), torch.empty(shape.hidden_size), 1e-6)
    hidden, width = shape.hidden_size, shape.head_dim
    attention = 2 * hidden * width * (shape.num_heads + 2 * shape.num_kv_heads) + shape.num_heads * width * hidden
    trained = 3 * hidden * hidden + attention + 3 * hidden * shape.intermediate_size + 4 * hidden + shape.draft_vocab_size * hidden
    frozen = heads.lm_head_VH.numel() * (1 if shape.is_tied else 2)
    return 16 * trained + frozen * dtype_of(shape).itemsize


# --- what should hold -------------------------------------------------------------------------------------------------------


def claims(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """[{claim, figure, holds}] of the parts that were measured; `at_most` is the largest figure that the bare matrix products leave possible."""
    found: list[dict[str, Any]] = []

    def add(claim: str, figure: float, holds: bool, **bound: float) -> None:
        found.append({"claim": claim, "figure": figure, "holds": holds, **bound})

    for row in document["step"]["rows"] if "step" in document else []:
        for name, ratio in row["ours_against"].items():
            if name == "ours_drop" or "out_of_memory" in ratio:
                continue
            at = f"than {name}'s at {row['tokens']} tokens, {row['pack']}"
            bound = {"at_most": row["most_against"][name]} if name in row.get("most_against", {}) else {}
            add(f"tokens/s at least 10 times higher {at}", ratio["speed"], ratio["speed"] >= 10, **bound)
            add(f"peak memory at most a third {at}", ratio["memory"], ratio["memory"] <= 1 / 3)
    if "length" in document:
        costs = [row["seconds_per_token_without_base_attention"]["median"] for row in document["length"]["rows"]]
        figure = max(costs) / min(costs)
        add("seconds a token without the base attention vary by at most 15% over all lengths", figure, figure <= 1.15)
    if "vocabulary" in document:
        part = document["vocabulary"]
        for name, growth in part["growth_bytes"].items():
            figure = growth / part["ttt_step_bytes"]
            add(f"{name}: memory grows with V by less than the activations of one TTT step", figure, figure < 1)
    return found


def main(
    parts: tuple[Part, ...] = ("step", "length", "vocabulary"), repeats: int = 3, tokens: tuple[int, ...] = (), job: str | None = None
) -> None:
    """
    Args:
        parts: what is measured; the result file keeps the others as they were.
        repeats: processes of each variant.
        tokens: other T than the bench's, for a look that writes nothing; the part vocabulary takes the first.
        job: what a process that this one starts measures, as JSON.
    """
    if job is not None:
        print(json.dumps(work(Job.from_json(job))))
        return
    measure: dict[Part, Callable[[], dict[str, Any]]] = {
        "step": lambda: measure_step(BASE_SHAPE, tokens or STEP_TOKENS, repeats),
        "length": lambda: measure_length(BASE_SHAPE, tokens or LENGTHS, repeats),
        "vocabulary": lambda: measure_vocabulary(replace(BASE_SHAPE, num_tokens=(tokens or STEP_TOKENS)[0]), VOCABULARIES),
    }
    written = RESULTS / f"{NAME}.json"
    document: dict[str, Any] = json.loads(written.read_text()) if written.exists() and not tokens else {}
    document |= {part: {"about": about(("torch", "transformers")), **measure[part]()} for part in parts}
    document["claims"] = claims(document)
    for claim in document["claims"]:
        bound = f"; the matrix products alone: {claim['at_most']:.3g}" if "at_most" in claim else ""
        print(f"{'holds' if claim['holds'] else 'DOES NOT HOLD'}: {claim['claim']} ({claim['figure']:.3g}{bound})")
    if tokens:
        print(json.dumps({part: _without_samples(document[part]) for part in parts}, indent=1))
    else:
        write_results(NAME, document)


def _without_samples(value: Any) -> Any:
    """The same document for reading."""
    if isinstance(value, dict):
        return {key: _without_samples(item) for key, item in value.items() if key != "samples"}
    return [_without_samples(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
