"""The train stage: optimizer steps from the newest checkpoint, held-out acceptance on the way, the best step kept.

Place in the flow: train/run.py, when samples and states are there -> `Training` -> step_N/, best.json, draft_vocab.json, metrics.jsonl. Every
process of a launch takes every step; rank 0 also measures, logs and commits checkpoints.

Shapes: V target vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from transformers import PretrainedConfig

from checkpoints.resume import (
    begin_checkpoint,
    commit_checkpoint,
    latest_checkpoint,
    load_rng,
    move_aside,
    prune_checkpoints,
    read_state,
    save_rng,
    write_state,
)
from data.batch import Features, drafter_batch
from data.extract import document_lengths
from data.loader import PackPlan, load_steps, token_reader
from data.shards import FeatureStore
from data.target import Target, TargetHeads, load_target_heads
from data.vocab import DraftVocabulary, choose_draft_vocabulary, count_supervised_tokens
from train.best import BestStep
from train.config import RunConfig
from train.drafters.base import Drafter, FeatureRequest, TargetTrainer
from train.engine import DeepSpeedEngine, Engine, Precision, Processes, StepRates, TorchEngine, resolve_precision
from train.evaluator import Evaluator
from train.metrics import MetricsLog
from train.trackers import Trackers
from train.warm_start import WarmStart


@dataclass(frozen=True)
class Samples:
    """What is trained on.

    Attributes:
        train: the documents, in the order in which their states are stored.
        for_vocabulary: splits whose supervised tokens the draft vocabulary is chosen by.
        answers_dir: the held-out answers and the target's states of them.
        target: the loaded target, where states are computed on the way.
    """

    train: Dataset
    for_vocabulary: Sequence[Dataset]
    answers_dir: Path
    target: Callable[[], Target]


@dataclass(frozen=True)
class Training:
    """The drafter of a run and how it is trained.

    Attributes:
        config: of the run.
        drafter_class: the algorithm's.
        target_config: of the target's language model.
        request: the states that the drafter reads.
        warm_start: the weights that it starts from; None is at random.
        evaluator: measures held-out acceptance.
        processes: of the launch.
        trackers: of the run.
    """

    config: RunConfig
    drafter_class: type[Drafter]
    target_config: PretrainedConfig
    request: FeatureRequest
    warm_start: WarmStart | None
    evaluator: Evaluator
    processes: Processes
    trackers: Trackers

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def run(self, samples: Samples, fingerprint: str, started: float) -> float:
        """Takes the steps that are missing.

        Args:
            samples: what is trained on.
            fingerprint: of the train stage; checkpoints of another are moved aside.
            started: when the stage began, on the monotonic clock.

        Returns:
            The same as if what earlier starts did had been done at once.

        Raises:
            ValueError: if the loss is not finite, or another number of DeepSpeed ranks wrote the checkpoint.
        """
        config, processes = self.config, self.processes
        checkpoint = self._checkpoint_to_resume(fingerprint)
        is_best_known = (self.run_dir / "best.json").exists()  # looked up before any rank can write it
        self._choose_vocabulary(samples.for_vocabulary)
        if self.warm_start is not None and processes.is_main:
            if checkpoint is None:
                self.warm_start.keep(self.run_dir)
            for difference in self.warm_start.differences(self.heads()):
                print(f"note: --train.init-from {self.warm_start.source}: {difference}", flush=True)
        drafter, plan, read = self.build_drafter(), self._plan(samples.train), self._reader(samples)
        engine = self._engine(drafter, plan)
        num_steps = self._num_steps(plan)
        first_step = 0
        if checkpoint is not None:
            resumed = read_state(checkpoint)
            first_step = int(resumed["step"])
            started -= float(resumed["seconds"])
            if config.train.engine == "deepspeed" and resumed["world_size"] != processes.world_size:
                raise ValueError(f"{checkpoint} was written by {resumed['world_size']} ranks: DeepSpeed resumes with as many only")
            engine.load(checkpoint)
        log = MetricsLog(config, num_steps, first_step, self.trackers) if processes.is_main else None
        keeper = None
        if log is not None:
            measure = self.evaluator.heldout(samples.answers_dir, config.eval, processes.device)
            keeper = BestStep(self.run_dir, self.build_drafter().to(processes.device), measure, log)
        if checkpoint is not None and processes.rank < resumed["world_size"]:
            load_rng(checkpoint, processes.rank)  # last: building a drafter draws random numbers
        print(f"rank {processes.rank}: steps {first_step} to {num_steps} on {processes.device}", flush=True)

        if first_step == num_steps and not is_best_known:  # trained before, but best.json is gone
            self._measure(keeper, engine, num_steps)
        steps = load_steps(plan, read, first_step, processes.rank, processes.world_size, config.features.mode == "offline")
        for step in range(first_step, num_steps):
            waiting = time.monotonic()
            packs = next(steps)
            waited_s = time.monotonic() - waiting
            rates = StepRates(config.optim.rate(step, num_steps), drafter.schedule(step, num_steps))
            output = engine.train_step([drafter_batch(pack) for pack in packs], rates)
            done = step + 1
            if not np.isfinite(output.loss):
                raise ValueError(
                    f"the loss is {output.loss} at step {done}: lower optim.learning_rate, then run again; {self.run_dir} keeps the last checkpoint"
                )
            if log is not None:
                log.step(done, output, rates.rate, waited_s)
            if done % config.train.heldout_every == 0 or done == num_steps:
                self._measure(keeper, engine, done)
            if done % config.train.save_every == 0 or done == num_steps:
                self._save(engine, done, fingerprint, started)
        if log is not None:
            log.close()
        return started

    def _measure(self, keeper: BestStep | None, engine: Engine, step: int) -> None:
        """Held-out acceptance on rank 0; every rank takes part in gathering the weights."""
        state = engine.state()
        if keeper is not None:
            keeper.measure(step, state)
        self.processes.barrier()

    def _checkpoint_to_resume(self, fingerprint: str) -> Path | None:
        """The newest checkpoint of these very settings; those of other settings are moved aside, never deleted."""
        if self.processes.is_main:
            prune_checkpoints(self.run_dir, self.config.train.num_kept_checkpoints)
            newest = latest_checkpoint(self.run_dir)
            if newest is not None and read_state(newest)["fingerprint"] != fingerprint:
                self.move_aside()
        self.processes.barrier()
        return latest_checkpoint(self.run_dir)

    def move_aside(self) -> None:
        """Puts away what other settings have trained; nothing is deleted."""
        aside = move_aside(self.run_dir)
        if aside is not None:
            print(f"the settings of training have changed: the earlier steps are now in {aside}", flush=True)

    def _save(self, engine: Engine, step: int, fingerprint: str, started: float) -> None:
        partial = self.run_dir / f"step_{step}.partial"
        if self.processes.is_main:
            begin_checkpoint(self.run_dir, step)
        self.processes.barrier()
        engine.save(partial)
        save_rng(partial, self.processes.rank)
        self.processes.barrier()
        if self.processes.is_main:
            seconds = round(time.monotonic() - started, 2)
            facts = {"step": step, "seconds": seconds, "fingerprint": fingerprint, "world_size": self.processes.world_size}
            write_state(partial, facts)
            commit_checkpoint(partial)
            prune_checkpoints(self.run_dir, self.config.train.num_kept_checkpoints)
        self.processes.barrier()

    def build_drafter(self, dtype: Literal["bfloat16", "float32"] | None = None) -> Drafter:
        """The drafter as it is before the first step, the same on every rank and at every call.

        Args:
            dtype: of the target that it trains too, where it does; None is the training precision.
        """
        path = self._vocabulary_path()
        vocabulary = None if path is None else DraftVocabulary.load(path)
        torch.manual_seed(self.config.train.seed)
        drafter = self.drafter_class(self.config.drafter, self.target_config, self.heads(), vocabulary)
        drafter.recomputes = self.config.train.recompute
        if self.warm_start is not None:
            self.warm_start.load_into(drafter)
        if isinstance(drafter, TargetTrainer):
            dtype = dtype or ("bfloat16" if self.precision == "bf16" else "float32")
            drafter.attach_target(Target.load(dataclasses.replace(self.config.target, dtype=dtype), self.processes.device))
        return drafter

    def heads(self) -> TargetHeads:
        """The target's embedding, norm and head on this rank's device, in the training precision."""
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        return load_target_heads(self.config.target, self.processes.device, dtype)

    def _engine(self, drafter: Drafter, plan: PackPlan) -> Engine:
        config, processes = self.config, self.processes
        if config.train.deepspeed_config is None:
            return TorchEngine(drafter, config.optim, self.precision, processes)
        packs_per_rank = plan.packs_per_step // processes.world_size
        return DeepSpeedEngine(drafter, config.optim, self.precision, processes, config.train.deepspeed_config, packs_per_rank)

    @property
    def precision(self) -> Precision:
        """What "auto" is on this machine, or what was asked for."""
        return resolve_precision(self.config.train.precision, self.processes.device.type)

    def _choose_vocabulary(self, splits: Sequence[Dataset]) -> None:
        """Chooses the run's draft vocabulary, once: it is never rebuilt under a trained head."""
        path = self._vocabulary_path()
        if self.processes.is_main and path is not None and not path.exists():
            samples = itertools.chain.from_iterable(split.with_format("numpy") for split in splits)
            pairs = ((sample["input_ids"], sample["loss_mask"]) for sample in samples)
            size = self.config.drafter.vocabulary_size(self.target_config.vocab_size)
            assert size is not None
            counts_V = count_supervised_tokens(pairs, self.target_config.vocab_size)
            given = None if self.warm_start is None else self.warm_start.vocabulary(counts_V)
            vocabulary = given or choose_draft_vocabulary(counts_V, size)
            vocabulary.save(path)
            print(f"draft vocabulary: {size} tokens cover {vocabulary.coverage:.2%} of the supervised tokens", flush=True)
        self.processes.barrier()

    def _vocabulary_path(self) -> Path | None:
        """Where the draft vocabulary is kept; None where the drafter covers the whole vocabulary."""
        has_own = self.config.drafter.vocabulary_size(self.target_config.vocab_size) is not None
        return self.run_dir / "draft_vocab.json" if has_own else None

    def _plan(self, samples: Dataset) -> PackPlan:
        train = self.config.train
        return PackPlan(
            lengths=document_lengths(samples), pack_tokens=train.pack_tokens, packs_per_step=train.packs_per_step, seed=train.seed
        )

    def _num_steps(self, plan: PackPlan) -> int:
        num_steps = plan.num_steps(self.config.train.num_epochs)
        return num_steps if self.config.train.max_steps is None else min(num_steps, self.config.train.max_steps)

    def _reader(self, samples: Samples) -> Callable[[Any], Features]:
        """Features of a pack of documents, from the store or from the target at once."""
        if self.config.features.mode == "offline":
            store = FeatureStore.open(self.config.features_dir)
            store.require(self.request.aux_layers, self.request.last)
            return partial(store.read, aux_layers=self.request.aux_layers, last=self.request.last)
        if self.config.drafter.trains_target:  # it has a target of its own
            return token_reader(samples.train, None, (), last=False)
        return token_reader(samples.train, samples.target(), self.request.aux_layers, self.request.last)
