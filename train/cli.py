"""The command line of every recipe and launch script: strips launcher flags, applies overrides, runs or prints the plan."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn

import tyro
from safetensors import SafetensorError

from train.config import RunConfig
from train.evaluator import Evaluator
from train.plan import print_plan
from train.run import run

_OTHER_RANKS_FIRST_S = 5.0


@dataclass(frozen=True)
class CommandLine:
    """A recipe with the command line's overrides.

    Attributes:
        config: the recipe's settings.
        dry_run: print the plan (parameters, steps, tokens, bytes on disk, memory) and stop.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    dry_run: bool = False


def main(recipe: RunConfig, evaluator: Evaluator, arguments: Sequence[str] | None = None) -> None:
    """Runs a recipe with the overrides of the command line.

    A mistake of the user's ends with one line on stderr and exit code 2, never with a traceback, and never leaves other ranks waiting.
    """
    arguments = strip_launcher_flags(sys.argv[1:] if arguments is None else arguments)
    rank = int(os.environ.get("RANK", 0))
    description = sys.modules["__main__"].__doc__
    try:
        # What every rank would say alike, rank 0 says.
        command = tyro.cli(CommandLine, default=CommandLine(config=recipe), args=arguments, description=description, console_outputs=rank == 0)
        if not command.dry_run:
            run(command.config, evaluator)
        elif rank == 0:
            print_plan(command.config)
    except (ValueError, OSError, SafetensorError) as error:
        _stop(rank, f"error: {' '.join(str(error).split())}")
    except RuntimeError as error:
        # What gloo says where another rank has gone; that one has said why.
        if "RANK" in os.environ and ("closed by peer" in str(error) or "reset by peer" in str(error)):
            _stop(rank, "error: another rank has stopped, so this one does too")
        raise


def _stop(rank: int, message: str) -> NoReturn:
    """Ends this process with one line and exit code 2; the launcher then ends the others."""
    if rank > 0:
        # The same mistake on every rank is one line, of rank 0: the launcher ends this process meanwhile.
        time.sleep(_OTHER_RANKS_FIRST_S)
        message = f"rank {rank}: {message}"
    print(message, file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(2)  # not through destructors of process groups, which would wait for the other ranks
    raise SystemExit(2) from None


def strip_launcher_flags(arguments: Sequence[str]) -> list[str]:
    """Without the `--local_rank=N` that the deepspeed launcher adds; the rank is read from the environment."""
    return [argument for argument in arguments if not argument.startswith(("--local_rank=", "--local-rank="))]
