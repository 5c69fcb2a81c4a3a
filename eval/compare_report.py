"""A comparison of decoding methods for people: tables on the console, and one HTML file with plots and commands to copy.

Place in the flow: eval/compare.py -> `Comparison`, eval/advisor.py -> advice; then `print_comparison` and `write_html`. What both say is in
eval/compare_sheets.py, the plots in eval/compare_plots.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.compare_plots import CSS_VARIABLES, Plot, draw_comparison, inline_svg
from eval.compare_sheets import (
    Cell,
    Sheet,
    batch_sheets,
    conditions,
    domain_sheets,
    draft_length_sheets,
    headline,
    method_sheet,
    settings_sheet,
    tuning_sheets,
)
from eval.measurement import Comparison

# --- console ----------------------------------------------------------------------------------------------------------


def comparison_table(comparison: Comparison) -> Table:
    """One row a method; readable from 100 columns on."""
    return _table(method_sheet(comparison))


def print_comparison(comparison: Comparison, advice: Sequence[Mapping[str, str]], console: Console | None = None) -> None:
    """Prints the headline, what it was measured on, the tables, what is not available and why, and the advice.

    Args:
        comparison: what was measured.
        advice: of each scenario the method to deploy: scenario, method, num_speculative_tokens, reason, vllm, sglang; any may be empty.
        console: where to print; standard output by default.
    """
    console = console or Console(highlight=False)
    console.print()
    console.print(headline(comparison), style="bold", markup=False)
    for name, value in conditions(comparison):
        console.print(f"{name}: {value}", style="dim", markup=False, soft_wrap=True)
    for sheet in _sheets(comparison):
        console.print()
        console.print(sheet.title, style="bold", markup=False)
        console.print(_table(sheet))
        if sheet.note:
            console.print(sheet.note, style="dim", markup=False)
    if comparison.not_available:
        console.print("\nNot available", style="bold")
        for name, reason in comparison.not_available.items():
            console.print(f"  {name}: {reason}", markup=False)
    for item in advice:
        _print_advice(item, console)
    console.print()


def _sheets(comparison: Comparison) -> list[Sheet]:
    """The methods first; none without a method."""
    if not comparison.methods:
        return []
    measured = [*domain_sheets(comparison), *batch_sheets(comparison), *draft_length_sheets(comparison)]
    return [method_sheet(comparison), *measured, *tuning_sheets(comparison)]


def _print_advice(item: Mapping[str, str], console: Console) -> None:
    console.print()
    console.print(Text.assemble((f"{item['scenario'] or 'advice'}: ", "bold"), _advised(item)))
    if item["reason"]:
        console.print(item["reason"], markup=False)
    for engine in ("vllm", "sglang"):
        if item[engine]:
            # Never wrapped: it must survive copying.
            console.print(item[engine], soft_wrap=True, markup=False, style="cyan")


def _advised(item: Mapping[str, str]) -> str:
    tokens = item["num_speculative_tokens"]
    return (item["method"] or "no method") + (f", {tokens} speculative token{'' if tokens == '1' else 's'}" if tokens else "")


def _table(sheet: Sheet) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, cell in enumerate(sheet.header):
        # Only names may be broken.
        table.add_column(_text(cell), justify="right" if index else "left", no_wrap=index > 0 and len(cell.text) < 14, overflow="fold")
    for row in sheet.rows:
        table.add_row(*map(_text, row))
    return table


def _text(cell: Cell) -> Text:
    text = Text(cell.text, style="bold green" if cell.is_best else "")
    return text.append(f"\n{cell.detail}", "not bold dim") if cell.detail else text


# --- HTML -------------------------------------------------------------------------------------------------------------


def write_html(comparison: Comparison, advice: Sequence[Mapping[str, str]], path: Path) -> None:
    """Writes one file that needs nothing beside it: no script, font or picture from elsewhere. The same input gives the same bytes.

    Args:
        comparison: what was measured.
        advice: as for `print_comparison`.
        path: the file, replaced atomically.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(html_page(comparison, advice), encoding="utf-8")
    temporary.replace(path)


