"""The result of a run: report.json with the same keys for every recipe, and a readable summary.

    python -m eval.report runs/quickstart      # report.html (eval/report_page.py), also of a run that is not finished

Place in the flow: the last stage of a recipe. `build_report` -> `write_report` (report.json) -> `print_report`. Every number stands beside what it
was measured on (algorithms.md section 7): dataset, prompts, temperature, chain, draft length, dtype.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoints.provenance import TrainingFacts
from eval.acceptance import Acceptance, NearTies
from eval.decode.speedup import Speedup
from eval.deploy import serve_commands

_BAR_CELLS = 24


@dataclass(frozen=True)
class MeasuredOn:
    """The conditions that acceptance numbers are meaningless without.

    Attributes:
        algorithm: the drafter's, as in train/drafters/.
        target: path or Hub id, as an engine would be given it.
        dataset: the sources of the held-out prompts.
        dtype: of the target while it was measured, for example "float32".
        device: what it ran on, for example "cpu" or the GPU's name.
    """

    algorithm: str
    target: str
    dataset: tuple[str, ...]
    dtype: str
    device: str


def build_report(
    *,
    trained: Acceptance,
    untrained: Acceptance,
    speedup: Speedup,
    lossless: dict[str, Any],
    near_ties: NearTies,
    training: TrainingFacts,
    measured_on: MeasuredOn,
    export_dir: Path,
) -> dict[str, Any]:
    """The contents of report.json.

    Args:
        trained: of the exported drafter over the held-out trajectories.
        untrained: of the drafter as it was initialised, over the same trajectories.
        speedup: of the reference decoder, in the target's own dtype.
        lossless: from `check_lossless`, in the dtype of `measured_on`.
        near_ties: trajectory tokens against the packed forward that `trained` was measured with.
        training: durations and counts.
        measured_on: target, data, dtype.
        export_dir: where the checkpoint is.
    """
    return {
        **trained.to_json(),
        "tau_untrained": untrained.tau,
        "joint_acceptance_untrained": untrained.joint_acceptance,
        "speedup_reference_decoder": speedup.ratio,
        "train_seconds": round(training.train_seconds, 1),
        "total_seconds": round(training.total_seconds, 1),
        "num_train_tokens": training.num_train_tokens,
        "num_steps": training.num_steps,
        "best_step": training.best_step,
        "num_near_ties": near_ties.num_ties,
        "num_tokens_compared": near_ties.num_tokens,
        "largest_tie_gap": near_ties.largest_gap,
        "reference_decoder": speedup.to_json(),
        "lossless": lossless,
        "algorithm": measured_on.algorithm,
        "target": measured_on.target,
        "dataset": list(measured_on.dataset),
        "dtype": measured_on.dtype,
        "device": measured_on.device,
        "temperature": 0.0,
        "draft_shape": "chain",
        "export": str(export_dir),
        "serve_commands": serve_commands(measured_on.algorithm, measured_on.target, export_dir, trained.draft_length),
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    """Writes report.json, atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(path)


# --- the summary ------------------------------------------------------------------------------------------------------


def print_report(report: dict[str, Any], files: Sequence[Path] = (), console: Console | None = None) -> None:
    """Prints what a reader wants to know first: tau before and after, acceptance by position, speed-up, how to serve it.

    Args:
        report: from `build_report`, or read back from report.json.
        files: further results to name, for example report.html.
        console: where to print; standard output by default.
    """
    console = console or Console(highlight=False)
    low, high = report["tau_interval_95"]
    console.print()
    console.print(
        f"[bold]tau {report['tau_untrained']:.3f} -> {report['tau']:.3f}[/bold] tokens per target forward  "
        f"(95% interval {low:.3f} to {high:.3f}; mean over prompts {report['tau_macro']:.3f})",
        soft_wrap=True,
    )
    console.print(conditions_text(report), style="dim", soft_wrap=True, markup=False)
    console.print()
    console.print(_acceptance_table(report))
    for line in _speed_lines(report):
        console.print(line, soft_wrap=True, markup=False)
    console.print()
    console.print(f"checkpoint  {report['export']}", soft_wrap=True, markup=False)
    for path in files:
        console.print(f"            {path}", soft_wrap=True, markup=False)
    for engine, command in report["serve_commands"].items():
        console.print(f"\nserve it with {engine}:", markup=False)
        # Never wrapped: it must survive copying.
        console.print(command, soft_wrap=True, markup=False, style="cyan")
    console.print()


