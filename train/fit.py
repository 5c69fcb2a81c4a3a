"""Which settings fit a machine: the cheapest rung whose predicted peak memory leaves the margin free.

Place in the flow: train/plan.py gives the run's config and sizes, `choose` tries the rungs in order and `command_line` says how to start the choice.

The order of preference: what costs no time first, then what costs a little communication, then computing, then waiting for the host. On each rung
the recipe's own micro-batch is tried first, then smaller ones down to data.max_length. The global batch (train.batch_tokens) is never changed.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig

from train.config import RunConfig
from train.machine import Machine
from train.memory import DrafterSizes, Part, Sharding, Work, device_total, sharding_of, step_parts

ROOT = Path(__file__).resolve().parent.parent
# What the planner decides, and how many values each takes on the command line.
_DECIDED = {"--train.engine": 1, "--train.deepspeed-config": 1, "--train.pack-tokens": 1, "--train.recompute": 0, "--train.no-recompute": 0}


class Rung(NamedTuple):
    """An engine and whether activations are recomputed.

    Attributes:
        zero_file: relative to the checkout; None is the torch engine.
        cost: what it costs, for the table.
    """

    name: str
    zero_file: str | None
    recomputes: bool
    cost: str


RUNGS = (
    Rung("torch engine", None, False, "nothing"),
    Rung("ZeRO-1", "launch/ds_zero1.json", False, "about nothing"),
    Rung("ZeRO-2", "launch/ds_zero2.json", False, "about nothing"),
    Rung("torch engine, recomputing", None, True, "a third more computing"),
    Rung("ZeRO-2, recomputing", "launch/ds_zero2.json", True, "a third more computing"),
    Rung("ZeRO-3", "launch/ds_zero3.json", False, "weights gathered in every pass"),
    Rung("ZeRO-3, recomputing", "launch/ds_zero3.json", True, "weights gathered in every pass, a third more computing"),
    Rung("ZeRO-2, optimizer offloaded", "launch/ds_zero2_offload.json", False, "AdamW on the host's processor"),
    Rung("ZeRO-2, optimizer offloaded, recomputing", "launch/ds_zero2_offload.json", True, "AdamW on the host's processor, a third more computing"),
    Rung("ZeRO-3, optimizer offloaded, recomputing", "launch/ds_zero3_offload.json", True, "all of the above"),
)


@dataclass(frozen=True)
class Setting:
    """One way to train, with its predicted peak.

    Attributes:
        pack_tokens: of a micro-batch.
        packs_per_rank: micro-batches of a step (gradient accumulation).
        parts: of rank 0 at the peak, without the process's own base.
        total_bytes: with base and the allocator's slack.
    """

    rung: Rung
    pack_tokens: int
    packs_per_rank: int
    parts: list[Part]
    total_bytes: int

    @property
    def host_bytes(self) -> int:
        """Of one rank, beside the device."""
        return sum(part.host_bytes for part in self.parts)


@dataclass(frozen=True)
class Subject:
    """What is to be trained.

    Attributes:
        target: its (text) config.
        sizes: the drafter's.
        num_states: target states of a token of features.
        feature_bytes: of one number of them.
        target_bytes: weights of a target that runs in the training process, 0 for none.
    """

    config: RunConfig
    target: PretrainedConfig
    sizes: DrafterSizes
    num_states: int
    feature_bytes: int
    target_bytes: int
    is_bf16: bool


def setting(subject: Subject, machine: Machine, rung: Rung, pack_tokens: int, sharding: Sharding | None = None) -> Setting:
    """A setting with its predicted peak; every token counts as supervised, which no pack exceeds."""
    train = subject.config.train
    packs_per_rank = max(1, train.batch_tokens // pack_tokens // machine.world_size)
    work = Work(
        num_tokens=pack_tokens,
        num_supervised=pack_tokens,
        packs_per_rank=packs_per_rank,
        world_size=machine.world_size,
        is_bf16=subject.is_bf16,
        recomputes=rung.recomputes,
        has_gpu=machine.has_gpu,
        is_prefetched=subject.config.features.mode == "offline",
        feature_bytes=subject.feature_bytes,
        target_layers=subject.target.num_hidden_layers if subject.config.drafter.trains_target else 0,
        online_target_bytes=subject.target_bytes,
    )
    if sharding is None:
        sharding = sharding_of(None if rung.zero_file is None else ROOT / rung.zero_file)
    parts = step_parts(subject.config.drafter, subject.target, subject.sizes, subject.num_states, sharding, work)
    return Setting(rung, pack_tokens, packs_per_rank, parts, machine.base_bytes + round(device_total(parts) * (1 + machine.slack)))


def as_given(subject: Subject, machine: Machine) -> Setting:
    """The run's own settings."""
    train = subject.config.train
    name = "torch engine" if train.deepspeed_config is None else f"DeepSpeed with {train.deepspeed_config.name}"
    rung = Rung(name + (", recomputing" if train.recompute else ""), None, train.recompute, "")
    return setting(subject, machine, rung, train.pack_tokens, sharding_of(train.deepspeed_config))


