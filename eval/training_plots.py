"""The curves of a training, as far as it has got: loss, acceptance, learning rate, speed, memory.

Place in the flow: metrics.jsonl (checkpoints/metrics.py) -> `draw_training` -> `Plot`s -> eval/report_page.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from checkpoints.metrics import Metrics
from eval.plots import COLOURS, Plot, say_nothing_measured, style_axes

MAX_POINTS = 400
_MARKED_POINTS = 40
_SIZE = (5.0, 2.9)
_MARGINS = {"left": 0.13, "right": 0.97, "bottom": 0.17, "top": 0.86}


@dataclass(frozen=True)
class Curve:
    """One series over steps; not all of its values need be finite.

    Attributes:
        label: in the legend, before the last value.
        format: of the last value.
        is_noisy: drawn smoothed, with the values themselves faint behind.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    format: Callable[[float], str]
    is_noisy: bool = False

    def finite(self) -> Curve:
        """Without the values that are none."""
        keep = np.isfinite(self.values)
        return replace(self, steps=self.steps[keep], values=self.values[keep])


def draw_training(metrics: Metrics) -> list[Plot]:
    """One plot of each quantity; one that was never measured says so. None where no step was trained."""
    train, heldout = metrics.of("train"), metrics.of("heldout")
    if not train and not heldout:
        return []
    last_step = max(1, metrics.last_step)
    loss = _curve("loss", train, "loss", "{:.3f}".format, is_noisy=True)
    tau = _curve("tau", heldout, "tau", "{:.3f}".format)
    plots = [
        ("loss", "Training loss", [loss], _fit_noisy),
        ("accuracy", "Accuracy in training, by draft", _curves(train, "accuracy", is_noisy=True), _from_zero),
        ("tau", "Held-out tau: tokens per target forward", [tau, _best_of(tau)], _from_one),
        ("joint", "Held-out joint acceptance, by draft", _curves(heldout, "joint_acceptance"), _from_zero),
        ("rate", "Learning rate", [_curve("rate", train, "learning_rate", "{:.2e}".format)], _from_zero),
        ("speed", "Training speed: tokens/s since the last start", [_curve("tokens/s", train, "tokens_per_s", "{:,.0f}".format)], _from_zero),
        ("wait", "Share of the time spent waiting for data", [_curve("waiting", train, "wait_share", "{:.1%}".format)], _from_zero),
        ("memory", "Peak memory so far, GB", _memory(train), _from_zero),
    ]
    return [_plot(key, title, curves, fit, last_step) for key, title, curves, fit in plots]


def _curve(label: str, records: Sequence[dict[str, Any]], name: str, form: Callable[[float], str], is_noisy: bool = False) -> Curve:
    found = [(record["step"], _number(record[name])) for record in records if name in record]
    return Curve(label, np.array([step for step, _ in found]), np.array([value for _, value in found], float), form, is_noisy)


def _curves(records: Sequence[dict[str, Any]], name: str, is_noisy: bool = False) -> list[Curve]:
    """One curve a position of a list."""
    found = [(record["step"], record[name]) for record in records if isinstance(record.get(name), list)]
    steps = np.array([step for step, _ in found])
    longest = max((len(values) for _, values in found), default=0)
    columns = [np.array([_number(values[place]) if place < len(values) else np.nan for _, values in found]) for place in range(longest)]
    return [Curve(f"draft {place + 1}", steps, column, "{:.1%}".format, is_noisy) for place, column in enumerate(columns)]


def _memory(records: Sequence[dict[str, Any]]) -> list[Curve]:
    curves = [_curve(label, records, name, "{:.2f} GB".format) for label, name in (("process", "peak_rss_bytes"), ("GPU", "peak_gpu_bytes"))]
    return [replace(curve, values=curve.values / 1e9) for curve in curves if len(curve.values)]


def _number(value: Any) -> float:
    """NaN for what is no number: metrics.jsonl may have been damaged."""
    return float(value) if isinstance(value, (int, float)) else np.nan


def _best_of(curve: Curve) -> Curve:
    """Its highest point."""
    known = curve.finite()
    if not len(known.values):
        return replace(known, label="best")
    best = int(np.argmax(known.values))
    label = f"best, at step {known.steps[best]:,}:"
    return replace(known, label=label, steps=known.steps[best : best + 1], values=known.values[best : best + 1])


# --- drawing ----------------------------------------------------------------------------------------------------------


def _plot(key: str, title: str, curves: Sequence[Curve], fit: Callable[[Axes, Sequence[Curve]], None], last_step: int) -> Plot:
    figure = Figure(figsize=_SIZE)
    figure.subplots_adjust(**_MARGINS)  # measuring the labels instead takes longer than all the drawing
    axes = figure.subplots()
    style_axes(axes, title, "optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlim(0, last_step)
    known = [curve.finite() for curve in curves]
    drawn = [(COLOURS[place % len(COLOURS)], curve) for place, curve in enumerate(known) if len(curve.values)]
    for colour, curve in drawn:
        _draw(axes, curve, colour)
    if drawn:
        fit(axes, [curve for _, curve in drawn])
    else:
        say_nothing_measured(axes)
        axes.set_yticks([])
    legend = tuple((colour, "●", f"{curve.label} {curve.format(float(curve.values[-1]))}") for colour, curve in drawn)
    return Plot(key, title, figure, legend, is_wide=False)


def _draw(axes: Axes, curve: Curve, colour: str) -> None:
    steps, values = downsampled(curve.steps, curve.values, MAX_POINTS)
    marker = "o" if len(values) <= _MARKED_POINTS else None
    if curve.is_noisy and len(values) > _MARKED_POINTS:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        values = smoothed(values, len(values) // 60)
    size = 7 if len(values) == 1 else 3.5
    axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=size, clip_on=False)


def _fit_noisy(axes: Axes, curves: Sequence[Curve]) -> None:
    """The first steps may be far above the rest; the view is that of the smoothed curve and most of the points."""
    low, high = float(curves[0].values.min()), float(np.quantile(curves[0].values, 0.995))
    axes.set_ylim(low - 0.05 * (high - low) - 1e-6, high + 0.05 * (high - low) + 1e-6)


def _from_zero(axes: Axes, curves: Sequence[Curve]) -> None:
    top = max(float(curve.values.max()) for curve in curves)
    axes.set_ylim(0, 1.1 * top if top > 0 else 1)
    if curves[0].format is not None and curves[0].format(0.0).endswith("%"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.{0 if top > 0.05 else 1}%}")
    elif top >= 1000:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    elif top < 0.01:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1e}" if value else "0")


def _from_one(axes: Axes, curves: Sequence[Curve]) -> None:
    """Tau is 1 where nothing is accepted."""
    axes.set_ylim(1.0, max(1.05, 1.0 + 1.15 * (max(float(curve.values.max()) for curve in curves) - 1.0)))


def downsampled(steps: np.ndarray, values: np.ndarray, max_points: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `max_points` points: means of equally many neighbours (within one), so that nothing is picked out."""
    if len(values) <= max_points:
        return steps, values
    edges = np.linspace(0, len(values), max_points + 1).astype(int)
    counts = np.diff(edges)
    return np.add.reduceat(steps, edges[:-1]) / counts, np.add.reduceat(values, edges[:-1]) / counts


def smoothed(values: Sequence[float] | np.ndarray, half_window: int) -> np.ndarray:
    """Mean over each value and its neighbours on both sides: `half_window` of them, fewer (but equally many) near the ends. It
    does not lag."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    half = np.minimum(half_window, np.minimum(index, index[::-1]))
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)
