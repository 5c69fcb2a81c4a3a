"""The parts of an HTML page that needs nothing beside it: no script, font or picture from elsewhere; light or dark as the reader's system is.

Place in the flow: eval/compare_report.py and eval/report_page.py build their pages from these. Everything that is passed in as text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from eval.plots import CSS_VARIABLES, Plot, inline_svg


@dataclass(frozen=True)
class Cell:
    """Text, and what qualifies it in small below; `is_best` for one that stands out."""

    text: str
    detail: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn: the first column is text, the others are numbers.

    Attributes:
        title: of the table.
        header: one cell a column.
        rows: each as long as the header.
        note: how to read it; may be empty.
        is_prose: every column is text.
    """

    title: str
    header: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    is_prose: bool = False


def write_page(page: str, path: Path) -> None:
    """Writes the page, atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def html_page(title: str, parts: Iterable[str]) -> str:
    """The whole page from parts that are HTML already."""
    body = "\n".join([f'<p class="kicker">{escape(title)}</p>', *parts])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>\n<style>{_css()}</style></head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def html_headline(text: str) -> str:
    """The one sentence that the page is about."""
    return f"<h1>{escape(text)}</h1>"


def html_definitions(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they are set to."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f"<h2>{escape(title)}</h2>\n<dl>{items}</dl>"


def html_folded(title: str, groups: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Names and values in groups that open at a click."""
    parts = []
    for name, rows in groups:
        items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in rows)
        parts.append(f"<details><summary>{escape(name)}</summary><dl>{items}</dl></details>")
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def html_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Main numbers side by side: name, number, what qualifies it."""
    cards = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(number)}</b><small>{escape(detail)}</small></div>' for name, number, detail in tiles
    )
    return f'<div class="tiles">{cards}</div>'


def html_plots(plots: Sequence[Plot]) -> str:
    """Plots in two columns, in one on a phone."""
    figures = "\n".join(_html_plot(plot) for plot in plots)
    return f'<div class="plots">\n{figures}\n</div>'


def _html_plot(plot: Plot) -> str:
    legend = "".join(
        f'<span><b style="color:var({CSS_VARIABLES[colour]})">{glyph}</b> {escape(label)}</span>' for colour, glyph, label in plot.legend
    )
    width = "wide" if plot.is_wide else "half"
    return f'<figure id="plot-{plot.key}" class="{width}">{inline_svg(plot)}<figcaption>{legend}</figcaption></figure>'


def html_table(sheet: Sheet) -> str:
    """A table under its title, scrolled sideways where it is too wide."""
    head = "".join(f"<th>{_html_cell(cell)}</th>" for cell in sheet.header)
    rows = "\n".join(f"<tr>{''.join(map(_html_data, row))}</tr>" for row in sheet.rows)
    note = f'\n<p class="note">{escape(sheet.note)}</p>' if sheet.note else ""
    opened = '<div class="scroll"><table class="prose">' if sheet.is_prose else '<div class="scroll"><table>'
    return f"<h2>{escape(sheet.title)}</h2>\n{opened}\n<tr>{head}</tr>\n{rows}\n</table></div>{note}"


def _html_data(cell: Cell) -> str:
    return f'<td class="best">{_html_cell(cell)}</td>' if cell.is_best else f"<td>{_html_cell(cell)}</td>"


def _html_cell(cell: Cell) -> str:
    return escape(cell.text) + (f"<small>{escape(cell.detail)}</small>" if cell.detail else "")


def html_note(text: str) -> str:
    """A remark in small."""
    return f'<p class="note">{escape(text)}</p>'


def html_command(name: str, command: str) -> str:
    """A command to copy, under its name."""
    return f"<p>{escape(name)}:</p><pre>{escape(command)}</pre>"


# `CSS_VARIABLES` in their order, for a dark page.
_DARK = (
    *("#f3f4f6", "#9ca3af", "#4b5563", "#2b3340"),
    *("#6f9be8", "#4fb8aa", "#e5a545", "#e07a62", "#a983cf", "#94a1ae", "#bd9c75", "#e07bb5", "#86b53f", "#45b4d8"),
)


def _css() -> str:
    light = "".join(f"{name}:{colour};" for colour, name in CSS_VARIABLES.items())
    dark = "".join(f"{name}:{colour};" for name, colour in zip(CSS_VARIABLES.values(), _DARK, strict=True))
    return f":root{{{light}--page:#fff;--panel:#f6f7f9}}\n@media (prefers-color-scheme:dark){{:root{{{dark}--page:#12161c;--panel:#1b212a}}}}{_CSS}"


_CSS = """
body{max-width:1080px;margin:2rem auto;padding:0 1rem;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;line-height:1.3;margin:.2rem 0 1rem} h2{font-size:1.1rem;margin:2rem 0 .6rem} h3{font-size:1rem;margin:0}
h1,dd,td:first-child,th:first-child,figcaption,.kicker,.note{overflow-wrap:anywhere}
.kicker,.note,dt,small,figcaption,.tile span{color:var(--muted)} .kicker{margin:0} .note{font-size:13px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0} dt{max-width:16rem;overflow-wrap:anywhere} dd{margin:0}
.scroll{overflow-x:auto} table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:.4rem .6rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--grid);white-space:pre}
th{border-color:var(--rule)} td:first-child,th:first-child{text-align:left;min-width:9rem;white-space:normal}
.prose th,.prose td{text-align:left} .prose td{white-space:normal;overflow-wrap:anywhere} .prose td:nth-child(2){min-width:6rem}
.prose td:nth-child(3),.prose td:nth-child(4){min-width:11rem}
small{display:block;font-size:12px;font-weight:400} .best{color:var(--series-1);font-weight:700}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.2rem,1fr));gap:.8rem;margin:1rem 0}
.tile{background:var(--panel);border-radius:8px;padding:.7rem .9rem} .tile span,.tile b{display:block} .tile span{font-size:13px}
.tile b{font-size:1.35rem;line-height:1.4;white-space:nowrap;font-variant-numeric:tabular-nums}
.plots{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1.5rem;margin-top:2rem} .wide{grid-column:1/-1}
@media (max-width:760px){.plots{grid-template-columns:minmax(0,1fr)} .wide{overflow-x:auto} .wide svg{min-width:680px}}
figure{margin:0} svg{width:100%;height:auto;display:block} svg text{font-family:system-ui,sans-serif!important}
figcaption{font-size:13px;padding-left:.4rem} figcaption span{margin-right:1.1rem;display:inline-block}
details{border-bottom:1px solid var(--grid);padding:.4rem 0} summary{cursor:pointer} details dl{margin:.4rem 0 .6rem 1rem;font-size:14px}
.advice{background:var(--panel);border-radius:8px;padding:.9rem 1.1rem;margin:.8rem 0} .advice p{margin:.4rem 0}
pre{background:var(--page);border:1px solid var(--grid);border-radius:6px;padding:.6rem;margin:.2rem 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;user-select:all}
"""
