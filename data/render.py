"""Conversations to text, by the target's own chat template.

Place in the flow: data/chat.py hands over messages -> `Renderer` -> the text and where each answer's prompt ends in it. Rendering by Jinja is
the slowest part of it, and of a conversation of n answers it takes n + 1 renders: the whole, and the turns before each answer. So the text around
the words is remembered by the sequence of roles (data/template_trace.py), where the template does not look at the words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from data.template_trace import Skeleton, Tracer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

_MAX_TURNS = 2**16  # of remembered shapes: some 10 MB
_STRIPS: tuple[Callable[[str], str], ...] = (str, str.lstrip, str.rstrip, str.strip)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: of all turns.
        prompt_ends: for each of the assistant's turns, how many characters the turns before it have with the generation prompt; None
            where the text does not begin with theirs.
    """

    text: str
    prompt_ends: list[int | None]


@dataclass(frozen=True)
class _Shape:
    """What conversations of the same roles have in common.

    `prompts` says where the prompts of the answers end: (gaps before it, characters of the literal text after them).
    """

    skeleton: Skeleton
    prompts: tuple[tuple[int, int], ...]

    def fill(self, words: Sequence[str]) -> Rendered:
        """The text with these words, each of which holds a visible character."""
        parts = [""] * (2 * len(self.skeleton.gaps) + 1)
        parts[::2] = self.skeleton.literals
        parts[1::2] = [_STRIPS[ends](words[index]) for index, ends in self.skeleton.gaps]
        begins = list(itertools.accumulate(map(len, parts), initial=0))
        return Rendered("".join(parts), [begins[2 * num_gaps] + num_chars for num_gaps, num_chars in self.prompts])


class Renderer:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._template = str(tokenizer.get_chat_template())
        self._special: dict[str, Any] = tokenizer.special_tokens_map
        self._tracer: Tracer | None = None
        self._shapes: dict[tuple[str, ...], _Shape | None] = {}
        self._num_turns = 0

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """The text of messages.

        Raises:
            Exception: what the template raises; it is foreign code.
        """
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt))

    def render_all(self, batch: Sequence[list[Message]], generation_prompt: bool) -> list[str | Exception]:
        """The text of each, or what the template raises: in one call, which costs less; one by one where it refuses any of them."""
        if not batch:
            return []
        try:
            # What `apply_chat_template` calls, without its copies of messages that are plain already: a tenth of the time of everything.
            rendered: Any = render_jinja_template(
                list(batch), chat_template=self._template, add_generation_prompt=generation_prompt, **self._special
            )
            return list(rendered[0])
        except Exception:
            return [self._attempt(messages, generation_prompt) for messages in batch]

    def render_answers(self, batch: Sequence[list[Message]]) -> list[Rendered | Exception]:
        """The text of each and where the prompts of its answers end, or what the template raises."""
        filled = [self._filled(messages) for messages in batch]
        rendered = iter(self._rendered([messages for messages, found in zip(batch, filled, strict=True) if found is None]))
        return [next(rendered) if found is None else found for found in filled]

    def __getstate__(self) -> dict[str, Any]:
        # A compiled template cannot be sent to another process, what was learnt from it can.
        return {**self.__dict__, "_tracer": None}

    def _attempt(self, messages: list[Message], generation_prompt: bool) -> str | Exception:
        try:
            return self.render(messages, generation_prompt)
        except Exception as error:
            return error

    def _rendered(self, batch: Sequence[list[Message]]) -> list[Rendered | Exception]:
        """Each by Jinja itself."""
        befores = [messages[:index] for messages in batch for index in answers(messages)]
        texts, prompts = self.render_all(batch, False), iter(self.render_all(befores, True))
        rendered: list[Rendered | Exception] = []
        for messages, text in zip(batch, texts, strict=True):
            parts = [text, *itertools.islice(prompts, len(answers(messages)))]
            refused = next((part for part in parts if isinstance(part, Exception)), None)
            whole, *befores_of_it = map(str, parts)
            ends = [len(before) if whole.startswith(before) else None for before in befores_of_it]
            rendered.append(refused or Rendered(whole, ends))
        return rendered

    # --- remembered shapes ----------------------------------------------------------------------------------------------

    def _filled(self, messages: list[Message]) -> Rendered | None:
        """The text from the shape of its roles; None where there is none."""
        words = [message["content"] for message in messages]
        if not all(words) or any(map(str.isspace, words)):
            return None
        roles = tuple([message["role"] for message in messages])
        if roles not in self._shapes:
            if self._num_turns > _MAX_TURNS:
                self._shapes, self._num_turns = {}, 0
            self._shapes[roles] = self._learned(messages, roles)
            self._num_turns += len(roles)
        shape = self._shapes[roles]
        return None if shape is None else shape.fill(words)

    def _learned(self, messages: list[Message], roles: tuple[str, ...]) -> _Shape | None:
        """The shape of these roles, seen to give what Jinja gives for this conversation."""
        if self._tracer is None:
            self._tracer = Tracer(self._template, self._special)
        whole = self._tracer.trace(roles, False)
        if whole is None:
            return None
        befores = [self._tracer.trace(roles[:index], True) for index in answers(messages)]
        prompts = [None if before is None else _prompt_end(whole, before) for before in befores]
        shape = _Shape(whole, tuple(prompt for prompt in prompts if prompt is not None))
        # Of a prompt that is missing, the two differ as well.
        return shape if self._rendered([messages]) == [shape.fill([message["content"] for message in messages])] else None


def answers(messages: Sequence[Message]) -> list[int]:
    """Which of the messages are the assistant's."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _prompt_end(whole: Skeleton, before: Skeleton) -> tuple[int, int] | None:
    """Where `before` ends in `whole`, whatever the words: (gaps before it, characters after them); None where it may not be how that begins."""
    num_gaps = len(before.gaps)
    *literals, last = before.literals
    if whole.gaps[:num_gaps] != before.gaps or whole.literals[:num_gaps] != tuple(literals) or not whole.literals[num_gaps].startswith(last):
        return None
    return num_gaps, len(last)
