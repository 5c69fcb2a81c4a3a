"""A comparison survives JSON; the console and the HTML page say what was measured, escape it, and need nothing from elsewhere."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.acceptance import Acceptance
from eval.advisor import advise
from eval.compare_plots import draw_comparison
from eval.compare_report import comparison_page, comparison_table, print_comparison, write_html
from eval.compare_sheets import draft_length_sheets, headline, method_sheet
from eval.measurement import Comparison, Lossless, Memory, MethodResult, Speed, size_text
from eval.plots import inline_svg

DOMAINS = {"chat": 2, "code": 2, "math & <logic>": 1}
ADVICE = [
    {
        "scenario": "one user, <2 GiB>",
        "method": "EAGLE-3 chain",
        "num_speculative_tokens": "3",
        "reason": "1.85x & lossless",
        "vllm": """vllm serve /m --speculative-config '{"method": "eagle3", "model": "runs/a/export", "num_speculative_tokens": 3}'""",
        "sglang": "python -m sglang.launch_server --model-path /m --speculative-algorithm EAGLE3",
    },
    {"scenario": "", "method": "", "num_speculative_tokens": "", "reason": "", "vllm": "", "sglang": ""},
]


def speed(ratio: float) -> Speed:
    return Speed(ratio, (0.8 * ratio, 1.2 * ratio), 40 * ratio, 40.0, 0.004, 0.012)


def method(name: str, ratio: float, walks: list[list[int]], **changes: Any) -> MethodResult:
    length = 5
    acceptance = Acceptance.from_walks(walks, length)
    fields: dict[str, Any] = {
        "name": name,
        "kind": "chain",
        "algorithm": "eagle3",
        "drafter": "runs/quickstart/export",
        "settings": {"draft_length": length},
        "is_lossless": True,
        "nodes_per_verification": 5.0,
        "acceptance": acceptance,
        "acceptance_by_domain": {domain: Acceptance.from_walks(walks[index : index + 1], length) for index, domain in enumerate(DOMAINS)},
        "speed_by_domain": {domain: speed(ratio + 0.1 * index) for index, domain in enumerate(DOMAINS)},
        "speed_by_batch": {1: speed(ratio), 4: speed(0.8 * ratio), 16: speed(0.5 * ratio)},
        "speed_by_draft_length": {},
        "memory": Memory(200 * 2**20, 3 * 2**20, 0, 2**19),
        "lossless": Lossless("float32", 5, 5, 0, 0.0),
        "tau_predicted": None,
    }
    return MethodResult(**(fields | changes))


def comparison(**changes: Any) -> Comparison:
    # tau of the first: (3 + 1 + 2) accepted + 5 verifications = 11 / 5.
    methods = (
        method("EAGLE-3 chain", 1.85, [[3, 1], [2, 0], [0]], tau_predicted=2.25, speed_by_draft_length={1: speed(1.3), 3: speed(1.6)}),
        method("EAGLE-2 dynamic tree", 1.60, [[5, 1], [2, 2], [1]], kind="dynamic tree", lossless=Lossless("float32", 5, 3, 2, 1e-4)),
        method("Medusa typical", 2.40, [[5, 5], [4, 2], [1]], kind="medusa tree", is_lossless=False, lossless=None),
        method("n-gram", 0.95, [[], [], []], kind="n-gram", drafter=None, memory=Memory(0, 0, 2048, 0), speed_by_batch={1: speed(0.95)}),
        method("Lookahead [bold] <b>W&N</b>", 1.10, [[1, 0], [0, 0], [0]], kind="lookahead", lossless=Lossless("float32", 5, 2, 1, 3.0)),
        method("a draft model whose name is very long, $1 and $2 included", 1.20, [[4, 4], [3], [2]], kind="draft model"),
    )
    fields: dict[str, Any] = {
        "target": "org/target<7B>",
        "domains": DOMAINS,
        "about": {"dtype": "bfloat16", "temperature": 0.0, "hardware": "1 x <GPU>", "versions": {"torch": "2.9", "transformers": "5.24"}},
        "plain_tokens_per_s": {1: 40.0, 4: 150.0, 16: 500.0},
        "forward_s": {1: {1: 0.02, 8: 0.021}, 4: {1: 0.022}},
        "methods": methods,
        "weights_bytes": 2 * 2**30,
        "not_available": {"Medusa <2>": "the target has no heads & none were trained"},
    }
    return Comparison(**(fields | changes))


def printed(found: Comparison, width: int = 120) -> str:
    out = io.StringIO()
    print_comparison(found, ADVICE, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def row_of(text: str, name: str) -> str:
    """Of the first table that has it: the headline starts with a name too."""
    return next(line for line in text.splitlines() if line.startswith(f"{name}  "))


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("methods", [comparison().methods, ()], ids=["six methods, one without verifications", "no methods"])
def test_comparison_survives_a_trip_through_json(methods: tuple[MethodResult, ...]) -> None:
    found = comparison(methods=methods)
    assert Comparison.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_comparison_from_before_revisions_were_kept_is_read() -> None:
    document = comparison(revision="v1").to_json()
    assert Comparison.from_json(json.loads(json.dumps(document))).revision == "v1"
    del document["revision"]
    assert Comparison.from_json(document).revision is None


def test_acceptance_without_verifications_is_null_beside_its_counts() -> None:
    row = comparison().to_json()["methods"][3]["acceptance"]
    assert row["tau"] is None and row["tau_interval_95"] is None and row["joint_acceptance"] is None
    assert (row["num_prompts"], row["num_tokens"], row["num_verifications"], row["draft_length"]) == (3, 0, 0, 5)
    assert row.keys() == comparison().to_json()["methods"][0]["acceptance"].keys()


def test_something_else_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="no comparison"):
        Comparison.from_json({"tau": 1.0})


# --- console ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [100, 120, 140])
def test_no_number_is_broken_or_cut_off_at_usual_widths(width: int) -> None:
    text = printed(comparison(), width)
    row = row_of(text, "EAGLE-3 chain")
    # 3 of 5 verifications accept a first draft, 2 a second, 1 a third.
    for expected in ("2.20", "60 40 20  0", "1.85x", "+204 MiB", "4.0 ms", "5.0", "yes 5/5"):
        assert expected in row
    table = text[text.index("Methods, batch 1") : text.index("tau: tokens per")]
    assert max(map(len, table.splitlines())) <= width
    for detail in ("1.48-2.22", "9.9%", "25%", "2 near ties", "40.0 tok/s", "NO 2/5", "2 differ", "LOSSY"):
        assert detail in table
    assert "…" not in table


def test_plain_decoding_is_the_first_row_and_the_reference() -> None:
    lines = printed(comparison()).splitlines()
    place = lines.index("Methods, batch 1")
    first = next(line for line in lines[place + 1 :] if "1.00x" in line)
    assert first.startswith("plain decoding") and first.rstrip().endswith("reference")
    assert not any(line.startswith("EAGLE") for line in lines[place : lines.index(first)])


def test_interval_and_macro_average_are_those_of_the_acceptance() -> None:
    acceptance = comparison().methods[0].acceptance
    low, high = acceptance.tau_interval()
    text = printed(comparison())
    assert f"{low:.2f}-{high:.2f}" in text
    # Prompts give 6/2, 4/2 and 1/1.
    assert "2.00" in row_of(text, "EAGLE-3 chain") and acceptance.tau_macro == 2.0


def test_method_without_verifications_shows_dashes_and_its_speed() -> None:
    cells = row_of(printed(comparison()), "n-gram").split()
    assert cells == ["n-gram", "-", "-", "-", "0.95x", "+2.0", "KiB", "4.0", "ms", "5.0", "yes", "5/5"]


def test_one_prompt_has_no_interval() -> None:
    only = replace(method("chain", 1.5, [[3, 1]]), acceptance_by_domain={}, speed_by_domain={})
    found = comparison(methods=(only,), domains={"chat": 1})
    text = printed(found)
    assert "3.00-3.00" not in text and "1 prompt" in text and "by domain" not in text
    assert "3.00" in comparison_page(found, [])


def test_domains_and_batches_have_their_tables_and_missing_batches_a_dash() -> None:
    text = printed(comparison())
    domains = text[text.index("Speed-up and tau by domain") : text.index("Speed-up by batch size")]
    # tau of the first prompt alone: 6 tokens in 2 verifications.
    assert row_of(domains, "EAGLE-3 chain").split()[2:] == ["1.85x", "1.95x", "2.05x"] and "tau 3.00" in domains
    batches = text[text.index("Speed-up by batch size") : text.index("Speed-up by draft length")]
    assert row_of(batches, "n-gram").split() == ["n-gram", "0.95x", "-", "-"]
    assert "150.0 tok/s" in batches and "1.48x" in batches and "0.96x" in batches
    assert row_of(text[text.index("Speed-up by draft length") :], "EAGLE-3 chain").split()[2:] == ["1.30x", "1.60x"]


def test_many_domains_are_split_over_tables() -> None:
    domains = {f"domain {index}": 2 for index in range(8)}
    text = printed(comparison(domains=domains), 100)
    assert text.count("Speed-up and tau by domain") == 2 and "domain 7" in text and "…" not in text


def test_names_are_not_markup_and_commands_are_not_broken() -> None:
    text = printed(comparison(), 100)
    assert "[bold]" in text and "Medusa <2>: the target has no heads & none were trained" in text
    assert ADVICE[0]["vllm"] in text and ADVICE[0]["sglang"] in text and "EAGLE-3 chain, 3 speculative tokens" in text


def steady(name: str, ratio: float, **changes: Any) -> MethodResult:
    """On enough prompts, all alike: half of the first drafts are accepted, tau 1.5."""
    return method(name, ratio, [[1, 0]] * 12, **changes)


def test_headline_names_what_a_few_samples_showed_and_that_they_are_few() -> None:
    """Three prompts; of those that keep the target's output, the chain is the fastest."""
    found = headline(comparison())
    assert found.startswith("EAGLE-3 chain measured fastest of the lossless methods, on too few samples to advise it: 1.")
    slow = comparison(methods=(method("chain", 0.9, [[0], [0]]), comparison().methods[2]))
    assert headline(slow).startswith(
        "No lossless method measured clearly faster than plain decoding, on too few samples to advise; the nearest is chain: 0.90x"
    )
    assert headline(comparison(methods=comparison().methods[2:3])) == "No method that keeps the target's output was measured."


