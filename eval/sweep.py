"""Measures a run's drafter through a real HTTP server, with and without the drafter, at several numbers of requests at once.

    python -m eval.serve runs/quickstart --http --concurrency 1 2 4 8

Place in the flow: eval/serve.py -> this -> serve_http.json and serve_http.png of the run (eval/sweep_result.py). The servers are `vllm serve`,
started here one after the other, or the user's own (`--url`). What is finished is in serve_http.json after every step: an error loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
from rich.console import Console

from checkpoints.serving import FORMATS
from data.progress import Progress
from data.vllm_engine import EngineError, engine_python
from eval.completions import CompletionClient, Endpoint, api_headers, complete_all
from eval.engine_counters import DraftCounts, EngineName, draft_counts
from eval.served_run import Acceptance, RunFiles, stop_token_ids
from eval.sweep_result import Difference, Level, Quantiles, ServerMeasurement, SweepResult, plot_sweep, print_sweep, write_sweep
from eval.vllm_server import is_loopback, served_models, vllm_server

# The first version of vLLM that gives token ids back.
OLDEST_VLLM = (0, 10, 2)
RESULT_FILE, PLOT_FILE, LOG_FILE = "serve_http.json", "serve_http.png", "serve_http.log"


@dataclass(frozen=True)
class SweepOptions:
    """How to measure.

    Attributes:
        concurrency: requests at once, one measurement each; the smallest is the one that is compared with ours.
        dtype: what both models compute in.
        timeout_s: longest time until a server is healthy.
        engine: whose counters the server has.
        url: a server of the user's with the drafter, instead of one that is started here.
        plain_url: the same without the drafter.
        model: the name that the user's servers have for the target.
    """

    concurrency: tuple[int, ...]
    dtype: str
    timeout_s: float
    engine: EngineName = "vllm"
    url: str | None = None
    plain_url: str | None = None
    model: str | None = None


def sweep(run_dir: Path, run: RunFiles, options: SweepOptions, console: Console) -> SweepResult:
    """Measures at every concurrency and writes serve_http.json, and serve_http.png at the end.

    Raises:
        ValueError: if the server does not fit the run.
        EngineError: if a server is not there, or fails; what was finished before is in serve_http.json, with the error.
    """
    if options.url is None:
        engine_python()
        (run_dir / LOG_FILE).write_text("")
        console.print(f"{len(run.prompts)} prompts to vllm serve, {options.dtype}, {run.draft_length} drafts; log in {run_dir / LOG_FILE}")
    result = SweepResult(options.engine, options.dtype, run.ours, len(run.prompts))
    measurement = _Sweep(run_dir, run, options, stop_token_ids(run.target, run.revision), result, console)
    try:
        measurement.measure()
    except BaseException as error:
        result.error = str(error).split("\n", 1)[0] if isinstance(error, Exception) else "interrupted"
        measurement.write()
        if result.levels:
            console.print(f"{len(result.levels)} of {len(options.concurrency)} levels with the drafter are in {run_dir / RESULT_FILE}")
        raise
    plot_sweep(run_dir / PLOT_FILE, result)
    print_sweep(result, console)
    return result


@dataclass(frozen=True)
class _Sweep:
    """One sweep; it fills `result`, which is written after each step."""

    run_dir: Path
    run: RunFiles
    options: SweepOptions
    stops: Sequence[int]
    result: SweepResult
    console: Console

    def write(self) -> None:
        write_sweep(self.run_dir / RESULT_FILE, self.result)

    def measure(self) -> None:
        options = self.options
        has_plain_server = options.url is None or options.plain_url is not None
        with _server(self.run, options, self.run_dir / LOG_FILE, True, self.console) as endpoint:
            self.result.engine_version = _engine_version(endpoint, options.engine, self.console)
            for concurrency in sorted(set(options.concurrency)):
                self.result.levels.append(Level(concurrency, self._measured(endpoint, concurrency, options.engine)))
                self.write()
            if not has_plain_server:
                # One token is asked for at a time, so nothing is drafted.
                self._compare_outputs(endpoint)
        if has_plain_server:
            with _server(self.run, options, self.run_dir / LOG_FILE, False, self.console) as endpoint:
                for level in self.result.levels:
                    level.plain = self._measured(endpoint, level.concurrency, None)
                    self.write()
                self._compare_outputs(endpoint)

    def _measured(self, endpoint: Endpoint, concurrency: int, engine: EngineName | None) -> ServerMeasurement:
        """One server at one concurrency; `engine` is None where nothing is drafted."""
        title = f"{concurrency} at once, {'without the drafter' if engine is None else 'with the drafter'}"
        progress = Progress(title, "prompts", len(self.run.prompts), is_shown=not self.console.quiet)
        try:
            return asyncio.run(_measure(endpoint, self.run, self.stops, concurrency, engine, progress))
        finally:
            progress.close()

    def _compare_outputs(self, endpoint: Endpoint) -> None:
        """Looks at each output that differs from the one without the drafter (else from our answer): were the best two tokens nearly tied?"""
        for level in self.result.levels:
            references = self.run.answers if level.plain is None else level.plain.outputs
            level.differences = asyncio.run(_differences(endpoint, self.run.prompts, self.stops, level.drafted.outputs, references))
        self.result.is_complete = True
        self.write()


@contextlib.contextmanager
def _server(run: RunFiles, options: SweepOptions, log: Path, has_drafter: bool, console: Console) -> Iterator[Endpoint]:
    url = options.url if has_drafter else options.plain_url
    if url is not None:
        base_url = _base_url(url)
        yield Endpoint(base_url, _model_name(base_url, run, options.model))
        return
    arguments = [
        *("--max-num-seqs", str(max(options.concurrency)), "--max-model-len", str(run.max_model_len)),
        # As in the offline check: eager, no prefix computed only once, and greedy unless a request says otherwise.
        *("--enforce-eager", "--no-enable-prefix-caching", "--generation-config", "vllm"),
    ]
    with vllm_server(
        run.target,
        log=log,
        revision=run.revision,
        dtype=options.dtype,
        speculative=run.speculative if has_drafter else None,
        arguments=arguments,
        timeout_s=options.timeout_s,
        console=console,
    ) as server:
        yield Endpoint(server.base_url, server.model, server.require_alive)


def _base_url(url: str) -> str:
    try:
        parsed = httpx2.URL(url)
        is_right = parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.userinfo
    except httpx2.InvalidURL:
        is_right = False
    if not is_right:
        raise ValueError("a server's URL is http://HOST:PORT or https://HOST, without a name or password in it (the key comes from OPENAI_API_KEY)")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _model_name(base_url: str, run: RunFiles, chosen: str | None) -> str:
    """The name that the server has for the target.

    Raises:
        ValueError: if it serves something else.
    """
    cards = served_models(base_url, api_headers())
    names = [str(card["id"]) for card in cards]
    wanted = {run.target, run.target_path} if chosen is None else {chosen}
    for card in cards:
        if wanted & {str(card["id"]), str(card.get("root"))}:
            return str(card["id"])
    remedy = "start it with this target, or say --model NAME if that is the same under another name" if chosen is None else "check --model"
    raise ValueError(f"{base_url} serves {', '.join(names)}, expected {chosen or run.target}: {remedy}")


def _engine_version(endpoint: Endpoint, engine: EngineName, console: Console) -> str:
    """The server's version; a word when it is not the one that our exports are checked with.

    Raises:
        EngineError: if it is too old.
    """
    path = {"vllm": "/version", "sglang": "/server_info"}[engine]
    try:
        trust_env = not is_loopback(endpoint.base_url)
        version = str(httpx2.get(endpoint.base_url + path, timeout=10.0, headers=api_headers(), trust_env=trust_env).json()["version"])
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        console.print(f"[yellow]the server does not say its version at {path}: is it {engine}?[/yellow]")
        return "unknown"
    checked = FORMATS["eagle3"].engines[engine].version
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if engine == "vllm" and numbers[:2] != (0, 0) and numbers < OLDEST_VLLM:
        oldest = ".".join(map(str, OLDEST_VLLM))
        raise EngineError(f"the server is vLLM {version}, too old: {oldest} or newer is needed, and {checked} is what exports are checked with")
    if version.split("+")[0] != checked:
        console.print(f"[yellow]the server is {engine} {version}; our exports are checked with {checked}[/yellow]")
    return version


async def _measure(
    endpoint: Endpoint, run: RunFiles, stops: Sequence[int], concurrency: int, engine: EngineName | None, progress: Progress
) -> ServerMeasurement:
    num_answered = 0

    def answered() -> None:
        nonlocal num_answered
        num_answered += 1
        progress.advance(1)

    async with CompletionClient(endpoint, stops, concurrency) as client:
        # The first requests allocate and compile: kept out of the time and of the counts.
        await complete_all(client, run.prompts[:concurrency], 4, concurrency, lambda: None)
        before = draft_counts(await client.metrics(), engine) if engine else None
        if before is not None:
            _check_draft_length(before, run)
        started = time.perf_counter()
        try:
            completions = await complete_all(client, run.prompts, run.max_tokens, concurrency, answered)
        except EngineError as error:
            raise EngineError(f"after {num_answered} of {len(run.prompts)} answers at concurrency {concurrency}: {error}") from None
        seconds = time.perf_counter() - started
        counts = draft_counts(await client.metrics(), engine).since(before) if engine and before else None
    return ServerMeasurement(
        seconds=seconds,
        first_token_s=_quantiles([completion.first_token_s for completion in completions]),
        later_token_s=_quantiles([completion.later_token_s for completion in completions if len(completion.token_ids) > 1]),
        request_s=_quantiles([completion.seconds for completion in completions]),
        num_retries=sum(completion.num_retries for completion in completions),
        acceptance=_acceptance(counts, run) if counts else None,
        num_verifications=counts.num_verifications if counts else 0,
        num_drafted=counts.num_drafted if counts else 0,
        outputs=[completion.token_ids for completion in completions],
    )


def _check_draft_length(counts: DraftCounts, run: RunFiles) -> None:
    """Raises ValueError where the server drafts another number of tokens; vLLM has a counter for each position from its start."""
    if counts.accepted_at and len(counts.accepted_at) != run.draft_length:
        raise ValueError(
            f"the server drafts {len(counts.accepted_at)} tokens at a time, but the run was measured with {run.draft_length}: "
            f"start it with num_speculative_tokens {run.draft_length}"
        )


def _acceptance(counts: DraftCounts, run: RunFiles) -> Acceptance:
    num = counts.num_verifications
    if num == 0:
        raise EngineError("the engine counted no verification at all: does the server run without a drafter?")
    return Acceptance(tau=1 + counts.num_accepted / num, joint_acceptance=[accepted / num for accepted in counts.accepted_at])


def _quantiles(seconds: Sequence[float]) -> Quantiles:
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) if seconds else (0.0, 0.0)
    return Quantiles(float(p50), float(p99))


async def _differences(
    endpoint: Endpoint, prompts: Sequence[list[int]], stops: Sequence[int], outputs: Sequence[list[int]], references: Sequence[list[int]]
) -> list[Difference]:
    found = []
    async with CompletionClient(endpoint, stops, 1) as client:
        for index, (prompt, output, reference) in enumerate(zip(prompts, outputs, references, strict=True)):
            if output == reference:
                continue
            shared = zip(output, reference, strict=False)
            position = next((place for place, (a, b) in enumerate(shared) if a != b), min(len(output), len(reference)))
            found.append(Difference(index, position, await client.top_two_gap(prompt + reference[:position])))
    return found
