"""What 8-bit states cost a drafter in acceptance: the quickstart's training again on lossless ones, everything before and after it the same.

    .venv/bin/python bench/storage_tau.py --run runs/quickstart     # seven minutes on two idle cores; `make quickstart` makes the run

The second run takes data, answers and regenerated conversations from the first, and its settings but `features.storage`: same documents in the
same order, same start. It lies beside the first, as <run>-lossless, and goes on where it was stopped. Both exports are measured on the first
run's answers, prompts being resampled for both at once. Writes bench/results/storage_tau.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import tyro

from bench.measure import about, write_results
from bench.regeneration import gain
from data.shards import FeatureStore
from eval.acceptance import chain_acceptance
from eval.evaluation import Evaluation, exported_drafter, measured_target, read_packs
from recipes import quickstart
from train.run import run as run_recipe

# What stands before the states; the stages' records say that it is done.
_SHARED = ("data", "data_report.json", "answers", "regenerated", *(f"stages/{name}.json" for name in ("prepare", "answer", "states", "regenerate")))
LARGEST_LOSS = 0.01


def share(source: Path, folder: Path) -> None:
    """Puts what the first run did before its states into the folder of the second, once."""
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "stages").mkdir(parents=True)
    for name in _SHARED:
        copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
        copy(source / name, partial / name)
    partial.replace(folder)


def train_lossless(run: Path) -> Path:
    """The second run, in a process of its own; returns its folder."""
    folder = run.with_name(f"{run.name}-lossless")
    share(run, folder)
    command = [sys.executable, __file__, "--run", str(run), "--is-second"]
    with folder.with_suffix(".log").open("a") as log:
        print(f"training on lossless states: log in {log.name}", flush=True)
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ})
    return folder


def row_of(folder: Path) -> dict[str, Any]:
    """What a finished run says of its storage and its training."""
    report = json.loads((folder / "report.json").read_text())
    header = FeatureStore.open(folder / "features").header
    return {
        "storage": header.storage,
        "bytes_per_token": header.bytes_per_token,
        **{key: report[key] for key in ("tau", "tau_interval_95", "joint_acceptance", "num_train_tokens", "num_steps", "best_step", "train_seconds")},
    }


def main(run: Path = Path("runs/quickstart"), is_second: bool = False) -> None:
    """
    Args:
        run: the finished quickstart.
        is_second: this process is the second run.
    """
    config = replace(quickstart.recipe(), name=run.name, runs_dir=run.parent)
    if is_second:
        storage = replace(config.features, storage="lossless")
        run_recipe(replace(config, name=f"{run.name}-lossless", features=storage, eval=replace(config.eval, num_speedup_prompts=1)), Evaluation())
        return
    second, device = train_lossless(run), torch.device("cpu")
    packs = read_packs(run / "answers" / "answers.safetensors")
    target = measured_target(config.target, config.eval, device)
    stored, lossless = (
        chain_acceptance(exported_drafter(folder / "export", target, device), packs, config.eval.draft_length) for folder in (run, second)
    )
    change = stored.tau / lossless.tau - 1
    document = {
        "about": about(("torch", "transformers")),
        "rows": [row_of(run), row_of(second)],
        "relative_change": change,
        "difference": gain(stored, lossless),
        "claims": [{"claim": "8-bit states change tau by less than 1%", "figure": change, "holds": abs(change) < LARGEST_LOSS}],
    }
    print(f"tau {stored.tau:.4f} on 8-bit states, {lossless.tau:.4f} on lossless ones: {change:+.2%}")
    write_results("storage_tau", document)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