def conditions_text(report: dict[str, Any]) -> str:
    """What the acceptance was measured on, in one sentence."""
    return (
        f"{report['algorithm']} for {report['target']}; {report['num_prompts']} held-out prompts of "
        f"{', '.join(report['dataset'])}, {report['num_verifications']:,} verifications; "
        f"greedy (temperature 0), {report['draft_shape']} of {report['draft_length']}, "
        f"{report['dtype']} on {report['device']}, full vocabulary"
    )


def _acceptance_table(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("draft", justify="right")
    table.add_column("untrained", justify="right")
    table.add_column("accepted", justify="right")
    table.add_column("", min_width=_BAR_CELLS, no_wrap=True)
    table.add_column("given the earlier ones", justify="right", no_wrap=True)
    rows = zip(report["joint_acceptance_untrained"], report["joint_acceptance"], report["conditional_acceptance"], strict=True)
    for position, (untrained, joint, conditional) in enumerate(rows, start=1):
        table.add_row(str(position), f"{untrained:.1%}", f"{joint:.1%}", bar(joint, _BAR_CELLS), f"{conditional:.1%}")
    return table


def bar(share: float, num_cells: int) -> Text:
    """A horizontal bar of `share` of the cells, to an eighth of a cell."""
    eighths = round(share * num_cells * 8)
    filled = "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])
    return Text(filled.ljust(num_cells), style="green")


def _speed_lines(report: dict[str, Any]) -> list[str]:
    decoder = report["reference_decoder"]
    low, high = decoder["speedup_range"]
    lines = [
        "",
        f"reference decoder  {decoder['speedup_reference_decoder']:.2f}x plain decoding (median; {low:.2f} to {high:.2f})  "
        f"{decoder['tokens_per_s_plain']:.1f} -> {decoder['tokens_per_s']:.1f} tokens/s, "
        f"drafting {decoder['drafting_share']:.0%} of the time",
        _identity_line(decoder),
        _identity_line(report["lossless"]),
    ]
    if report["num_near_ties"]:
        lines.append(
            f"near ties          {report['num_near_ties']} of {report['num_tokens_compared']:,} trajectory tokens are not the "
            f"argmax of the packed forward (largest gap {report['largest_tie_gap']:.2g})"
        )
    lines.append(
        f"training           {report['num_train_tokens']:,} tokens, {report['num_steps']:,} steps "
        f"(best: {report['best_step']:,}) in {duration_text(report['train_seconds'])}; "
        f"everything {duration_text(report['total_seconds'])}"
    )
    return lines


def _identity_line(counts: dict[str, Any]) -> str:
    line = f"                   {counts['num_identical_outputs']} of {counts['num_outputs']} outputs identical to plain decoding in {counts['dtype']}"
    return line + (f", {counts['num_near_ties']} differ at a near tie of the target" if counts["num_near_ties"] else "")


def duration_text(seconds: float) -> str:
    """For people: 12.3 s, 4 min 5 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest_s} s"


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageCommand:
    """Writes report.html of a run, at any time: of an unfinished one what exists so far.

    Attributes:
        run: the run's folder.
        out: the file; None is <run>/report.html.
    """

    run: tyro.conf.Positional[Path]
    out: Path | None = None


def main(args: Sequence[str] | None = None) -> int:
    """0 when the page is written, 2 when it could not be."""
    from eval.report_page import write_run_page

    command = tyro.cli(PageCommand, args=args, prog="python -m eval.report")
    try:
        print(write_run_page(command.run, command.out))
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
