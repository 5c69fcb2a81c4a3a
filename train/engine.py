"""Two ways to take a training step, behind the same few methods: plain torch (DDP) and DeepSpeed (ZeRO-0/1/2/3).

Place in the flow: `run.py` hands an engine the micro-batches of a global step; everything about processes, precision and sharding is in here.

The loss of a step is the sum over all supervised positions of the global batch, divided by their number. Both engines average gradients over ranks
(and DeepSpeed over micro-batches too), so each micro-batch's sum is scaled to undo that: the result is the same for any split of the batch.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.resume import load_optimizer, save_optimizer
from data.batch import DrafterBatch
from data.loader import check_divisible
from train.drafters.base import Drafter
from train.launcher import check_launcher
from train.optim import OptimConfig, build_optimizer, set_rates

Precision = Literal["fp32", "bf16"]


def resolve_precision(precision: Literal["auto", "fp32", "bf16"], device: str) -> Precision:
    """What `auto` means on a kind of device: bf16 on a GPU, and on a CPU that multiplies in it (elsewhere it would be emulated)."""
    if precision != "auto":
        return precision
    capabilities = torch.cpu.get_capabilities()
    multiplies_bf16 = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return "bf16" if device == "cuda" or multiplies_bf16 else "fp32"


class StepRates(NamedTuple):
    """Learning rates of one step.

    Attributes:
        rate: the schedule's.
        factors: by part of the drafter (`Drafter.schedule`).
    """

    rate: float
    factors: dict[str, float]


@dataclass(frozen=True)
class StepOutput:
    """One optimizer step, summed over all ranks.

    Attributes:
        loss: loss sum / supervised positions.
        num_supervised: supervised positions of the global batch.
        num_tokens: tokens of the global batch.
        grad_norm: before clipping.
        metrics: the drafter's sums.
    """

    loss: float
    num_supervised: int
    num_tokens: int
    grad_norm: float
    metrics: dict[str, float]


class Engine(Protocol):
    """What a run needs of an engine."""

    processes: Processes

    def train_step(self, batches: Sequence[DrafterBatch], rates: StepRates) -> StepOutput:
        """One optimizer step over this rank's micro-batches of the global batch; each comes to the device when its turn has come."""

    def save(self, folder: Path) -> None:
        """Writes parameters and optimizer state; called by every rank."""

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote; called by every rank."""

    def state(self) -> dict[str, Tensor]:
        """All trained parameters by name, on the CPU of rank 0 (empty elsewhere); called by every rank."""


class Processes:
    """The ranks of this run and the little they tell each other; one process alone needs no launcher."""

    def __init__(self, engine: Literal["torch", "deepspeed"]) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        has_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", self.local_rank) if has_gpu else torch.device("cpu")
        if has_gpu:
            torch.cuda.set_device(self.device)
        if engine == "deepspeed":
            _init_deepspeed(has_gpu)
        elif self.world_size > 1:
            dist.init_process_group("nccl" if has_gpu else "gloo")
        # Rank 0 prepares data while the others wait, for hours on a large set: a group of its own with a timeout to match.
        is_waiting_group_needed = self.world_size > 1
        self._waiting = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7)) if is_waiting_group_needed else None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for every rank, for as long as it takes."""
        if self._waiting is not None:
            dist.barrier(group=self._waiting)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks, in float64."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._waiting)
        return tensor.tolist()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _init_deepspeed(has_gpu: bool) -> None:
    """Starts DeepSpeed's communication; alone and without a launcher, as the single rank of its own."""
    if not has_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed

    if not has_gpu:
        # DeepSpeed would compile a shared-memory kernel for minutes; gloo gives the same numbers without it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if has_gpu else "gloo", verbose=False)


def _reduced(processes: Processes, losses: list[Tensor], metrics: dict[str, Tensor], batches: Sequence[DrafterBatch]) -> list[float]:
    """[loss sum, tokens, metrics...] over all micro-batches and ranks."""
    loss_sum, *sums = torch.stack([torch.stack(losses).sum(), *metrics.values()]).tolist()  # one copy from the device
    return processes.sum([loss_sum, sum(batch.num_tokens for batch in batches), *sums])


def _add(total: dict[str, Tensor], metrics: dict[str, Tensor]) -> None:
    for name, value in metrics.items():
        total[name] = total[name] + value.detach() if name in total else value.detach()


