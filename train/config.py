"""The whole configuration of a run: frozen dataclasses, filled by a recipe, overridden on the command line, saved before step 0."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.heldout import EvalConfig
from data.prepare import DataConfig
from data.storage import Storage
from data.target import TargetConfig
from train.drafters.base import DrafterConfig
from train.optim import OptimConfig


@dataclass(frozen=True)
class AnswersConfig:
    """Whose answers the drafter trains on.

    Attributes:
        source: "dataset" takes the conversations as they are; "target" lets the target answer the first turn of each greedily, which is
            what the drafter will meet in service.
        max_conversations: conversations to answer when source is "target"; None answers all.
        max_prompt_tokens: longer prompts are left out and counted.
        max_new_tokens: longest answer.
    """

    source: Literal["dataset", "target"] = "dataset"
    max_conversations: int | None = None
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        if self.source == "dataset" and self.max_conversations is not None:
            raise ValueError("answers.max_conversations has no effect with answers.source dataset: use data.max_conversations")


@dataclass(frozen=True)
class FeaturesConfig:
    """Where the target's hidden states come from.

    Attributes:
        mode: "offline" extracts them once to disk; "online" runs the target inside the training process and stores nothing.
        path: the store; None is <run>/features. A store can serve several runs.
        shard_tokens: tokens of a shard, the unit of resuming.
        storage: "int8" stores states in 8 bits with a scale for each 32 values, in little more than half the bytes of bfloat16 (data/storage.py);
            "lossless" stores them as the target computed them.
    """

    mode: Literal["offline", "online"] = "offline"
    path: Path | None = None
    shard_tokens: int = 65536
    storage: Storage = "int8"


@dataclass(frozen=True)
class TrainConfig:
    """How long, how large, with which engine.

    Attributes:
        num_epochs: passes over the train split; a fraction is fine.
        max_steps: stops earlier; the schedule ends there too.
        batch_tokens: tokens of a global optimizer step: all ranks and micro-batches.
        pack_tokens: tokens of a micro-batch of one rank; at least data.max_length.
        precision: "auto" is bf16 on a GPU, and on a CPU that multiplies in it, else fp32. bf16 keeps fp32 master weights.
        recompute: compute the layer's activations again in the backward pass instead of keeping them: less memory for long packs, a third more time.
        engine: "torch" (DDP) or "deepspeed".
        deepspeed_config: ZeRO configuration, used by the deepspeed engine only.
        heldout_every: steps between measurements of held-out acceptance; the best step is kept.
        save_every: steps between checkpoints.
        num_kept_checkpoints: older ones are removed.
        log_every: steps between progress lines.
        seed: of initialisation and data order.
    """

    num_epochs: float = 2.0
    max_steps: int | None = None
    batch_tokens: int = 65536
    pack_tokens: int = 8192
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    recompute: bool = False
    engine: Literal["torch", "deepspeed"] = "torch"
    deepspeed_config: Path | None = None
    heldout_every: int = 200
    save_every: int = 200
    num_kept_checkpoints: int = 2
    log_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_epochs <= 0:
            raise ValueError(f"train.num_epochs is {self.num_epochs}, expected a positive number")
        if self.batch_tokens % self.pack_tokens:
            raise ValueError(
                f"train.batch_tokens is {self.batch_tokens}, which is no multiple of train.pack_tokens {self.pack_tokens}: a step is whole packs"
            )
        if self.engine == "torch" and self.deepspeed_config is not None:
            raise ValueError("train.deepspeed_config has no effect with train.engine torch: set train.engine deepspeed")
        if self.engine == "deepspeed" and self.deepspeed_config is None:
            raise ValueError("train.engine deepspeed needs train.deepspeed_config, for example launch/ds_zero2.json")
        for name in ("heldout_every", "save_every", "log_every", "num_kept_checkpoints"):
            if dataclasses.asdict(self)[name] < 1:
                raise ValueError(f"train.{name} is {dataclasses.asdict(self)[name]}, expected at least 1")

    @property
    def packs_per_step(self) -> int:
        return self.batch_tokens // self.pack_tokens


@dataclass(frozen=True)
class LogConfig:
    """Trackers beside metrics.jsonl, which is always written.

    Attributes:
        wandb: also log to Weights & Biases; offline when there is no key or no network.
        wandb_project: its project.
    """

    wandb: bool = False
    wandb_project: str = "headstart"


@dataclass(frozen=True)
class RunConfig:
    """One run: what is trained, on what, how.

    Attributes:
        name: the run's folder is runs_dir / name.
    """

    name: str
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig
    runs_dir: Path = Path("runs")
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name is {self.name!r}, expected a folder name")
        if self.train.pack_tokens < self.data.max_length:
            raise ValueError(
                f"train.pack_tokens is {self.train.pack_tokens}, less than data.max_length {self.data.max_length}: a pack must hold a document"
            )
        longest_chain = self.drafter.longest_chain()
        if longest_chain is not None and self.eval.draft_length > longest_chain:
            raise ValueError(f"eval.draft_length is {self.eval.draft_length}, but this drafter makes {longest_chain} drafts at most")
        if self.drafter.trains_target and self.features.mode == "offline":
            raise ValueError(f"{self.drafter.algorithm} trains the target too, so its states cannot be stored: set features.mode online")
        if self.features.mode == "online" and self.features.path is not None:
            raise ValueError("features.path has no effect with features.mode online")
        if "eagle-" in str(self.run_dir).lower():
            raise ValueError(f"{self.run_dir}: vLLM takes any path with 'eagle-' in it for EAGLE-1; choose another --name or --runs-dir")

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def features_dir(self) -> Path:
        return self.features.path or self.run_dir / "features"


def under_deepspeed(config: RunConfig, deepspeed_config: Path) -> RunConfig:
    """The same run with the DeepSpeed engine."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, engine="deepspeed", deepspeed_config=deepspeed_config))


def to_json(value: Any) -> Any:
    """A config as plain JSON values (paths as strings)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def save_config(config: RunConfig, path: Path) -> None:
    """Writes the resolved configuration, atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(to_json(config), indent=2) + "\n")
    temporary.replace(path)
