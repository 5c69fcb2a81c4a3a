"""The README's figures are those of the files that the benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def test_the_recipes_tau_is_what_the_bench_measured() -> None:
    document = results("recipes.json")
    for name in ("eagle3", "eagle1", "medusa1", "medusa2"):
        [row] = [line for line in README.splitlines() if line.startswith(f"| `recipes/{name}.py`")]
        assert row.endswith(f"| {document['rows'][name]['tau']:.3f} |")
    assert f"a bigram table reaches {document['bigram_table']['tau']:.3f}" in README


def test_the_quickstarts_figures_are_what_it_measured() -> None:
    report = results("quickstart.json")["report"]
    low, high = report["tau_interval_95"]
    assert f"**{report['tau']:.3f}** (95% interval {low:.3f} to {high:.3f})" in README
    assert f"{report['num_train_tokens']:,} tokens" in README


def test_the_training_step_is_what_the_bench_measured() -> None:
    rows = {row["pack"]: row["variants"] for row in results("training_step.json")["step"]["rows"]}
    names = {"ours": "headstart", "speculators_sdpa": "speculators, sdpa", "speculators_eager": "speculators, eager", "naive": "plain torch"}
    for name, label in names.items():
        cells = []
        for pack in ("one document", "packed"):
            variant = rows[pack][name]
            cells.append(f"{variant['tokens_per_s']['median']:.0f}, {variant['peak_bytes']['median'] / 1e9:.2f} GB")
        assert f"| {label} | {' | '.join(cells)} |" in README
    shares = []
    for pack in ("one document", "packed"):
        bound = rows[pack]["speculators_eager"]["seconds"]["median"] / rows[pack]["products"]["seconds"]["median"]
        assert f"{bound:.1f} times" in README
        shares.append(f"{rows[pack]['products']['seconds']['median'] / rows[pack]['ours']['seconds']['median']:.0%}")
    assert f"ours gets {' and '.join(shares)} of the way" in README


def test_what_else_is_fast_and_small_is_what_the_benches_measured() -> None:
    planner, before = results("planner.json"), results("quickstart.json")["before"]
    assert f"within {planner['largest_relative_error']:.0%} of the measured one in {len(planner['cases'])} cases" in README
    one, two = (results("data_preparation.json")["ratios"][f"some, {count}"]["seconds"]["median"] for count in (1, 2))
    assert f"| {one:.1f} times as fast with one process, {two:.1f} with two |" in README
    [extraction] = [row for row in results("extraction.json")["rows"] if row["variant"] == "int8"]
    assert f"| {extraction['speed_of_bare']['median']:.0%} of its tokens/s |" in README
    [store] = [row for row in results("store.json")["speed"] if row["storage"] == "int8"]
    assert f"| {store['of_bfloat16']:.0%} of the bytes, tau {results('storage_tau.json')['relative_change']:+.1%} |" in README
    assert f"| {before['share_of_its_time']:.2f} of its time |" in README
    parts = [part for shape in results("compile.json")["shapes"].values() for part in shape["parts"].values()]
    saved = 1 - min(part["compiled_against_eager"]["seconds"]["median"] for part in parts)
    seconds = [part["compile_seconds"]["median"] for part in parts]
    assert f"| at most {saved:.0%} saved, {min(seconds):.0f} to {max(seconds):.0f} s of compiling: nothing is compiled |" in README
