"""What the recipes are worth beside each other: the quickstart's target and data, equal tokens seen, a chain of 4, greedy.

    .venv/bin/python bench/recipes.py                 # everything; over an hour on two cores, goes on where it was stopped
    .venv/bin/python bench/recipes.py --only medusa1  # one run

Trains every variant below in a process of its own, then measures two controls on the same held-out prompts: a bigram table counted on the same
training data, and each trained drafter with the target's states shuffled among the positions. Runs lie in runs/recipes/; writes
bench/results/recipes.json.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import tyro
from datasets import Dataset, load_from_disk
from torch import Tensor

from checkpoints.provenance import git_commit, installed_versions
from data.batch import DrafterBatch
from data.smollm2 import make_smollm2
from data.target import TargetConfig, target_hf_config
from eval.acceptance import TrajectoryPack, chain_acceptance
from eval.evaluation import Evaluation, exported_drafter, measured_target, read_packs
from recipes import quickstart
from train.config import FeaturesConfig, RunConfig
from train.drafters.base import DrafterConfig
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.medusa1 import Medusa1Config
from train.drafters.medusa2 import Medusa2Config
from train.optim import OptimConfig
from train.run import run

RUNS_DIR = Path("runs") / "recipes"
STORE = RUNS_DIR / "store"
NUM_STEPS, STEP_TOKENS, NUM_ANSWERS = 110, 2048, 480


@dataclass(frozen=True)
class Variant:
    """One line of the table."""

    drafter: DrafterConfig
    optim: OptimConfig


def _adamw(learning_rate: float) -> OptimConfig:
    return OptimConfig(learning_rate=learning_rate, max_grad_norm=1.0)


# The first extracts the store for all, so it is one that reads every state.
VARIANTS = {
    "eagle3": Variant(Eagle3Config(draft_vocab_size=8192, ttt_steps=7, outside_vocabulary="renormalise"), _adamw(3e-3)),
    "medusa2": Variant(Medusa2Config(num_heads=4), _adamw(5e-4)),
    "medusa1": Variant(Medusa1Config(num_heads=4), _adamw(2e-3)),
    "eagle1": Variant(Eagle1Config(), _adamw(1e-3)),
    "eagle3_ttt1": Variant(Eagle3Config(draft_vocab_size=8192, ttt_steps=1, outside_vocabulary="renormalise"), _adamw(3e-3)),
}
FIRST = next(iter(VARIANTS))


def config_of(name: str) -> RunConfig:
    """The quickstart with another drafter, for NUM_STEPS steps of STEP_TOKENS tokens of NUM_ANSWERS answers."""
    base, variant = quickstart.recipe(), VARIANTS[name]
    is_online = variant.drafter.trains_target
    return replace(
        base,
        name=name,
        runs_dir=RUNS_DIR,
        drafter=variant.drafter,
        optim=variant.optim,
        features=FeaturesConfig(mode="online") if is_online else FeaturesConfig(path=STORE),
        # Only the last step is measured and exported: every variant has then seen the same tokens.
        answers=replace(base.answers, max_conversations=NUM_ANSWERS),
        train=replace(base.train, batch_tokens=STEP_TOKENS, pack_tokens=STEP_TOKENS, max_steps=NUM_STEPS, heldout_every=NUM_STEPS, save_every=25),
        eval=replace(base.eval, num_selection_prompts=16, num_speedup_prompts=1),
    )


def share_inputs(name: str) -> None:
    """Spares a run what the first one has done already: prepared data, the target's answers to held-out and train prompts."""
    source, folder = RUNS_DIR / FIRST, RUNS_DIR / name
    if (folder / "stages").exists():
        return
    for part in ("data", "regenerated"):
        shutil.copytree(source / part, folder / part)
    for part in ("data_report.json", *(f"answers/{part}.jsonl" for part in ("answers", "selection"))):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / part, folder / part)
    (folder / "stages").mkdir()
    for stage in ("prepare", "answer", "regenerate"):
        shutil.copy2(source / "stages" / f"{stage}.json", folder / "stages")


def train(name: str) -> None:
    """One run, in a process of its own, with one thread: two of them use two cores best."""
    if name != FIRST:
        share_inputs(name)
    RUNS_DIR.mkdir(parents=True, exist_ok=True)
    with (RUNS_DIR / f"{name}.log").open("a") as log:
        print(f"{name}: log in {log.name}", flush=True)
        command = [sys.executable, __file__, "--only", name]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})


# --- controls -------------------------------------------------------------------------------------------------------------


class BigramTable:
    """Drafts the token that followed the last one most often in the supervised training data."""

    def __init__(self, samples: Dataset, vocab_size: int) -> None:
        counts: Counter[tuple[int, int]] = Counter()
        for sample in samples:
            pairs = zip(sample["input_ids"], sample["input_ids"][1:], sample["loss_mask"][1:], strict=False)
            counts.update((token, following) for token, following, is_supervised in pairs if is_supervised)
        self._following_V = torch.zeros(vocab_size, dtype=torch.int64)
        for (token, following), _ in reversed(counts.most_common()):
            self._following_V[token] = following

    def parameters(self) -> list[Tensor]:
        return []

    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        return torch.stack([self._following_V[batch.known_tokens(step)] for step in range(num_drafts)])


