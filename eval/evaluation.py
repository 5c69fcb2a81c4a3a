"""The measuring side of a run: answers to the held-out prompts, acceptance while training, and the report on the export.

Place in the flow: a recipe hands `Evaluation` to train/run.py. What is reported is measured on the *exported* checkpoint, read back
as an engine reads it, and on the very trajectories that `eval.serve` sends to the engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from checkpoints.export import read_export
from checkpoints.provenance import TrainingFacts
from data.batch import Features
from data.generate import generate_greedy
from data.heldout import EvalConfig, choose_prompts
from data.target import Target, TargetConfig, load_target_heads, stored_dtype, target_hf_config
from eval.acceptance import (
    Acceptance,
    Trajectory,
    TrajectoryPack,
    TrajectorySpan,
    chain_acceptance,
    count_near_ties,
    read_trajectories,
    trajectory_features,
    write_trajectories,
)
from eval.backbone import answered_documents, comparison, fit, heldout_documents
from eval.decode.chain import Chain
from eval.decode.speedup import check_lossless, measure_speedup
from eval.report import MeasuredOn, build_report, print_report, write_report
from eval.report_page import write_run_page
from train.drafters.base import Drafter, FeatureRequest, load_drafter_class

_PACK_TOKENS = 4096
# Longest chain that can be measured later without answering again, plus one.
_EXTRA_TOKENS = 16


class Evaluation:
    """What train/run.py calls between its own stages; stateless, everything lies in the run's folder."""

    def answer(self, answers_dir: Path, target: TargetConfig, settings: EvalConfig, device: torch.device, heldout: Dataset) -> None:
        """Answers the held-out prompts greedily."""
        answers_dir.mkdir(exist_ok=True)
        prompts = choose_prompts(heldout, settings)
        measured = Target.load(measured_target(target, settings, device), device)
        generated = generate_greedy(measured, prompts.report + prompts.selection, settings.max_new_tokens, _EXTRA_TOKENS)
        trajectories = [
            Trajectory(tuple(prompt), tuple(answer.answer_ids), tuple(answer.extra_ids))
            for prompt, answer in zip(prompts.report + prompts.selection, generated, strict=True)
        ]
        write_trajectories(answers_dir / "answers.jsonl", trajectories[: len(prompts.report)])
        write_trajectories(answers_dir / "selection.jsonl", trajectories[len(prompts.report) :])

    def states(self, answers_dir: Path, target: TargetConfig, settings: EvalConfig, device: torch.device, request: FeatureRequest) -> None:
        """Stores the target's states of the answers beside them; the last one always, near ties are counted from it."""
        measured = Target.load(measured_target(target, settings, device), device)
        wanted = FeatureRequest(aux_layers=request.aux_layers, last=True)
        for name in ("answers", "selection"):
            trajectories = read_trajectories(answers_dir / f"{name}.jsonl")
            write_packs(answers_dir / f"{name}.safetensors", trajectory_features(measured, trajectories, wanted, _PACK_TOKENS))

    def heldout(self, answers_dir: Path, settings: EvalConfig, device: torch.device) -> Callable[[Drafter], Acceptance]:
        """A function that measures a drafter on the selection prompts."""
        packs = [pack.to(device) for pack in read_packs(answers_dir / "selection.safetensors")]
        return partial(chain_acceptance, packs=packs, draft_length=settings.draft_length)

    def compare_targets(
        self,
        run_dir: Path,
        original: TargetConfig,
        trained: TargetConfig,
        settings: EvalConfig,
        device: torch.device,
        heldout: Dataset,
        max_perplexity_increase: float,
    ) -> None:
        """Perplexity before and after, and agreement with the original's answers, to backbone.json."""
        conversations = heldout_documents(heldout, settings.num_prompts)
        trajectories = read_trajectories(run_dir / "answers" / "answers.jsonl")
        before = fit(Target.load(measured_target(original, settings, device), device), conversations)
        target = Target.load(measured_target(trained, settings, device), device)
        answers = fit(target, answered_documents(trajectories))
        found = comparison(before, fit(target, conversations), answers, len(trajectories), max_perplexity_increase)
        write_report(found, run_dir / "backbone.json")
        print(
            f"the trained target: held-out perplexity {found['perplexity_before']:.3f} -> {found['perplexity_after']:.3f} "
            f"({found['perplexity_increase']:+.1%}); {found['answer_token_agreement']:.1%} of the original's answer tokens are still its choice, "
            f"{found['num_identical_answers']} of {len(trajectories)} answers unchanged",
            flush=True,
        )
        if not found["perplexity_increase"] <= max_perplexity_increase:  # so that nan is no pass
            raise ValueError(
                f"training has hurt the target: its held-out perplexity went from {found['perplexity_before']:.3f} to "
                f"{found['perplexity_after']:.3f} ({found['perplexity_increase']:+.1%}), expected at most {max_perplexity_increase:+.1%} "
                "(drafter.max_perplexity_increase): lower optim.learning_rate or drafter.heads_weight; nothing was exported"
            )

    def report(
        self,
        run_dir: Path,
        answers_dir: Path,
        target: TargetConfig,
        settings: EvalConfig,
        device: torch.device,
        dataset: tuple[str, ...],
        untrained: Drafter,
        training: TrainingFacts,
    ) -> None:
        """Measures the exported checkpoint and the untrained drafter; writes report.json and report.html; prints the summary."""
        started = time.monotonic()
        measured_config = measured_target(target, settings, device)
        drafter = exported_drafter(run_dir / "export", measured_config, device)
        packs = read_packs(answers_dir / "answers.safetensors")
        timed = read_trajectories(answers_dir / "answers.jsonl")[: settings.num_speedup_prompts]
        trained = chain_acceptance(drafter, packs, settings.draft_length)
        near_ties = count_near_ties(packs, drafter.heads.lm_head_VH.cpu())
        measured = Target.load(measured_config, device)
        chain = Chain(drafter, settings.draft_length)
        lossless = check_lossless(measured, chain, timed, settings.max_new_tokens, measured.end_ids)
        # Speed is measured in the dtype that is served; acceptance and losslessness above in the one that is exact.
        served = Target.load(target, device)
        served_chain = Chain(exported_drafter(run_dir / "export", target, device), settings.draft_length)
        prompts = [trajectory.prompt_ids for trajectory in timed]
        speedup = measure_speedup(served, served_chain, prompts, settings.max_new_tokens, served.end_ids, num_rounds=1)
        report = build_report(
            trained=trained,
            untrained=chain_acceptance(untrained.to(device), packs, settings.draft_length),
            speedup=speedup,
            lossless=lossless,
            near_ties=near_ties,
            training=replace(training, total_seconds=training.total_seconds + time.monotonic() - started),
            measured_on=MeasuredOn(
                algorithm=drafter.config.algorithm,
                target=target.model,
                dataset=dataset,
                dtype=str(measured.dtype).removeprefix("torch."),
                device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
            ),
            export_dir=run_dir / "export",
        )
        if target.model == str(run_dir / "backbone"):
            report["backbone"] = json.loads((run_dir / "backbone.json").read_text())
        write_report(report, run_dir / "report.json")
        print_report(report, files=[write_run_page(run_dir)])


