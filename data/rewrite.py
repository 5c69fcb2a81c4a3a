"""A conversation written anew by the target, turn by turn: what it is asked next, what is kept of its answer, and where it ends early.

Place in the flow: data/conversations.py `Conversation` -> `Questions` -> `Dialogue`, which is fed by a server (data/openai_client.py) or by
transformers (data/rewrite_local.py) -> a record of data/rewritten_file.py.

Each user turn is answered given the target's *own* earlier answers, as in service:

    source    user 1   their answer 1   user 2   their answer 2
    asked     user 1 ->                 user 1, answer 1, user 2 ->
    written   user 1   answer 1         user 2   answer 2

Thinking is never sent back with the history: clients do not send it, and chat templates drop it. So a chat in which every answer still has its
thoughts is one that no target ever saw; where thoughts are kept they stand in the last answer's words, `<think>` tags around them, and beside the
words of the others (`reasoning_content`), which nothing is trained on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from data.conversations import Conversation

_BROKEN_OFF = ("abort", "error")  # by the server, not by the model or the limit

Choice = Literal["keep", "drop"]
Message = dict[str, Any]

# Why a conversation ends before its last question, or is not written at all where that was the first.
REFUSALS = {
    "content_filter": "the server's filter cut the answer off (finish_reason content_filter)",
    "refusal": "the model refused (message.refusal)",
    "empty": "the answer has no text",
}
ENDINGS = REFUSALS | {
    "unfinished_thinking": "the token limit came before the thoughts had ended",
    "tool_call": "the answer calls a tool: there is nobody to give its result",
    "cut_off": "the token limit came before the answer had ended, and --cut-off is drop",
}


@dataclass(frozen=True)
class RewriteChoices:
    """What is kept.

    Attributes:
        system: the source's system turn.
        turns: all user turns, or the first one only.
        thinking: the target's thoughts (`reasoning_content`, or `<think>` in the answer).
        tool_calls: answers that call a tool. A conversation ends with one, or before it. data/conversations.py leaves out records that have one.
        cut_off: answers that the token limit cut off. The chat template puts an end token after them which the target did not write.
    """

    system: Choice = "keep"
    turns: Literal["all", "first"] = "all"
    thinking: Choice = "keep"
    tool_calls: Choice = "drop"
    cut_off: Choice = "keep"


@dataclass(frozen=True)
class Questions:
    """What a conversation asks; its answers are not held.

    Attributes:
        key: tells it from all others, by what is asked.
    """

    id: str
    key: str
    system: str | None
    users: tuple[str, ...]

    @classmethod
    def of(cls, conversation: Conversation, choices: RewriteChoices) -> Questions:
        system = next((turn.content for turn in conversation.turns if turn.role == "system"), None) if choices.system == "keep" else None
        users = [turn.content for turn in conversation.turns if turn.role == "user"]
        users = users[:1] if choices.turns == "first" else users
        digest = hashlib.blake2b(digest_size=12)
        for text in (system or "", *users):
            digest.update(f"{len(text)}\0{text}".encode("utf-8", "backslashreplace"))
        return cls(conversation.id, digest.hexdigest(), system, tuple(users))


@dataclass(frozen=True)
class Answer:
    """One answer of the target.

    Attributes:
        content: its words, without thoughts.
        thinking: its thoughts, without tags.
        tool_calls: as the API gives them.
        finish_reason: stop, length, tool_calls or content_filter.
        is_refusal: whether the API says so.
        has_open_thinking: whether the thoughts never ended.
        num_prompt_tokens, num_new_tokens: as counted by whoever answered.
        num_retries: times it was asked again.
    """

    content: str
    finish_reason: str
    thinking: str = ""
    tool_calls: tuple[Any, ...] = ()
    is_refusal: bool = False
    has_open_thinking: bool = False
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_retries: int = 0


def read_answer(reply: dict[str, Any]) -> Answer:
    """The answer in a reply of /chat/completions.

    Raises:
        KeyError, TypeError, ValueError, IndexError, AttributeError: if it is not such a reply.
    """
    choice = reply["choices"][0]
    message, finish_reason = choice["message"], choice["finish_reason"]
    content = message.get("content") or ""
    if not isinstance(content, str) or not isinstance(finish_reason, str):
        raise TypeError(f"content is {type(content).__name__} and finish_reason {finish_reason!r}, expected text")
    if finish_reason in _BROKEN_OFF:
        raise ValueError(f"finish_reason {finish_reason!r}")
    # vLLM has renamed the first; both are met.
    thinking = message.get("reasoning_content") or message.get("reasoning") or ""
    thought, content, is_open = split_thinking(_valid(content))
    usage = reply.get("usage") or {}
    return Answer(
        content=content,
        finish_reason=finish_reason,
        thinking=_valid(thinking).strip() or thought,
        tool_calls=tuple(message.get("tool_calls") or ()),
        is_refusal=bool(message.get("refusal")),
        has_open_thinking=is_open or bool(thinking and not content and finish_reason == "length"),
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_new_tokens=int(usage.get("completion_tokens") or 0),
    )


def split_thinking(text: str) -> tuple[str, str, bool]:
    """(thoughts, words, whether the thoughts never end) of an answer; templates that open the thoughts themselves leave only the closing tag."""
    text = text.strip()
    before, closing, after = text.partition("</think>")
    if closing:
        return before.removeprefix("<think>").strip(), after.strip(), False
    if text.startswith("<think>"):
        return text.removeprefix("<think>").strip(), "", True
    return "", text, False


def _valid(text: str) -> str:
    """Text that UTF-8 can hold: half a surrogate pair, where a token limit cuts an emoji, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass
