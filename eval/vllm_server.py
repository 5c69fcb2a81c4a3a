"""Starts the installed vLLM as an HTTP server, waits until it is healthy, and ends it with all its processes.

    with vllm_server("my-org/my-model", log=Path("serve_http.log"), speculative={"method": "eagle3", ...}) as server:
        httpx2.post(f"{server.base_url}/v1/completions", json={"model": server.model, ...})

Place in the flow: eval/sweep.py measures through it. The server listens on the loopback interface only, on a port that is free. It is gone after the
`with` block, after an exception, Ctrl-C or SIGTERM in it, and also when our process is killed (eval/process_guard.py).
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console

from data.vllm_engine import EngineError, engine_python, worker_environment
from eval.process_guard import start_guarded, stop_guarded

COMMAND_LINE = Path(__file__).with_name("vllm_cli.py")
LOG_TAIL_LINES = 20
_POLL_S = 0.25
_SECONDS_BETWEEN_LINES = 15.0
_GRACE_S = 15.0
_PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class VllmServer:
    """A running server.

    Attributes:
        base_url: without the /v1 of the API and without a slash at its end.
        model: the name that requests have to say.
        log: what the server prints.
        guard: the process that keeps it, running for as long as the server does.
    """

    base_url: str
    model: str
    log: Path
    guard: subprocess.Popen[bytes]

    def require_alive(self) -> None:
        """Raises an EngineError with the end of the log when the server's process has ended."""
        if (exit_code := self.guard.poll()) is not None:
            raise EngineError(f"vllm serve ended with code {exit_code}. The end of {self.log}:\n\n{log_tail(self.log)}")


@contextlib.contextmanager
def vllm_server(
    target: str,
    *,
    log: Path,
    revision: str | None = None,
    dtype: str = "auto",
    speculative: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    timeout_s: float = 900.0,
    console: Console | None = None,
) -> Iterator[VllmServer]:
    """Runs `vllm serve` while the block runs.

    Args:
        target: path or Hub id of the model; also the name that it is served under.
        log: the server's output is added to its end.
        revision: of the target on the Hub.
        dtype: what the models compute in.
        speculative: vLLM's speculative config, with absolute paths; None serves the target alone.
        arguments: more of `vllm serve`, for example ("--max-num-seqs", "8").
        timeout_s: longest time from the start to a healthy server.
        console: where progress is shown; None shows none.

    Raises:
        EngineError: if vLLM is not installed, or the server ends, does not become healthy in time or serves another model.
    """
    port = _free_port()
    folder = Path(target)
    command = [
        *(str(engine_python()), "-I", str(COMMAND_LINE), "serve", str(folder.resolve()) if folder.is_dir() else target),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", target, "--dtype", dtype, "--seed", "0"),
        *(() if revision is None else ("--revision", revision)),
        *(() if speculative is None else ("--speculative-config", json.dumps(speculative))),
        *arguments,
    ]
    with tempfile.TemporaryDirectory(prefix="headstart-serve-") as scratch, log.open("a") as log_file:
        log_file.write(f"==== vllm serve {target} {'alone' if speculative is None else 'with a drafter'}\n")
        log_file.flush()
        guard = start_guarded(command, log_file, _environment(), Path(scratch), _GRACE_S)
        try:
            server = VllmServer(f"http://127.0.0.1:{port}", target, log, guard)
            _wait_until_healthy(server, timeout_s, console or Console(quiet=True))
            yield server
        finally:
            stop_guarded(guard)


def log_tail(log: Path) -> str:
    """The last lines of a log, indented."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"    {line[:300]}" for line in lines)


def served_models(base_url: str, headers: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The entries of /v1/models.

    Raises:
        EngineError: if the server does not give them.
    """
    try:
        response = httpx2.get(f"{base_url}/v1/models", timeout=_PROBE_TIMEOUT_S, headers=headers, trust_env=not is_loopback(base_url))
        response.raise_for_status()
        return list(response.json()["data"])
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{base_url}/v1/models does not list the served models ({error}): is this an OpenAI-compatible server?") from None


def is_loopback(base_url: str) -> bool:
    """Whether the server is on this machine: a proxy in the environment must not be asked for it."""
    return httpx2.URL(base_url).host in ("127.0.0.1", "localhost", "::1")


def _environment() -> dict[str, str]:
    # A key that the user has for some server of their own would lock us out of this one. The server always has an engine process
    # beside it, whatever this variable says.
    left_out = ("VLLM_API_KEY", "VLLM_ENABLE_V1_MULTIPROCESSING")
    return {name: value for name, value in worker_environment().items() if name not in left_out}


def _wait_until_healthy(server: VllmServer, timeout_s: float, console: Console) -> None:
    started = printed = time.monotonic()
    with console.status("vllm serve starts") as status:
        while not _is_healthy(server.base_url):
            server.require_alive()
            elapsed = time.monotonic() - started
            if elapsed > timeout_s:
                raise EngineError(f"vllm serve was not healthy after {timeout_s:g} s. The end of {server.log}:\n\n{log_tail(server.log)}")
            status.update(f"vllm serve starts: {elapsed:.0f} s")
            if not console.is_terminal and time.monotonic() - printed > _SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                console.print(f"vllm serve starts: {elapsed:.0f} s")
            time.sleep(_POLL_S)
    server.require_alive()  # or another process answers on this port
    names = [card["id"] for card in served_models(server.base_url)]
    if server.model not in names:
        raise EngineError(f"{server.base_url} serves {', '.join(names)}, expected {server.model}: another server has this port")
    console.print(f"vllm serve is healthy after {time.monotonic() - started:.0f} s")


def _is_healthy(base_url: str) -> bool:
    try:
        return httpx2.get(f"{base_url}/health", timeout=_PROBE_TIMEOUT_S, trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
