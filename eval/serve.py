"""Serves a run's export with a real engine and compares what the engine counts with what we measured.

    python -m eval.serve runs/quickstart --engine vllm              # the engine alone: serve.json
    python -m eval.serve runs/quickstart --engine vllm --http       # its HTTP server, with 1, 2, 4 and 8 requests at once: serve_http.json

Place in the flow: a finished run (eval/served_run.py) -> this -> its serve.json, or eval/sweep.py -> its serve_http.json. The engine runs in its
own environment and its own processes (eval/vllm_worker.py); the same prompts go in twice as token ids, with the drafter and without
it. The check fails when joint acceptance differs from ours by more than `TOLERANCE` anywhere, or when an output differs from the
engine's own output without the drafter and the two best tokens were not nearly tied there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from checkpoints.serving import FORMATS
from data.vllm_engine import EngineError, engine_python, worker_environment
from eval.process_guard import start_guarded, stop_guarded
from eval.served_run import NEAR_TIE_NATS, TOLERANCE, Acceptance, RunFiles, largest_difference, read_run, stop_token_ids
from eval.sweep import SweepOptions, sweep
from eval.sweep_result import SweepResult
from eval.vllm_server import log_tail

WORKER = Path(__file__).with_name("vllm_worker.py")
VLLM_VERSION = FORMATS["eagle3"].engines["vllm"].version
_GRACE_S = 5.0


@dataclass(frozen=True)
class ServeConfig:
    """Serve a run's exported drafter with a real engine and compare acceptance and outputs.

    Attributes:
        run: the run's directory, for example runs/quickstart.
        engine: the engine; SGLang only as a server of yours (--url), with acceptance compared by tau.
        dtype: what both models compute in. float32 is exactly comparable with a report measured in float32.
        max_num_seqs: sequences that the engine decodes together; 1 is what drafting is for, and the tokens/s of the papers. Not with --http.
        timeout_s: longest time for one of the engine's two runs; with --http, until a server is healthy.
        http: measure a real `vllm serve` on this machine through its OpenAI API.
        concurrency: with --http: requests at once, one measurement each (default 1 2 4 8).
        url: measure this server of yours, which has the drafter, for example http://localhost:8000. A key is taken from OPENAI_API_KEY.
        plain_url: with --url: the same without the drafter, for the speed-up.
        model: with --url: the name that the server has for the run's target, where it is another.
    """

    run: tyro.conf.Positional[Path]
    engine: Literal["vllm", "sglang"] = "vllm"
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    max_num_seqs: int = 1
    timeout_s: float = 3600.0
    http: bool = False
    concurrency: tuple[int, ...] = ()
    url: str | None = None
    plain_url: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.timeout_s <= 0:
            raise ValueError(f"max-num-seqs is {self.max_num_seqs} and timeout-s {self.timeout_s}, expected positive numbers")
        if any(number < 1 for number in self.concurrency):
            raise ValueError(f"concurrency is {' '.join(map(str, self.concurrency))}, expected positive numbers")
        if self.is_http and self.max_num_seqs != 1:
            raise ValueError("max-num-seqs has no effect with --http or --url: say --concurrency")
        if self.concurrency and not self.is_http:
            raise ValueError("concurrency has no effect without --http or --url")
        if self.url is None and (self.plain_url or self.model):
            raise ValueError("plain-url and model have no effect without --url")
        if self.engine == "sglang" and self.url is None:
            raise ValueError(
                "SGLang is measured as a server of yours: start it with `python -m sglang.launch_server ... --enable-metrics` and say --url http://HOST:PORT"
            )

    @property
    def is_http(self) -> bool:
        return self.http or self.url is not None


@dataclass(frozen=True)
class ServeResult:
    """serve.json, the same keys for every recipe."""

    engine: str
    engine_version: str
    ours: Acceptance
    measured: Acceptance
    num_outputs: int
    num_identical_outputs: int
    num_near_ties: int
    tokens_per_s: float
    tokens_per_s_plain: float

    @property
    def largest_difference(self) -> float:
        return largest_difference(self.ours, self.measured)

    @property
    def num_different_outputs(self) -> int:
        """Outputs that the drafter changed, near-ties left out."""
        return self.num_outputs - self.num_identical_outputs - self.num_near_ties

    @property
    def is_passed(self) -> bool:
        return self.largest_difference <= TOLERANCE and self.num_different_outputs == 0


def run_worker(title: str, job: dict[str, Any], log: Path, timeout_s: float, console: Console) -> dict[str, Any]:
    """Runs one job in the engine's environment; its output goes to the end of `log`.

    Raises:
        EngineError: if it fails or takes longer than `timeout_s`, with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="headstart-serve-") as scratch, log.open("a") as log_file:
        job_path, result_path = Path(scratch, "job.json"), Path(scratch, "result.json")
        job_path.write_text(json.dumps(job))
        log_file.write(f"==== {title}\n")
        log_file.flush()
        # -I keeps our folders, and whatever PYTHONPATH names, away from the engine's imports.
        command = [str(engine_python()), "-I", str(WORKER), str(job_path), str(result_path)]
        guard = start_guarded(command, log_file, worker_environment(), Path(scratch), _GRACE_S)
        try:
            exit_code = _wait(guard, title, timeout_s, console)
        finally:
            stop_guarded(guard)
        if exit_code != 0 or not result_path.is_file():
            reason = f"took longer than {timeout_s:g} s" if exit_code is None else f"ended with code {exit_code}"
            raise EngineError(f"vLLM {title} {reason}. The end of {log}:\n\n{log_tail(log)}")
        return json.loads(result_path.read_text())


