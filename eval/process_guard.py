"""Runs a command and ends it, with all that it started, as soon as nobody waits for it any more.

    python -I eval/process_guard.py GRACE_S COMMAND...

Place in the flow: eval/vllm_server.py starts servers through it. A `finally` does not run when a process is killed, and a server would then keep the
memory and the port. The guard lives outside the server's process group and holds one end of a pipe: it ends the server when the pipe closes, be it on
purpose or because the process at the other end is gone in whatever way. It needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_POLL_S = 0.1
# Dying takes a moment. Where nobody collects dead orphans, they look alive for ever.
_KILLED_S = 5.0


def start_guarded(command: Sequence[str], output: IO[str], environment: Mapping[str, str], folder: Path, grace_s: float) -> subprocess.Popen[bytes]:
    """Starts a command under a guard, which ends with the command's exit code.

    Args:
        command: of the process, which leads a process group of its own.
        output: the file that its stdout and stderr go to.
        environment: of the process.
        folder: its working directory.
        grace_s: seconds that it has from SIGTERM to SIGKILL when it is ended.
    """
    return subprocess.Popen(
        [sys.executable, "-I", __file__, str(grace_s), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=folder,
        start_new_session=True,  # Ctrl-C in a terminal goes to our process group: the guard is not in it
    )


def stop_guarded(guard: subprocess.Popen[bytes]) -> None:
    """Ends the guarded process and everything in its group, and waits until it is gone."""
    if guard.stdin is not None:
        guard.stdin.close()
    guard.wait()


def main(arguments: list[str]) -> int:
    """Runs the command to its end, or to the end of the pipe; its exit code, 128 + n where signal n ended it."""
    grace_s, command = float(arguments[0]), arguments[1:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    # After the start, or the command would inherit it. From here on only the pipe ends the guard.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while process.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            break
    code = _end_group(process)
    return code if code >= 0 else 128 - code


def _end_group(process: subprocess.Popen[bytes]) -> int:
    """Ends whatever is left of the process group and waits until it is gone; the exit code of its leader."""
    with contextlib.suppress(ProcessLookupError):  # the usual case: nothing is left
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end = time.monotonic() + _KILLED_S
        while time.monotonic() < end:
            os.killpg(process.pid, 0)  # raises when nobody is there any more
            time.sleep(0.02)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