def test_headline_is_the_advice_for_a_single_request() -> None:
    """0.95x as set, 1.40x with a single draft: what the advice says, and with its tokens per verification."""
    timed = {1: speed(1.4), 5: speed(0.95)}
    found = comparison(methods=(steady("A", 0.95, speed_by_draft_length=timed, speed_by_batch={1: speed(0.95)}),))
    (single, *_) = advise(found)
    assert single.method == "A" and single.num_speculative_tokens == 1 and "1.40x" in single.reason
    assert headline(found) == (
        "A is the lossless method to deploy for a single request: 1.40x plain decoding at batch 1 with 1 speculative token, "
        "1.50 tokens per verification."
    )


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ([steady("slow", 0.9, kind="static tree")], "No lossless method is clearly faster than plain decoding here; the nearest is slow: 0.90x"),
        ([steady("near", 1.04, kind="static tree")], "No lossless method is clearly faster than plain decoding here; the nearest is near: 1.04x"),
        (
            [method("useless", 1.5, [[0, 0]] * 12, kind="static tree")],
            "No lossless method is of use here: none has drafts accepted often enough to matter.",
        ),
        (
            [steady("heavy", 1.52, kind="static tree"), steady("lean", 1.5, kind="static tree", memory=Memory(1, 0, 0, 0))],
            "lean is the lossless method to deploy for a single request: 1.50x",
        ),
        (
            [steady("Medusa-2 tree", 3.0, kind="medusa tree", algorithm="medusa2"), steady("slow", 0.9, kind="static tree")],
            "No lossless method is clearly faster than plain decoding here; the nearest is slow: 0.90x",
        ),
        ([steady("Medusa-2 tree", 3.0, kind="medusa tree", algorithm="medusa2")], "No method that keeps the target's output was measured."),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(one.name for one in value),
)
def test_headline_never_contradicts_the_advice(methods: list[MethodResult], expected: str) -> None:
    found = comparison(methods=tuple(replace(one, speed_by_batch={1: one.speed}) for one in methods))
    assert headline(found).startswith(expected) and headline(found).count(". ") == 0
    advised = advise(found)[0].method
    assert (advised in headline(found)) if advised not in ("", "Medusa-2 tree") else "to deploy" not in headline(found)


