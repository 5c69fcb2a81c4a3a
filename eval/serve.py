"""Serves a run's export with a real engine and compares what the engine counts with what we measured.

    python -m eval.serve runs/quickstart --engine vllm

Place in the flow: config.json, export/, answers/ and report.json of a run -> this -> its serve.json. The engine runs in its own
environment and its own processes (eval/vllm_worker.py); the same prompts go in twice as token ids, with the drafter and without
it. The check fails when joint acceptance differs from ours by more than `TOLERANCE` anywhere, or when an output differs from the
engine's own output without the drafter and the two best tokens were not nearly tied there.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from checkpoints.export import validate_export
from checkpoints.serving import FORMATS, format_of_config
from data.target_files import TargetConfig, target_fingerprint
from data.vllm_engine import EngineError, engine_python, worker_environment

TOLERANCE = 0.01
# Two log-probabilities closer than this can change places when the same sum is taken in another order.
NEAR_TIE_NATS = {"float32": 1e-3, "bfloat16": 0.25, "auto": 0.25}
WORKER = Path(__file__).with_name("vllm_worker.py")
VLLM_VERSION = FORMATS["eagle3"].engines["vllm"].version
LOG_TAIL_LINES = 20


@dataclass(frozen=True)
class ServeConfig:
    """Serve a run's exported drafter with a real engine and compare acceptance and outputs.

    Attributes:
        run: the run's directory, for example runs/quickstart.
        engine: the engine.
        dtype: what both models compute in. float32 is exactly comparable with a report measured in float32.
        max_num_seqs: sequences that the engine decodes together; 1 is what drafting is for, and the tokens/s of the papers.
        timeout_s: longest time for one of the engine's two runs.
    """

    run: tyro.conf.Positional[Path]
    engine: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    max_num_seqs: int = 1
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.timeout_s <= 0:
            raise ValueError(f"max-num-seqs is {self.max_num_seqs} and timeout-s {self.timeout_s}, expected positive numbers")


@dataclass(frozen=True)
class RunFiles:
    """What the check reads of a run.

    Attributes:
        target: path or Hub id of the target; `revision` belongs to it.
        prompts: token ids of the held-out prompts.
        answers: the target's own greedy answers, as our evaluation walked them.
        ours: `tau` and `joint_acceptance` of report.json.
    """

    target: str
    revision: str | None
    export: Path
    vllm_method: str
    prompts: list[list[int]]
    answers: list[list[int]]
    draft_length: int
    ours: Acceptance


@dataclass(frozen=True)
class Acceptance:
    """Mean acceptance length, and the share of verifications in which drafts 0..p were all accepted."""

    tau: float
    joint_acceptance: list[float]


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
        pairs = zip(self.ours.joint_acceptance, self.measured.joint_acceptance, strict=True)
        return max(abs(ours - measured) for ours, measured in pairs)

    @property
    def num_different_outputs(self) -> int:
        """Outputs that the drafter changed, near-ties left out."""
        return self.num_outputs - self.num_identical_outputs - self.num_near_ties

    @property
    def is_passed(self) -> bool:
        return self.largest_difference <= TOLERANCE and self.num_different_outputs == 0


def read_run(run: Path) -> RunFiles:
    """Reads and checks the files of a run.

    Raises:
        ValueError: if one is missing or does not fit the others.
    """
    target = _read_json(run / "config.json")["target"]
    report = _read_json(run / "report.json")
    if "backbone" in report:  # the drafter was trained with its target, and fits no other
        target = {"model": str(run / "backbone"), "revision": None}
        fits, found = _read_json(run / "export" / "headstart.json")["target_fingerprint"], target_fingerprint(TargetConfig(target["model"]))
        if fits != found:
            raise ValueError(f"{run}/export fits the target {fits}, but {run}/backbone is {found}: run the recipe to its end again")
    config = validate_export(run / "export")
    path = run / ("backbone_answers" if "backbone" in report else "answers") / "answers.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing: run the recipe to its end, it answers the held-out prompts")
    answers = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    ours = Acceptance(tau=report["tau"], joint_acceptance=report["joint_acceptance"])
    if len(answers) != report["num_prompts"] or len(ours.joint_acceptance) != report["draft_length"]:
        raise ValueError(
            f"{run}/report.json speaks of {report['num_prompts']} prompts and {report['draft_length']} drafts, but there are "
            f"{len(answers)} answers and {len(ours.joint_acceptance)} acceptances: run the recipe again to evaluate anew"
        )
    return RunFiles(
        target=target["model"],
        revision=target["revision"],
        export=(run / "export").resolve(),
        vllm_method=format_of_config(config).vllm_method,
        prompts=[answer["prompt_ids"] for answer in answers],
        answers=[answer["answer_ids"] for answer in answers],
        draft_length=report["draft_length"],
        ours=ours,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: run the recipe to its end first")
    return json.loads(path.read_text())


def stop_token_ids(target: str, revision: str | None) -> list[int]:
    """The tokens that end an answer, as for `Target`: the generation config's (else the config's) and the tokenizer's own."""
    commit = revision or "main"
    try:
        eos = GenerationConfig.from_pretrained(target, revision=commit).eos_token_id
    except OSError:  # no such file
        eos = AutoConfig.from_pretrained(target, revision=commit).get_text_config().eos_token_id
    configured = eos if isinstance(eos, (list, tuple)) else [eos]
    tokenizer = AutoTokenizer.from_pretrained(target, revision=commit)
    return sorted({token for token in [*configured, tokenizer.eos_token_id] if token is not None})


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
        # -I keeps our folders, and whatever PYTHONPATH names, away from the engine's imports. Its own session is a process group
        # that can be ended as a whole.
        command = [str(engine_python()), "-I", str(WORKER), str(job_path), str(result_path)]
        process = subprocess.Popen(
            command, stdout=log_file, stderr=subprocess.STDOUT, env=worker_environment(), cwd=scratch, start_new_session=True
        )
        try:
            exit_code = _wait(process, title, timeout_s, console)
        finally:
            _end_group(process)
        if exit_code != 0 or not result_path.is_file():
            reason = f"took longer than {timeout_s:g} s" if exit_code is None else f"ended with code {exit_code}"
            raise EngineError(f"vLLM {title} {reason}. The end of {log}:\n\n{_tail(log)}")
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


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the worker and whatever it started."""
    with contextlib.suppress(ProcessLookupError):  # the usual case: nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"    {line[:300]}" for line in lines)


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


def _job(config: ServeConfig, run: RunFiles, drafted_outputs: list[list[int]] | None) -> dict[str, Any]:
    """The worker's job: with the drafter, or (given its outputs) without it."""
    speculative = {
        "method": run.vllm_method,
        "model": str(run.export),
        "num_speculative_tokens": run.draft_length,
    }
    target = Path(run.target)
    # An answer that is shorter than the longest ended with a stop token, so one limit gives the engine all the same ends.
    max_tokens = max(len(answer) for answer in run.answers)
    return {
        "target": str(target.resolve()) if target.exists() else run.target,
        "revision": run.revision,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": max(len(prompt) for prompt in run.prompts) + max_tokens + run.draft_length + 1,
        "max_tokens": max_tokens,
        "stop_token_ids": stop_token_ids(run.target, run.revision),
        "prompts": run.prompts,
        "speculative": speculative if drafted_outputs is None else None,
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
        return 0 if serve_check(config, console).is_passed else 1
    except (ValueError, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the engine is ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