class TorchEngine:
    """DDP where there are several ranks, nothing around the module where there is one."""

    def __init__(self, drafter: Drafter, optim: OptimConfig, precision: Precision, processes: Processes) -> None:
        self.processes = processes
        self._drafter = drafter.to(processes.device)
        self._max_grad_norm = optim.max_grad_norm
        self._autocasts = precision == "bf16"
        self._optimizer = build_optimizer(drafter, optim, is_fused=True)
        self._model: torch.nn.Module = drafter
        if processes.world_size > 1:
            self._model = torch.nn.parallel.DistributedDataParallel(drafter, gradient_as_bucket_view=True)

    def train_step(self, batches: Sequence[DrafterBatch], rates: StepRates) -> StepOutput:
        num_supervised = int(self.processes.sum([sum(self._drafter.num_supervised(batch) for batch in batches)])[0])
        scale = self.processes.world_size / max(1, num_supervised)
        losses: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for index, batch in enumerate(batches):
            with self._without_reduction(is_last=index == len(batches) - 1):
                with torch.autocast(self.processes.device.type, dtype=torch.bfloat16, enabled=self._autocasts):
                    output = self._model(batch.to(self.processes.device))
                (output.loss_sum * scale).backward()
            losses.append(output.loss_sum.detach())
            _add(metrics, output.metrics)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._drafter.parameters(), self._max_grad_norm))
        set_rates(self._optimizer, rates.rate, rates.factors)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum, num_tokens, *sums = _reduced(self.processes, losses, metrics, batches)
        return StepOutput(loss_sum / max(1, num_supervised), num_supervised, int(num_tokens), grad_norm, dict(zip(metrics, sums, strict=True)))

    def _without_reduction(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are reduced once a step, with the last micro-batch."""
        if isinstance(self._model, torch.nn.parallel.DistributedDataParallel) and not is_last:
            return self._model.no_sync()
        return contextlib.nullcontext()

    def save(self, folder: Path) -> None:
        if self.processes.is_main:
            save_file(self.state(), folder / "weights.safetensors")
            save_optimizer(folder / "optimizer.safetensors", self._drafter, self._optimizer)

    def load(self, folder: Path) -> None:
        _require(folder / "optimizer.safetensors", "torch")
        self._drafter.load_trained(load_file(folder / "weights.safetensors"))
        load_optimizer(folder / "optimizer.safetensors", self._drafter, self._optimizer)

    def state(self) -> dict[str, Tensor]:
        if not self.processes.is_main:
            return {}
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self._drafter.trained()}


def check_launch(packs_per_step: int, deepspeed_config: Path | None) -> None:
    """Raises ValueError, before any work is done, where the launch, its number of ranks or the ZeRO file cannot serve."""
    check_launcher(os.environ)
    check_divisible(packs_per_step, int(os.environ.get("WORLD_SIZE", 1)))
    if deepspeed_config is not None:
        read_deepspeed_config(deepspeed_config)


_RECIPE_DECIDES = (
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
)


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """A ZeRO configuration file.

    Raises:
        ValueError: if it is missing, is not JSON, names no ZeRO stage, or sets what the recipe decides.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = f"train.deepspeed_config {path} cannot be read as JSON ({error})"
        raise ValueError(f"{reason}: name one like launch/ds_zero2.json") from error
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"{path} has the ZeRO stage {stage!r}, expected zero_optimization.stage to be 0, 1, 2 or 3, as in launch/ds_zero2.json")
    for name in _RECIPE_DECIDES:
        if name in config:
            raise ValueError(f"{path} sets {name!r}, which the recipe decides: remove it there")
    return config


class DeepSpeedEngine:
    """DeepSpeed with a ZeRO configuration file."""

    def __init__(
        self, drafter: Drafter, optim: OptimConfig, precision: Precision, processes: Processes, config_path: Path, packs_per_rank: int
    ) -> None:
        import deepspeed

        config = read_deepspeed_config(config_path)
        if config["zero_optimization"]["stage"] == 0 and precision == "bf16":
            raise ValueError(f"{config_path}: bf16 with ZeRO stage 0 loses accuracy in DeepSpeed: use stage 1, or train.precision fp32")
        config |= {
            "train_micro_batch_size_per_gpu": 1,  # one pack
            "gradient_accumulation_steps": packs_per_rank,
            "gradient_clipping": optim.max_grad_norm,
            "bf16": {"enabled": precision == "bf16"},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if precision == "bf16":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        self.processes = processes
        self._drafter = drafter.to(processes.device)
        self._packs_per_rank = packs_per_rank
        optimizer = build_optimizer(drafter, optim, is_fused=processes.device.type == "cuda")
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=drafter, optimizer=optimizer, config=config, model_parameters=[parameter for _, parameter in drafter.trained()]
        )

    def train_step(self, batches: Sequence[DrafterBatch], rates: StepRates) -> StepOutput:
        num_supervised = int(self.processes.sum([sum(self._drafter.num_supervised(batch) for batch in batches)])[0])
        scale = self.processes.world_size * self._packs_per_rank / max(1, num_supervised)
        set_rates(self._optimizer, rates.rate, rates.factors)
        losses: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for batch in batches:
            loss_sum, sums = self._engine(batch.to(self.processes.device))
            self._engine.backward(loss_sum * scale)
            self._engine.step()
            losses.append(loss_sum.detach())
            _add(metrics, sums)
        grad_norm = self._engine.get_global_grad_norm()
        loss, num_tokens, *totals = _reduced(self.processes, losses, metrics, batches)
        return StepOutput(
            loss / max(1, num_supervised),
            num_supervised,
            int(num_tokens),
            float("nan") if grad_norm is None else float(grad_norm),
            dict(zip(metrics, totals, strict=True)),
        )

    def save(self, folder: Path) -> None:
        try:
            self._engine.save_checkpoint(str(folder), tag="deepspeed", exclude_frozen_parameters=True)
        except RuntimeError as error:  # what torch.save raises where the disk is full
            raise OSError(f"DeepSpeed could not write its checkpoint to {folder}: {error}") from error

    def load(self, folder: Path) -> None:
        _require(folder / "deepspeed", "deepspeed")
        # Not strict: what is frozen is not in there.
        loaded, _ = self._engine.load_checkpoint(str(folder), tag="deepspeed", load_module_strict=False)
        if loaded is None:
            raise ValueError(f"DeepSpeed found no checkpoint in {folder}: remove the folder to go on from the one before it")

    def state(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._drafter.trained():
            with _whole(parameter):
                if self.processes.is_main:
                    tensors[name] = parameter.detach().cpu().contiguous().clone()
        return tensors


@contextlib.contextmanager
def _whole(parameter: Tensor) -> Iterator[None]:
    """The parameter gathered from all ranks where ZeRO-3 has sharded it."""
    import deepspeed

    if hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter]):
            yield
    else:
        yield


def _require(path: Path, engine: str) -> None:
    """A checkpoint of one engine cannot be resumed by the other."""
    if not path.exists():
        raise ValueError(f"{path.parent} has no {path.name}, so it was not written by the {engine} engine: resume with the engine that wrote it")
