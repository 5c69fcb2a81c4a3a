"""The plan as tables: what a run would do, what it takes, and the command that fits. Place in the flow: train/cli.py calls it for `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from train.config import RunConfig
from train.fit import Setting, command_line, fits
from train.machine import Machine, MachineConfig
from train.memory import device_total
from train.plan import Plan, make_plan


def print_plan(config: RunConfig, machine_config: MachineConfig, script: str, arguments: Sequence[str]) -> None:
    """Prints the plan, the memory line by line, and how to start the choice.

    Args:
        config: the run.
        machine_config: what to plan for.
        script: as the user started it.
        arguments: the user's, launcher flags stripped.
    """
    plan = make_plan(config, machine_config)
    console = Console()
    table = Table(title=f"{config.run_dir}: {config.drafter.algorithm} for {config.target.model}", show_header=False)
    for name, value in _rows(config, plan):
        table.add_row(name, value)
    console.print(table)
    shown = plan.chosen or plan.smallest
    if shown is not None:
        console.print(_memory_table(shown, plan.machine, "the choice" if plan.chosen else "the least of all settings"))
    for line in _advice(config, plan, script, arguments):
        console.print(Text(line), soft_wrap=True)


def _rows(config: RunConfig, plan: Plan) -> list[tuple[str, str]]:
    about = "" if plan.is_exact else "about "
    disk, machine, given = plan.disk, plan.machine, plan.given
    states = f"{about}{_gb(disk.store)} ({config.features.storage})" if disk.store else "none (online)"
    settings = f"the run's own settings ({given.rung.name}, packs of {given.pack_tokens:,})"
    free = "" if disk.free is None else f" ({_gb(disk.free)} free here{'' if disk.free > disk.total else ': TOO LITTLE'})"
    return [
        ("machine", machine.describe()),
        ("drafter parameters", f"{plan.num_parameters:,}"),
        ("train split", f"{about}{plan.num_documents:,} conversations, {about}{plan.num_tokens:,} tokens"),
        ("steps", f"{about}{plan.num_steps:,} of {config.train.batch_tokens:,} tokens ({config.train.packs_per_step} packs)"),
        ("tokens trained on", f"{about}{plan.num_train_tokens:,}"),
        ("hidden states on disk", states),
        ("checkpoints on disk", f"{_gb(disk.checkpoints)}, best weights and export {_gb(disk.weights)}"),
        ("disk in all", f"{_gb(disk.total)}{free}"),
        ("the target in memory", _target_line(plan)),
        ("memory of a rank", f"{_gb(given.total_bytes)} with {settings}: {_verdict(config, plan)}"),
        ("time", _time_line(plan)),
    ]


def _verdict(config: RunConfig, plan: Plan) -> str:
    machine = plan.machine
    if config.train.packs_per_step % machine.world_size:
        return f"{machine.world_size} ranks CANNOT SHARE {config.train.packs_per_step} packs evenly"
    return ("fits " if fits(plan.given, machine) else "DOES NOT FIT ") + f"{_gb(machine.usable_bytes)} ({machine.margin:.0%} left free)"


def _target_line(plan: Plan) -> str:
    verdict = "fits" if plan.target_memory_bytes <= plan.machine.usable_bytes else f"DOES NOT FIT {_gb(plan.machine.usable_bytes)}"
    parameters = f"{plan.num_target_parameters / 1e9:,.1f} B parameters"
    return f"{_gb(plan.target_memory_bytes)} on each GPU ({parameters}), to answer, extract and evaluate: {verdict}"


def _time_line(plan: Plan) -> str:
    machine = plan.machine
    training = plan.training_flops / (machine.training_flops * machine.world_size)
    extraction = plan.extraction_flops / (machine.forward_flops * machine.world_size)
    parts = [f"training in about {_duration(training)}"]
    if plan.extraction_flops:
        parts.insert(0, f"extraction in about {_duration(extraction)}")
    return f"{', '.join(parts)} (assumed, not measured: {machine.assumption})"


def _memory_table(shown: Setting, machine: Machine, title: str) -> Table:
    """Each part of rank 0 at its peak; they sum to the last line."""
    table = Table(title=f"peak memory of rank 0, {title}:\n{shown.rung.name}, packs of {shown.pack_tokens:,} tokens")
    table.add_column("part")
    table.add_column("GB", justify="right")
    parts = [(part.name, part.device_bytes) for part in shown.parts if part.device_bytes]
    parts.append(("allocator slack", round(device_total(shown.parts) * machine.slack)))
    parts.append(("CUDA and NCCL" if machine.has_gpu else "Python and its packages", machine.base_bytes))
    for name, num_bytes in parts:
        table.add_row(name, f"{num_bytes / 1e9:,.2f}")
    table.add_row("sum", f"{shown.total_bytes / 1e9:,.2f}", style="bold")
    table.add_row("usable", f"{machine.usable_bytes / 1e9:,.2f}")
    if machine.has_gpu:
        table.add_row("beside it, host memory of each rank", f"{shown.host_bytes / 1e9:,.2f}")
    return table


def _advice(config: RunConfig, plan: Plan, script: str, arguments: Sequence[str]) -> list[str]:
    machine, lines = plan.machine, []
    if plan.target_memory_bytes > machine.usable_bytes:
        lines += _too_large_target(plan)
    if plan.chosen is not None:
        chosen = plan.chosen
        lines.append(
            f"choice: {chosen.rung.name} (costs {chosen.rung.cost}), micro-batches of {chosen.pack_tokens:,} tokens, {chosen.packs_per_rank} for "
            f"each rank and step, {_gb(chosen.total_bytes)} of {_gb(machine.device_bytes)}"
        )
        if chosen.rung.zero_file is not None:
            lines.append(f"ZeRO file: {chosen.rung.zero_file}")
        lines.append(f"command{' on each node' if machine.num_nodes > 1 and chosen.rung.zero_file is None else ''}:")
        lines.append(f"    {command_line(chosen, machine, script, arguments)}")
    elif plan.smallest is not None:
        lines += _nothing_fits(config, plan, plan.smallest)
    else:
        lines.append(
            f"nothing fits: {machine.world_size} ranks cannot share a batch of {config.train.batch_tokens:,} tokens in packs of at least "
            f"{config.data.max_length:,} (data.max_length): raise train.batch_tokens to a multiple of {machine.world_size * config.data.max_length:,}"
        )
    return lines


def _nothing_fits(config: RunConfig, plan: Plan, smallest: Setting) -> list[str]:
    missing = smallest.total_bytes - plan.machine.usable_bytes
    least = f"{smallest.rung.name} with micro-batches of {smallest.pack_tokens:,} tokens"
    needed = smallest.total_bytes / (1 - plan.machine.margin) / 2**30
    ways = [f"devices of {needed:,.0f} GiB"]
    if config.data.max_length == smallest.pack_tokens:
        ways.append("a smaller --data.max-length, and micro-batches of it")
    if config.features.mode == "online" and not config.drafter.trains_target:
        ways.append("--features.mode offline, which keeps the target out of training")
    if config.drafter.algorithm.startswith("medusa"):
        ways.append("--drafter.shared-lm-head, fewer --drafter.num-heads")
    if missing <= 0:
        ways = [f"more host memory than {_gb(smallest.host_bytes)} for each rank"]
    return [f"nothing fits: the least is {least}, which lacks {_gb(max(0, missing))}", f"what would: {'; '.join(ways)}"]


def _too_large_target(plan: Plan) -> list[str]:
    """A target is loaded whole on each rank's device: what is possible without that."""
    missing = plan.target_memory_bytes - plan.machine.usable_bytes
    needed = plan.target_memory_bytes / (1 - plan.machine.margin) / 2**30
    return [
        f"the target does not fit one GPU: it is loaded whole on each, and lacks {_gb(missing)}. Its states can be extracted by an engine that "
        "splits it (--target-backend vllm --target-tensor-parallel N); it still answers and is evaluated whole. Possible for that: run the same "
        f"command, up to the training stage, on a machine with devices of {needed:,.0f} GiB, or on a CPU with as much host memory for each process "
        "(CUDA_VISIBLE_DEVICES=, and --eval.dtype bfloat16 in every run; slow), with the runs/ folder on a disk that both see; then train where "
        "training fits: it reads the store, and of the target embedding, head and norm only; and evaluate there again."
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def _duration(seconds: float) -> str:
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {name}"
    return f"{seconds:,.0f} s"
