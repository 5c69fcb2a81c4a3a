"""Measures every decoding method on your own target, drafters, prompts and machine in one run, and says which to deploy.

    python -m eval.compare --target my-org/my-model --drafters runs/my-drafter --prompts chat.jsonl code.jsonl

Place in the flow: a target, finished runs and prompts -> compare.json (every number), compare.html (tables and plots), and the advice of
eval/advisor.py. In this order: prompts; losslessness in float32, where a difference is a bug and ends the run before the long work; every prompt by
every method in alternation, with plain decoding before and after; chains at each draft length; batches; the target's forward at several widths.

Without `--prompts` the four shipped sets are asked (eval/prompt_sets/). A prompt source is `NAME=PATH` or a PATH whose stem names the domain.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from checkpoints.provenance import git_commit, installed_versions
from data.progress import Progress
from data.target import Target, TargetConfig, load_tokenizer
from eval.acceptance import Acceptance, chain_acceptance, trajectory_features
from eval.advisor import advise
from eval.compare_report import print_comparison, write_html
from eval.decode.loop import Decoded, Method
from eval.decode.speedup import difference_gap
from eval.decode.verify import Verifier
from eval.measurement import Comparison, Lossless, Memory, MethodResult, Speed
from eval.methods import (
    PACK_TOKENS,
    Builder,
    Contender,
    DrafterFiles,
    LineUp,
    MethodConfig,
    find_drafters,
    not_available,
    with_extra_tokens,
)
from eval.prompts import DomainPrompts, read_prompts
from eval.timing import Timed, cache_bytes_per_token, forward_seconds, num_calls, time_methods
from eval.tune import TunedPoint, coordinate_search

FORWARD_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
LOOKAHEAD_AXES = {"N": (3, 4, 5), "W": (2, 3, 5, 8, 12), "G": (1, 2, 3, 5, 8, 12)}
TREE_AXES = {"total_tokens": (4, 6, 8, 12, 16, 27, 60), "depth": (2, 3, 4, 5, 7), "top_k": (2, 4, 8)}


@dataclass(frozen=True)
class CompareConfig:
    """Compare decoding methods side by side on one target.

    Attributes:
        target: path or Hub id of the target that every drafter but Medusa-2 was trained for.
        drafters: finished runs (runs/NAME) or their exports.
        prompts: NAME=PATH or PATH, JSON or JSONL of `turns` or conversations; none takes the shipped sets.
        draft_model: a smaller model with the same tokenizer, for standard speculative decoding.
        revision: of the target on the Hub.
        out: folder for compare.json and compare.html.
        num_prompts: of each domain.
        num_calibration_prompts: of each domain; further prompts that calibrate Medusa's tree and that --tune searches on. Only where there is either.
        max_prompt_tokens: longer prompts are left out, and counted.
        max_new_tokens: longest answer.
        temperature: 0 is greedy.
        dtype: of the target while it is timed. "auto" is its own.
        batch_sizes: sequences decoded together; 1 is always measured.
        num_batches: of each batch size above 1; 0 takes all prompts, so that the sizes compare.
        num_length_prompts: prompts for timing chains at every shorter draft length.
        num_lossless_prompts: prompts whose outputs are compared with plain decoding in float32; only where the temperature is 0.
        tune: search Lookahead's W, N, G and the dynamic tree's depth, top-k and total tokens first, on the calibration prompts.
        methods: what the methods are set to.
    """

    target: str
    drafters: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    draft_model: str | None = None
    revision: str | None = None
    out: Path = Path("runs/compare")
    num_prompts: int = 8
    num_calibration_prompts: int = 2
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 128
    temperature: float = 0.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    batch_sizes: tuple[int, ...] = (2, 4, 8)
    num_batches: int = 0
    num_length_prompts: int = 8
    num_lossless_prompts: int = 8
    tune: bool = False
    methods: MethodConfig = field(default_factory=MethodConfig)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_calibration_prompts", "max_new_tokens", "num_length_prompts", "num_lossless_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.temperature < 0 or self.num_batches < 0 or any(size < 1 for size in self.batch_sizes):
            found = f"temperature is {self.temperature}, num_batches {self.num_batches} and batch_sizes {self.batch_sizes}"
            raise ValueError(f"{found}: expected no negative and no empty ones")
        existing = next(folder for folder in (self.out, *self.out.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"--out {self.out} cannot be made: {existing} is no folder that can be written to")


@dataclass(frozen=True)
class Question:
    """A measured prompt and its domain."""

    domain: str
    prompt: tuple[int, ...]


def compare(config: CompareConfig, console: Console) -> Comparison:
    """The whole comparison, top to bottom; writes compare.json and compare.html.

    Raises:
        ValueError: if target, drafters, draft model or prompts do not fit together, or a method is not lossless.
    """
    disable_progress_bar()  # transformers' own, one for every model that is loaded
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = TargetConfig(config.target, config.revision, config.dtype)
    drafters = find_drafters(config.drafters)
    draft_model = None if config.draft_model is None else TargetConfig(config.draft_model, None, config.dtype)
    num_calibration = config.num_calibration_prompts if config.tune or any(drafter.has_heads for drafter in drafters) else 0
    asked = read_prompts(config.prompts, load_tokenizer(target), config.num_prompts + num_calibration, config.max_prompt_tokens)
    questions, calibration = divide(asked, num_calibration)
    builder = Builder(config.methods, calibration, config.max_new_tokens, config.temperature, device)

    tuning = tune(builder, builder.line_ups(target, drafters, draft_model), config.max_new_tokens, console) if config.tune else []
    lossless: dict[str, Lossless] = {}
    if config.temperature == 0:
        console.print("[bold]losslessness[/bold]: outputs against plain decoding in float32")
        exact = replace(target, dtype="float32")
        exact_draft_model = None if draft_model is None else replace(draft_model, dtype="float32")
        chosen = questions[: config.num_lossless_prompts]
        lossless = check_all_lossless(builder.line_ups(exact, drafters, exact_draft_model), chosen, config.max_new_tokens)

    line_ups = builder.line_ups(target, drafters, draft_model)
    methods: list[MethodResult] = []
    plain_rates: dict[int, float] = {}
    for line_up in line_ups:
        console.print(f"[bold]{line_up.name}[/bold]: {len(line_up.contenders)} methods, {len(questions)} prompts")
        results, rates = measure(line_up, questions, config, lossless)
        methods += results
        plain_rates = plain_rates or rates
    first = line_ups[0].target
    context = sum(len(question.prompt) for question in questions) // len(questions) + config.max_new_tokens // 2
    comparison = Comparison(
        target=config.target,
        revision=config.revision,
        domains={domain.domain: sum(question.domain == domain.domain for question in questions) for domain in asked},
        about=_about(config, drafters, first, device),
        plain_tokens_per_s=plain_rates,
        forward_s=forward_seconds(first, sorted(plain_rates), FORWARD_WIDTHS, context),
        methods=tuple(methods),
        weights_bytes=sum(parameter.numel() * parameter.element_size() for parameter in first.model.parameters()),
        not_available=builder.not_available | not_available(first),
        tuning=tuple(tuning),
    )
    config.out.mkdir(parents=True, exist_ok=True)
    comparison.write(config.out / "compare.json", {})  # before anything else can fail: it took long
    advice = [advised.to_json() for advised in advise(comparison)]
    comparison.write(config.out / "compare.json", {"advice": advice})
    write_html(comparison, advice, config.out / "compare.html")
    print_comparison(comparison, advice, console)
    console.print(f"every number: {config.out / 'compare.json'}    tables and plots: {config.out / 'compare.html'}")
    return comparison


def divide(asked: Sequence[DomainPrompts], num_calibration: int) -> tuple[list[Question], list[tuple[int, ...]]]:
    """The measured prompts, domains in turn, and those to calibrate with: none is both.

    The prompts of a domain lie evenly over its set, and those that calibrate evenly among them.

    Raises:
        ValueError: if nothing is left to measure in a domain.
    """
    measured: list[list[Question]] = []
    calibration: list[tuple[int, ...]] = []
    for domain in asked:
        if len(domain.prompts) <= num_calibration:
            raise ValueError(
                f"domain {domain.domain} has {len(domain.prompts)} usable prompts, expected more than the {num_calibration} that calibrate "
                "(--num-calibration-prompts): give more prompts, let fewer calibrate, or raise --max-prompt-tokens"
            )
        chosen = {(2 * index + 1) * len(domain.prompts) // (2 * num_calibration) for index in range(num_calibration)}
        calibration += [domain.prompts[index] for index in sorted(chosen)]
        measured.append([Question(domain.domain, prompt) for index, prompt in enumerate(domain.prompts) if index not in chosen])
    longest = max(map(len, measured))
    return [questions[index] for index in range(longest) for questions in measured if index < len(questions)], calibration


def check_all_lossless(line_ups: Sequence[LineUp], questions: Sequence[Question], max_new_tokens: int) -> dict[str, Lossless]:
    """`check_lossless` of every target."""
    found: dict[str, Lossless] = {}
    for line_up in line_ups:
        found |= check_lossless(line_up, questions, max_new_tokens)
    return found


def check_lossless(line_up: LineUp, questions: Sequence[Question], max_new_tokens: int) -> dict[str, Lossless]:
    """Every lossless method's greedy outputs against plain decoding's.

    Raises:
        ValueError: if one differs where the target's two best logits are no near tie.
    """
    target, prompts = line_up.target, [question.prompt for question in questions]
    ways = _ways([contender for contender in line_up.contenders if contender.is_lossless])
    timed, plain = _time(line_up, "checking", ways, [[prompt] for prompt in prompts], max_new_tokens)
    found = {}
    for name, calls in timed.items():
        gaps = []
        for index, (prompt, mine, theirs) in enumerate(zip(prompts, plain, calls.decoded, strict=True)):
            try:
                gaps.append(difference_gap(target, index, prompt, mine.answers[0].token_ids, theirs.answers[0].token_ids))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        ties = [gap for gap in gaps if gap is not None]
        found[name] = Lossless(str(target.dtype).removeprefix("torch."), len(gaps), gaps.count(None), len(ties), max(ties, default=0.0))
    return found


def tune(builder: Builder, line_ups: Sequence[LineUp], max_new_tokens: int, console: Console) -> list[TunedPoint]:
    """Searches the parameters of each method that has some; the builder goes on with the best. Returns everything that was tried."""
    points = []
    for line_up in line_ups:
        for contender in line_up.contenders:
            if contender.with_settings is not None:
                start = {name: int(value) for name, value in contender.settings.items()}
                found = _search(contender, start, line_up, builder.calibration_prompts, max_new_tokens, console)
                builder.tuned[contender.name] = next(point.settings for point in found if point.is_best)
                points += found
    return points


def _search(
    contender: Contender, start: Mapping[str, int], line_up: LineUp, prompts: Sequence[Sequence[int]], max_new_tokens: int, console: Console
) -> list[TunedPoint]:
    """Everything that was tried of one method, the best marked."""
    tried: list[TunedPoint] = []

    def speed_of(settings: Mapping[str, int]) -> float:
        ways = {contender.name: (contender.tuned(settings).method, contender.verifier)}
        timed, _ = time_methods(line_up.target, ways, line_up.verifier, [[prompt] for prompt in prompts], max_new_tokens, line_up.target.end_ids)
        calls = timed[contender.name]
        tried.append(TunedPoint(contender.name, dict(settings), calls.speed().ratio, calls.acceptance().tau))
        console.print(f"  {contender.name} {dict(settings)}: {tried[-1].speedup:.3f}x, tau {tried[-1].tau:.3f}")
        return tried[-1].speedup

    axes = LOOKAHEAD_AXES if contender.kind == "lookahead" else TREE_AXES
    best = coordinate_search(start, axes, _is_sensible, speed_of)
    return [replace(point, is_best=point.settings == best) for point in tried]


def _is_sensible(settings: Mapping[str, int]) -> bool:
    """A dynamic tree of more tokens than its rounds can make is a smaller one."""
    if "total_tokens" not in settings:
        return True
    return settings["total_tokens"] - 1 <= settings["top_k"] + settings["depth"] * settings["top_k"] ** 2


def measure(
    line_up: LineUp, questions: Sequence[Question], config: CompareConfig, lossless: Mapping[str, Lossless]
) -> tuple[list[MethodResult], dict[int, float]]:
    """Times every method of a target; returns the results and plain decoding's tokens/s by batch size."""
    prompts, ways = [question.prompt for question in questions], _ways(line_up.contenders)
    alone, plain = _time(line_up, "batch 1", ways, [[prompt] for prompt in prompts], config.max_new_tokens)
    rates = {1: sum(call.num_tokens for call in plain) / sum(call.total_s for call in plain)}
    batched: dict[int, dict[str, Timed]] = {}
    for size in sorted(set(config.batch_sizes) - {1}):
        # The prompts come again from the start where they do not fill the last batch.
        num_batches = config.num_batches or math.ceil(len(prompts) / size)
        batches = [[prompts[(start + index) % len(prompts)] for index in range(size)] for start in range(0, num_batches * size, size)]
        try:
            batched[size], plain_batches = _time(line_up, f"batch {size}", ways, batches, config.max_new_tokens)
        except torch.OutOfMemoryError:
            print(f"WARNING: batches of {size} do not fit into the memory: they are left out", file=sys.stderr, flush=True)
            continue
        rates[size] = sum(call.num_tokens for call in plain_batches) / sum(call.total_s for call in plain_batches)
    lengths = _time_lengths(line_up, prompts[: config.num_length_prompts], config)
    bytes_per_token = cache_bytes_per_token(line_up.target)
    domains = list(dict.fromkeys(question.domain for question in questions))
    calls_of = {domain: [index for index, question in enumerate(questions) if question.domain == domain] for domain in domains}
    results = []
    for contender in line_up.contenders:
        timed = alone[contender.name]
        nodes = [count for decoded in timed.decoded for answer in decoded.answers for count in answer.num_nodes]
        results.append(
            MethodResult(
                name=contender.name,
                kind=contender.kind,
                algorithm=contender.algorithm,
                drafter=contender.drafter,
                settings=contender.settings,
                is_lossless=contender.is_lossless,
                nodes_per_verification=sum(nodes) / max(1, len(nodes)),
                acceptance=timed.acceptance(),
                acceptance_by_domain={domain: timed.acceptance(calls) for domain, calls in calls_of.items()},
                speed_by_domain={domain: timed.speed(calls) for domain, calls in calls_of.items()},
                speed_by_batch={1: timed.speed()} | {size: of_size[contender.name].speed() for size, of_size in batched.items()},
                speed_by_draft_length=lengths.get(contender.name, {}),
                memory=Memory(
                    weights_bytes=contender.method.weights_bytes,
                    cache_bytes=timed.cache_bytes,
                    pool_bytes=timed.pool_bytes,
                    tree_bytes=contender.method.most_nodes * bytes_per_token,
                ),
                lossless=lossless.get(contender.name),
                tau_predicted=_predicted_tau(contender, line_up, questions, plain) if config.temperature == 0 else None,
            )
        )
    return results, rates