def _wait(process: subprocess.Popen[bytes], title: str, timeout_s: float, console: Console) -> int | None:
    """The exit code, or None when the time is over."""
    started = time.monotonic()
    with console.status(f"vLLM {title}") as status:
        while (elapsed := time.monotonic() - started) < timeout_s:
            status.update(f"vLLM {title}: {elapsed:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=min(1.0, timeout_s - elapsed))
    return None


def serve_check(config: ServeConfig, console: Console) -> ServeResult:
    """Runs the engine with the drafter and without it, and writes serve.json.

    Raises:
        ValueError: if the run is not complete.
        EngineError: if the engine is not there or fails.
    """
    run = read_run(config.run)
    engine_python()
    log = config.run / "serve.log"
    log.write_text("")
    console.print(f"{len(run.prompts)} prompts to vLLM {VLLM_VERSION}, {config.dtype}, {run.draft_length} drafts; log in {log}")
    drafted = run_worker("with the drafter", _job(config, run, None), log, config.timeout_s, console)
    plain = run_worker("without it", _job(config, run, drafted["outputs"]), log, config.timeout_s, console)
    result = _compare(config, run, drafted, plain)
    (config.run / "serve.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    _print_result(result, run, drafted, plain, console)
    return result


def http_check(config: ServeConfig, console: Console) -> SweepResult:
    """Measures HTTP servers with the drafter and without it, and writes serve_http.json and serve_http.png.

    Raises:
        ValueError: if the run is not complete, or a server does not fit it.
        EngineError: if a server is not there or fails.
    """
    options = SweepOptions(
        concurrency=config.concurrency or (1, 2, 4, 8),
        dtype=config.dtype,
        timeout_s=config.timeout_s,
        engine=config.engine,
        url=config.url,
        plain_url=config.plain_url,
        model=config.model,
    )
    return sweep(config.run, read_run(config.run), options, console)


def _job(config: ServeConfig, run: RunFiles, drafted_outputs: list[list[int]] | None) -> dict[str, Any]:
    """The worker's job: with the drafter, or (given its outputs) without it."""
    return {
        "target": run.target_path,
        "revision": run.revision,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": run.max_model_len,
        "max_tokens": run.max_tokens,
        "stop_token_ids": stop_token_ids(run.target, run.revision),
        "prompts": run.prompts,
        "speculative": run.speculative if drafted_outputs is None else None,
        "reference_outputs": drafted_outputs,
    }


def _compare(config: ServeConfig, run: RunFiles, drafted: dict[str, Any], plain: dict[str, Any]) -> ServeResult:
    counters = drafted["counters"]
    num_drafts = counters["num_drafts"]
    if num_drafts == 0:
        raise EngineError("vLLM counted no draft at all: did it ignore the speculative config? See serve.log")
    num_tokens, num_tokens_plain = (sum(map(len, outputs["outputs"])) for outputs in (drafted, plain))
    return ServeResult(
        engine=config.engine,
        engine_version=drafted["engine_version"],
        ours=run.ours,
        measured=Acceptance(
            tau=1 + counters["num_accepted"] / num_drafts,
            joint_acceptance=[accepted / num_drafts for accepted in counters["accepted_per_position"]],
        ),
        num_outputs=len(run.prompts),
        num_identical_outputs=sum(a == b for a, b in zip(drafted["outputs"], plain["outputs"], strict=True)),
        num_near_ties=sum(gap["gap"] < NEAR_TIE_NATS[config.dtype] for gap in plain["gaps"]),
        tokens_per_s=num_tokens / drafted["seconds"],
        tokens_per_s_plain=num_tokens_plain / plain["seconds"],
    )


def _print_result(result: ServeResult, run: RunFiles, drafted: dict[str, Any], plain: dict[str, Any], console: Console) -> None:
    table = Table("joint acceptance", "ours", f"{result.engine} {result.engine_version}", "difference")
    rows = zip(result.ours.joint_acceptance, result.measured.joint_acceptance, strict=True)
    for position, (ours, measured) in enumerate(rows, start=1):
        table.add_row(f"draft {position}", f"{ours:.4f}", f"{measured:.4f}", f"{measured - ours:+.4f}")
    tau_difference = result.measured.tau - result.ours.tau
    table.add_row("tau", f"{result.ours.tau:.4f}", f"{result.measured.tau:.4f}", f"{tau_difference:+.4f}", end_section=True)
    console.print(table)
    speedup = result.tokens_per_s / result.tokens_per_s_plain
    console.print(
        f"{result.tokens_per_s:.1f} tokens/s with the drafter, {result.tokens_per_s_plain:.1f} without: {speedup:.2f} times\n"
        f"{result.num_identical_outputs} of {result.num_outputs} outputs identical with and without the drafter, "
        f"{result.num_near_ties} near-ties; {drafted['counters']['num_drafts']} verifications counted"
    )
    as_walked = sum(output == answer for output, answer in zip(plain["outputs"], run.answers, strict=True))
    console.print(f"{as_walked} of {result.num_outputs} outputs without the drafter are the answers that our acceptance is of")
    for gap in plain["gaps"]:
        console.print(
            f"  prompt {gap['prompt']} differs from token {gap['position']}: the best two are {gap['gap']:.2g} nats apart"
        )
    if result.is_passed:
        console.print(f"[green]passed[/green]: joint acceptance within {TOLERANCE} everywhere, no output changed")
    else:
        console.print(
            f"[red]failed[/red]: joint acceptance differs by up to {result.largest_difference:.4f} (allowed: {TOLERANCE}), "
            f"{result.num_different_outputs} outputs changed (allowed: none)"
        )


def _end_on_sigterm(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)  # as an exception, so that the engine is ended on the way out


def main(args: list[str] | None = None) -> int:
    """0 when the check passes, 1 when it fails, 2 when it could not be made, 130 when interrupted."""
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    console = Console()
    try:
        config = tyro.cli(ServeConfig, args=args, prog="python -m eval.serve")
        return 0 if (http_check if config.is_http else serve_check)(config, console).is_passed else 1
    except (ValueError, OSError, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the engine is ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
