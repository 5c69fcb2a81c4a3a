"""The result of a run: report.json with the same keys for every recipe, a readable summary, and a plot of training.

Place in the flow: the last stage of a recipe. `build_report` -> `write_report` (report.json) -> `print_report`; `plot_training`
(training.png) from metrics.jsonl. Every number stands beside what it was measured on (algorithms.md section 7): dataset, prompts,
temperature, chain, draft length, dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoints.provenance import TrainingFacts
from eval.acceptance import Acceptance, NearTies
from eval.decode.speedup import Speedup
from eval.deploy import serve_commands

_BAR_CELLS = 24
COLOURS = ("#1f4e9c", "#2f8f83", "#d58a1a", "#b8442f", "#7a4ea3", "#5f6b77", "#8c6d46")
INK, GREY, RULE, GRID = "#111827", "#6b7280", "#d1d5db", "#e5e7eb"


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
        files: further results to name, for example training.png.
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
    console.print(_conditions(report), style="dim", soft_wrap=True, markup=False)
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


def _conditions(report: dict[str, Any]) -> str:
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
        f"(best: {report['best_step']:,}) in {_duration(report['train_seconds'])}; "
        f"everything {_duration(report['total_seconds'])}"
    )
    return lines


def _identity_line(counts: dict[str, Any]) -> str:
    line = f"                   {counts['num_identical_outputs']} of {counts['num_outputs']} outputs identical to plain decoding in {counts['dtype']}"
    return line + (f", {counts['num_near_ties']} differ at a near tie of the target" if counts["num_near_ties"] else "")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest_s} s"


# --- the plot ---------------------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The train and held-out records of metrics.jsonl, by ascending step.

    Raises:
        ValueError: on a line that is not JSON, or where there is no train record.
    """
    records: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error.msg}): remove it if a killed run left it half written") from error
        if record["event"] in records:
            records[record["event"]].append(record)
    if not records["train"]:
        raise ValueError(f"{path} holds no training step: train before plotting")
    train, heldout = (sorted(records[event], key=lambda record: record["step"]) for event in ("train", "heldout"))
    return train, heldout


def plot_training(metrics_path: Path, out_path: Path, title: str) -> None:
    """Draws training loss, held-out tau and held-out acceptance by position over steps, as one PNG.

    Args:
        metrics_path: metrics.jsonl of the run.
        out_path: the PNG.
        title: of the whole figure.
    """
    train, heldout = read_metrics(metrics_path)
    figure = Figure(figsize=(13, 4.2), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12))
    figure.suptitle(title, x=0.008, ha="left", fontsize=13, fontweight="bold")
    loss_axes, tau_axes, acceptance_axes = figure.subplots(1, 3)
    _draw_loss(loss_axes, train)
    _draw_tau(tau_axes, heldout)
    _draw_acceptance(acceptance_axes, heldout)
    for axes in (loss_axes, tau_axes, acceptance_axes):
        axes.set_xlim(0, train[-1]["step"])
    figure.savefig(out_path)


def _draw_loss(axes: Axes, train: Sequence[dict[str, Any]]) -> None:
    steps, losses = [record["step"] for record in train], [record["loss"] for record in train]
    _style(axes, "Training loss")
    axes.plot(steps, losses, color=COLOURS[0], alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(losses, len(losses) // 60), color=COLOURS[0], linewidth=1.8)
    # The first steps may be far above the rest; the view is that of the smoothed curve and most of the points.
    low, high = min(losses), float(np.quantile(losses, 0.995))
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low) + 1e-6)


def _draw_tau(axes: Axes, heldout: Sequence[dict[str, Any]]) -> None:
    _style(axes, "Held-out tau (tokens per target forward)")
    if not heldout:
        _say_nothing_measured(axes)
        return
    steps, taus = [record["step"] for record in heldout], [record["tau"] for record in heldout]
    axes.plot(steps, taus, color=COLOURS[1], linewidth=1.8, marker="o", markersize=4, clip_on=False)
    best = int(np.argmax(taus))
    axes.plot(steps[best], taus[best], "o", color=COLOURS[2], markersize=8, clip_on=False, zorder=5)
    axes.set_ylim(1.0, max(1.05, 1.0 + 1.15 * (taus[best] - 1.0)))
    axes.text(
        0.03,
        0.97,
        f"best {taus[best]:.3f} at step {steps[best]:,}",
        transform=axes.transAxes,
        color=COLOURS[2],
        fontweight="bold",
        va="top",
    )


def _draw_acceptance(axes: Axes, heldout: Sequence[dict[str, Any]]) -> None:
    _style(axes, "Held-out joint acceptance by draft position")
    if not heldout:
        _say_nothing_measured(axes)
        return
    steps = [record["step"] for record in heldout]
    joint_NK = np.array([record["joint_acceptance"] for record in heldout])
    for position, joint_N in enumerate(joint_NK.T):
        colour = COLOURS[position % len(COLOURS)]
        label = f"draft {position + 1}: {joint_N[-1]:.1%}"
        axes.plot(steps, joint_N, color=colour, linewidth=1.8, marker="o", markersize=3, label=label, clip_on=False)
    top = float(joint_NK.max())
    axes.set_ylim(0, min(1.0, max(0.05, 1.15 * top)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor="linecolor", handlelength=1.2)


def _style(axes: Axes, title: str) -> None:
    style_axes(axes, title, "optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))


def style_axes(axes: Axes, title: str, x_label: str) -> None:
    """The look of every plot: a title at the left, grey labels, horizontal grid lines, no frame."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x_label, fontsize=9, color=GREY)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)


def _say_nothing_measured(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not measured during training", transform=axes.transAxes, ha="center", color=GREY)


def smoothed(values: Sequence[float], half_window: int) -> list[float]:
    """Mean over each value and its neighbours on both sides: `half_window` of them, fewer (but equally many) near the ends. It
    does not lag."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    half = np.minimum(half_window, np.minimum(index, index[::-1]))
    return ((sums[index + half + 1] - sums[index - half]) / (2 * half + 1)).tolist()