def shuffled(pack: TrajectoryPack, seed: int) -> TrajectoryPack:
    """The same tokens with the target's states of other positions of the pack."""
    features = pack.features
    order_T = torch.randperm(len(features.input_ids_T), generator=torch.Generator().manual_seed(seed))
    assert features.last_TH is not None
    aux_TX = None if features.aux_TX is None else features.aux_TX[order_T]
    return replace(pack, features=replace(features, aux_TX=aux_TX, last_TH=features.last_TH[order_T]))


def row_of(name: str) -> dict[str, Any]:
    """What a finished run says, and its shuffled control."""
    config, folder = config_of(name), RUNS_DIR / name
    report = json.loads((folder / "report.json").read_text())
    answers, target = ("backbone_answers", TargetConfig(str(folder / "backbone"))) if "backbone" in report else ("answers", config.target)
    device = torch.device("cpu")
    drafter = exported_drafter(folder / "export", measured_target(target, config.eval, device), device)
    packs = read_packs(folder / answers / "answers.safetensors")
    control = chain_acceptance(drafter, [shuffled(pack, seed=index) for index, pack in enumerate(packs)], config.eval.draft_length)
    wanted = ("tau", "tau_interval_95", "joint_acceptance", "conditional_acceptance", "tau_untrained", "num_train_tokens", "num_steps")
    wanted += ("num_prompts", "num_verifications", "draft_length", "dtype", "train_seconds")
    row = {key: report[key] for key in wanted} | {"tau_shuffled_states": control.tau}
    row["num_exported_parameters"] = sum(tensor.numel() for tensor in drafter.export_tensors().values() if tensor.is_floating_point())
    return row | ({"backbone": report["backbone"]} if "backbone" in report else {})


def claims(rows: dict[str, dict[str, Any]], tau_bigram: float) -> dict[str, bool]:
    """What should hold, and whether it does."""
    eagle, medusa = ("eagle1", "eagle3"), ("medusa1", "medusa2")

    def decay(name: str) -> float:
        conditional = rows[name]["conditional_acceptance"]
        return conditional[2] / conditional[0]

    deep = {name: rows[name]["joint_acceptance"][1:] for name in ("eagle3", "eagle3_ttt1")}
    return {
        "every trained drafter beats itself untrained": all(row["tau_interval_95"][0] > row["tau_untrained"] for row in rows.values()),
        "every trained drafter beats the bigram table": all(row["tau"] > tau_bigram for row in rows.values()),
        "both EAGLEs beat both Medusas": min(rows[name]["tau"] for name in eagle) > max(rows[name]["tau"] for name in medusa),
        "acceptance given the earlier drafts decays less with depth for EAGLE-3 than for EAGLE-1": decay("eagle3") > decay("eagle1"),
        "7 training-time-test steps beat 1 at every depth from 2 on": all(a > b for a, b in zip(*deep.values(), strict=True)),
        "shuffled target states cut tau - 1 by at least 30%": all(
            row["tau_shuffled_states"] - 1 <= 0.7 * (row["tau"] - 1) for row in rows.values()
        ),
    }


def main(only: str | None = None, jobs: int = 2, is_trained: bool = False) -> None:
    """
    Args:
        only: one variant, trained in this process; nothing is written but its run.
        jobs: runs at a time.
        is_trained: the runs are there; measure the controls and write the results.
    """
    make_smollm2(quickstart.TARGET_DIR)
    if only is not None:
        run(config_of(only), Evaluation())
        return
    if not is_trained:
        train(FIRST)
        with ThreadPoolExecutor(jobs) as executor:
            list(executor.map(train, [name for name in VARIANTS if name != FIRST]))
    rows = {name: row_of(name) for name in VARIANTS}
    samples = load_from_disk(str(RUNS_DIR / FIRST / "regenerated"))
    table = BigramTable(samples, target_hf_config(quickstart.recipe().target).vocab_size)
    draft_length = config_of(FIRST).eval.draft_length
    bigram = chain_acceptance(table, read_packs(RUNS_DIR / FIRST / "answers" / "answers.safetensors"), draft_length)  # type: ignore[arg-type]
    document = {
        "command": ".venv/bin/python bench/recipes.py",
        "about": {"processor": platform.processor() or platform.machine(), "num_cores": os.cpu_count(), "commit": git_commit(ROOT)},
        "versions": installed_versions(),
        "target": "SmolLM2-135M-Instruct",
        "rows": rows,
        "bigram_table": bigram.to_json(),
        "claims": claims(rows, bigram.tau),
    }
    results = ROOT / "bench" / "results"
    results.mkdir(exist_ok=True)
    (results / "recipes.json").write_text(json.dumps(document, indent=2) + "\n")
    for name, row in rows.items():
        joint = " ".join(f"{value:.3f}" for value in row["joint_acceptance"])
        low, high = row["tau_interval_95"]
        print(f"{name:14s} tau {row['tau']:.3f} ({low:.3f} to {high:.3f})  joint {joint}  shuffled {row['tau_shuffled_states']:.3f}")
    print(f"bigram table   tau {bigram.tau:.3f}")
    for claim, holds in document["claims"].items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
