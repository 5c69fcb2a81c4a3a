"""The most memory that this process has held, for every line of metrics.jsonl."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def peak_memory() -> dict[str, int]:
    """The peak of this process's resident set, and of what torch has allocated on its GPU where there is one; in bytes, since the process began."""
    found = {"peak_rss_bytes": _peak_rss_bytes()}
    if torch.cuda.is_available():
        found["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    return found


def _peak_rss_bytes() -> int:
    """VmHWM where there is /proc: unlike getrusage, it does not begin with the peak of the process that started this one."""
    status = Path("/proc/self/status")
    if status.exists():
        (kib,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return 1024 * int(kib)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
