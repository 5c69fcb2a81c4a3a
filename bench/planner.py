"""Is the planner's memory right? Real training steps in fresh processes, their peak against what train/memory.py predicts.

    python bench/planner.py                  # about three minutes on two cores; writes bench/results/planner.json
    python bench/planner.py --case NAME      # one case, in this process

Each case has the quickstart's target (SmolLM2-135M's shapes, random weights: memory does not depend on them) and does what `train/run.py` does:
drafter, engine, the copy that rank 0 measures with, the features of two steps, three optimizer steps.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import json

import torch
from transformers import LlamaConfig

from bench import measure
from data.batch import Features, drafter_batch
from data.target import TargetHeads
from data.vocab import DraftVocabulary
from recipes.quickstart import recipe
from train.drafters.base import Drafter, DrafterConfig, load_drafter_class
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.medusa1 import Medusa1Config
from train.engine import DeepSpeedEngine, Engine, Processes, StepRates, TorchEngine
from train.machine import MachineConfig, machine_of
from train.memory import Work, device_total, sharding_of, step_parts
from train.plan import drafter_sizes

BOUND = 0.15
NUM_STEPS = 3
SUPERVISED_SHARE = 0.75


@dataclass(frozen=True)
class Case:
    """One training setup."""

    drafter: DrafterConfig
    pack_tokens: int = 2048
    packs_per_rank: int = 1
    precision: str = "bf16"
    deepspeed_config: str | None = None
    recomputes: bool = False


EAGLE3 = recipe().drafter
CASES = {
    "eagle3-bf16": Case(EAGLE3),
    "eagle3-fp32": Case(EAGLE3, precision="fp32"),
    "eagle3-7-steps": Case(Eagle3Config(draft_vocab_size=8192, ttt_steps=7)),
    "eagle3-pack-6144": Case(EAGLE3, pack_tokens=6144),
    "eagle3-accumulated-recomputed": Case(EAGLE3, pack_tokens=4096, packs_per_rank=2, recomputes=True),
    "eagle1-bf16": Case(Eagle1Config(), pack_tokens=4096),
    "medusa1-bf16": Case(Medusa1Config()),
    "eagle3-zero2-bf16": Case(EAGLE3, packs_per_rank=2, deepspeed_config="launch/ds_zero2.json"),
}


def target_config() -> LlamaConfig:
    """SmolLM2-135M's."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )


def run_case(case: Case) -> dict[str, float]:
    """Bytes predicted and measured; the prediction comes first, before anything is built."""
    target = target_config()
    torch.manual_seed(0)
    _warm_up()
    here = machine_of(MachineConfig())
    request = load_drafter_class(case.drafter.algorithm).feature_request_of(case.drafter, target)
    num_states = len(request.aux_layers) + request.last
    batches = [_features(case, target, len(request.aux_layers), index) for index in range(2 * case.packs_per_rank)]
    num_supervised = max(int(drafter_batch(batch).supervised(0).sum()) for batch in batches)
    work = Work(
        num_tokens=case.pack_tokens,
        num_supervised=num_supervised,
        packs_per_rank=case.packs_per_rank,
        world_size=1,
        is_bf16=case.precision == "bf16",
        recomputes=case.recomputes,
        has_gpu=here.has_gpu,
        is_prefetched=True,
        feature_bytes=2,
    )
    sharding = sharding_of(None if case.deepspeed_config is None else ROOT / case.deepspeed_config)
    parts = step_parts(case.drafter, target, drafter_sizes(case.drafter, target), num_states, sharding, work)
    # torch counts neither the CUDA context nor what its allocator loses.
    predicted = device_total(parts) if here.has_gpu else here.base_bytes + round(device_total(parts) * (1 + here.slack))
    measure.reset_peak_memory()
    _train(case, target, batches)
    measured = measure.peak_memory()
    return {"predicted_bytes": predicted, "measured_bytes": measured, **{part.name: part.device_bytes for part in parts}}


def _warm_up() -> None:
    """What a process of a run has loaded by the time that it trains: matrix kernels."""
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(256, 256, dtype=dtype)
        values @ values


def _features(case: Case, target: LlamaConfig, num_aux: int, index: int) -> Features:
    """One pack of random states: documents of 512 tokens, each with a question that is not supervised."""
    tokens, hidden = case.pack_tokens, target.hidden_size
    torch.manual_seed(index)
    aux = torch.randn(tokens, num_aux * hidden, dtype=torch.bfloat16) if num_aux else None
    is_answer = torch.arange(tokens) % 512 >= 512 * (1 - SUPERVISED_SHARE)
    last = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    return Features(torch.randint(0, target.vocab_size, (tokens,)), is_answer, (512,) * (tokens // 512), aux, last)


def _build(case: Case, target: LlamaConfig, device: torch.device) -> Drafter:
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    embed_VH = torch.randn(target.vocab_size, target.hidden_size, dtype=dtype, device=device)
    heads = TargetHeads(embed_VH, embed_VH, torch.ones(target.hidden_size, dtype=dtype, device=device), 1e-5)
    size = case.drafter.vocabulary_size(target.vocab_size)
    vocabulary = None if size is None else DraftVocabulary(tuple(range(size)), target.vocab_size, 1.0)
    drafter = load_drafter_class(case.drafter.algorithm)(case.drafter, target, heads, vocabulary)
    drafter.recomputes = case.recomputes
    return drafter


def _train(case: Case, target: LlamaConfig, batches: list[Features]) -> None:
    """Three steps, as train/run.py takes them."""
    processes = Processes("torch" if case.deepspeed_config is None else "deepspeed")
    precision = "bf16" if case.precision == "bf16" else "fp32"
    drafter = _build(case, target, processes.device)
    optim = recipe().optim
    engine: Engine
    if case.deepspeed_config is None:
        engine = TorchEngine(drafter, optim, precision, processes)
    else:
        engine = DeepSpeedEngine(drafter, optim, precision, processes, ROOT / case.deepspeed_config, case.packs_per_rank)
    copy = _build(case, target, processes.device).to(processes.device)
    for step in range(NUM_STEPS):
        first = step % 2 * case.packs_per_rank
        packs = [drafter_batch(pack) for pack in batches[first : first + case.packs_per_rank]]
        engine.train_step(packs, StepRates(1e-4, drafter.schedule(step, NUM_STEPS)))
    del copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(run_case(CASES[arguments.case])), flush=True)
        return
    variants = {name: [sys.executable, __file__, "--case", name] for name in CASES}
    found = measure.alternate(variants, arguments.repeats, env={"OMP_WAIT_POLICY": "PASSIVE"})
    results = {name: _compared(CASES[name], runs) for name, runs in found.items()}
    largest = max(abs(result["relative_error"]["median"]) for result in results.values())
    document = {
        "about": measure.about(("torch", "transformers", "deepspeed")),
        "claim": f"predicted peak memory of training is within {BOUND:.0%} of the measured peak",
        "largest_relative_error": largest,
        "holds": largest <= BOUND,
        "cases": results,
    }
    measure.write_results("planner", document)
    for name, result in results.items():
        print(f"{name}: {result['relative_error']['median']:+.1%}")


def _compared(case: Case, runs: list[dict[str, float]]) -> dict[str, object]:
    errors = [run["predicted_bytes"] / run["measured_bytes"] - 1 for run in runs]
    settings = {**asdict(case), "drafter": {"algorithm": case.drafter.algorithm, **asdict(case.drafter)}}
    return {"settings": settings, "relative_error": measure.spread(errors), "runs": runs}


if __name__ == "__main__":
    main()
