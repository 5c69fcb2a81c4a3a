"""What a sweep over numbers of requests at once has found: serve_http.json, its table and its plot.

Place in the flow: eval/sweep.py fills a `SweepResult` level by level -> `write_sweep` after each -> `print_sweep` and `plot_sweep` at the end.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from eval.engine_counters import EngineName
from eval.served_run import NEAR_TIE_NATS, TOLERANCE, Acceptance, largest_difference


@dataclass(frozen=True)
class Quantiles:
    """Of seconds: the median, and what one in a hundred exceeds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class ServerMeasurement:
    """One server at one concurrency.

    Attributes:
        seconds: from the first request to the last answer.
        first_token_s, later_token_s, request_s: of each answer: to its first token, each token after it, and the whole.
        num_retries: requests that were tried again; the tries count in the engine's counters too.
        acceptance: by the engine's counters; None where it drafts nothing.
        num_verifications, num_drafted: counted; zero where it drafts nothing, None where the engine does not say.
        outputs: token ids.
    """

    seconds: float
    first_token_s: Quantiles
    later_token_s: Quantiles
    request_s: Quantiles
    num_retries: int
    acceptance: Acceptance | None
    num_verifications: int
    num_drafted: int | None
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Without the outputs."""
        fields = asdict(self)
        del fields["outputs"]
        return {"tokens_per_s": self.tokens_per_s, **fields}


@dataclass(frozen=True)
class Difference:
    """An output that is not the reference: the first differing token, and by how many nats the best token leads the second best there."""

    prompt: int
    position: int
    gap: float


@dataclass
class Level:
    """One concurrency.

    Attributes:
        drafted, plain: with the drafter and without it; `plain` stays None where there is no such server.
        differences: from the outputs without the drafter at the same concurrency (else from our own answers); None until compared.
    """

    concurrency: int
    drafted: ServerMeasurement
    plain: ServerMeasurement | None = None
    differences: list[Difference] | None = None

    @property
    def speedup(self) -> float | None:
        return None if self.plain is None else self.drafted.tokens_per_s / self.plain.tokens_per_s


@dataclass
class SweepResult:
    """serve_http.json. It has the keys of serve.json too, filled from the lowest concurrency.

    Attributes:
        ours: of report.json.
        levels: those whose measurement with the drafter is finished, by concurrency.
        error: why the sweep ended early; None where it did not.
    """

    engine: EngineName
    dtype: str
    ours: Acceptance
    num_outputs: int
    engine_version: str = "unknown"
    levels: list[Level] = field(default_factory=list)
    is_complete: bool = False
    error: str | None = None

    def num_near_ties(self, level: Level) -> int:
        return sum(difference.gap < NEAR_TIE_NATS[self.dtype] for difference in level.differences or ())

    def num_identical(self, level: Level) -> int | None:
        return None if level.differences is None else self.num_outputs - len(level.differences)

    @property
    def num_changed_outputs(self) -> int:
        """At all levels; near-ties left out."""
        return sum(len(level.differences or ()) - self.num_near_ties(level) for level in self.levels)

    @property
    def largest_difference(self) -> float | None:
        """Of joint acceptance at the lowest concurrency, from ours; None where the engine does not count it."""
        measured = self.levels[0].drafted.acceptance
        return None if measured is None or not measured.joint_acceptance else largest_difference(self.ours, measured)

    @property
    def is_passed(self) -> bool:
        return self.is_complete and (self.largest_difference or 0.0) <= TOLERANCE and self.num_changed_outputs == 0

    def to_json(self) -> dict[str, Any]:
        first = self.levels[0] if self.levels else None
        acceptance = first.drafted.acceptance if first else None
        return {
            "engine": self.engine,
            "engine_version": self.engine_version,
            "dtype": self.dtype,
            "is_complete": self.is_complete,
            "error": self.error,
            "ours": asdict(self.ours),
            "measured": asdict(acceptance) if acceptance else None,
            "num_outputs": self.num_outputs,
            "num_identical_outputs": self.num_identical(first) if first else None,
            "num_near_ties": self.num_near_ties(first) if first else None,
            "tokens_per_s": first.drafted.tokens_per_s if first else None,
            "tokens_per_s_plain": first.plain.tokens_per_s if first and first.plain else None,
            "levels": [
                {
                    "concurrency": level.concurrency,
                    "speedup": level.speedup,
                    "num_identical_outputs": self.num_identical(level),
                    "num_near_ties": self.num_near_ties(level),
                    "with_drafter": level.drafted.to_json(),
                    "without_drafter": level.plain.to_json() if level.plain else None,
                }
                for level in self.levels
            ],
        }


def write_sweep(path: Path, result: SweepResult) -> None:
    """Writes what there is so far, whole or not at all."""
    scratch = path.with_suffix(".writing")
    scratch.write_text(json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n")
    os.replace(scratch, path)


def print_sweep(result: SweepResult, console: Console) -> None:
    """The tables, and whether the check has passed."""
    speeds = Table("at once", "tokens/s", "without drafter", "speed-up", "tau", "joint acceptance", "identical")
    latencies = Table("at once", "", "first token ms", "later token ms", "request s")
    for level in result.levels:
        measured, plain, acceptance = level.drafted, level.plain, level.drafted.acceptance
        speeds.add_row(
            str(level.concurrency),
            f"{measured.tokens_per_s:.1f}",
            f"{plain.tokens_per_s:.1f}" if plain else "",
            f"{level.speedup:.2f}" if level.speedup else "",
            f"{acceptance.tau:.3f}" if acceptance else "",
            " ".join(f"{share:.3f}" for share in acceptance.joint_acceptance) if acceptance else "",
            f"{result.num_identical(level)} of {result.num_outputs}",
        )
        for name, side in (("with drafter", measured), ("without", plain)):
            if side is not None:
                times = _span(side.first_token_s, 1e3), _span(side.later_token_s, 1e3), _span(side.request_s, 1.0)
                latencies.add_row(str(level.concurrency), name, *times, end_section=side is plain)
    joint = " ".join(f"{share:.3f}" for share in result.ours.joint_acceptance)
    speeds.add_row("ours", "", "", "", f"{result.ours.tau:.3f}", joint)
    console.print(speeds)
    console.print(latencies)
    console.print("times: median / 99th percentile")
    for level in result.levels:
        for found in level.differences or ():
            where = f"prompt {found.prompt} differs from token {found.position} at concurrency {level.concurrency}"
            console.print(f"  {where}: the best two are {found.gap:.2g} nats apart")
        if level.drafted.num_retries:
            again = f"{level.drafted.num_retries} requests were tried again at concurrency {level.concurrency}"
            console.print(f"  {again}; the engine counted the tries too")
    _print_verdict(result, console)


def _print_verdict(result: SweepResult, console: Console) -> None:
    concurrency = result.levels[0].concurrency
    if result.largest_difference is None:
        console.print(f"{result.engine} counts no acceptance by position: tau is shown, and only the outputs are judged")
    if result.is_passed:
        acceptance = "" if result.largest_difference is None else f"joint acceptance within {TOLERANCE} at concurrency {concurrency}, "
        console.print(f"[green]passed[/green]: {acceptance}no output changed")
    else:
        console.print(
            f"[red]failed[/red]: joint acceptance differs by up to {result.largest_difference or 0.0:.4f} at concurrency {concurrency} "
            f"(allowed: {TOLERANCE}), {result.num_changed_outputs} outputs changed (allowed: none)\n"
            f"a server that computes in another dtype rounds otherwise: start it with --dtype {result.dtype}, which ours is measured in"
        )


def _span(seconds: Quantiles, factor: float) -> str:
    digits = 2 if factor == 1.0 else 0
    return f"{seconds.p50 * factor:.{digits}f} / {seconds.p99 * factor:.{digits}f}"


def plot_sweep(path: Path, result: SweepResult) -> None:
    """Tokens/s against requests at once, with the drafter and without it, as a PNG."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.add_subplot()
        x = [level.concurrency for level in result.levels]
        axes.plot(x, [level.drafted.tokens_per_s for level in result.levels], marker="o", color="#1f4e9c", label="with the drafter")
        plain = [(level.concurrency, level.plain.tokens_per_s) for level in result.levels if level.plain]
        if plain:
            axes.plot(*zip(*plain, strict=True), marker="s", color="0.5", label="without it")
        axes.set(xlabel="requests at once", ylabel="tokens/s", xticks=x, title=f"{result.engine} {result.engine_version}")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        axes.grid(axis="y", alpha=0.3)
        figure.savefig(path, dpi=160)