def pack_sizes(config: RunConfig, world_size: int) -> list[int]:
    """Micro-batches to try, the recipe's own first if the ranks can share its packs: each divides the batch into packs that they share evenly."""
    train, sizes = config.train, []
    for divisor in range(1, train.batch_tokens // config.data.max_length + 1):
        if divisor % world_size == 0 and train.batch_tokens % divisor == 0:
            sizes.append(train.batch_tokens // divisor)
    return [size for size in sizes if size <= train.pack_tokens] or sizes[-1:]


def fits(candidate: Setting, machine: Machine) -> bool:
    """Whether device and host hold it; a host of unknown size is taken to."""
    has_room = machine.host_bytes is None or not machine.has_gpu or candidate.host_bytes * machine.ranks_per_node <= 0.9 * machine.host_bytes
    return candidate.total_bytes <= machine.usable_bytes and has_room


def choose(subject: Subject, machine: Machine) -> tuple[Setting | None, Setting | None]:
    """(the first setting that fits, or None; the smallest of all that were tried, or None where no pack can be shared)."""
    smallest: Setting | None = None
    for candidate in _candidates(subject, machine):
        if fits(candidate, machine):
            return candidate, candidate
        if smallest is None or candidate.total_bytes < smallest.total_bytes:
            smallest = candidate
    return None, smallest


def _candidates(subject: Subject, machine: Machine) -> Iterator[Setting]:
    sizes = pack_sizes(subject.config, machine.world_size)
    for rung in RUNGS:
        is_alone = machine.world_size == 1 and rung.zero_file is not None and "offload" not in rung.zero_file
        is_idle_offload = not machine.has_gpu and rung.zero_file is not None and "offload" in rung.zero_file
        if is_alone or is_idle_offload:
            continue  # nothing to divide, or nowhere to offload to
        for pack_tokens in sizes:
            yield setting(subject, machine, rung, pack_tokens)


def command_line(chosen: Setting, machine: Machine, script: str, arguments: Sequence[str]) -> str:
    """The command that starts a run with the chosen settings, on each node."""
    flags = ["--train.pack-tokens", str(chosen.pack_tokens)]
    is_deepspeed = chosen.rung.zero_file is not None
    flags += ["--train.engine", "deepspeed" if is_deepspeed else "torch", "--train.deepspeed-config", chosen.rung.zero_file or "None"]
    flags += ["--train.recompute"] if chosen.rung.recomputes else ["--train.no-recompute"]
    return " ".join([_launcher(machine, is_deepspeed), shlex.quote(script), *(shlex.quote(part) for part in [*kept_arguments(arguments), *flags])])


def _launcher(machine: Machine, is_deepspeed: bool) -> str:
    if machine.world_size == 1:
        return "python"
    if is_deepspeed and machine.num_nodes == 1:
        count = "--num_gpus" if machine.has_gpu else "--num_accelerators"
        return f"deepspeed {count} {machine.ranks_per_node}"
    if is_deepspeed:
        return f"deepspeed --hostfile launch/hostfile.example --num_nodes {machine.num_nodes} --num_gpus {machine.ranks_per_node}"
    nodes = f"--nnodes {machine.num_nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 " if machine.num_nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {machine.ranks_per_node}"


def kept_arguments(arguments: Sequence[str]) -> list[str]:
    """The user's own, without those of the dry run and those that the planner decides."""
    kept, skipped = [], 0
    for argument in arguments:
        if skipped:
            skipped -= 1
            continue
        name, has_value, _ = argument.replace("_", "-").partition("=")
        if name in ("--dry-run", "--no-dry-run"):
            continue
        if name.startswith("--plan.") or name in _DECIDED:
            skipped = 0 if has_value else _DECIDED.get(name, 1)
            continue
        kept.append(argument)
    return kept


def with_setting(config: RunConfig, chosen: Setting) -> RunConfig:
    """The run with the chosen settings."""
    zero_file = None if chosen.rung.zero_file is None else Path(chosen.rung.zero_file)
    train = dataclasses.replace(
        config.train,
        pack_tokens=chosen.pack_tokens,
        recompute=chosen.rung.recomputes,
        engine="torch" if zero_file is None else "deepspeed",
        deepspeed_config=zero_file,
    )
    return dataclasses.replace(config, train=train)
