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

from eval.compare_plots import draw_comparison
from eval.compare_sheets import (
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
from eval.page import Cell, Sheet, html_command, html_definitions, html_headline, html_page, html_plots, html_table, write_page

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
    write_page(comparison_page(comparison, advice), path)


def comparison_page(comparison: Comparison, advice: Sequence[Mapping[str, str]]) -> str:
    """The page; everything that comes from the measurement is escaped."""
    parts = [html_headline(headline(comparison)), html_definitions("Measured on", conditions(comparison))]
    if comparison.methods:
        first, *others = _sheets(comparison)
        parts += [html_table(first), html_plots(draw_comparison(comparison)), *map(html_table, [*others, settings_sheet(comparison)])]
    if comparison.not_available:
        parts.append(html_definitions("Not available", comparison.not_available.items()))
    if advice:
        parts += ["<h2>What to deploy</h2>", *map(_html_advice, advice)]
    return html_page(f"Decoding methods on {comparison.target}", parts)


def _html_advice(item: Mapping[str, str]) -> str:
    scenario, advised = escape(item["scenario"] or "Advice"), escape(_advised(item))
    reason = f"<p>{escape(item['reason'])}</p>" if item["reason"] else ""
    commands = "".join(html_command(name, item[key]) for key, name in (("vllm", "vLLM"), ("sglang", "SGLang")) if item[key])
    return f'<section class="advice"><h3>{scenario}</h3><p><b>{advised}</b></p>{reason}{commands}</section>'