def test_marked_are_those_that_could_be_advised() -> None:
    """Within 5% of plain decoding, useless, lossy, or with a target of its own: none of these; what is as fast as the fastest is."""
    methods = (
        steady("fastest", 1.50, kind="static tree"),
        steady("as fast", 1.45, kind="static tree"),
        steady("slower", 1.30, kind="static tree"),
        method("useless", 1.9, [[0, 0]] * 12, kind="static tree"),
        steady("own", 1.9, kind="medusa tree", algorithm="medusa2"),
        steady("lossy", 1.9, is_lossless=False, lossless=None),
    )
    rows = method_sheet(comparison(methods=methods)).rows
    assert [row[0].text for row in rows if any(cell.is_best for cell in row)] == ["fastest", "as fast"]
    near = method_sheet(comparison(methods=(steady("near", 1.04, kind="static tree"),))).rows
    assert not any(cell.is_best for row in near for cell in row)


def test_the_length_that_makes_a_method_fast_is_marked() -> None:
    one = steady("A", 0.95, speed_by_draft_length={1: speed(1.4), 3: speed(1.2), 5: speed(0.95)})
    (sheet,) = draft_length_sheets(comparison(methods=(one,)))
    assert [cell.is_best for cell in sheet.rows[0]] == [False, True, False, False]


