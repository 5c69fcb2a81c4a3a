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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_POLL_S = 0.1


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
    with contextlib.suppress(ProcessLookupError):  # whatever is left of the group, and nothing in the usual case
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
