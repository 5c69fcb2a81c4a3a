"""Every decoding method beside each other on the quickstart's target, and whether what should hold between them does.

    .venv/bin/python bench/recipes.py              # the four drafters, once
    .venv/bin/python bench/draft_model.py          # a small draft model, once
    .venv/bin/python bench/compare.py --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl sum.jsonl

Writes bench/results/compare.json: what `python -m eval.compare` measures, with the claims. Without `--prompts` the shipped sets are asked. What
Lookahead and n-grams gain on repetitive text differs from prompt to prompt by more than twenty prompts show: it is decoded once more, untimed, over
more prompts and longer answers.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import tyro
from rich.console import Console

from data.target import TargetConfig
from eval.acceptance import Acceptance
from eval.advisor import Candidate, advise
from eval.compare import CompareConfig, compare
from eval.decode.loop import decode
from eval.draft_length import best_draft_length, has_draft_length, share_of_best_measured
from eval.measurement import Comparison, MethodResult, acceptance_from_json, acceptance_to_json
from eval.methods import Builder
from eval.prompts import read_prompts

OUT = Path("runs/compare")
REPETITIVE, CHAT = ("code", "summarisation"), "chat"
REPETITION_PROMPTS, REPETITION_TOKENS, REPETITION_BATCH = 24, 96, 8
MOST_PREDICTION_ERROR, LEAST_SHARE_OF_BEST = 0.03, 0.95
DEFAULT = CompareConfig(
    target="runs/targets/SmolLM2-135M-Instruct",
    drafters=tuple(f"runs/recipes/{name}" for name in ("eagle3", "eagle1", "medusa1", "medusa2")),
    draft_model="runs/targets/SmolLM2-6-layers",
    out=OUT,
    num_prompts=5,
    max_prompt_tokens=768,
    max_new_tokens=40,
    num_batches=1,
    num_length_prompts=5,
    num_lossless_prompts=4,
)


def main(config: Annotated[CompareConfig, tyro.conf.arg(name="")] = DEFAULT, is_measured: bool = False) -> None:
    """
    Args:
        config: of the comparison.
        is_measured: the comparison in runs/compare is there; measure what is not, judge, and write the results.
    """
    prompts = tuple(str(Path(source).resolve()) if Path(source).exists() else source for source in config.prompts)
    os.chdir(ROOT)  # so that the results name the runs as a user of this folder would
    if not is_measured:
        compare(replace(config, prompts=prompts), Console(highlight=False))
    document = json.loads((config.out / "compare.json").read_text())
    comparison = Comparison.from_json(document)
    files = " ".join(Path(source).name for source in config.prompts)
    document["about"]["command"] = f".venv/bin/python bench/compare.py --prompts {files}"
    document["repetition"] = _repetition_of(replace(config, prompts=prompts))
    document["advice"] = [advised.to_json() for advised in advise(comparison)]
    document["claims"] = claims(comparison, document["repetition"])
    results = ROOT / "bench" / "results"
    (results / "compare.json").write_text(json.dumps(document, indent=2) + "\n")
    for name, claim in document["claims"].items():
        print(f"{'holds' if claim['holds'] else 'DOES NOT HOLD'}: {name}: {claim['found']}")


def _repetition_of(config: CompareConfig) -> dict[str, dict[str, Any]]:
    """Acceptance of the methods that train nothing, by method and domain; kept in runs/compare."""
    path = config.out / "repetition.json"
    if path.exists():
        return json.loads(path.read_text())
    builder = Builder(config.methods, (), REPETITION_TOKENS, config.temperature, torch.device("cpu"))
    [line_up] = builder.line_ups(TargetConfig(config.target, config.revision, config.dtype), [], None)
    asked = read_prompts(config.prompts, line_up.target.tokenizer, REPETITION_PROMPTS, config.max_prompt_tokens)
    found: dict[str, dict[str, Any]] = {contender.name: {} for contender in line_up.contenders}
    for domain in (domain for domain in asked if domain.domain in (CHAT, *REPETITIVE)):
        for contender in line_up.contenders:
            batches = [domain.prompts[start : start + REPETITION_BATCH] for start in range(0, len(domain.prompts), REPETITION_BATCH)]
            acceptances = []
            for batch in batches:
                decoded = decode(line_up.target, contender.method, batch, contender.verifier, REPETITION_TOKENS, line_up.target.end_ids)
                acceptances.append(decoded.acceptance)
            acceptance = sum(acceptances[1:], acceptances[0])
            found[contender.name][domain.domain] = acceptance_to_json(acceptance)
            print(f"{contender.name}, {domain.domain}: tau {acceptance.tau:.3f} over {acceptance.num_prompts} prompts", flush=True)
    path.write_text(json.dumps(found))
    return found


def claims(comparison: Comparison, repetition: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What should hold, whether it does, and the numbers."""
    methods = {method.name: method for method in comparison.methods}
    return {
        "a tree accepts at least what a chain of the same drafter does": _all(
            (f"{tree.name} {tree.acceptance.tau:.3f} against {chain.acceptance.tau:.3f}", tree.acceptance.tau >= chain.acceptance.tau)
            for chain in methods.values()
            for tree in methods.values()
            if chain.kind == "chain" and tree.kind.endswith("tree") and tree.is_lossless and tree.drafter == chain.drafter
        ),
        "a dynamic tree accepts at least what a static tree of as many nodes does": _all(
            _dynamic_against_static(methods[f"{name} dynamic tree"], methods[f"{name} static tree"]) for name in ("EAGLE-1", "EAGLE-3")
        ),
        "n-gram and Lookahead with the prompt pool gain clearly more on code and summaries than on chat": _all(
            _gains_from_repetition(name, domains) for name, domains in repetition.items() if name != "Lookahead"
        ),
        "so does Lookahead without the prompt pool, which only knows what the target has guessed": _all(
            _gains_from_repetition(name, domains) for name, domains in repetition.items() if name == "Lookahead"
        ),
        f"tau predicted by the teacher-forced acceptance is within {MOST_PREDICTION_ERROR:.0%} of the decoder's": _all(
            (
                f"{method.name} {method.tau_predicted:.3f} against {method.acceptance.tau:.3f}",
                abs(method.tau_predicted / method.acceptance.tau - 1) <= MOST_PREDICTION_ERROR,
            )
            for method in methods.values()
            if method.tau_predicted is not None
        ),
        f"the advised number of drafts reaches {LEAST_SHARE_OF_BEST:.0%} of the best measured speed": _all(
            _advised_length(comparison, method) for method in methods.values() if has_draft_length(method)
        ),
    }


