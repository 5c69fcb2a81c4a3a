"""The command line of every recipe and launch script: strips launcher flags, applies overrides, runs or prints the plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from train.config import RunConfig
from train.plan import print_plan
from train.run import Evaluator, run


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

    A mistake of the user's ends with one line on stderr and exit code 2, never with a traceback.
    """
    arguments = strip_launcher_flags(sys.argv[1:] if arguments is None else arguments)
    try:
        command = tyro.cli(CommandLine, default=CommandLine(config=recipe), args=arguments, description=sys.modules["__main__"].__doc__)
        if command.dry_run:
            print_plan(command.config)
        else:
            run(command.config, evaluator)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def strip_launcher_flags(arguments: Sequence[str]) -> list[str]:
    """Without the `--local_rank=N` that the deepspeed launcher adds; the rank is read from the environment."""
    return [argument for argument in arguments if not argument.startswith(("--local_rank=", "--local-rank="))]
