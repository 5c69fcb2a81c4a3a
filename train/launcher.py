"""What a launcher has to have done before a run begins, and what it must not be asked to do.

Place in the flow: torchrun, deepspeed, accelerate and Slurm start a script once a process and say who is who by RANK and WORLD_SIZE. Where they
have not, every process would take itself for the only one and write the same run.
"""

from __future__ import annotations

import errno
import fcntl
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

# How many processes were started, by what starts them.
_STARTED = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
# What accelerate does in scripts that are written for it: the variable that says so, the value that asks for nothing, its flag, and ours.
_ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": ("no", "--mixed_precision", ", and use --train.precision bf16"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "--dynamo_backend", ""),
    "ACCELERATE_USE_DEEPSPEED": ("false", "--use_deepspeed", ", and use launch/train_<algorithm>.py"),
    "ACCELERATE_USE_FSDP": ("false", "--use_fsdp", ", and use launch/train_<algorithm>.py --train.deepspeed-config launch/ds_zero3.json"),
    "ACCELERATE_USE_MEGATRON_LM": ("false", "--use_megatron_lm", ""),
}
_APPEARS_S = 20.0  # a network file system may show a new file late
_POLL_S = 0.2


class Ranks(Protocol):
    """The part of `train.engine.Processes` that is needed here."""

    rank: int
    world_size: int

    def barrier(self) -> None: ...

    def sum(self, values: Sequence[float]) -> list[float]: ...


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raises ValueError where processes do not know of each other, or accelerate is asked for what only scripts written for it do."""
    if "RANK" not in environment:
        for variable, starter in _STARTED.items():
            if environment.get(variable, "1").isdigit() and int(environment.get(variable, "1")) > 1:
                raise ValueError(
                    f"{starter} has started {environment[variable]} processes that do not know of each other (RANK and WORLD_SIZE are not set): "
                    "let it start one torchrun or deepspeed on each node, as launch/slurm.sh does"
                )
        if environment.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1") and "MASTER_ADDR" in environment:
            raise ValueError(
                "on a CPU accelerate starts one process, whatever --num_processes says: use `torchrun --nproc-per-node N`, or "
                "`accelerate launch --multi_gpu --num_processes N`, which starts them without a GPU too"
            )
    for variable, (nothing, flag, instead) in _ACCELERATE.items():
        if environment.get(variable, nothing).lower() != nothing:
            raise ValueError(
                f"accelerate's {flag} ({variable}={environment[variable]}) has no effect on a recipe: leave it out of the command or the "
                f"configuration file{instead}"
            )


def check_shared_folder(folder: Path, ranks: Ranks) -> None:
    """Raises ValueError on a rank that does not see what rank 0 writes into the run's folder; called by every rank."""
    if ranks.world_size == 1:
        return
    number = int(ranks.sum([float(secrets.randbelow(2**50)) if ranks.rank == 0 else 0.0])[0])
    path = folder / f".rank0-{number}"
    if ranks.rank == 0:
        path.touch()
    ranks.barrier()
    until = time.monotonic() + _APPEARS_S
    while not path.exists():
        if time.monotonic() > until:
            raise ValueError(
                f"rank {ranks.rank} on {socket.gethostname()} does not see what rank 0 writes to {folder.resolve()}: a run on several nodes needs "
                "the checkout and runs/ on a file system that all of them share, at the same path (or --runs-dir on such a one)"
            )
        time.sleep(_POLL_S)
    ranks.barrier()
    if ranks.rank == 0:
        path.unlink()


def hold_run_folder(run_dir: Path) -> TextIO:
    """Keeps other runs away from a folder for as long as the returned file is open; a process that is killed gives it back.

    Raises:
        ValueError: if another run has it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    held = (run_dir / ".lock").open("a")
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ValueError(f"{run_dir} is in use by another run: wait for it, end it, or choose another --name") from error
        # Not every file system has locks; it is no worse there than without.
    return held