def _time(
    line_up: LineUp, label: str, ways: Mapping[str, tuple[Method, Verifier]], batches: Sequence[Sequence[Sequence[int]]], max_new_tokens: int
) -> tuple[dict[str, Timed], list[Decoded]]:
    """`time_methods` on a target's own terms, with progress."""
    progress = Progress(label, "answers", num_calls(len(ways), len(batches)))
    target = line_up.target
    timed = time_methods(target, ways, line_up.verifier, batches, max_new_tokens, target.end_ids, lambda: progress.advance(1))
    progress.close()
    return timed


def _ways(contenders: Sequence[Contender]) -> dict[str, tuple[Method, Verifier]]:
    return {contender.name: (contender.method, contender.verifier) for contender in contenders}


def _time_lengths(line_up: LineUp, prompts: Sequence[Sequence[int]], config: CompareConfig) -> dict[str, dict[int, Speed]]:
    """Chains at every draft length up to their own, each length beside the others."""
    ways, place = {}, {}
    for contender in line_up.contenders:
        if contender.at_length is not None:
            for length in range(1, int(contender.settings["draft_length"]) + 1):
                place[f"{contender.name}, {length}"] = (contender.name, length)
                ways[f"{contender.name}, {length}"] = (contender.at_length(length), contender.verifier)
    timed, _ = _time(line_up, "draft lengths", ways, [[prompt] for prompt in prompts], config.max_new_tokens)
    speeds: dict[str, dict[int, Speed]] = {}
    for way, (name, length) in place.items():
        speeds.setdefault(name, {})[length] = timed[way].speed()
    return speeds


