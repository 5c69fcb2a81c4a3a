"""What every bench shares: where it ran, variants in alternating fresh processes, medians with their range, and the result file.

A variant is a command whose last line of output is a JSON object of numbers. Fresh processes, because peak memory is a process's own and one
variant's caches must not serve another; alternating, because these machines are shared and get slower and faster.

Peak memory: `reset_peak_memory` after everything that is not measured is there, then `peak_memory`; on a GPU what torch's allocator held, else the
process's resident set (`VmHWM`), start-up included in neither where the caller subtracts `resident_memory`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def about(packages: Sequence[str] = ("torch",)) -> dict[str, Any]:
    """The machine, the versions and the commit."""
    return {
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() or None,
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


def alternate(variants: Mapping[str, Sequence[str]], repeats: int, env: Mapping[str, str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Runs every variant `repeats` times in turn, each time in a process of its own; returns the JSON objects they printed last.

    Raises:
        RuntimeError: with the end of its output, if a variant fails.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, command in variants.items():
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **(env or {})})
            if done.returncode:
                raise RuntimeError(f"{name} failed with exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
            found[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(f"  {name}: {found[name][-1]}", flush=True)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def reset_peak_memory() -> None:
    """Forgets the highest point so far."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Bytes at the highest point since the last reset."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def resident_memory() -> int:
    """Bytes held now."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else _status("VmRSS")


def write_results(name: str, document: Mapping[str, Any]) -> Path:
    """Writes bench/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written: {path.relative_to(ROOT)}", flush=True)
    return path


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory is measured on Linux only")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
