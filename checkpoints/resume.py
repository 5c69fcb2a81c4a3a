"""Checkpoints of a run that survive a kill at any moment.

A checkpoint is the folder `runs/<name>/step_N/`. It is written as `step_N.partial` and renamed when everything in it is on disk, so a folder named
`step_N` is always whole; leftovers of an interrupted write are removed at the next start. Tensors go into safetensors and the rest into JSON;
DeepSpeed's own part lies in a subfolder that DeepSpeed reads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STATE_FILE = "state.json"
_STEP_NAME = re.compile(r"step_(\d+)")
WARM_START_FOLDER = "init_from"  # the weights that the steps began with, where they are another drafter's
# Everything that the steps of a run leave in its folder.
_TRAINING_OUTPUT = ("step_*", "best*", "metrics.jsonl", "draft_vocab.json", "wandb_id", "trackers.json", "tensorboard", WARM_START_FOLDER)


def begin_checkpoint(run_dir: Path, step: int) -> Path:
    """An empty folder to write checkpoint `step` into (one process calls this)."""
    partial = run_dir / f"step_{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit_checkpoint(partial: Path) -> Path:
    """Makes a written checkpoint the run's newest: flushes every file, then renames the folder."""
    for path in partial.rglob("*"):
        if path.is_file():
            _flush(path)
    final = partial.with_suffix("")
    _remove(final)
    partial.replace(final)
    _flush(final.parent)
    return final


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The whole checkpoint with the highest step, or None."""
    found = [(int(match[1]), path) for path in run_dir.glob("step_*") if (match := _STEP_NAME.fullmatch(path.name))]
    return max(found)[1] if found else None


def prune_checkpoints(run_dir: Path, num_kept: int) -> None:
    """Removes unfinished checkpoints and all but the newest `num_kept`."""
    for pattern in ("step_*.partial", "step_*.removed"):
        for path in run_dir.glob(pattern):
            shutil.rmtree(path)
    steps = sorted((int(match[1]), path) for path in run_dir.glob("step_*") if (match := _STEP_NAME.fullmatch(path.name)))
    for _, path in steps[: max(0, len(steps) - num_kept)]:
        _remove(path)


def _remove(checkpoint: Path) -> None:
    """Takes the name away first: a folder named `step_N` is whole, also while it goes."""
    if checkpoint.exists():
        removed = checkpoint.with_suffix(".removed")
        checkpoint.replace(removed)
        shutil.rmtree(removed)


def move_aside(run_dir: Path) -> Path | None:
    """Moves everything that training has written to a new folder `superseded_<n>`; None where there is nothing.

    A kill in between leaves the rest to the next call.
    """
    paths = [path for pattern in _TRAINING_OUTPUT for path in run_dir.glob(pattern)]
    if not paths:
        return None
    numbers = [int(path.name.removeprefix("superseded_")) for path in run_dir.glob("superseded_*")]
    aside = run_dir / f"superseded_{max(numbers, default=0) + 1}"
    aside.mkdir()
    for path in paths:
        path.replace(aside / path.name)
    return aside


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes the step and whatever else the run needs to go on, as JSON."""
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2))


def read_state(folder: Path) -> dict[str, Any]:
    """Reads what `write_state` wrote."""
    return json.loads((folder / STATE_FILE).read_text())


def save_rng(folder: Path, rank: int) -> None:
    """Saves this rank's random state; DeepSpeed does not."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, folder / f"rng_rank{rank}.safetensors")


def load_rng(folder: Path, rank: int) -> None:
    """Restores this rank's random state.

    Raises:
        ValueError: if the checkpoint was written by fewer ranks.
    """
    path = folder / f"rng_rank{rank}.safetensors"
    if not path.exists():
        ranks = len(list(folder.glob("rng_rank*.safetensors")))
        raise ValueError(f"{folder} was written by {ranks} ranks and this is rank {rank}: resume with {ranks} processes")
    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def save_optimizer(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes an optimizer's per-parameter tensors as safetensors, named `<parameter>/<state>`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for parameter, states in optimizer.state.items():
        tensors |= {f"{names[parameter]}/{key}": value.detach().contiguous() for key, value in states.items()}
    save_file(tensors, path)


def load_optimizer(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restores what `save_optimizer` wrote.

    Raises:
        ValueError: if the file is of another module.
    """
    tensors = load_file(path)
    parameters = dict(module.named_parameters())
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        if name not in parameters:
            raise ValueError(f"{path} holds optimizer state of {name!r}, which this drafter lacks: it belongs to another run")
        state = optimizer.state[parameters[name]]
        # The step count stays on the CPU unless the optimizer is fused on a GPU; moments lie beside their parameter.
        state[key] = value.to(parameters[name].device) if value.ndim or optimizer.defaults.get("fused") else value


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
