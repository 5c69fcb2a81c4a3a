"""Conversations from whatever people have, with a count of everything that is left out.

Place in the flow: data/sources.py `Record` | `Damage` -> `Conversation` -> data/tokenize.py. Turns are ShareGPT's (`conversations`:
`from`/`value`) or OpenAI's (`messages`: `role`/`content`), with any mix of their keys; pairs of prompt and response, and columns with names of
their own, are the matter of data/columns.py. What leaves a record out, and what is changed in one that is kept, is listed in data/report.py,
one rule each.

A record without an id that is a string or a whole number is named `<file>:<index>`. An id that comes again with other words is
kept: held-out splits are by id, so both fall on the same side.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from data.columns import ID_KEYS, KNOWN_COLUMNS, ColumnConfig
from data.json_records import Damage, Note, Record
from data.report import MAX_RECORD_CHARS, DataError, DataReport, printable
from data.sources import read_records

Role = Literal["system", "user", "assistant", "tool"]

# Names are compared without case. The other assistants of ShareGPT count as the assistant: their words are answers too.
_ROLE_NAMES: dict[Role, str] = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard bot chatbot model ai claude",
    "tool": "tool function function_call function_response tool_call tool_response observation",
}
ROLES: dict[str, Role] = {name: role for role, names in _ROLE_NAMES.items() for name in names.split()}
_MAX_ID_CHARS = 200


@dataclass(frozen=True)
class Turn:
    """What one side says; `content` has no white space at its ends."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Conversation:
    """At most one system turn, then user and assistant in turn, ending with the assistant."""

    id: str
    turns: tuple[Turn, ...]


class LeftOut(Exception):
    """A rule leaves the record out; the argument is the reason, a key of data/report.py `REASONS`."""


def read_conversations(
    source: str, report: DataReport, *, strict: bool = False, columns: ColumnConfig = KNOWN_COLUMNS, streaming: bool = True
) -> Iterator[Conversation]:
    """The usable conversations of a source, in its order, read only as far as they are asked for.

    Args:
        source: see data/sources.py.
        report: counts every record that is met.
        strict: whether damage to the source is an error instead of a warning.
        columns: which columns of a record hold the conversation, where their names are not the usual ones.
        streaming: see data/sources.py.

    Raises:
        DataError: if the source does not exist or cannot be read at all, or under `strict` if it is damaged; if no record of it has columns that
            fit.
    """
    report.sources.append(printable(source))
    found = _Found(printable(source), columns, report)
    for event in read_records(source, columns, streaming):
        if isinstance(event, Damage):
            _count_damage(event, report, strict)
            continue
        if isinstance(event, Note):
            report.warn(event.message)
            continue
        report.num_read += 1
        record_id = _record_id(event, columns)
        try:
            conversation, changes = _conversation(event.value, record_id, found)
            if (fingerprint := _fingerprint(conversation)) in report.fingerprints:
                raise LeftOut("duplicate")
        except LeftOut as left_out:
            report.leave_out(str(left_out), record_id)
            continue
        report.fingerprints.add(fingerprint)
        for change in changes:
            report.change(change, record_id)
        report.num_kept += 1
        yield conversation
    found.check()
    report.check()


class _Found:
    """Which columns the records of one source were read from."""

    def __init__(self, source: str, columns: ColumnConfig, report: DataReport) -> None:
        self.columns = columns
        self._source, self._report = source, report
        self._counts: dict[str, int] = {}
        self._unfit: list[str] | None = None
        self._is_fallback_said = not columns.names_a_layout

    def turns(self, record: dict[str, Any]) -> Any:
        """The turns as the record holds them; None where no column fits."""
        layout = self.columns.find(record)
        if layout is None:
            self._unfit = self._unfit or list(record)
            return None
        if not layout.is_named and not self._is_fallback_said:
            self._is_fallback_said = True
            self._report.warn(f"{self._source} has none of the columns that data.columns names: it is read by {layout.names}")
        self._report.named_columns_used |= layout.is_named
        self._counts = self._report.columns.setdefault(self._source, self._counts)
        self._counts[layout.names] = self._counts.get(layout.names, 0) + 1
        return layout.turns

    def check(self) -> None:
        """Raises DataError where no record at all has columns that fit."""
        if self._unfit is not None and not self._counts:
            raise DataError(self.columns.refusal(self._unfit, self._source))


def read_opening(value: Any) -> tuple[Turn, ...]:
    """What a record asks first: its system turn, if there is one, and the user turns before the first answer, joined.

    The record need not hold an answer. Where it does, these are the turns of `TokenizedSample.prompt_ids`.

    Raises:
        LeftOut: with the reason of the first rule that leaves it out; what comes after the first answer breaks none but those of a turn.
    """
    turns = _checked_turns(value, _Found("", KNOWN_COLUMNS, DataReport()))
    first_user = next((index for index, (role, _) in enumerate(turns) if role == "user"), len(turns))
    system = [turn for turn in turns[:first_user] if turn[0] == "system" and turn[1]]
    question = list(itertools.takewhile(lambda turn: turn[0] == "user", turns[first_user:]))
    if not question:
        raise LeftOut("one_sided")
    if not all(text for _, text in question):
        raise LeftOut("empty_turn")
    return tuple(Turn(role, text) for role, text in _join_neighbours(system + question))  # type: ignore[arg-type]