def test_a_target_of_its_own_is_said_where_its_outputs_are_judged() -> None:
    own = method("Medusa-2 chain", 1.5, [[3, 1], [2, 0], [0]], algorithm="medusa2", lossless=Lossless("float32", 5, 4, 1, 1e-5))
    (_, row) = method_sheet(comparison(methods=(own,))).rows
    assert row[-1].text == "yes 4/5" and row[-1].detail.splitlines() == ["1 near tie", "own target"]
    assert method_sheet(comparison(methods=(comparison().methods[0],))).rows[1][-1].detail == ""


def test_the_note_counts_what_rides_along_and_the_reading_of_the_prompt() -> None:
    note = method_sheet(comparison()).note
    assert "nodes: tokens beyond the newest one in a verification." in note and "reads the prompt" in note


def test_no_method_at_all_is_said(tmp_path: Path) -> None:
    found = comparison(methods=(), plain_tokens_per_s={}, forward_s={})
    assert "No method was measured." in printed(found) and "Medusa <2>" in printed(found)
    assert "No method was measured." in comparison_page(found, []) and draw_comparison(found) == []
    assert comparison_table(found).row_count == 1


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0"), (512, "512 B"), (1536, "1.5 KiB"), (204 * 2**20, "204 MiB"), (3 * 2**30, "3.0 GiB")], ids=str
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


# --- HTML -------------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Counts elements, and gathers ids and the text outside of style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_has_every_plot_table_and_number() -> None:
    page = comparison_page(comparison(), ADVICE)
    elements = Elements(page)
    assert [name for name in elements.ids if re.fullmatch("plot-[a-z]+", name)] == ["plot-tau", "plot-batch", "plot-joint", "plot-memory"]
    assert elements.opened.count("figure") == elements.opened.count("svg") == 4 and elements.opened.count("table") == 5
    for expected in ("2.20", "1.85x", "1.48-2.22", "+204 MiB", "yes 3/5", "LOSSY", "bfloat16", "torch 2.9", "2.25", "40.0 tok/s", "draft_length 5"):
        assert expected in elements.text
    assert elements.text.count(ADVICE[0]["vllm"]) == 1


def test_page_escapes_what_comes_from_data() -> None:
    page = comparison_page(comparison(), ADVICE)
    for raw in ("<b>W", "<GPU>", "target<7B>", "<logic>", "Medusa <2>", "<2 GiB>", "& none"):
        assert raw not in page
    for text in ("Lookahead [bold] <b>W&N</b>", "1 x <GPU>", "org/target<7B>", "math & <logic>", "Medusa <2>", "one user, <2 GiB>"):
        assert text in Elements(page).text


def test_page_needs_nothing_from_elsewhere() -> None:
    page = comparison_page(comparison(), ADVICE)
    assert not re.search(r"https?:|//\w|@import|@font-face|<script|<link|<img|<iframe", page)
    assert set(re.findall(r'(?:href|src)="(.)', page)) == {"#"} and set(re.findall(r"url\((.)", page)) <= {"#"}


def test_every_reference_in_a_plot_has_one_target() -> None:
    page = comparison_page(comparison(), ADVICE)
    ids = Elements(page).ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)', page)) | set(re.findall(r"url\(#([^)]+)", page)) <= set(ids)


def test_same_comparison_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_html(comparison(), ADVICE, tmp_path / name)
    content = (tmp_path / "a.html").read_bytes()
    assert content == (tmp_path / "b.html").read_bytes() and content.startswith(b"<!DOCTYPE html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_plots_take_their_colours_from_the_page() -> None:
    for plot in draw_comparison(comparison()):
        svg = inline_svg(plot)
        assert "var(--series-0)" in svg and "var(--muted)" in svg
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", svg)) == set()


def test_tau_plot_has_a_bar_a_measured_domain_and_a_whisker_where_there_are_several_prompts() -> None:
    axes = draw_comparison(comparison())[0].figure.axes[0]
    heights = [round(float(bar.get_height()) + 1, 6) for bar in axes.patches]
    # Five methods have verifications, over all prompts and in each of three domains (of a single prompt, so without a whisker).
    assert len(heights) == 20 and heights[:4] == [2.2, 3.0, 2.0, 1.0]
    assert sum(len(lines.get_segments()) for lines in axes.collections) == 5


def test_speed_plot_has_a_point_a_measured_batch_and_the_reference() -> None:
    axes = draw_comparison(comparison())[1].figure.axes[0]
    ratios = [list(line.get_ydata()) for line in axes.lines]
    assert ratios[0] == pytest.approx([1.85, 1.48, 0.925]) and ratios[3] == [0.95] and ratios[-1] == [1.0, 1.0] and len(ratios) == 7


def test_a_page_of_methods_without_verifications_and_of_one_batch_is_drawn() -> None:
    nothing = [replace(comparison().methods[3], name=f"method {index}") for index in range(12)]
    page = comparison_page(comparison(methods=tuple(nothing)), [])
    assert "nothing measured" in page and page.count("<svg") == 4
