"""Conversations whose answers the target wrote itself.

    python -m data.regenerate SOURCE... OUT.jsonl --server http://localhost:8000/v1 --model NAME
    python -m data.regenerate SOURCE... OUT.jsonl --target MODEL

Place in the flow: sources (data/sources.py) -> `Questions` -> data/rewrite_server.py or data/rewrite_local.py -> OUT.jsonl, a source for any recipe.
A recipe can have the first turns answered by itself: data/regenerate_stage.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from data.columns import ColumnConfig
from data.conversations import read_conversations
from data.openai_client import ServerConfig
from data.report import DataReport
from data.rewrite import Questions, RewriteChoices
from data.rewrite_server import Sampling, check_server, rewrite_through
from data.rewritten_file import RewrittenFile

_OWN_FIELDS = ("model", "messages", "stream", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed")


@dataclass(frozen=True)
class RegenerateConfig:
    """Rewrites the assistant turns of conversations with the target.

    Each user turn is answered given the target's own earlier answers, through an OpenAI-compatible server (--server, --model) or here with
    transformers (--target). OUT.jsonl is a source for any recipe: --data.sources OUT.jsonl. Started again after any interruption, the same command
    goes on. A server's key is read from the environment variable OPENAI_API_KEY.

    Attributes:
        paths: sources (data/sources.py), then the output.
        server: URL of the server, for example http://localhost:8000/v1.
        model: name under which the server serves the target.
        target: folder or Hub id of the target, to answer here instead, greedily.
        dtype: of --target; "auto" is what its config says.
        concurrency: requests in flight at most.
        batch_sequences: answers that --target decodes together.
        temperature: 0 is greedy.
        top_p: share of the probability that is drawn from.
        seed: makes what is drawn repeatable; none leaves it to the server.
        max_new_tokens: longest answer.
        extra_body: JSON object with further fields of every request, for example '{"chat_template_kwargs": {"enable_thinking": false}}'.
        choices: what is kept.
        columns: which columns of the sources hold the conversation, where their names are not the usual ones.
        max_conversations: reading stops after so many usable conversations.
        timeout_s: longest time for one answer.
        max_retries: times that a request is asked again.
        first_wait_s: before the first of them; it doubles each time, up to 30 s.
        start_anew: replace an output that is there.
        strict: whether a damaged source is an error instead of a warning.
    """

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE... OUT.jsonl")]
    server: str | None = None
    model: str | None = None
    target: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    concurrency: int = 32
    batch_sequences: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 2048
    extra_body: str = "{}"
    choices: Annotated[RewriteChoices, tyro.conf.arg(name="")] = field(default_factory=RewriteChoices)
    columns: ColumnConfig = field(default_factory=ColumnConfig)
    max_conversations: int | None = None
    timeout_s: float = 600.0
    max_retries: int = 6
    first_wait_s: float = 1.0
    start_anew: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if len(self.paths) < 2:
            raise ValueError("expected at least one source and the output: python -m data.regenerate SOURCE... OUT.jsonl")
        if not self.paths[-1].endswith(".jsonl"):
            raise ValueError(f"the last argument is the output, and {self.paths[-1]!r} does not end in .jsonl")
        for source in self.paths[:-1]:
            if self.out.resolve() == Path(source).resolve():
                raise ValueError(f"{self.out} is both a source and the output, which would replace it: name another output")
            if Path(source).resolve() in self.out.resolve().parents:
                raise ValueError(f"{self.out} is in the source {source}, which would be read with it the next time: name another place")
        if (self.server is None) == (self.target is None):
            raise ValueError("name either --server URL --model NAME or --target MODEL: who answers?")
        if (self.server is None) != (self.model is None):
            raise ValueError("--server and --model go together: --model is the name under which the server serves the target")
        if self.target is not None and (self.temperature, self.top_p, self.seed, self.extra()) != (0.0, 1.0, None, {}):
            raise ValueError("--target answers greedily: --temperature, --top-p, --seed and --extra-body need --server")
        if self.server is not None and self.dtype != "auto":
            raise ValueError("--dtype has no effect with --server: the server has its own")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1 or self.batch_sequences < 1:
            raise ValueError(
                f"temperature is {self.temperature}, top-p {self.top_p}, max-new-tokens {self.max_new_tokens}, batch-sequences "
                f"{self.batch_sequences}: expected at least 0, more than 0 and at most 1, at least 1, at least 1"
            )
        if self.max_conversations is not None and self.max_conversations < 1:
            raise ValueError(f"max-conversations is {self.max_conversations}, expected at least 1")
        self.who_answers()
        self.extra()

    @property
    def out(self) -> Path:
        return Path(self.paths[-1])

    def who_answers(self) -> ServerConfig | None:
        """The server; None where it is --target."""
        if self.server is None or self.model is None:
            return None
        return ServerConfig(self.server, self.model, self.concurrency, self.timeout_s, self.max_retries, self.first_wait_s)

    def extra(self) -> dict[str, Any]:
        try:
            extra = json.loads(self.extra_body)
        except ValueError as error:
            raise ValueError(f"--extra-body is no JSON ({error}): {self.extra_body[:100]!r}") from None
        if not isinstance(extra, dict):
            raise ValueError(f"--extra-body is {self.extra_body[:100]!r}, expected a JSON object")
        if own := sorted(set(extra) & set(_OWN_FIELDS)):
            raise ValueError(f"--extra-body holds {', '.join(own)}, for which there are options of their own, or which cannot be chosen")
        return extra

    def settings(self) -> dict[str, Any]:
        """What the answers depend on: an output is gone on with only where all of it is the same. Not where the server stands."""
        who = {"model": self.model} if self.server is not None else {"target": self.target, "dtype": self.dtype}
        names = ("temperature", "top_p", "seed", "max_new_tokens")
        drawn = {name: value for name, value in dataclasses.asdict(self).items() if name in names}
        read = {"sources": list(self.paths[:-1])} | ({"columns": dataclasses.asdict(self.columns)} if self.columns.is_set else {})
        return {**read, **who, **drawn, "extra_body": self.extra(), **dataclasses.asdict(self.choices)}


def regenerate_conversations(config: RegenerateConfig) -> dict[str, Any]:
    """Runs the command; returns the report.

    Raises:
        ValueError: if a setting, a source, the output or the server is not as it must be; what is finished is in the output.
    """
    started = time.monotonic()
    questions, source = _read_questions(config)
    server = config.who_answers()
    if config.start_anew and server is not None:
        check_server(server)  # before an earlier output is emptied
    output = RewrittenFile.open(config.out, config.settings(), config.start_anew)
    try:
        waiting = [item for item in questions if item.key not in output]
        if len(waiting) < len(questions):
            print(f"regenerate: {len(questions) - len(waiting):,} of {len(questions):,} conversations are done before", flush=True)
        try:
            if waiting:
                _answer(config, waiting, output)
        except BaseException:
            output.save_report(is_finished=False)
            raise
        report = output.finish([item.key for item in questions], source)
    finally:
        output.close()
    _print_report(report, config.out, output, time.monotonic() - started)
    num_others = output.num_records - sum(item.key not in output.failures for item in questions)
    if num_others:
        print(f"  {num_others:,} records answer questions that are asked no more, and stay: --start-anew leaves them out", flush=True)
    if not output.num_records:
        example = next(iter(output.failures.values()))
        raise ValueError(f"no conversation was answered; {example.id}: {example.reason} ({example.message})")
    return report


def _read_questions(config: RegenerateConfig) -> tuple[list[Questions], dict[str, Any]]:
    """What is asked, each once, and what became of the sources' records."""
    report = DataReport()
    found: dict[str, Questions] = {}
    num_repeated = num_read = 0
    for source in config.paths[:-1]:
        for conversation in read_conversations(source, report, strict=config.strict, columns=config.columns):
            questions = Questions.of(conversation, config.choices)
            num_repeated += questions.key in found
            found.setdefault(questions.key, questions)
            num_read += 1
            if num_read == config.max_conversations:
                return list(found.values()), _source_facts(report, num_repeated)
    if not found:
        raise ValueError(f"no conversation can be used: {report.summary()}")
    return list(found.values()), _source_facts(report, num_repeated)


