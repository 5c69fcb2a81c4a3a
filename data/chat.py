"""Conversations to token ids with a loss mask: what the target would see in an engine, and which of it the assistant wrote.

Place in the flow: `Conversation` -> `TokenizedSample` -> data/prepare.py. The tokenizer's own chat template renders the text
(data/render.py), data/encode.py makes ids of it. The mask covers each of the assistant's turns with its end token, found in one of two ways:

    {% generation %} tags   where the template has them, they say it
    render boundaries       else turn i begins where the render of the turns before it, with the generation prompt, ends;
                            that render must be how the whole render begins. It ends with the first special token after its words.

Either way it is checked that the masked tokens decode to the assistant's words and an end token. Text that a template puts
between the generation prompt and the words (Qwen3's empty thinking block) is not supervised.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from data.conversations import Conversation, Turn
from data.encode import IntArray, TextEncoder
from data.render import Message, Rendered, Renderer, answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_TAG = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")


@dataclass(frozen=True, eq=False)
class TokenizedSample:
    """One conversation as the drafter's target sees it.

    Attributes:
        conversation_id: of the record.
        input_ids: at most max_length tokens, int32.
        loss_mask: true where the token belongs to an assistant turn, its end token included.
        prompt_ids: system and first user turn with the generation prompt: what an engine is sent; int32.
        num_lost_tokens: tokens beyond max_length.
    """

    conversation_id: str
    input_ids: IntArray
    loss_mask: npt.NDArray[np.bool_]
    prompt_ids: IntArray
    num_lost_tokens: int = 0


class SampleError(ValueError):
    """A conversation that cannot be tokenised as it must be; `reason` is a key of data/report.py `REASONS`."""

    reason: ClassVar[str]


class SpecialTokenTextError(SampleError):
    """A turn's text spells out a special token: an engine would read it as the end of a turn or as a role."""

    reason = "special_token_text"


class TemplateRefusedError(SampleError):
    """The chat template raised an error."""

    reason = "template_refused"


class UnstableTemplateError(SampleError):
    """What the template renders for a turn is not what an engine had in its context when that turn was written."""

    reason = "unstable_template"


class WordsLostError(SampleError):
    """The supervised tokens do not decode to the assistant's words and its end token."""

    reason = "words_lost"


class NoSupervisedTokensError(SampleError):
    """Truncation leaves nothing to learn from."""

    reason = "no_supervised_tokens"


@dataclass(frozen=True)
class _Placed:
    """A conversation as text; spans are (first character, first character of the end token) of each assistant turn.

    `prompt_end`: characters of the turns before the first answer, with the generation prompt.
    """

    text: str
    prompt_end: int
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class _Masked:
    """Token ids with the assistant's turns as (first token, one past the end token).

    `is_checked`: whether the turns' tokens are known to decode to the words. `prompt_ids` is None where it is still to be found.
    """

    ids: IntArray
    runs: list[tuple[int, int]]
    is_checked: bool = False
    prompt_ids: IntArray | None = None


