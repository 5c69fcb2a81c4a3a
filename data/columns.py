"""Which columns of a record hold the conversation: the names that people use, or those that the user says.

Place in the flow: a record of data/sources.py -> its turns -> data/conversations.py. A column is a key of a JSON object, too. Known without
being named, in this order:

    conversations, messages, conversation, dialogue, dialog     a list of turns
    prompt -> response | completion                             one question and its answer, and so on
    instruction [+ input | context] -> output | response        Alpaca, Dolly: the second follows the first after a blank line
    question -> answer | response;  query -> response;  problem -> solution;  input -> output
    system | system_prompt                                      beside a pair: its system turn

The two sides of a pair may be lists of turns themselves. For anything else the user names the columns (`--data.columns.turns dialogue_turns`).
A source that has none of the named ones is read by the known names, and says so: several sources need not look alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from data.report import DataError, printable

TURN_LIST_KEYS = ("conversations", "messages", "conversation", "dialogue", "dialog")
ID_KEYS = ("id", "conversation_id", "uuid", "prompt_id")

_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("problem", "solution"),
    ("input", "output"),
)
_CONTEXT_KEYS = ("input", "context")  # of an instruction
_SYSTEM_KEYS = ("system", "system_prompt")
_MAX_SHOWN = 30


class Layout(NamedTuple):
    """Where a record's conversation was found.

    Attributes:
        names: the columns, as a reader of the data report wants to see them.
        turns: as the record holds them: a list of turns, JSON text of one, or an object of lists.
        is_named: whether the user has named the columns.
    """

    names: str
    turns: Any
    is_named: bool


@dataclass(frozen=True)
class ColumnConfig:
    """The columns of your data, where they have names of their own; the usual names are known (data/columns.py).

    Attributes:
        turns: the column that holds the list of turns; turns that are plain texts are the user's and the assistant's in turn.
        role: in a turn, who speaks.
        content: in a turn, what is said.
        user_role: what `role` says for the user.
        assistant_role: what `role` says for the assistant.
        prompt: the column of the question, where a record is one question and its answer.
        response: the column of the answer.
        context: a column that follows the prompt after a blank line, where it has text.
        system: the column of the system turn.
        id: the column that names the conversation; ids that differ in a final `_<number>` only are parts of one.
    """

    turns: str | None = None
    role: str | None = None
    content: str | None = None
    user_role: str | None = None
    assistant_role: str | None = None
    prompt: str | None = None
    response: str | None = None
    context: str | None = None
    system: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        if self.turns is not None and self.prompt is not None:
            raise ValueError("data.columns names both turns and prompt, expected one: a list of turns, or a pair of prompt and response")
        for name in ("response", "context"):
            if getattr(self, name) is not None and self.prompt is None:
                raise ValueError(f"data.columns.{name} has no effect without data.columns.prompt: name both")

    @property
    def is_set(self) -> bool:
        """Whether the user has named anything."""
        return self != KNOWN_COLUMNS

    @property
    def names_a_layout(self) -> bool:
        """Whether the user says where the conversation is, and not only how its turns look."""
        return self.turns is not None or self.prompt is not None

    def find(self, record: Mapping[str, Any]) -> Layout | None:
        """Where the conversation of a record is; None where no column fits."""
        if self.turns is not None and record.get(self.turns) is not None:
            return Layout(self.turns, record[self.turns], is_named=True)
        if self.prompt is not None and _has(record, self.prompt, self.response):
            return self._pair(record, self.prompt, self.response, is_named=True)
        for key in TURN_LIST_KEYS:
            if record.get(key) is not None:
                return Layout(key, record[key], is_named=False)
        # Those with both sides first: of a table's columns one may be empty in this row.
        pairs = [pair for pair in _PAIRS if _has(record, *pair)]
        pairs.sort(key=lambda pair: record[pair[0]] is None or record[pair[1]] is None)
        return self._pair(record, *pairs[0], is_named=False) if pairs else None

    def fits(self, names: Collection[str]) -> bool:
        """Whether a record or table of these columns can hold a conversation."""
        is_named = self.turns in names or (self.prompt is not None and _has(names, self.prompt, self.response))
        return is_named or any(key in names for key in TURN_LIST_KEYS) or any(_has(names, *pair) for pair in _PAIRS)

    def wanted(self, names: Sequence[str], where: str) -> list[str]:
        """The columns of a table that have to be read.

        Raises:
            DataError: if none fits; it lists what was found.
        """
        if not self.fits(names):
            raise DataError(self.refusal(names, where))
        own = (self.turns, self.prompt, self.response, self.context, self.system, self.id)
        known = {*TURN_LIST_KEYS, *ID_KEYS, *_CONTEXT_KEYS, *_SYSTEM_KEYS, *(name for pair in _PAIRS for name in pair), *own}
        return [name for name in names if name in known]

    def refusal(self, names: Collection[str], where: str) -> str:
        """What to say of a source none of whose columns fit."""
        shown = ", ".join(printable(str(name)) for name in list(names)[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")
        asked = [f"{name} {value!r}" for name, value in (("turns", self.turns), ("prompt", self.prompt), ("response", self.response)) if value]
        pairs = ", ".join(" and ".join(pair) for pair in _PAIRS[:3])
        return (
            f"{where} has the columns {shown or '(none)'}; expected {'data.columns.' + ' and '.join(asked) + ', or ' if asked else ''}"
            f"one of {', '.join(TURN_LIST_KEYS)}, or a pair like {pairs}: say which hold the conversation with "
            "--data.columns.turns, or --data.columns.prompt and --data.columns.response (data.tokenize: --columns.turns ...)"
        )

    def require_use(self, is_used: bool, used: Mapping[str, Collection[str]]) -> None:
        """Raises DataError where the user names columns that no source has: a misspelt name must not be read past."""
        if self.names_a_layout and not is_used:
            seen = "; ".join(f"{source} was read by {', '.join(names)}" for source, names in used.items())
            named = ", ".join(repr(name) for name in (self.turns, self.prompt, self.response) if name is not None)
            raise DataError(f"no record of any source has the columns that data.columns names ({named}): {seen}; correct the names or leave them out")

    def read_turns(self, record: Mapping[str, Any], turns: list[Any]) -> list[Any]:
        """The turns with the names that data/conversations.py knows, and with the system turn of a column of its own."""
        if self.turns is not None and turns and all(isinstance(turn, str) for turn in turns):
            turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]
        elif self.role or self.content or self.user_role or self.assistant_role:
            turns = [self._turn(turn) if isinstance(turn, dict) else turn for turn in turns]
        system = record.get(self.system) if self.system is not None else None
        begins_so = bool(turns) and isinstance(turns[0], dict) and "system" in (turns[0].get("role"), turns[0].get("from"))
        return [{"role": "system", "content": system}, *turns] if system and not begins_so else turns

    def _turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        renamed = dict(turn)
        if self.content in turn:
            renamed["value"] = turn[self.content]
        role = turn[self.role] if self.role in turn else turn.get("role") if turn.get("from") is None else turn["from"]
        renamed["from"] = role
        for name, meaning in ((self.user_role, "user"), (self.assistant_role, "assistant")):
            if name is not None and str(role) == name:
                renamed["from"] = meaning
        return renamed

    def _pair(self, record: Mapping[str, Any], prompt: str, response: str | None, is_named: bool) -> Layout:
        contexts = () if is_named or prompt != "instruction" else _CONTEXT_KEYS
        context = self.context if is_named else next((key for key in contexts if key in record), None)
        # One that the user names is read where turns are (`read_turns`).
        system = next((key for key in _SYSTEM_KEYS if isinstance(record.get(key), str)), None) if self.system is None else None
        question = record[prompt]
        if context is not None and isinstance(question, str) and isinstance(record.get(context), str) and record[context].strip():
            question = f"{question.rstrip()}\n\n{record[context].strip()}"
        turns = [{"role": "system", "content": record[system]}] if system is not None and record[system].strip() else []
        turns += _side("user", question)
        turns += _side("assistant", record[response]) if response is not None else []
        asked = ", ".join(name for name in (system or self.system, prompt, context) if name is not None)
        return Layout(f"{asked} -> {response}" if response is not None else asked, turns, is_named)


def _has(names: Collection[str], *wanted: str | None) -> bool:
    return all(name in names for name in wanted if name is not None)


def _side(role: str, said: Any) -> list[Any]:
    """The turns of one side of a pair; a missing text is an empty one, which is counted as such."""
    return list(said) if isinstance(said, list) else [{"role": role, "content": "" if said is None else said}]


KNOWN_COLUMNS = ColumnConfig()