def _source_facts(report: DataReport, num_repeated: int) -> dict[str, Any]:
    return {
        "num_read": report.num_read,
        "num_kept": report.num_kept,
        "left_out": {reason: tally.count for reason, tally in report.left_out.items()},
        "num_repeated_questions": num_repeated,
    }


def _answer(config: RegenerateConfig, waiting: list[Questions], output: RewrittenFile) -> None:
    server = config.who_answers()
    if server is not None:
        sampling = Sampling(config.temperature, config.top_p, config.seed, config.max_new_tokens, config.extra())
        rewrite_through(server, waiting, config.choices, sampling, output)
        return
    # Only here: a server needs neither torch nor the seconds of importing it.
    import torch

    from data.rewrite_local import rewrite_by
    from data.target import Target, TargetConfig

    assert config.target is not None
    target = Target.load(TargetConfig(config.target, dtype=config.dtype), "cuda" if torch.cuda.is_available() else "cpu")
    rewrite_by(target, waiting, config.choices, config.max_new_tokens, config.batch_sequences, output)


def _print_report(report: Mapping[str, Any], path: Path, output: RewrittenFile, seconds: float) -> None:
    counts = {"conversations": "num_conversations", "turns": "num_turns", "new tokens": "num_new_tokens", "cut off": "num_cut_off"}
    counts |= {"with thinking": "num_thinking", "asked again": "num_retries"}
    print(f"{path}: " + ", ".join(f"{label} {report[name]:,}" for label, name in counts.items()) + f"; {seconds:.0f} s", flush=True)
    for label, name in (("ended before their last question", "ended_early"), ("without a record", "failed")):
        if report[name]:
            print(f"  {label}: " + ", ".join(f"{reason} {count:,}" for reason, count in report[name].items()), flush=True)
    again = Counter(failure.is_final for failure in output.failures.values())[False]
    if again:
        print(f"  {again:,} of them failed by the server's fault: the same command asks them again", flush=True)


def main(args: list[str] | None = None) -> int:
    """0 when everything is done, 2 with one line on stderr when it cannot be, 130 when interrupted."""
    config: RegenerateConfig | None = None
    try:
        config = tyro.cli(RegenerateConfig, args=args, prog="python -m data.regenerate")
        regenerate_conversations(config)
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        where = f"; what is finished is in {config.out}, and the same command goes on" if config is not None else ""
        print(f"interrupted{where}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