def html_page(comparison: Comparison, advice: Sequence[Mapping[str, str]]) -> str:
    """The page; everything that comes from the measurement is escaped."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in conditions(comparison))
    parts = [f"<h1>{escape(headline(comparison))}</h1>", f"<h2>Measured on</h2>\n<dl>{rows}</dl>"]
    if comparison.methods:
        first, *others = _sheets(comparison)
        plots = "\n".join(_html_plot(plot) for plot in draw_comparison(comparison))
        parts += [_html_table(first), f'<div class="plots">\n{plots}\n</div>', *map(_html_table, [*others, settings_sheet(comparison)])]
    if comparison.not_available:
        items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(reason)}</dd>" for name, reason in comparison.not_available.items())
        parts.append(f"<h2>Not available</h2>\n<dl>{items}</dl>")
    if advice:
        parts += ["<h2>What to deploy</h2>", *map(_html_advice, advice)]
    title = escape(f"Decoding methods on {comparison.target}")
    body = "\n".join([f'<p class="kicker">{title}</p>', *parts])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>\n<style>{_css()}</style></head>\n<body>\n{body}\n</body>\n</html>\n'
    )


def _html_plot(plot: Plot) -> str:
    legend = "".join(
        f'<span><b style="color:var({CSS_VARIABLES[colour]})">{glyph}</b> {escape(label)}</span>' for colour, glyph, label in plot.legend
    )
    width = "wide" if plot.is_wide else "half"
    return f'<figure id="plot-{plot.key}" class="{width}">{inline_svg(plot)}<figcaption>{legend}</figcaption></figure>'


def _html_table(sheet: Sheet) -> str:
    head = "".join(f"<th>{_html_cell(cell)}</th>" for cell in sheet.header)
    rows = "\n".join(f"<tr>{''.join(map(_html_data, row))}</tr>" for row in sheet.rows)
    note = f'\n<p class="note">{escape(sheet.note)}</p>' if sheet.note else ""
    opened = '<div class="scroll"><table class="prose">' if sheet.is_prose else '<div class="scroll"><table>'
    return f"<h2>{escape(sheet.title)}</h2>\n{opened}\n<tr>{head}</tr>\n{rows}\n</table></div>{note}"


def _html_data(cell: Cell) -> str:
    return f'<td class="best">{_html_cell(cell)}</td>' if cell.is_best else f"<td>{_html_cell(cell)}</td>"


def _html_cell(cell: Cell) -> str:
    return escape(cell.text) + (f"<small>{escape(cell.detail)}</small>" if cell.detail else "")


def _html_advice(item: Mapping[str, str]) -> str:
    scenario, advised = escape(item["scenario"] or "Advice"), escape(_advised(item))
    reason = f"<p>{escape(item['reason'])}</p>" if item["reason"] else ""
    commands = "".join(f"<p>{name}:</p><pre>{escape(item[key])}</pre>" for key, name in (("vllm", "vLLM"), ("sglang", "SGLang")) if item[key])
    return f'<section class="advice"><h3>{scenario}</h3><p><b>{advised}</b></p>{reason}{commands}</section>'


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
h1,dd,td:first-child,th:first-child,figcaption,.kicker{overflow-wrap:anywhere}
.kicker,.note,dt,small,figcaption{color:var(--muted)} .kicker{margin:0} .note{font-size:13px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0} dt{max-width:16rem;overflow-wrap:anywhere} dd{margin:0}
.scroll{overflow-x:auto} table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:.4rem .6rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--grid);white-space:pre}
th{border-color:var(--rule)} td:first-child,th:first-child{text-align:left;min-width:9rem;white-space:normal}
.prose th,.prose td{text-align:left} .prose td{white-space:normal;overflow-wrap:anywhere} .prose td:nth-child(2){min-width:6rem}
.prose td:nth-child(3),.prose td:nth-child(4){min-width:11rem}
small{display:block;font-size:12px;font-weight:400} .best{color:var(--series-1);font-weight:700}
.plots{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1.5rem;margin-top:2rem} .wide{grid-column:1/-1}
@media (max-width:760px){.plots{grid-template-columns:minmax(0,1fr)} .wide{overflow-x:auto} .wide svg{min-width:680px}}
figure{margin:0} svg{width:100%;height:auto;display:block} svg text{font-family:system-ui,sans-serif!important}
figcaption{font-size:13px;padding-left:.4rem} figcaption span{margin-right:1.1rem;display:inline-block}
.advice{background:var(--panel);border-radius:8px;padding:.9rem 1.1rem;margin:.8rem 0} .advice p{margin:.4rem 0}
pre{background:var(--page);border:1px solid var(--grid);border-radius:6px;padding:.6rem;margin:.2rem 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;user-select:all}
"""
