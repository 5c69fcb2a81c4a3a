"""What it is worth that the target writes the training answers itself: the quickstart on ShareGPT's own answers and on its target's, equal tokens.

    .venv/bin/python bench/regeneration.py                    # every run, 40 minutes on two idle cores; goes on where it was stopped
    .venv/bin/python bench/regeneration.py --is-trained       # the runs are there: measure and write

All drafters take the same number of optimizer steps of the same number of tokens, from the same start, with the same rates, and are measured on the
same held-out prompts, answered by the target: four times as many as the quickstart's report has, since the differences are small. ShareGPT's whole
conversations have the advantage of seven times as much different text, each seen once at most, where 480 first answers come around six times. Runs
lie in runs/regeneration/; writes bench/results/regeneration.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import tyro
from datasets import Dataset, load_from_disk

from bench.measure import about, write_results
from data.smollm2 import make_smollm2
from data.target import target_hf_config
from eval.acceptance import Acceptance, TrajectoryPack, chain_acceptance, read_trajectories
from eval.evaluation import Evaluation, exported_drafter, measured_target, read_packs
from recipes import quickstart
from train.config import AnswersConfig, RunConfig
from train.drafters.eagle3 import Eagle3
from train.run import run

RUNS_DIR = Path("runs") / "regeneration"
NUM_PROMPTS = 160
# Of the second, only who has written the answers is different; the third is what a user has without regeneration.
VARIANTS = {
    "target": "the target's own answers",
    "same_prompts": "ShareGPT's, to the same prompts",
    "conversations": "ShareGPT's whole conversations",
}


def config_of(name: str) -> RunConfig:
    """The quickstart; on other answers than its target's for as many steps as it took on those."""
    config = replace(quickstart.recipe(), name=name, runs_dir=RUNS_DIR)
    if name == "target":
        return config
    num_steps = json.loads((RUNS_DIR / "target" / "report.json").read_text())["num_steps"]
    config = replace(config, train=replace(config.train, max_steps=num_steps, num_epochs=2 * config.train.num_epochs))
    return config if name == "same_prompts" else replace(config, answers=AnswersConfig(source="dataset"))


def share_inputs(name: str) -> None:
    """Spares a run what does not depend on the answers trained on: prepared data, and the target's answers to the held-out prompts."""
    source, folder = RUNS_DIR / "target", RUNS_DIR / name
    if (folder / "stages").exists():
        return
    shutil.copytree(source / "data", folder / "data", dirs_exist_ok=True)
    shutil.copy2(source / "data_report.json", folder)
    shutil.copytree(source / "answers", folder / "answers", dirs_exist_ok=True)
    shared = ["prepare", "answer", "states"]
    if name == "same_prompts":
        train_split, regenerated = load_from_disk(str(source / "data"))["train"], load_from_disk(str(source / "regenerated"))
        samples = theirs(train_split, regenerated, config_of(name).answers.max_new_tokens)
        samples.save_to_disk(str(folder / "regenerated"))
        shared.append("regenerate")
    (folder / "stages.partial").mkdir(exist_ok=True)
    for stage in shared:
        shutil.copy2(source / "stages" / f"{stage}.json", folder / "stages.partial")
    (folder / "stages.partial").rename(folder / "stages")


def theirs(train: Dataset, regenerated: Dataset, max_new_tokens: int) -> Dataset:
    """The regenerated split's prompts with the dataset's own first answers, cut where the target's were."""
    own = {sample["conversation_id"]: sample for sample in train}
    rows = []
    for ours in regenerated:
        sample, num_prompt_tokens = own[ours["conversation_id"]], len(ours["prompt_ids"])
        assert sample["input_ids"][:num_prompt_tokens] == ours["prompt_ids"]
        mask = sample["loss_mask"][num_prompt_tokens:]
        end = num_prompt_tokens + min(max_new_tokens, mask.index(False) if False in mask else len(mask))
        rows.append({**sample, "input_ids": sample["input_ids"][:end], "loss_mask": sample["loss_mask"][:end]})
    return Dataset.from_list(rows, features=train.features)


def train(name: str) -> None:
    """One run, in a process of its own; nothing is done again that is done."""
    RUNS_DIR.mkdir(parents=True, exist_ok=True)
    with (RUNS_DIR / f"{name}.log").open("a") as log:
        print(f"{name}: log in {log.name}", flush=True)
        command = [sys.executable, __file__, "--only", name]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ})


