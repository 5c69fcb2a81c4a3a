"""The plots of a comparison of decoding methods.

Place in the flow: `Comparison` -> `draw_comparison` -> `Plot`s -> eval/compare_report.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.acceptance import Acceptance
from eval.measurement import Comparison, MethodResult, size_text
from eval.plots import COLOURS, GREY, GRID, INK, RULE, Plot, say_nothing_measured, style_axes

_MARKERS, _MARKER_GLYPHS = "osD^vPX*", "●■◆▲▼✚✖★"
_MEMORY_PARTS = (
    ("weights", "weights_bytes", COLOURS[0]),
    ("drafter's keys and values", "cache_bytes", COLOURS[1]),
    ("pools", "pool_bytes", COLOURS[2]),
    ("nodes of one verification", "tree_bytes", COLOURS[3]),
)
_GROUP_WIDTH = 0.84
_LABEL_CHARACTERS = 26


def draw_comparison(comparison: Comparison) -> list[Plot]:
    """Tau by domain, speed-up by batch size, acceptance by position and memory; none where no method was measured."""
    methods = comparison.methods
    if not methods:
        return []
    legend = tuple((COLOURS[i % len(COLOURS)], _MARKER_GLYPHS[i % len(_MARKERS)], method.name) for i, method in enumerate(methods))
    memory_legend = tuple((colour, "■", label) for label, _, colour in _MEMORY_PARTS)
    memory_height = 1.0 + 0.34 * len(methods)

    def plot(key: str, description: str, draw: Callable[[Axes], None], size: tuple[float, float], entries: tuple[tuple[str, str, str], ...]) -> Plot:
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        return Plot(key, description, figure, entries, is_wide=size[0] > 6)

    return [
        plot("tau", "tau by method and domain, with 95% intervals", lambda axes: _draw_tau(axes, comparison), (10, 3.4), legend),
        plot("batch", "speed-up over plain decoding by batch size", lambda axes: _draw_batches(axes, methods), (5, 3.4), legend),
        plot("joint", "joint acceptance by draft position", lambda axes: _draw_acceptance(axes, methods), (5, 3.4), legend),
        plot("memory", "memory beyond plain decoding", lambda axes: _draw_memory(axes, methods), (10, memory_height), memory_legend),
    ]


def _draw_tau(axes: Axes, comparison: Comparison) -> None:
    """Bars stand on 1.0, what plain decoding gives: their height is what the drafts add."""
    style_axes(axes, "tau: tokens per verification of the target", "")
    groups = ["all", *comparison.domains] if len(comparison.domains) > 1 else ["all"]
    width = _GROUP_WIDTH / len(comparison.methods)
    for index, method in enumerate(comparison.methods):
        for place, group in enumerate(groups):
            acceptance = method.acceptance if group == "all" and place == 0 else method.acceptance_by_domain.get(group)
            if acceptance is not None and acceptance.num_verifications:
                centre = place + (index + 0.5) * width - _GROUP_WIDTH / 2
                _draw_tau_bar(axes, centre, 0.9 * width, acceptance, index)
    counts = [sum(comparison.domains.values()), *comparison.domains.values()]
    axes.set_xticks(range(len(groups)), [f"{_label(group, 14)}\n{prompts_text(count)}" for group, count in zip(groups, counts, strict=False)])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    if len(groups) > 1:
        axes.axvline(0.5, color=RULE, linewidth=0.8)
    axes.set_ylim(bottom=1.0, top=max(1.05, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda tick, _: "plain 1.00" if abs(tick - 1) < 1e-9 else f"{tick:.2f}")


def _draw_tau_bar(axes: Axes, centre: float, width: float, acceptance: Acceptance, index: int) -> None:
    colour = COLOURS[index % len(COLOURS)]
    hatch = "////" if index >= len(COLOURS) else None
    axes.bar(centre, acceptance.tau - 1, width, bottom=1, color=colour, alpha=0.85, hatch=hatch, edgecolor=GRID, linewidth=0)
    if acceptance.num_prompts > 1:
        axes.vlines(centre, *acceptance.tau_interval(), color=INK, linewidth=1.0)


def _draw_batches(axes: Axes, methods: Sequence[MethodResult]) -> None:
    style_axes(axes, "Speed-up over plain decoding", "sequences decoded together")
    batches = sorted({batch for method in methods for batch in method.speed_by_batch})
    if not batches:
        say_nothing_measured(axes)
        return
    for index, method in enumerate(methods):
        places = [place for place, batch in enumerate(batches) if batch in method.speed_by_batch]
        if not places:
            continue
        speeds = [method.speed_by_batch[batches[place]] for place in places]
        # Side by side, so that methods that are equally fast do not hide each other.
        offset = 0.4 * ((index + 0.5) / len(methods) - 0.5)
        shifted = [place + offset for place in places]
        axes.vlines(shifted, *zip(*(speed.ratio_range for speed in speeds), strict=True), color=_colour(index), linewidth=1.0, alpha=0.35)
        _draw_line(axes, shifted, [speed.ratio for speed in speeds], index)
    axes.axhline(1.0, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlim(-0.5, len(batches) - 0.5)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1f}x")


def _draw_acceptance(axes: Axes, methods: Sequence[MethodResult]) -> None:
    style_axes(axes, "Joint acceptance: all drafts up to this one", "draft position")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    measured = [(index, method.acceptance) for index, method in enumerate(methods) if method.acceptance.num_verifications]
    if not measured:
        say_nothing_measured(axes)
        return
    for index, acceptance in measured:
        _draw_line(axes, range(1, acceptance.draft_length + 1), acceptance.joint_acceptance, index)
    longest = max(acceptance.draft_length for _, acceptance in measured)
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_ylim(0, min(1.0, 1.1 * max([0.05, *(share for _, acceptance in measured for share in acceptance.joint_acceptance)])))


def _draw_memory(axes: Axes, methods: Sequence[MethodResult]) -> None:
    largest = max(method.memory.total_bytes for method in methods)
    unit, unit_bytes = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20) if largest >= 2**20 else ("KiB", 2**10)
    style_axes(axes, "Memory beyond plain decoding, batch 1", unit)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    rows, left = np.arange(len(methods)), np.zeros(len(methods))
    for _, attribute, colour in _MEMORY_PARTS:
        sizes = np.array([vars(method.memory)[attribute] / unit_bytes for method in methods])
        axes.barh(rows, sizes, 0.62, left=left, color=colour, alpha=0.85)
        left += sizes
    for row, method in enumerate(methods):
        axes.annotate(size_text(method.memory.total_bytes), (left[row], row), (5, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    axes.set_yticks(rows, [_label(method.name, _LABEL_CHARACTERS) for method in methods])
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * left.max() or 1)


def prompts_text(count: int) -> str:
    """For people: 1 prompt, 40 prompts."""
    return "1 prompt" if count == 1 else f"{count} prompts"


def _draw_line(axes: Axes, places: Sequence[float], values: Sequence[float], index: int) -> None:
    marker = _MARKERS[index % len(_MARKERS)]
    axes.plot(places, values, color=_colour(index), marker=marker, linewidth=1.6, markersize=6, markeredgewidth=0, clip_on=False)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _label(text: str, num_characters: int) -> str:
    """At most two lines; a dollar sign is a dollar sign, not the start of a formula."""
    lines = textwrap.wrap(text, num_characters, max_lines=2, placeholder=" …") or [""]
    return "\n".join(lines).replace("$", r"\$")
