"""The whole run, top to bottom. Read this first.

    (target)    a target that is a base with a LoRA adapter becomes one model: <run>/target
    prepare     conversations -> tokenised train and held-out splits, data_report.json
    answer      the target answers the held-out prompts: what acceptance is measured on
    states      the target's hidden states of those answers
    regenerate  (answers.source target) the target answers the train prompts
    extract     (features.mode offline) the target's hidden states of the train split, to disk
    train       the drafter; held-out acceptance is measured on the way and the best step kept
    backbone    (a drafter that trains the target too) the target as the best step left it, and what that did to it
    export      the best step as a checkpoint that vLLM and SGLang load
    evaluate    acceptance of the *exported* checkpoint, speed-up, report.json, report.html
    upload      (push_to_hub) the export and its model card, to the Hugging Face Hub

Each stage is skipped when its output is whole and its inputs are unchanged (train/stages.py), so running the same command again goes on where an
interrupted run stopped. Every process of a launch runs this file; rank 0 does what only one can do while the others wait.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file
from transformers import PretrainedConfig

from checkpoints.card import backbone_card, drafter_card
from checkpoints.draft_config import draft_dimensions, sliding_window_of
from checkpoints.export import export_drafter
from checkpoints.hub import upload_after_run
from checkpoints.hub_client import check_can_upload
from checkpoints.metrics import read_metrics
from checkpoints.provenance import TrainingFacts, collect_provenance, portable_name
from checkpoints.serving import target_limits
from data.extract import extract, finish_store, is_served_by
from data.loader import shuffled_once
from data.merge_adapter import write_merged
from data.prepare import prepare
from data.regenerate_stage import LocalAnswers, regenerate
from data.server_answers import ServerAnswers
from data.shards import INDEX_FILE, StoreHeader
from data.target import (
    Target,
    TargetConfig,
    base_and_adapter,
    check_plain_logits,
    load_tokenizer,
    stored_dtype,
    target_fingerprint,
    target_hf_config,
)
from data.vllm_states import VllmSource
from train.best import best_weights
from train.config import RunConfig, save_config, to_json
from train.drafters.base import TargetTrainer, load_drafter_class
from train.engine import Processes, check_launch, read_deepspeed_config
from train.evaluator import Evaluator
from train.launcher import check_shared_folder, hold_run_folder
from train.stages import Stage, StageRecords, source_identity
from train.trackers import Trackers, check_trackers
from train.training import Samples, Training
from train.warm_start import load_warm_start


def run(config: RunConfig, evaluator: Evaluator) -> None:
    """Runs every stage that is missing or stale."""
    check_launch(config.train.packs_per_step, config.train.deepspeed_config)
    check_trackers(config.log)
    processes = Processes(config.train.engine)
    stages = Run(config, evaluator, processes)
    stages.prepare()
    stages.answer()
    stages.regenerate()
    stages.extract()
    stages.train()
    stages.backbone()
    stages.export()
    stages.evaluate()
    stages.upload()
    stages.trackers.close()
    processes.close()  # not after an error: it waits for ranks that may be gone


class Run:
    """The stages of one run and what they share."""

    def __init__(self, config: RunConfig, evaluator: Evaluator, processes: Processes) -> None:
        self.config = config
        self.evaluator = evaluator
        self.processes = processes
        self.run_dir = config.run_dir
        self.records = StageRecords(config.run_dir)
        self.trackers = Trackers(config, processes.is_main)
        if config.push_to_hub is not None and processes.is_main:
            check_can_upload(config.push_to_hub)  # not after a day of training
        self.target_config: PretrainedConfig = target_hf_config(config.target)
        check_plain_logits(self.target_config)
        drafter_class = load_drafter_class(config.drafter.algorithm)
        drafter_class.check_target(self.target_config)
        self.request = drafter_class.feature_request_of(config.drafter, self.target_config)
        self._say_engine_limits()
        self._held = hold_run_folder(self.run_dir) if processes.is_main else None
        self.given = config  # as the user gave it; `config` names the merged target
        self.base, self.adapter = base_and_adapter(config.target)
        if self.adapter is not None:
            self._merge_adapter()
        self.target_id = target_fingerprint(self.config.target)
        source = config.train.init_from
        warm_start = load_warm_start(source, config.drafter, self.target_config, self.request, self.run_dir, processes.is_main)
        self.training = Training(
            self.config, drafter_class, self.target_config, self.request, warm_start, evaluator, processes, self.trackers
        )
        self._target: Target | None = None
        self._stage_started = time.monotonic()
        if processes.is_main:
            save_config(config, self.run_dir / "config.json")
        processes.barrier()
        check_shared_folder(self.run_dir, processes)

    def _merge_adapter(self) -> None:
        """A base with an adapter becomes one model, <run>/target: from here on it is the target, and what is served."""
        folder = self.run_dir / "target"
        if self.processes.is_main:
            write_merged(self.config.target, folder)
        self.processes.barrier()
        self.config = dataclasses.replace(self.config, target=TargetConfig(str(folder), dtype=self.config.target.dtype))
        self.target_config = target_hf_config(self.config.target)

    def _say_engine_limits(self) -> None:
        """Said before any work: an engine that cannot serve this pair of target and algorithm, or not as well."""
        limits = target_limits(self.config.drafter.algorithm, self.target_config.model_type, sliding_window_of(self.target_config))
        for reason in limits.values() if self.processes.is_main else ():
            print(f"note: {reason}", flush=True)

    # --- data and target ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Conversations to tokenised splits."""
        data = self.config.data
        sources = [source_identity(source, version) for source in data.sources]
        unchanging = ("sources", "num_workers", "streaming", *(() if data.columns.is_set else ("columns",)))
        settings = {name: value for name, value in to_json(data).items() if name not in unchanging}
        self.prepare_stage = Stage("prepare", {"sources": sources, "target": self.target_id, **settings}, self.run_dir / "data_report.json")

        def work() -> None:
            report = prepare(data, load_tokenizer(self.config.target), self.run_dir / "data")
            report.save(self.run_dir / "data_report.json")
            report.print_table()

        self._once(self.prepare_stage, work)

    def answer(self) -> None:
        """The held-out prompts, answered by the target, and its states of the answers."""
        self.answers_dir = self.run_dir / "answers"
        self.states_stage = self._answer("", self.config.target, {"prepare": self.prepare_stage.fingerprint})

    def _answer(self, prefix: str, target: TargetConfig, answered_by: dict[str, Any]) -> Stage:
        """Two stages, since the answers are the dear part and serve every algorithm; returns the second."""
        config, device, folder = self.config, self.processes.device, self.answers_dir
        settings = to_json(config.eval)
        inputs = {name: settings[name] for name in ("num_prompts", "num_selection_prompts", "max_prompt_tokens", "max_new_tokens", "dtype")}
        answer = Stage(f"{prefix}answer", inputs | answered_by, folder / "selection.jsonl")
        self._once(answer, lambda: self.evaluator.answer(folder, target, config.eval, device, self._prepared("heldout")))
        states = Stage(
            f"{prefix}states", {"answers": answer.fingerprint, "request": to_json(self.request)}, folder / "selection.safetensors"
        )
        self._once(states, lambda: self.evaluator.states(folder, target, config.eval, device, self.request))
        return states

    def regenerate(self) -> None:
        """The train prompts, answered by the target, where the recipe asks for it."""
        answers = self.config.answers
        self.samples_stage, self.samples_dir = self.prepare_stage, self.run_dir / "data"
        if answers.source == "dataset":
            return
        self.samples_dir = self.run_dir / "regenerated"
        inputs = {"prepare": self.prepare_stage.fingerprint, **answers.identity(self.config.target)}
        self.samples_stage = Stage("regenerate", inputs, self.samples_dir)
        server = answers.served_by(self.config.target)
        self._once(
            self.samples_stage,
            lambda: regenerate(
                LocalAnswers(self._loaded_target()) if server is None else ServerAnswers.of(self.config.target, server),
                self._prepared("train"),
                self.samples_dir,
                max_samples=answers.max_conversations,
                max_prompt_tokens=answers.max_prompt_tokens,
                max_new_tokens=answers.max_new_tokens,
            ),
        )

    def extract(self) -> None:
        """The target's states of the train split, to disk, where the recipe asks for it."""
        features, processes = self.config.features, self.processes
        self.features_stage = self.samples_stage
        if features.mode == "online":
            return
        inputs = {"samples": self.samples_stage.fingerprint, "request": to_json(self.request), "storage": features.storage}
        if features.backend != "transformers":
            inputs["backend"] = features.backend
        self.features_stage = Stage("extract", inputs, self.config.features_dir / INDEX_FILE)

        def work() -> None:
            target, samples, folder = self._state_source(), self._samples(), self.config.features_dir
            header = StoreHeader(
                target=self.target_id,
                samples=self.samples_stage.fingerprint,
                aux_layers=self.request.aux_layers,
                has_last=self.request.last,
                dtype=str(target.dtype).removeprefix("torch."),
                hidden_size=target.hidden_size,
                storage=features.storage,
            )
            if features.path is not None and is_served_by(folder, header, is_shown=processes.is_main):
                return
            if isinstance(target, Target):
                extract(
                    target, samples, folder, header=header, shard_tokens=features.shard_tokens, rank=processes.rank, world_size=processes.world_size
                )
            elif processes.is_main:  # one engine does the work of all ranks
                extract(target, samples, folder, header=header, shard_tokens=features.shard_tokens)
            processes.barrier()
            if processes.is_main:
                finish_store(samples, folder, header, features.shard_tokens)

        def discard() -> None:
            """The run's own store, of states that are stale now; a shared one is the user's."""
            if features.path is None:
                shutil.rmtree(self.config.features_dir, ignore_errors=True)

        self._everywhere(self.features_stage, work, discard)
        self._target = None

    # --- training -------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """The optimizer steps, from the newest checkpoint if there is one."""
        settings = to_json(self.config.train)
        ignored = ("log_every", "save_every", "num_kept_checkpoints", "recompute", "init_from")
        settings = {name: value for name, value in settings.items() if name not in ignored}
        settings["precision"] = self.training.precision
        if self.training.warm_start is not None:
            settings["init_from"] = self.training.warm_start.digest
        drafter = {name: value for name, value in to_json(self.config.drafter).items() if name != "max_perplexity_increase"}
        if self.config.train.deepspeed_config is not None:  # what it says, wherever it lies
            settings["deepspeed_config"] = read_deepspeed_config(self.config.train.deepspeed_config)
        self.train_stage = Stage(
            "train",
            {
                "features": self.features_stage.fingerprint,
                "answers": self.states_stage.fingerprint,
                "drafter": drafter,
                "algorithm": self.config.drafter.algorithm,
                "optim": to_json(self.config.optim),
                **settings,
            },
            self.run_dir / "best.json",
        )
        self._everywhere(self.train_stage, self._train, self.training.move_aside)

    def _train(self) -> None:
        if self.config.drafter.trains_target:
            self._target = None  # it has one of its own; the one that answered is not needed any more
        # Where the target's own answers are few, the conversations say better which tokens its users meet.
        more = [] if self.samples_stage is self.prepare_stage else [self._prepared("train")]
        samples = Samples(self._samples(), [self._samples(), *more], self.answers_dir, self._loaded_target)
        self._stage_started = self.training.run(samples, self.train_stage.fingerprint, self._stage_started)

    # --- after training -------------------------------------------------------------------------------------------------

    def backbone(self) -> None:
        """The target as the best step left it, where the drafter trains it too: it is what the drafter serves with from here on."""
        self.served_target, self.best_stage = self.config.target, self.train_stage
        bound = self.config.drafter.perplexity_bound()
        if bound is None:
            return
        config, device, folder = self.config, self.processes.device, self.run_dir / "backbone"
        self.served_target = TargetConfig(model=str(folder))
        inputs = {"train": self.train_stage.fingerprint, "perplexity_bound": bound}
        self.best_stage = Stage("backbone", inputs, folder / "README.md")

        def discard() -> None:
            """All that belongs to an earlier trained target: heads, answers and reports fit no other."""
            for name in ("backbone", "backbone_answers", "export"):
                shutil.rmtree(self.run_dir / name, ignore_errors=True)
            for name in ("backbone.json", "report.json"):
                (self.run_dir / name).unlink(missing_ok=True)

        def work() -> None:
            candidate = folder.with_suffix(".partial")
            shutil.rmtree(candidate, ignore_errors=True)
            drafter = self.training.build_drafter(dtype="float32")
            assert isinstance(drafter, TargetTrainer)
            drafter.load_trained(load_file(best_weights(self.run_dir)))
            drafter.save_target(candidate, stored_dtype(self.target_config))
            self.evaluator.compare_targets(  # raises where it has got worse
                self.run_dir,
                config.target,
                TargetConfig(model=str(candidate)),
                config.eval,
                device,
                self._prepared("heldout"),
                bound,
            )
            (candidate / "README.md").write_text(backbone_card(self._original_name(), self._backbone_facts()))
            shutil.rmtree(folder, ignore_errors=True)
            candidate.rename(folder)

        self._once(self.best_stage, work, discard)
        self.answers_dir = self.run_dir / "backbone_answers"
        self._answer("backbone_", self.served_target, {"backbone": self.best_stage.fingerprint})

    def _original_name(self) -> str:
        """The target as the user named it."""
        return portable_name(self.base.model) + ("" if self.adapter is None else f" with the adapter {portable_name(self.adapter.name)}")

    def _backbone_facts(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "backbone.json").read_text())

    def export(self) -> None:
        """The best step as a checkpoint for the engines."""
        self.export_stage = Stage("export", {"train": self.best_stage.fingerprint}, self.run_dir / "export" / "config.json")

        def work() -> None:
            drafter = self.training.build_drafter()
            drafter.load_trained(load_file(best_weights(self.run_dir)))
            config, is_own = self.config, self.config.drafter.trains_target
            served, adapter = self.served_target.model, None
            if self.adapter is not None and not is_own:
                served, adapter = self.base.model, self.adapter.name
            provenance = collect_provenance(served, target_fingerprint(self.served_target), to_json(self.given), adapter)
            original, facts = (self._original_name(), self._backbone_facts()) if is_own else (None, None)
            export_drafter(
                drafter.export_tensors(),
                algorithm=self.config.drafter.algorithm,
                target_config=self.target_config,
                dimensions=draft_dimensions(self.config.drafter.algorithm, drafter.export_dimensions()),
                aux_layers=self.request.aux_layers,
                dtype=stored_dtype(self.target_config),
                out_dir=self.run_dir / "export",
                provenance=provenance,
                card=drafter_card(config.drafter.algorithm, provenance, config.eval.draft_length, original, facts),
            )

        self._once(self.export_stage, work)

    def evaluate(self) -> None:
        """Acceptance and speed of the exported checkpoint."""
        started = time.monotonic()
        inputs = {"export": self.export_stage.fingerprint, "eval": to_json(self.config.eval)}
        self.evaluate_stage = Stage("evaluate", inputs, self.run_dir / "report.json")

        def work() -> None:
            metrics = read_metrics(self.run_dir / "metrics.jsonl")
            steps = metrics.of("train")
            facts = TrainingFacts(
                train_seconds=self.records.seconds("train"),
                total_seconds=self.records.total_seconds() + time.monotonic() - started,
                num_train_tokens=sum(step["num_tokens"] for step in steps),
                num_steps=len(steps),
                best_step=json.loads((self.run_dir / "best.json").read_text())["step"],
            )
            config, device = self.config, self.processes.device
            untrained = self.training.build_drafter()
            self.evaluator.report(
                self.run_dir, self.answers_dir, self.served_target, config.eval, device, config.data.sources, untrained, facts
            )
            self.trackers.open(metrics.records)
            self.trackers.finish(json.loads((self.run_dir / "report.json").read_text()), self.run_dir / "report.html")

        self._once(self.evaluate_stage, work)

    def upload(self) -> None:
        """The export with its model card to the Hub, where the recipe asks for it."""
        config, repo = self.config, self.config.push_to_hub
        if repo is None:
            return
        inputs = {"evaluate": self.evaluate_stage.fingerprint, "repo": repo, "private": config.hub_private}
        self._once(Stage("upload", inputs, self.run_dir / "hub.json"), lambda: upload_after_run(self.run_dir, repo, config.hub_private))

    # --- stages ---------------------------------------------------------------------------------------------------------

    def _once(self, stage: Stage, work: Callable[[], None], discard: Callable[[], None] | None = None) -> None:
        """Runs a stage on rank 0 if it is not done, while the others wait."""
        self._everywhere(stage, work if self.processes.is_main else lambda: None, discard)

    def _everywhere(self, stage: Stage, work: Callable[[], None], discard: Callable[[], None] | None = None) -> None:
        """Runs a stage on every rank if it is not done; `discard` first puts away, on rank 0, what other inputs have left."""
        if self._is_done(stage):
            return
        self._stage_started = time.monotonic()
        if self.processes.is_main:
            if discard is not None and self.records.changes(stage):
                discard()
            self.records.begin(stage)
        self.processes.barrier()
        work()
        self.processes.barrier()
        if self.processes.is_main:
            self.records.complete(stage, time.monotonic() - self._stage_started)
        self.processes.barrier()

    def _is_done(self, stage: Stage) -> bool:
        """Rank 0's view of a stage, shared by all ranks; says why a stage runs again."""
        flag = 0.0
        if self.processes.is_main:
            flag = float(self.records.is_done(stage))
            if flag:
                print(f"[{stage.name}] done before", flush=True)
            else:
                for change in self.records.changes(stage):
                    print(f"[{stage.name}] stale: {change}", flush=True)
                print(f"[{stage.name}]", flush=True)
        return bool(self.processes.sum([flag])[0])

    def _state_source(self) -> Target | VllmSource:
        """What runs the target for extraction. vLLM takes the GPUs' memory, so every rank gives back what it can."""
        config, processes = self.config, self.processes
        if config.features.backend == "transformers":
            return self._loaded_target()
        self._target = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if processes.is_main and processes.world_size > 1:
            print(f"extract: rank 0 drives vLLM; the other {processes.world_size - 1} wait for it", flush=True)
        return VllmSource(config.target, config.features.tensor_parallel, processes.device)

    def _loaded_target(self) -> Target:
        if self._target is None:
            self._target = Target.load(self.config.target, self.processes.device)
        return self._target

    def _prepared(self, name: str) -> Dataset:
        return load_from_disk(str(self.run_dir / "data"))[name]

    def _samples(self) -> Dataset:
        """The documents to train on, in the order in which they are stored."""
        loaded = load_from_disk(str(self.samples_dir))
        return shuffled_once(loaded if isinstance(loaded, Dataset) else loaded["train"])