def measured_target(target: TargetConfig, settings: EvalConfig, device: torch.device) -> TargetConfig:
    """The target in the dtype that acceptance is measured in."""
    if settings.dtype == "auto":
        return replace(target, dtype="float32") if device.type == "cpu" else target
    return replace(target, dtype=settings.dtype)


def exported_drafter(export_dir: Path, target: TargetConfig, device: torch.device) -> Drafter:
    """The drafter of a checkpoint, as an engine would read it, in the dtype that the target is loaded in.

    Raises:
        ValueError: if the checkpoint breaks the serving contract.
    """
    export_config, tensors = read_export(export_dir)
    provenance = json.loads((export_dir / "headstart.json").read_text())
    target_config: PretrainedConfig = target_hf_config(target)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": stored_dtype(target_config)}[target.dtype]
    heads = load_target_heads(target, device, dtype)
    drafter = load_drafter_class(provenance["algorithm"]).from_export(export_config, tensors, target_config, heads)
    return drafter.to(device=device, dtype=dtype).eval()


def write_packs(path: Path, packs: list[TrajectoryPack]) -> None:
    """Stores packed trajectory states: tensors as safetensors, spans in its metadata."""
    tensors: dict[str, Tensor] = {}
    for index, pack in enumerate(packs):
        features = pack.features
        tensors[f"{index}.input_ids"] = features.input_ids_T.cpu()
        tensors[f"{index}.loss_mask"] = features.loss_mask_T.cpu()
        tensors[f"{index}.document_lengths"] = torch.tensor(features.document_lengths)
        tensors[f"{index}.spans"] = torch.tensor([list(asdict(span).values()) for span in pack.spans])
        for name, tensor in (("aux", features.aux_TX), ("last", features.last_TH)):
            if tensor is not None:
                tensors[f"{index}.{name}"] = tensor.cpu().contiguous()
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary)
    temporary.replace(path)


def read_packs(path: Path) -> list[TrajectoryPack]:
    """Reads what `write_packs` wrote."""
    tensors = load_file(path)
    packs = []
    for index in range(sum(name.endswith(".spans") for name in tensors)):
        features = Features(
            input_ids_T=tensors[f"{index}.input_ids"],
            loss_mask_T=tensors[f"{index}.loss_mask"],
            document_lengths=tuple(tensors[f"{index}.document_lengths"].tolist()),
            aux_TX=tensors.get(f"{index}.aux"),
            last_TH=tensors.get(f"{index}.last"),
        )
        packs.append(TrajectoryPack(features, tuple(TrajectorySpan(*span) for span in tensors[f"{index}.spans"].tolist())))
    return packs