def _all(found: Any) -> dict[str, Any]:
    judged = list(found)
    return {"holds": bool(judged) and all(holds for _, holds in judged), "found": "; ".join(text for text, _ in judged)}


def _dynamic_against_static(dynamic: MethodResult, static: MethodResult) -> tuple[str, bool]:
    low, high = tau_difference_interval(dynamic.acceptance, static.acceptance)
    difference = dynamic.acceptance.tau - static.acceptance.tau
    return f"{dynamic.algorithm} {difference:+.3f} (95% {low:+.3f} to {high:+.3f})", difference >= 0


def _gains_from_repetition(name: str, domains: dict[str, Any]) -> tuple[str, bool]:
    """tau on repetitive prompts together and on chat: clearly more where the interval of the difference lies above zero."""
    code, summaries, chat = (acceptance_from_json(domains[domain]) for domain in (*REPETITIVE, CHAT))
    repetitive = code + summaries
    low, high = tau_difference_interval(repetitive, chat, is_paired=False)
    return f"{name} {repetitive.tau:.3f} against {chat.tau:.3f} (95% of the difference: {low:+.3f} to {high:+.3f})", low > 0


def _advised_length(comparison: Comparison, method: MethodResult) -> tuple[str, bool]:
    """The advisor's number; the cost model's own is told where measurement overruled it."""
    advised = Candidate(method, comparison, 1, method.acceptance, method.speed.ratio)
    choice = best_draft_length(method, comparison, 1)
    share = choice.measured[advised.num_drafts] / max(choice.measured.values())
    by_model = f"; the cost model alone: {choice.num_drafts}, {share_of_best_measured(choice):.1%}" * (choice.num_drafts != advised.num_drafts)
    return f"{method.name} {advised.num_drafts} drafts {share:.1%}{by_model}", share >= LEAST_SHARE_OF_BEST


def tau_difference_interval(first: Acceptance, second: Acceptance, is_paired: bool = True, num_resamples: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of the difference of two taus; `is_paired` where they are of the same prompts, which are then resampled together."""
    random = np.random.default_rng(0)
    taus, drawn = [], np.empty(0)
    for acceptance in (first, second):
        counts_P2 = np.array([(prompt.num_tokens, prompt.num_verifications) for prompt in acceptance.prompts])
        if not is_paired or not len(drawn):
            drawn = random.integers(len(counts_P2), size=(num_resamples, len(counts_P2)))
        sums_R2 = counts_P2[drawn].sum(axis=1)
        taus.append(sums_R2[:, 0] / sums_R2[:, 1])
    low, high = np.quantile(taus[0] - taus[1], [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
