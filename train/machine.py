"""The machine that a plan is for: the one at hand, or one that the user names by `--plan.*`.

Place in the flow: train/cli.py reads `MachineConfig`, `machine_of` turns it into a `Machine` for train/plan.py.

Speeds are assumptions, named in the plan's output: dense bf16 peak of the data sheet times the share of it that a target's forward pass and a
drafter's training are taken to reach. They were not measured here, except the CPU's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

DeviceKind = Literal["auto", "a100", "h100", "h200", "b200", "l40s", "other-gpu", "cpu"]

# Dense bf16 TFLOP/s by the data sheets.
_PEAK_TFLOPS = {"a100": 312.0, "h100": 989.0, "h200": 989.0, "b200": 2250.0, "l40s": 362.0, "other-gpu": 100.0}
_FORWARD_SHARE, _TRAINING_SHARE = 0.4, 0.3
# Measured on a core of an AMD EPYC: SmolLM2's 0.27 GFLOP a token at 480 tokens/s, and the quickstart's 7 minutes come to about as much.
_CPU_TFLOPS_PER_CORE = 0.13
# The CUDA context with cuBLAS and cuDNN, and NCCL's channels where there are several ranks.
_CUDA_BYTES, _NCCL_BYTES = 600_000_000, 400_000_000
_CPU_PROCESS_BYTES = 550_000_000  # Python with torch, transformers and datasets
# Fragments: of torch's caching allocator an assumption, of malloc what bench/planner.py measured.
_GPU_SLACK, _CPU_SLACK = 0.05, 0.1


@dataclass(frozen=True)
class MachineConfig:
    """What --dry-run plans for; the machine at hand where nothing is said.

    Attributes:
        gpus: GPUs (or, with device cpu, processes) of a node; None takes those of this machine, or of this launch.
        nodes: machines of that kind.
        gpu_memory_gb: memory of a GPU, in 10^9 bytes times 1.0737 as vendors count it (GiB); with device cpu, of a process.
        host_memory_gb: memory of a node, in GiB; None takes this machine's, or is not checked for a named one.
        device: kind of GPU, for the assumed speed; "auto" is this machine's, or an A100 where a memory size is named.
        margin: share of the memory that stays free.
        tokens: tokens of the train split, where neither the data are prepared nor the target's tokenizer is there to count a sample.
    """

    gpus: int | None = None
    nodes: int = 1
    gpu_memory_gb: float | None = None
    host_memory_gb: float | None = None
    device: DeviceKind = "auto"
    margin: float = 0.1
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("gpus", self.gpus), ("nodes", self.nodes), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise ValueError(f"plan.{name} is {value}, expected at least 1")
        for name, size in (("gpu_memory_gb", self.gpu_memory_gb), ("host_memory_gb", self.host_memory_gb)):
            if size is not None and size <= 0:
                raise ValueError(f"plan.{name} is {size}, expected a positive number")
        if not 0 <= self.margin < 1:
            raise ValueError(f"plan.margin is {self.margin}, expected a share in [0, 1)")

    @property
    def is_named(self) -> bool:
        """Whether it describes a machine other than the one at hand."""
        return self.gpus is not None or self.nodes > 1 or self.gpu_memory_gb is not None or self.device != "auto"


@dataclass(frozen=True)
class Machine:
    """Where a run happens.

    Attributes:
        kind: of its devices.
        num_nodes, ranks_per_node: one rank a device.
        device_bytes: memory of a rank's device; on a CPU its share of the machine's.
        host_bytes: memory of a node, None where unknown.
        is_here: whether it is the machine at hand, whose disk can be looked at.
        margin: share of the memory that stays free.
    """

    kind: str
    num_nodes: int
    ranks_per_node: int
    device_bytes: int
    host_bytes: int | None
    is_here: bool
    margin: float

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def has_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def usable_bytes(self) -> int:
        """Of a rank's device, the margin left free."""
        return int(self.device_bytes * (1 - self.margin))

    @property
    def base_bytes(self) -> int:
        """What a process takes before it does anything: CUDA and NCCL, or Python with its packages."""
        if self.has_gpu:
            return _CUDA_BYTES + (_NCCL_BYTES if self.world_size > 1 else 0)
        return max(process_bytes(), _CPU_PROCESS_BYTES) if self.is_here else _CPU_PROCESS_BYTES

    @property
    def slack(self) -> float:
        """Share that the allocator loses to fragments."""
        return _GPU_SLACK if self.has_gpu else _CPU_SLACK

    @property
    def forward_flops(self) -> float:
        """FLOP/s that a device is taken to reach in a target's forward pass."""
        return self._flops(_FORWARD_SHARE)

    @property
    def training_flops(self) -> float:
        """FLOP/s that a device is taken to reach in training a drafter."""
        return self._flops(_TRAINING_SHARE)

    def _flops(self, share: float) -> float:
        if not self.has_gpu:
            return _CPU_TFLOPS_PER_CORE * 1e12 * max(1, _num_cores() // self.ranks_per_node)
        return _PEAK_TFLOPS[self.kind] * share * 1e12

    @property
    def assumption(self) -> str:
        """The speeds, in words."""
        if not self.has_gpu:
            return f"{_CPU_TFLOPS_PER_CORE * 1000:.0f} GFLOP/s a core"
        peak = f"{self.kind}: {_PEAK_TFLOPS[self.kind]:.0f} TFLOP/s bf16 peak"
        return f"{peak}, {_FORWARD_SHARE:.0%} of it in the target's forward pass and {_TRAINING_SHARE:.0%} in training"

    def describe(self) -> str:
        """One line."""
        device = f"{self.kind} of {self.device_bytes / 2**30:.0f} GiB" if self.has_gpu else f"CPU process with {self.device_bytes / 2**30:.1f} GiB"
        nodes = f"{self.num_nodes} nodes x " if self.num_nodes > 1 else ""
        return f"{nodes}{self.ranks_per_node} x {device}{', this machine' if self.is_here else ''}"


def machine_of(config: MachineConfig) -> Machine:
    """The machine to plan for: what is said of it, and the rest from the one at hand."""
    has_gpu = torch.cuda.is_available()
    kind: str
    if config.device != "auto":
        kind = config.device
    elif has_gpu:
        kind = _kind_of(torch.cuda.get_device_name())
    else:
        kind = "a100" if config.gpu_memory_gb is not None else "cpu"
    if kind != "cpu" and not has_gpu and config.gpu_memory_gb is None:
        raise ValueError(f"plan.device is {kind}, but this machine has no GPU whose memory could be read: say plan.gpu_memory_gb too")
    if kind == "cpu":
        return _cpu_machine(config)
    total = torch.cuda.get_device_properties(0).total_memory if has_gpu else 0
    ranks = config.gpus or (int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or (torch.cuda.device_count() if has_gpu and not config.is_named else 1))
    return Machine(
        kind=kind,
        num_nodes=config.nodes if config.is_named else _num_launched_nodes(),
        ranks_per_node=ranks,
        device_bytes=total if config.gpu_memory_gb is None else int(config.gpu_memory_gb * 2**30),
        host_bytes=_bytes_of(config.host_memory_gb) or (None if config.is_named else _host_bytes()),
        is_here=not config.is_named,
        margin=config.margin,
    )


def _cpu_machine(config: MachineConfig) -> Machine:
    ranks = config.gpus or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or int(os.environ.get("WORLD_SIZE", 1))
    host = _bytes_of(config.host_memory_gb) or _host_bytes()
    return Machine(
        kind="cpu",
        num_nodes=config.nodes if config.is_named else _num_launched_nodes(),
        ranks_per_node=ranks,
        device_bytes=_bytes_of(config.gpu_memory_gb) or host // ranks,
        host_bytes=host,
        is_here=not config.is_named,
        margin=config.margin,
    )


def process_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _num_launched_nodes() -> int:
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return world // local if local else 1


def _kind_of(name: str) -> str:
    """The kind of a GPU by the name that its driver gives."""
    known = [kind for kind in _PEAK_TFLOPS if kind.replace("-", " ") in name.lower().replace("-", " ")]
    return known[0] if known else "other-gpu"


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _num_cores() -> int:
    return os.cpu_count() or 1


def _bytes_of(gib: float | None) -> int:
    return 0 if gib is None else int(gib * 2**30)
