"""The command line of every recipe and launch script: strips launcher flags, applies overrides, runs or prints the plan."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NoReturn

import tyro
from safetensors import SafetensorError

from train.config import RunConfig
from train.evaluator import Evaluator
from train.machine import MachineConfig
from train.plan_table import print_plan
from train.run import run

_OTHER_RANKS_FIRST_S = 5.0
# tests/test_cli.py counts every figure again.
RECIPES_ABOUT = (
    "The recipes for a target of 8B (hidden size 4096, 128,256 tokens): trained parameters; bytes stored for each token of data; "
    "memory for weights, gradients and AdamW in fp32. --dry-run says it for your target."
)
RECIPES = {
    "eagle3": "0.42 B; 17.4 kB; 6.8 GB. The longest acceptance: one decoder layer over three middle states, trained as it will be used.",
    "eagle1": "0.25 B; 4.4 kB; 4.0 GB. One decoder layer that predicts the target's next state; the target's own head.",
    "medusa1": "2.71 B; 4.4 kB; 43.4 GB (0.08 B and 1.3 GB with --drafter.shared-lm-head). Five heads, no attention, no cache; vLLM only.",
    "medusa2": "2.79 B; nothing stored; 44.7 GB and the target twice. Medusa heads with a target trained to fit them, served instead of yours.",
}


@dataclass(frozen=True)
class CommandLine:
    """A recipe with the command line's overrides.

    Attributes:
        config: the recipe's settings.
        dry_run: print the plan (parameters, steps, tokens, bytes on disk, memory, time), choose settings that fit, and stop.
        plan: the machine that --dry-run plans for, where it is not this one.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    dry_run: bool = False
    plan: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        if self.plan != MachineConfig() and not self.dry_run:
            raise ValueError("plan.* has no effect on a run: add --dry-run")


def main(recipe: RunConfig, evaluator: Evaluator, arguments: Sequence[str] | None = None) -> None:
    """Runs a recipe with the overrides of the command line.

    A mistake of the user's ends with one line on stderr and exit code 2, never with a traceback, and never leaves other ranks waiting.
    """
    arguments = strip_launcher_flags(sys.argv[1:] if arguments is None else arguments)
    rank = int(os.environ.get("RANK", 0))
    # Each line a paragraph of its own: tyro joins the lines of a paragraph.
    own = (sys.modules["__main__"].__doc__ or "").splitlines()
    about = [*own, RECIPES_ABOUT, *(f"{name}: {line}" for name, line in RECIPES.items())]
    description = "\n\n".join(line for line in about if line)
    try:
        # What every rank would say alike, rank 0 says.
        command = tyro.cli(CommandLine, default=CommandLine(config=recipe), args=arguments, description=description, console_outputs=rank == 0)
        if not command.dry_run:
            run(command.config, evaluator)
        elif rank == 0:
            print_plan(command.config, command.plan, _script(), arguments)
    except (ValueError, OSError, SafetensorError) as error:
        _stop(rank, f"error: {' '.join(str(error).split())}")
    except RuntimeError as error:
        # What gloo says where another rank has gone; that one has said why.
        if "RANK" in os.environ and ("closed by peer" in str(error) or "reset by peer" in str(error)):
            _stop(rank, "error: another rank has stopped, so this one does too")
        raise


def _script() -> str:
    """The script that was started, as a user in the same folder names it."""
    return os.path.relpath(sys.argv[0]) if sys.argv[0] else "recipes/eagle3.py"


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
