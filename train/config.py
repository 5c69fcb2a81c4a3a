"""The whole configuration of a run: frozen dataclasses, filled by a recipe, overridden on the command line, saved before step 0."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from checkpoints.hub_client import check_repo_id
from data.heldout import EvalConfig
from data.openai_client import ServerConfig
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
        server: URL of an OpenAI-compatible server of the target that answers instead of this process, for example http://localhost:8000/v1.
        model: name under which it serves the target; None is target.model.
        concurrency: requests that it has to do at a time.
    """

    source: Literal["dataset", "target"] = "dataset"
    max_conversations: int | None = None
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 512
    server: str | None = None
    model: str | None = None
    concurrency: int = 32

    def __post_init__(self) -> None:
        if self.source == "dataset" and self.max_conversations is not None:
            raise ValueError("answers.max_conversations has no effect with answers.source dataset: use data.max_conversations")
        if self.source == "dataset" and self.server is not None:
            raise ValueError("answers.server has no effect with answers.source dataset: set answers.source target")
        if self.server is None and (self.model is not None or self.concurrency != type(self).concurrency):
            raise ValueError("answers.model and answers.concurrency have no effect without answers.server")
        if self.max_conversations is not None and self.max_conversations < 1:
            raise ValueError(f"answers.max_conversations is {self.max_conversations}, expected at least 1")
        if self.server is not None and ServerConfig(self.server, self.model or "", self.concurrency).shown_url != self.server:
            raise ValueError("answers.server holds a name or password, which config.json and trackers would show: set OPENAI_API_KEY instead")

    def served_by(self, target: TargetConfig) -> ServerConfig | None:
        """The server that answers; None where the target is run here."""
        return None if self.server is None else ServerConfig(self.server, self.model or target.model, self.concurrency)

    def identity(self, target: TargetConfig) -> dict[str, Any]:
        """What the answers depend on: of a server, the model that it serves, not where it stands."""
        plain = {name: value for name, value in to_json(self).items() if name not in ("server", "model", "concurrency")}
        return plain if self.server is None else {**plain, "server_model": self.model or target.model}


@dataclass(frozen=True)
class FeaturesConfig:
    """Where the target's hidden states come from.

    Attributes:
        mode: "offline" extracts them once to disk; "online" runs the target inside the training process and stores nothing.
        path: the store; None is <run>/features. A store can serve several runs.
        shard_tokens: tokens of a shard, the unit of resuming.
        storage: "int8" stores states in 8 bits with a scale for each 32 values, in little more than half the bytes of bfloat16 (data/storage.py);
            "lossless" stores them as the target computed them.
        backend: what runs the target for an offline extraction: "transformers", a copy of it in each process; or "vllm", one engine, installed by
            `make vllm`, which can split a large target over several GPUs.
        tensor_parallel: GPUs that vLLM splits the target over.
    """

    mode: Literal["offline", "online"] = "offline"
    path: Path | None = None
    shard_tokens: int = 65536
    storage: Storage = "int8"
    backend: Annotated[Literal["transformers", "vllm"], tyro.conf.arg(aliases=("--target-backend",))] = "transformers"
    tensor_parallel: Annotated[int, tyro.conf.arg(aliases=("--target-tensor-parallel",))] = 1

    def __post_init__(self) -> None:
        if self.backend == "vllm" and self.mode == "online":
            raise ValueError("features.backend vllm extracts to disk, but features.mode is online: set --features.mode offline, or leave it out")
        if self.tensor_parallel < 1:
            raise ValueError(f"features.tensor_parallel is {self.tensor_parallel}, expected at least 1")
        if self.backend != "vllm" and self.tensor_parallel != 1:
            raise ValueError("features.tensor_parallel has no effect with features.backend transformers: set --target-backend vllm")


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
        init_from: a run's export, or a checkpoint that checkpoints/convert.py reads (folder or Hub id), whose weights the drafter starts from; read
            where training begins, and kept in the run's folder.
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
    init_from: str | None = None

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
    """Trackers beside metrics.jsonl, which is always written; see train/trackers.py.

    Attributes:
        wandb: also log to Weights & Biases; offline when there is no key or no network, or WANDB_MODE=offline says so.
        wandb_project: its project.
        wandb_entity: the team or user that owns the project; None is the key's default.
        wandb_tags: to find the run by.
        tensorboard: also write event files to <run>/tensorboard.
    """

    wandb: bool = False
    wandb_project: str = "headstart"
    wandb_entity: str | None = None
    wandb_tags: tuple[str, ...] = ()
    tensorboard: bool = False

    def __post_init__(self) -> None:
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        for name in ("wandb_project", "wandb_entity", "wandb_tags"):
            if not self.wandb and dataclasses.asdict(self)[name] != defaults[name]:
                raise ValueError(f"log.{name} has no effect without log.wandb: add --log.wandb")


@dataclass(frozen=True)
class RunConfig:
    """One run: what is trained, on what, how.

    Attributes:
        name: the run's folder is runs_dir / name.
        push_to_hub: user/name on the Hugging Face Hub that the drafter is uploaded to when everything is done (checkpoints/hub.py).
        hub_private: make that repository private.
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
    push_to_hub: str | None = None
    hub_private: bool = False

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

        if self.push_to_hub is not None:
            check_repo_id(self.push_to_hub, self.drafter.algorithm)
        elif self.hub_private:
            raise ValueError("hub_private has no effect without push_to_hub")

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
