"""Whether a run that several processes took, or that was interrupted, ended like the one of a single process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from train.engine import Engine
from train.training import Training


def losses(run_dir: Path) -> list[float]:
    """Of every step."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "train"]


def assert_same_run(run_dir: Path, reference: Path) -> None:
    """Losses of all six steps and exported weights within 1e-5."""
    assert len(losses(run_dir)) == len(losses(reference)) == 6
    np.testing.assert_allclose(losses(run_dir), losses(reference), rtol=0, atol=1e-5)
    assert_same_weights(run_dir, reference, tolerance=1e-5)


def assert_same_weights(run_dir: Path, reference: Path, tolerance: float) -> None:
    """Of the exports."""
    tensors, expected = (load_file(folder / "export" / "model.safetensors") for folder in (run_dir, reference))
    assert tensors.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=tolerance, msg=name)


@contextmanager
def interrupted_after(last_step: int) -> Iterator[None]:
    """A run that is started inside ends with KeyboardInterrupt as soon as this step is saved."""
    save = Training._save

    def save_and_stop(self: Training, engine: Engine, step: int, *rest: Any) -> None:
        save(self, engine, step, *rest)
        if step == last_step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Training, "_save", save_and_stop)
        yield
