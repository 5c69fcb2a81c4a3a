"""Prompts by domain, for the comparison of decoding methods: what a method is worth depends on what is asked.

Place in the flow: prompt files -> `DomainPrompts` (token ids, ready for the target) -> eval/compare.py. A source is `NAME=PATH`, or a PATH whose stem
names the domain. Whatever else data/sources.py reads (a folder, package:NAME, a Hub dataset) can stand after `NAME=`. Two shapes of record:

    {"turns": ["...", ...]}                 question sets (MT-bench, HumanEval, ...): the FIRST turn is asked, later ones are not
    {"conversations" | "messages": [...]}   ShareGPT and OpenAI: what is asked before the first answer, with its system turn

No source at all means the four sets of eval/prompt_sets/. A prompt is rendered as a run's held-out prompts are: white space at its ends dropped, the
chat template with its generation prompt. At most the first 1,000 usable prompts of a source are looked at, and those that are taken lie evenly among
them, because sets such as MT-bench are sorted by category. Every record that is met and cannot be asked is counted under a reason.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.chat import ChatTokenizer, SampleError
from data.conversations import LeftOut, read_opening
from data.json_records import Damage, Note
from data.report import REASONS, DataError, Tally, printable
from data.sources import read_records

SHIPPED = Path(__file__).with_name("prompt_sets")
SHIPPED_DOMAINS = ("chat", "code", "summarisation", "maths")
# File names of the field's sets, and what they are sets of.
KNOWN_STEMS = {"mt_bench": "chat", "humaneval": "code", "gsm8k": "maths", "sum": "summarisation"}
# Why a record is not asked: the rules of data/report.py, in other words where they mean something else here.
PROMPT_REASONS = {
    **REASONS,
    "no_turn_list": "no list under `turns`, `conversations` or `messages`",
    "malformed_turn": "a turn is not a text (in `turns`), or not an object with a role and a text",
    "one_sided": "no user turn",
    "duplicate": "the same prompt as an earlier record of the domain",
    "too_long": "more tokens than allowed, the chat template's included",
}

_MAX_USABLE = 1000
_NAMED = re.compile(r"([^/\\=]+)=(.+)", re.DOTALL)


@dataclass(frozen=True)
class DomainPrompts:
    """What is asked of one domain.

    Attributes:
        domain: its name.
        prompts: token ids, generation prompt included; all different.
        num_left_out: records that could not be asked, by reason, a key of `PROMPT_REASONS`.
        first_left_out: the first of each, as `FILE:INDEX`, counted from 0.
    """

    domain: str
    prompts: tuple[tuple[int, ...], ...]
    num_left_out: Mapping[str, int]
    first_left_out: Mapping[str, str]

    def describe_left_out(self) -> str:
        """The counts in one line, with rule and first place of each; empty where nothing was left out."""
        return "; ".join(
            f"{count} {reason} ({PROMPT_REASONS[reason]}; first: {self.first_left_out[reason]})" for reason, count in self.num_left_out.items()
        )


def read_prompts(sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_per_domain: int, max_prompt_tokens: int) -> list[DomainPrompts]:
    """Prompts of each source, in the order of the sources; what had to be left out is also said on stderr.

    Args:
        sources: see above; the shipped sets if there are none.
        tokenizer: the target's, fast, with its chat template.
        num_per_domain: most prompts of a domain.
        max_prompt_tokens: longer prompts are left out, not cut.

    Raises:
        ValueError: if a source cannot be read or holds no usable prompt, or two sources are of one domain.
    """
    for name, value in (("num_per_domain", num_per_domain), ("max_prompt_tokens", max_prompt_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    chat = ChatTokenizer(tokenizer)
    return [
        _read_domain(domain, source, chat, num_per_domain, max_prompt_tokens)
        for domain, source in _sources_by_domain(sources or [f"{name}={SHIPPED / name}.jsonl" for name in SHIPPED_DOMAINS]).items()
    ]


def _sources_by_domain(sources: Sequence[str]) -> dict[str, str]:
    """Where each domain is read from, all checked before anything is read."""
    found: dict[str, str] = {}
    for source in sources:
        domain, path = _split_source(source)
        if domain in found:
            raise ValueError(
                f"the prompt sources {found[domain]} and {path} are both of the domain {domain!r}, expected one source for each: "
                f"name one of them otherwise, as in {domain}-2={path}"
            )
        found[domain] = path
    return found


def _split_source(source: str) -> tuple[str, str]:
    """(domain, what data/sources.py reads)."""
    is_path = os.path.exists(os.path.expanduser(source))
    if not is_path and (named := _NAMED.fullmatch(source)) and named[1].strip():
        return printable(named[1].strip()), named[2]
    stem = Path(source).stem
    if not is_path and not Path(source).suffix:
        raise ValueError(
            f"the prompt source {source!r} is not there, expected the path of a JSONL file, or NAME=SOURCE with the domain's name before a path, "
            "package:NAME or Hub dataset"
        )
    return printable(KNOWN_STEMS.get(stem.lower(), stem)), source


def _read_domain(domain: str, source: str, chat: ChatTokenizer, num_prompts: int, max_prompt_tokens: int) -> DomainPrompts:
    usable: dict[tuple[int, ...], None] = {}
    left_out: dict[str, Tally] = {}
    num_read = 0
    try:
        for event in read_records(source):
            if isinstance(event, Note):
                _warn(event.message)
                continue
            if isinstance(event, Damage):
                num_read += event.count if event.reason else 0
                _leave_out(left_out, event.reason, event.name, event.count)
                if event.is_loud:
                    _warn(event.message)
                continue
            num_read += 1
            prompt, reason = _prompt(event.value, event.name, chat, max_prompt_tokens)
            if prompt in usable:
                reason = "duplicate"
            _leave_out(left_out, reason, event.name)
            if reason is None:
                usable[prompt] = None
                if len(usable) == _MAX_USABLE:
                    break
    except DataError as error:
        raise ValueError(f"the prompts of the domain {domain!r} cannot be read: {error}") from error
    counts = {reason: tally.count for reason, tally in left_out.items()}
    chosen = _evenly(list(usable), num_prompts)
    found = DomainPrompts(domain, tuple(chosen), counts, {reason: tally.example_id for reason, tally in left_out.items()})
    if not chosen:
        raise ValueError(
            f"{source} has no usable prompt for the domain {domain!r}: of {num_read} records {found.describe_left_out() or 'none'}. Expected records "
            f'such as {{"turns": ["a question"]}}, or ShareGPT or OpenAI conversations, of at most {max_prompt_tokens} tokens: correct the file, '
            "allow longer prompts, or name no prompts at all to use the shipped ones"
        )
    if counts:
        _warn(f"prompts of the domain {domain!r}, {source}: of {num_read} records these are left out: {found.describe_left_out()}")
    return found


def _prompt(value: Any, name: str, chat: ChatTokenizer, max_prompt_tokens: int) -> tuple[tuple[int, ...], str | None]:
    """Token ids of what a record asks and None; or nothing and the reason why it cannot be asked."""
    try:
        if isinstance(value, dict) and "turns" in value:
            value = {"messages": _first_turn(value["turns"])}
        prompt = tuple(chat.prompt(name, read_opening(value)))
    except LeftOut as left_out:
        return (), str(left_out)
    except SampleError as error:
        return (), error.reason
    return (prompt, None) if len(prompt) <= max_prompt_tokens else ((), "too_long")


def _first_turn(turns: Any) -> list[dict[str, Any]]:
    """The first of a question's turns as a message."""
    if not isinstance(turns, list):
        raise LeftOut("no_turn_list")
    if turns and not isinstance(turns[0], str):
        raise LeftOut("malformed_turn")
    return [{"role": "user", "content": turn} for turn in turns[:1]]


def _evenly(prompts: list[tuple[int, ...]], num_wanted: int) -> list[tuple[int, ...]]:
    """At most so many prompts, from the first on at equal distances."""
    num_taken = min(num_wanted, len(prompts))
    return [prompts[number * len(prompts) // num_taken] for number in range(num_taken)]


def _leave_out(left_out: dict[str, Tally], reason: str | None, name: str, count: int = 1) -> None:
    """Counts records under a reason, if there is one."""
    if reason is not None:
        assert reason in PROMPT_REASONS, reason
        left_out.setdefault(reason, Tally(example_id=name)).count += count


def _warn(message: str) -> None:
    print(f"WARNING: {message}", file=sys.stderr, flush=True)
