"""The README's figures are those of the files that the benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.measurement import acceptance_from_json

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def test_the_recipes_table_is_what_the_bench_measured() -> None:
    document = results("recipes.json")
    for name, row in document["rows"].items():
        low, high = row["tau_interval_95"]
        joint = " ".join(f"{value:.3f}".removeprefix("0") for value in row["joint_acceptance"])
        line = f"| {row['tau']:.3f} ({low:.3f} to {high:.3f}) | {joint} | {row['tau_untrained']:.3f} | {row['tau_shuffled_states']:.3f} |"
        assert line in README, f"{name}: {line}"
        assert f"{row['num_train_tokens']:,} tokens" in README
    assert f"| bigram table | {document['bigram_table']['tau']:.3f}" in README
    backbone = document["rows"]["medusa2"]["backbone"]
    assert f"{backbone['perplexity_before']:.2f} to {backbone['perplexity_after']:.2f}" in README


def test_the_quickstarts_figures_are_what_it_measured() -> None:
    report = results("quickstart.json")["report"]
    low, high = report["tau_interval_95"]
    assert f"**{report['tau']:.3f}** (95% interval {low:.3f} to {high:.3f})" in README
    assert f"{report['num_train_tokens']:,} tokens" in README


def test_the_comparison_is_what_the_bench_measured() -> None:
    document = results("compare.json")
    for method in document["methods"]:
        acceptance, speeds = method["acceptance"], method["speed_by_batch"]
        low, high = acceptance["tau_interval_95"]
        domains = " | ".join(f"{method['acceptance_by_domain'][domain]['tau']:.2f}" for domain in ("chat", "code", "summarisation", "maths"))
        megabytes = sum(method["memory"].values()) / 2**20
        ratios = f"{speeds['1']['ratio']:.2f} | {speeds['8']['ratio']:.2f}"
        line = f"| {acceptance['tau']:.2f} ({low:.2f} to {high:.2f}) | {domains} | {ratios} | {megabytes:.1f} |"
        assert line in README, f"{method['name']}: {line}"
    about = document["about"]
    assert f"{sum(document['domains'].values())} prompts x {about['max_new_tokens']} tokens, {about['dtype']}" in README
    for method in ("n-gram", "Lookahead, prompt pool", "Lookahead"):
        code, summaries, chat = (acceptance_from_json(document["repetition"][method][domain]) for domain in ("code", "summarisation", "chat"))
        assert f"{(code + summaries).tau:.2f} against {chat.tau:.2f}" in README


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