def _count_damage(damage: Damage, report: DataReport, strict: bool) -> None:
    if strict:
        raise DataError(f"{damage.message} (an error because strict is on)")
    if damage.reason is not None:
        report.num_read += damage.count
        report.leave_out(damage.reason, damage.name, damage.count)
    if damage.is_loud:
        report.warn(damage.message)


def _record_id(record: Record, columns: ColumnConfig) -> str:
    if isinstance(record.value, dict):
        for key in ID_KEYS if columns.id is None else (columns.id, *ID_KEYS):
            value = record.value.get(key)
            if (isinstance(value, str) and value.strip()) or (isinstance(value, int) and not isinstance(value, bool)):
                return printable(str(value).strip()[:_MAX_ID_CHARS])
    return record.name


def _conversation(value: Any, record_id: str, found: _Found) -> tuple[Conversation, list[str]]:
    """A record's conversation and the changes made to it.

    Raises:
        LeftOut: with the reason of the first rule that leaves it out.
    """
    turns = _checked_turns(value, found)
    changes: list[str] = []
    first_user = next((index for index, (role, _) in enumerate(turns) if role == "user"), len(turns))
    head, body = turns[:first_user], turns[first_user:]
    if any(role == "system" for role, _ in body):
        raise LeftOut("late_system_turn")
    _note(changes, "leading_assistant_dropped", any(role == "assistant" for role, _ in head))
    system = [turn for turn in head if turn[0] == "system" and turn[1]]
    _note(changes, "empty_system_dropped", any(role == "system" and not text for role, text in head))
    num_turns = len(body)
    while body and body[-1][0] == "user":
        body.pop()
    _note(changes, "trailing_user_dropped", len(body) < num_turns)
    if not body:
        raise LeftOut("one_sided")
    if not all(text for _, text in body):
        raise LeftOut("empty_turn")
    joined = _join_neighbours(system + body)
    _note(changes, "same_role_joined", len(joined) < len(system) + len(body))
    return Conversation(record_id, tuple(Turn(role, text) for role, text in joined)), changes  # type: ignore[arg-type]


def _checked_turns(value: Any, found: _Found) -> list[tuple[Role, str]]:
    turns = [_turn(turn) for turn in _turn_list(value, found)]
    if sum(len(text) for _, text in turns) > MAX_RECORD_CHARS:
        raise LeftOut("over_long")
    if any(role == "tool" for role, _ in turns):
        raise LeftOut("tool_turn")
    return turns


def _note(changes: list[str], change: str, happened: bool) -> None:
    if happened:
        changes.append(change)


def _turn_list(value: Any, found: _Found) -> list[Any]:
    if not isinstance(value, dict):
        raise LeftOut("not_an_object")
    turns = found.turns(value)
    if isinstance(turns, str):  # a text column of a Parquet file
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError):
            raise LeftOut("no_turn_list") from None
    if isinstance(turns, dict) and turns and all(isinstance(column, list) for column in turns.values()):
        # How `datasets` used to store a list of objects: an object of lists.
        if len({len(column) for column in turns.values()}) != 1:
            raise LeftOut("malformed_turn")
        turns = [dict(zip(turns, row, strict=True)) for row in zip(*turns.values(), strict=True)]
    if not isinstance(turns, list):
        raise LeftOut("no_turn_list")
    if not turns:
        raise LeftOut("empty")
    return found.columns.read_turns(value, turns)


def _turn(value: Any) -> tuple[Role, str]:
    if not isinstance(value, dict):
        raise LeftOut("malformed_turn")
    name = value.get("role") if value.get("from") is None else value["from"]
    content = value.get("content") if value.get("value") is None else value["value"]
    if not isinstance(name, str):
        raise LeftOut("malformed_turn")
    if value.get("tool_calls") or value.get("function_call"):
        return "tool", ""
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise LeftOut("unknown_role")
    if role == "tool":
        return "tool", ""
    if isinstance(content, list):
        content = "".join(_part_text(part) for part in content)
    if not isinstance(content, str):
        raise LeftOut("malformed_turn")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise LeftOut("invalid_text") from None
    return role, content.strip()


def _part_text(part: Any) -> str:
    """The text of one of OpenAI's content parts."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise LeftOut("malformed_turn")
    if part.get("type", "text") not in ("text", "input_text", "output_text"):
        raise LeftOut("unsupported_content")
    if not isinstance(part.get("text"), str):
        raise LeftOut("malformed_turn")
    return str(part["text"])


def _join_neighbours(turns: list[tuple[Role, str]]) -> list[tuple[Role, str]]:
    joined: list[tuple[Role, str]] = []
    for role, text in turns:
        if joined and joined[-1][0] == role:
            joined[-1] = (role, f"{joined[-1][1]}\n\n{text}")
        else:
            joined.append((role, text))
    return joined


def _fingerprint(conversation: Conversation) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for turn in conversation.turns:
        digest.update(f"{turn.role}\0{len(turn.content)}\0{turn.content}".encode())
    return digest.digest()