class Dialogue:
    """A conversation while it is being written.

    Attributes:
        ended_by: why it ended before its last question, a key of `ENDINGS` or a reason of `RequestFailed`; empty while it has not.
    """

    questions: Questions
    choices: RewriteChoices
    answers: list[Answer] = field(default_factory=list)
    ended_by: str = ""

    @property
    def is_done(self) -> bool:
        return bool(self.ended_by) or len(self.answers) == len(self.questions.users)

    def prompt(self) -> list[Message]:
        """What the target is asked next."""
        return [*self._history(len(self.answers)), {"role": "user", "content": self.questions.users[len(self.answers)]}]

    def take(self, answer: Answer) -> None:
        """Takes the answer to `prompt()`."""
        ending = self._ending(answer)
        if not ending or (ending == "tool_call" and self.choices.tool_calls == "keep"):
            self.answers.append(answer)
        self.ended_by = ending

    def _ending(self, answer: Answer) -> str:
        if answer.finish_reason == "content_filter":
            return "content_filter"
        if answer.is_refusal:
            return "refusal"
        if answer.tool_calls:
            return "tool_call"
        if answer.has_open_thinking:
            return "unfinished_thinking"
        if not answer.content:
            return "empty"
        return "cut_off" if answer.finish_reason == "length" and self.choices.cut_off == "drop" else ""

    def _history(self, num_turns: int) -> list[Message]:
        system = [] if self.questions.system is None else [{"role": "system", "content": self.questions.system}]
        pairs = zip(self.questions.users[:num_turns], self.answers[:num_turns], strict=True)
        return system + [
            message
            for user, answer in pairs
            for message in ({"role": "user", "content": user}, {"role": "assistant", "content": answer.content})
        ]

    def record(self) -> dict[str, Any] | None:
        """The OpenAI-style record, or None where nothing was answered."""
        if not self.answers:
            return None
        messages = self._history(len(self.answers))
        for message, answer in zip((message for message in messages if message["role"] == "assistant"), self.answers, strict=True):
            is_last = answer is self.answers[-1]
            if answer.thinking and self.choices.thinking == "keep":
                if is_last:
                    message["content"] = f"<think>\n{answer.thinking}\n</think>\n\n{answer.content}".strip()
                else:
                    message["reasoning_content"] = answer.thinking
            if answer.tool_calls:
                message["tool_calls"] = list(answer.tool_calls)
        return {"id": self.questions.id, "messages": messages, "regeneration": self.facts()}

    def facts(self) -> dict[str, Any]:
        """What the report counts."""
        return {
            "key": self.questions.key,
            "ended_by": self.ended_by or None,
            "num_questions": len(self.questions.users),
            "num_turns": len(self.answers),
            "num_cut_off": sum(answer.finish_reason == "length" for answer in self.answers),
            "num_thinking": sum(bool(answer.thinking) for answer in self.answers),
            "num_tool_calls": sum(bool(answer.tool_calls) for answer in self.answers),
            "num_prompt_tokens": sum(answer.num_prompt_tokens for answer in self.answers),
            "num_new_tokens": sum(answer.num_new_tokens for answer in self.answers),
            "num_retries": sum(answer.num_retries for answer in self.answers),
        }
