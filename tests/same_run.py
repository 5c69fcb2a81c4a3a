"""Whether a run that several processes took ended like the one of a single process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file


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
