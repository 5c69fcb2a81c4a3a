"""The look of every plot, and plots as SVG that takes its colours from the page around it.

Place in the flow: eval/compare_plots.py and eval/training_plots.py draw `Plot`s with matplotlib -> `inline_svg` -> eval/page.py, which sets the
legend of each in HTML: names may be long, and HTML wraps them where matplotlib would not.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#1f4e9c", "#2f8f83", "#d58a1a", "#b8442f", "#7a4ea3", "#5f6b77", "#8c6d46", "#c2478f", "#4d7c0f", "#0e7fa6")
INK, GREY, RULE, GRID = "#111827", "#6b7280", "#d1d5db", "#e5e7eb"
# Of each colour its CSS variable: the page may be light or dark.
CSS_VARIABLES = {INK: "--ink", GREY: "--muted", RULE: "--rule", GRID: "--grid"} | {
    colour: f"--series-{index}" for index, colour in enumerate(COLOURS)
}


@dataclass(frozen=True)
class Plot:
    """One drawn plot.

    Attributes:
        key: unique in the page, a word.
        description: what it shows, for readers who do not see it.
        figure: drawn, not yet written.
        legend: colour, glyph and text of each series.
        is_wide: over the page's full width.
    """

    key: str
    description: str
    figure: Figure
    legend: tuple[tuple[str, str, str], ...]
    is_wide: bool


def style_axes(axes: Axes, title: str, x_label: str) -> None:
    """A title at the left, grey labels, horizontal grid lines, no frame."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=9)
    axes.set_xlabel(x_label, fontsize=9, color=GREY)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)


def say_nothing_measured(axes: Axes) -> None:
    """In the place of what would be drawn."""
    axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color=GREY)


def inline_svg(plot: Plot) -> str:
    """The plot as an `<svg>` element for an HTML page that defines `CSS_VARIABLES`; the same plot gives the same text.

    Text stays text, ids are unique in the page by the plot's key, and nothing refers to anything outside the page.
    """
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.key}):
        plot.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], count=1, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg, count=2)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{plot.key}-", svg)
    svg = re.sub("|".join(CSS_VARIABLES), lambda match: f"var({CSS_VARIABLES[match[0]]})", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{plot.description}" ', 1)