def answer_more() -> Path:
    """Answers NUM_PROMPTS held-out prompts, none of them one that has chosen a best step; returns the folder of answers and states."""
    folder, config, evaluation, device = RUNS_DIR / "answers", config_of("target"), Evaluation(), torch.device("cpu")
    if (folder / "answers.safetensors").exists():
        return folder
    heldout = load_from_disk(str(RUNS_DIR / "target" / "data"))["heldout"]
    chosen_by = {trajectory.prompt_ids for trajectory in read_trajectories(RUNS_DIR / "target" / "answers" / "selection.jsonl")}
    unseen = heldout.select([index for index, prompt_ids in enumerate(heldout["prompt_ids"]) if tuple(prompt_ids) not in chosen_by])
    settings = replace(config.eval, num_prompts=NUM_PROMPTS, num_selection_prompts=1)
    evaluation.answer(folder, config.target, settings, device, unseen)
    request = Eagle3.feature_request_of(config.drafter, target_hf_config(config.target))
    evaluation.states(folder, config.target, settings, device, request)
    return folder


def acceptance_of(name: str, packs: Sequence[TrajectoryPack]) -> Acceptance:
    """Of the run's export."""
    config, device = config_of(name), torch.device("cpu")
    drafter = exported_drafter(RUNS_DIR / name / "export", measured_target(config.target, config.eval, device), device)
    return chain_acceptance(drafter, packs, config.eval.draft_length)


def row_of(name: str, acceptance: Acceptance) -> dict[str, Any]:
    """What a finished run says."""
    folder = RUNS_DIR / name
    report = json.loads((folder / "report.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if step["event"] == "train"]
    return {
        "answers": VARIANTS[name],
        **acceptance.to_json(),
        **{key: report[key] for key in ("num_train_tokens", "num_steps", "best_step", "dtype")},
        "tau_of_the_report": report["tau"],
        "num_supervised_tokens": round(sum(step["num_tokens"] * step["supervised_share"] for step in trained)),
        "num_different_tokens": sum(json.loads((folder / "features" / "index.json").read_text())["document_lengths"]),
        "heldout_tau_by_step": {step["step"]: step["tau"] for step in steps if step["event"] == "heldout"},
    }


def gain(after: Acceptance, before: Acceptance, num_resamples: int = 2000) -> dict[str, Any]:
    """Difference of tau, and its 95% bootstrap interval: the same prompts are resampled for both."""
    counts_2P2 = np.array([[(prompt.num_tokens, prompt.num_verifications) for prompt in acceptance.prompts] for acceptance in (after, before)])
    num_prompts = counts_2P2.shape[1]
    drawn_RP = np.random.default_rng(0).integers(num_prompts, size=(num_resamples, num_prompts))
    sums_2R2 = counts_2P2[:, drawn_RP].sum(axis=2)
    tau_2R = sums_2R2[..., 0] / sums_2R2[..., 1]
    low, high = np.quantile(tau_2R[0] - tau_2R[1], [0.025, 0.975])
    return {"tau": after.tau - before.tau, "interval_95": [float(low), float(high)], "share_of_accepted_drafts": (after.tau - 1) / (before.tau - 1)}


def main(only: str | None = None, is_trained: bool = False, variants: tuple[str, ...] = tuple(VARIANTS)) -> None:
    """
    Args:
        only: one of the runs, in this process; nothing is written but its run.
        is_trained: the runs are there; measure them and write the results.
        variants: which to compare; target is the first.
    """
    make_smollm2(quickstart.TARGET_DIR)
    if only is not None:
        run(config_of(only), Evaluation())
        return
    if not is_trained:
        for name in variants:
            if name != "target":
                share_inputs(name)
            train(name)
    packs = read_packs(answer_more() / "answers.safetensors")
    measured = {name: acceptance_of(name, packs) for name in variants}
    rows = {name: row_of(name, acceptance) for name, acceptance in measured.items()}
    document = {
        "about": about(("torch", "transformers")),
        "target": "SmolLM2-135M-Instruct",
        "rows": rows,
        "gain_of_the_targets_answers_over": {name: gain(measured["target"], measured[name]) for name in variants if name != "target"},
    }
    for row in rows.values():
        low, high = row["tau_interval_95"]
        print(f"{row['answers']:34s} tau {row['tau']:.3f} ({low:.3f} to {high:.3f})  {row['num_train_tokens']:,} tokens in {row['num_steps']} steps")
    for name, difference in document["gain_of_the_targets_answers_over"].items():
        low, high = difference["interval_95"]
        print(f"over {VARIANTS[name]}: {difference['tau']:+.3f} ({low:+.3f} to {high:+.3f}), the same prompts resampled for both")
    write_results("regeneration", document)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