def _predicted_tau(contender: Contender, line_up: LineUp, questions: Sequence[Question], plain: Sequence[Decoded]) -> float | None:
    """tau by the teacher-forced acceptance of the drafter on plain decoding's answers: what training reports."""
    if contender.head is None:
        return None
    length = int(contender.settings["draft_length"])
    answered = [(question.prompt, call.answers[0].token_ids) for question, call in zip(questions, plain, strict=True)]
    trajectories = [with_extra_tokens(line_up.target, prompt, answer, length) for prompt, answer in answered if len(answer) > 1]
    if not trajectories:
        return None
    packs = trajectory_features(line_up.target, trajectories, contender.head.feature_request(), PACK_TOKENS)
    found: Acceptance = chain_acceptance(contender.head, packs, length)
    return found.tau


def _about(config: CompareConfig, drafters: Sequence[DrafterFiles], target: Target, device: torch.device) -> dict[str, Any]:
    """What a reader must know of how the numbers came about."""
    cpu = platform.processor() or platform.machine()
    return {
        "command": shlex.join(["python", "-m", "eval.compare", *sys.argv[1:]]),
        "hardware": f"{os.cpu_count()} cores, {cpu}" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        "drafters": {drafter.name: drafter.label for drafter in drafters},
        "versions": installed_versions(),
        "commit": git_commit(Path(__file__).parent),
    }


def main(args: list[str] | None = None) -> int:
    """0 when the comparison is made, 2 when it could not be, 130 when interrupted."""
    try:
        compare(tyro.cli(CompareConfig, args=args, prog="python -m eval.compare", description=__doc__), Console(highlight=False))
        return 0
    except (ValueError, OSError, SafetensorError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; a comparison that was not finished is not written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
