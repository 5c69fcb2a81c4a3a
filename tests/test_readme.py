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
    planner = results("planner.json")
    assert f"within {planner['largest_relative_error']:.0%} of the measured one in {len(planner['cases'])} cases" in README