class ChatTokenizer:
    """A tokenizer with its chat template, ready to tokenise many conversations.

    Raises:
        ValueError: if the tokenizer is not a fast one, or has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise ValueError(
                f"{name} is a slow tokenizer: one with character offsets (a tokenizer.json) is needed to place the loss mask"
            )
        if not tokenizer.chat_template:
            raise ValueError(
                f"{name} has no chat template: set tokenizer.chat_template to the one that the target is served with"
            )
        self.tokenizer = tokenizer
        special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        if not special:
            raise ValueError(f"{name} has no special tokens, so no end token that its chat template could close a turn with")
        self._special_ids = set(special.values())
        alternatives = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
        self._special = re.compile(alternatives)
        self._turn_end = re.compile(rf"\s*({alternatives})")
        self._encoder = TextEncoder(tokenizer)
        self._renderer = Renderer(tokenizer)
        self._has_generation_tags = bool(_GENERATION_TAG.search(str(tokenizer.get_chat_template())))

    def tokenize(self, conversations: Sequence[Conversation], max_length: int) -> list[TokenizedSample | SampleError]:
        """Samples of a batch of conversations, in order; in the place of one that cannot be had, the reason.

        Args:
            conversations: any number; a few hundred make good use of the tokenizer's threads.
            max_length: most tokens of a sample.
        """
        if self._has_generation_tags:
            masked = [self._attempt(self._mask_by_tags, conversation) for conversation in conversations]
        else:
            masked = self._mask_by_boundaries(self._render_turns(conversations))
        masked = self._check_words(conversations, self._with_prompts(conversations, masked))
        return [
            item if isinstance(item, SampleError) else _attempt_sample(conversation, item, max_length)
            for conversation, item in zip(conversations, masked, strict=True)
        ]

    def prompt(self, conversation_id: str, turns: Sequence[Turn]) -> list[int]:
        """Token ids of turns that end with the user's, and the generation prompt: as `prompt_ids` of a conversation that goes on so.

        Raises:
            SpecialTokenTextError: if a turn spells out a special token.
            TemplateRefusedError: if the chat template raises an error.
        """
        self._refuse_special(conversation_id, turns)
        try:
            text = self._renderer.render([{"role": turn.role, "content": turn.content} for turn in turns], True)
        except Exception as error:
            raise _refusal(conversation_id, error) from error
        (encoded,) = self._encoder.encode([text])
        return encoded.ids.tolist()

    # --- rendering ------------------------------------------------------------------------------------------------------

    def _attempt(self, step: Any, conversation: Conversation) -> Any:
        try:
            self._refuse_special(conversation.id, conversation.turns)
            return step(conversation)
        except SampleError as error:
            return error

    def _refuse_special(self, conversation_id: str, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if found := self._special.search(turn.content):
                raise SpecialTokenTextError(f"conversation {conversation_id}: a {turn.role} turn spells out {found.group()!r}")

    def _render_turns(self, conversations: Sequence[Conversation]) -> list[_Placed | SampleError]:
        """The whole conversations and where the assistant's turns are in them, or why they cannot be had."""
        allowed = [self._attempt(_messages, conversation) for conversation in conversations]
        rendered = iter(self._renderer.render_answers([item for item in allowed if isinstance(item, list)]))
        return [
            item if isinstance(item, SampleError) else self._attempt_spans(conversation, next(rendered))
            for conversation, item in zip(conversations, allowed, strict=True)
        ]

    def _attempt_spans(self, conversation: Conversation, rendered: Rendered | Exception) -> _Placed | SampleError:
        if isinstance(rendered, Exception):
            return _refusal(conversation.id, rendered)
        try:
            return self._spans(conversation, rendered)
        except SampleError as error:
            return error

    def _spans(self, conversation: Conversation, rendered: Rendered) -> _Placed:
        """Finds each assistant turn in the text.

        Raises:
            UnstableTemplateError: if a turn cannot be found where its generation prompt puts it.
        """
        text, ends = rendered.text, []
        assistant = [index for index, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        for index, end in zip(assistant, rendered.prompt_ends, strict=True):
            where = f"conversation {conversation.id}, turn {index}"
            if end is None:
                raise UnstableTemplateError(f"{where}: the render of the turns before it is not how the whole render begins")
            ends.append(end)
        spans = [
            self._find_turn(text, start, limit, conversation.turns[index].content, f"conversation {conversation.id}, turn {index}")
            for index, start, limit in zip(assistant, ends, [*ends[1:], len(text)], strict=True)
        ]
        return _Placed(text, ends[0], spans)

    def _find_turn(self, text: str, start: int, limit: int, content: str, where: str) -> tuple[int, int]:
        """Where `content` stands with a special token after it, in text[start:limit]."""
        position = text.find(content, start, limit)
        while position >= 0:
            ending = self._turn_end.match(text, position + len(content), limit)
            if ending is not None:
                if ending.group(1) in text[start:position]:
                    break  # the turn has ended before: these words are another turn's
                return position, ending.start(1)
            position = text.find(content, position + 1, limit)
        raise UnstableTemplateError(f"{where}: the template changes the assistant's words, or puts no special token after them")

    # --- masks ----------------------------------------------------------------------------------------------------------

    def _mask_by_boundaries(self, rendered: list[_Placed | SampleError]) -> list[_Masked | SampleError]:
        encoded = iter(self._encoder.encode([item.text for item in rendered if isinstance(item, _Placed)]))
        masked: list[_Masked | SampleError] = []
        for item in rendered:
            if isinstance(item, SampleError):
                masked.append(item)
                continue
            text = next(encoded)
            runs = []
            for begin, end in item.spans:
                # A normalizer may drop a character; the end token never.
                first = next(token for char in range(begin, end + 1) if (token := text.token_at(char)) is not None)
                last = text.token_at(end)
                runs.append((first, first if last is None else last + 1))
            # Of a lossless encoding nothing need be decoded: the words were found in the text.
            masked.append(_Masked(text.ids, runs, text.is_lossless, text.prefix(item.prompt_end)))
        return masked

    def _mask_by_tags(self, conversation: Conversation) -> _Masked:
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                _messages(conversation),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
        except Exception as error:
            raise _refusal(conversation.id, error) from error
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        runs = []
        for begin, end in mask_runs(mask):
            # White space that the tags hold after the end token is the template's, not the assistant's.
            last = next((index for index in range(end - 1, begin - 1, -1) if ids[index] in self._special_ids), end - 1)
            runs.append((begin, end if str(self.tokenizer.decode(ids[last + 1 : end])).strip() else last + 1))
        return _Masked(np.array(ids, np.int32), runs)

    def _check_words(
        self, conversations: Sequence[Conversation], masked: list[_Masked | SampleError]
    ) -> list[_Masked | SampleError]:
        """The same list with an error where the masked tokens are not the assistant's words and an end token."""
        unchecked = [item for item in masked if isinstance(item, _Masked) and not item.is_checked]
        segments = [item.ids[begin : end - 1].tolist() for item in unchecked for begin, end in item.runs]
        decoded = iter(
            self.tokenizer.batch_decode(segments, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if segments
            else []
        )
        checked: list[_Masked | SampleError] = []
        for conversation, item in zip(conversations, masked, strict=True):
            if isinstance(item, SampleError) or item.is_checked:
                checked.append(item)
            else:
                checked.append(self._words_problem(conversation, item, [next(decoded) for _ in item.runs]) or item)
        return checked

    def _words_problem(self, conversation: Conversation, masked: _Masked, found: list[str]) -> SampleError | None:
        wanted = [turn.content for turn in conversation.turns if turn.role == "assistant"]
        if len(found) != len(wanted):
            message = f"the template's generation tags mark {len(found)} stretches, but there are {len(wanted)} assistant turns"
            return UnstableTemplateError(f"conversation {conversation.id}: {message}")
        for number, (words, expected, (begin, end)) in enumerate(zip(found, wanted, masked.runs, strict=True)):
            where = f"conversation {conversation.id}, assistant turn {number}"
            if end <= begin or int(masked.ids[end - 1]) not in self._special_ids:
                return WordsLostError(f"{where}: the supervised tokens do not end with a special token")
            if words != expected and _bare(words) != _bare(expected):
                return WordsLostError(f"{where}: {_difference(_bare(words), _bare(expected))}")
        return None

    def _with_prompts(self, conversations: Sequence[Conversation], masked: list[_Masked | SampleError]) -> list[_Masked | SampleError]:
        """The same list with every prompt's ids, or an error where the template refuses the prompt."""
        missing = [index for index, item in enumerate(masked) if isinstance(item, _Masked) and item.prompt_ids is None]
        requests = [_messages(conversations[index]) for index in missing]
        texts = self._renderer.render_all([messages[: answers(messages)[0]] for messages in requests], True)
        encoded = iter(self._encoder.encode([text for text in texts if isinstance(text, str)]))
        completed = list(masked)
        for index, text in zip(missing, texts, strict=True):
            item = masked[index]
            if isinstance(item, _Masked):
                completed[index] = (
                    _refusal(conversations[index].id, text) if isinstance(text, Exception) else replace(item, prompt_ids=next(encoded).ids)
                )
        return completed


def _attempt_sample(conversation: Conversation, masked: _Masked, max_length: int) -> TokenizedSample | SampleError:
    assert masked.prompt_ids is not None
    mask = np.zeros(len(masked.ids), np.bool_)
    for begin, end in masked.runs:
        mask[begin:end] = True
    if not mask[:max_length].any():
        first = masked.runs[0][0]
        return NoSupervisedTokensError(
            f"conversation {conversation.id}: the first answer begins at token {first}, max_length is {max_length}"
        )
    num_lost = max(0, len(mask) - max_length)
    return TokenizedSample(conversation.id, masked.ids[:max_length], mask[:max_length], masked.prompt_ids, num_lost)


def _messages(conversation: Conversation) -> list[Message]:
    if not conversation.turns or conversation.turns[-1].role != "assistant":
        raise ValueError(f"conversation {conversation.id} does not end with an assistant turn")
    return [{"role": turn.role, "content": turn.content} for turn in conversation.turns]


def _refusal(conversation_id: str, error: Exception) -> TemplateRefusedError:
    # A template is foreign code: `raise_exception` gives a TemplateError, a slip in it any other.
    return TemplateRefusedError(f"conversation {conversation_id}: the chat template says {str(error) or type(error).__name__!r}")


def mask_runs(mask: Sequence[int] | npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Stretches of ones as (first, one past the last)."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _difference(found: str, expected: str) -> str:
    """Says where two texts part."""
    pairs = enumerate(zip(found, expected, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(len(found), len(expected)))
    window = slice(max(0, same - 10), same + 20)
    return f"the supervised tokens decode to {found[window]!r} where the words are {expected[window]!r}"


def _bare(text: str) -> str:
    """The text without white space, in the form that normalizing tokenizers give."""
    return "".join(unicodedata.normalize("NFC", text).split())
