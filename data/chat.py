"""Conversations to token ids with a loss mask: what the target would see in an engine, and which of it the assistant wrote.

Place in the flow: `Conversation` -> `TokenizedSample` -> data/prepare.py. The tokenizer's own chat template renders the text. The
mask covers each of the assistant's turns with its end token, found in one of two ways:

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
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation, Turn

_GENERATION_TAG = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")

Message = dict[str, str]


@dataclass(frozen=True)
class TokenizedSample:
    """One conversation as the drafter's target sees it.

    Attributes:
        conversation_id: of the record.
        input_ids: at most max_length tokens.
        loss_mask: true where the token belongs to an assistant turn, its end token included.
        prompt_ids: system and first user turn with the generation prompt: what an engine is sent.
        num_lost_tokens: tokens beyond max_length.
    """

    conversation_id: str
    input_ids: list[int]
    loss_mask: list[bool]
    prompt_ids: list[int]
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
class _Rendered:
    """A conversation as text; spans are (first character, first character of the end token) of each assistant turn."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class _Masked:
    """Token ids with the assistant's turns as (first token, one past the end token)."""

    ids: list[int]
    runs: list[tuple[int, int]]


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
        self._has_generation_tags = bool(_GENERATION_TAG.search(str(tokenizer.get_chat_template())))

    def tokenize(self, conversations: Sequence[Conversation], max_length: int) -> list[TokenizedSample | SampleError]:
        """Samples of a batch of conversations, in order; in the place of one that cannot be had, the reason.

        Args:
            conversations: any number; a few hundred make good use of the tokenizer's threads.
            max_length: most tokens of a sample.
        """
        masked: list[_Masked | SampleError] = []
        if self._has_generation_tags:
            masked = [self._attempt(self._mask_by_tags, conversation) for conversation in conversations]
        else:
            masked = self._mask_by_boundaries([self._attempt(self._render_turns, conversation) for conversation in conversations])
        prompts = self._prompts(conversations, masked)
        masked = self._check_words(conversations, masked)
        return [
            item if isinstance(item, SampleError) else _attempt_sample(conversation, item, prompt, max_length)
            for conversation, item, prompt in zip(conversations, masked, prompts, strict=True)
        ]

    def prompt(self, conversation_id: str, turns: Sequence[Turn]) -> list[int]:
        """Token ids of turns that end with the user's, and the generation prompt: as `prompt_ids` of a conversation that goes on so.

        Raises:
            SpecialTokenTextError: if a turn spells out a special token.
            TemplateRefusedError: if the chat template raises an error.
        """
        self._refuse_special(conversation_id, turns)
        text = self._render(conversation_id, [{"role": turn.role, "content": turn.content} for turn in turns], True)
        return list(self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])

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

    def _render(self, conversation_id: str, messages: list[Message], generation_prompt: bool) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        except Exception as error:
            # A template is foreign code: `raise_exception` gives a TemplateError, a slip in it any other.
            raise TemplateRefusedError(
                f"conversation {conversation_id}: the chat template says {str(error) or type(error).__name__!r}"
            ) from error
        return str(rendered)

    def _render_turns(self, conversation: Conversation) -> _Rendered:
        """The whole conversation and where the assistant's turns are in it.

        Raises:
            UnstableTemplateError: if a turn cannot be found where its generation prompt puts it.
        """
        messages = _messages(conversation)
        text = self._render(conversation.id, messages, False)
        assistant = [index for index, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        prompts = [self._render(conversation.id, messages[:index], True) for index in assistant]
        spans = []
        for number, (index, prompt) in enumerate(zip(assistant, prompts, strict=True)):
            where = f"conversation {conversation.id}, turn {index}"
            if not text.startswith(prompt):
                raise UnstableTemplateError(f"{where}: the render of the turns before it is not how the whole render begins")
            limit = len(prompts[number + 1]) if number + 1 < len(prompts) else len(text)
            spans.append(self._find_turn(text, len(prompt), limit, conversation.turns[index].content, where))
        return _Rendered(text, spans)

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

    def _mask_by_boundaries(self, rendered: list[_Rendered | SampleError]) -> list[_Masked | SampleError]:
        texts = [item.text for item in rendered if isinstance(item, _Rendered)]
        if not texts:
            return [item for item in rendered if isinstance(item, SampleError)]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        masked: list[_Masked | SampleError] = []
        row = 0
        for item in rendered:
            if isinstance(item, SampleError):
                masked.append(item)
                continue
            runs = []
            for begin, end in item.spans:
                # A normalizer may drop a character; the end token never.
                first = next(token for char in range(begin, end + 1) if (token := encoded.char_to_token(row, char)) is not None)
                last = encoded.char_to_token(row, end)
                runs.append((first, first if last is None else last + 1))
            masked.append(_Masked(encoded["input_ids"][row], runs))
            row += 1
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
            raise TemplateRefusedError(
                f"conversation {conversation.id}: the chat template says {str(error) or type(error).__name__!r}"
            ) from error
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        runs = []
        for begin, end in mask_runs(mask):
            # White space that the tags hold after the end token is the template's, not the assistant's.
            last = next((index for index in range(end - 1, begin - 1, -1) if ids[index] in self._special_ids), end - 1)
            runs.append((begin, end if str(self.tokenizer.decode(ids[last + 1 : end])).strip() else last + 1))
        return _Masked(ids, runs)

    def _check_words(
        self, conversations: Sequence[Conversation], masked: list[_Masked | SampleError]
    ) -> list[_Masked | SampleError]:
        """The same list with an error where the masked tokens are not the assistant's words and an end token."""
        segments = [item.ids[begin : end - 1] for item in masked if isinstance(item, _Masked) for begin, end in item.runs]
        decoded = iter(
            self.tokenizer.batch_decode(segments, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if segments
            else []
        )
        checked: list[_Masked | SampleError] = []
        for conversation, item in zip(conversations, masked, strict=True):
            if isinstance(item, _Masked):
                found = [next(decoded) for _ in item.runs]
                checked.append(self._words_problem(conversation, item, found) or item)
            else:
                checked.append(item)
        return checked

    def _words_problem(self, conversation: Conversation, masked: _Masked, found: list[str]) -> SampleError | None:
        wanted = [turn.content for turn in conversation.turns if turn.role == "assistant"]
        if len(found) != len(wanted):
            message = f"the template's generation tags mark {len(found)} stretches, but there are {len(wanted)} assistant turns"
            return UnstableTemplateError(f"conversation {conversation.id}: {message}")
        for number, (words, expected, (begin, end)) in enumerate(zip(found, wanted, masked.runs, strict=True)):
            where = f"conversation {conversation.id}, assistant turn {number}"
            if end <= begin or masked.ids[end - 1] not in self._special_ids:
                return WordsLostError(f"{where}: the supervised tokens do not end with a special token")
            if words != expected and _bare(words) != _bare(expected):
                return WordsLostError(f"{where}: {_difference(_bare(words), _bare(expected))}")
        return None

    def _prompts(self, conversations: Sequence[Conversation], masked: list[_Masked | SampleError]) -> list[list[int]]:
        """Prompt ids of each conversation; empty, and the error put into `masked`, where there are none."""
        texts = []
        for index, (conversation, item) in enumerate(zip(conversations, masked, strict=True)):
            texts.append("")
            if isinstance(item, _Masked):
                first = next(index for index, turn in enumerate(conversation.turns) if turn.role == "assistant")
                try:
                    texts[-1] = self._render(conversation.id, _messages(conversation)[:first], True)
                except SampleError as error:
                    masked[index] = error
        if not texts:
            return []
        return list(self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def _attempt_sample(
    conversation: Conversation, masked: _Masked, prompt: list[int], max_length: int
) -> TokenizedSample | SampleError:
    mask = [False] * len(masked.ids)
    for begin, end in masked.runs:
        mask[begin:end] = [True] * (end - begin)
    if not any(mask[:max_length]):
        first = masked.runs[0][0]
        return NoSupervisedTokensError(
            f"conversation {conversation.id}: the first answer begins at token {first}, max_length is {max_length}"
        )
    num_lost = max(0, len(mask) - max_length)
    return TokenizedSample(conversation.id, masked.ids[:max_length], mask[:max_length], prompt, num_lost)


def _messages(conversation: Conversation) -> list[Message]:
    if not conversation.turns or conversation.turns[-1].role != "assistant":
        raise ValueError(f"conversation {conversation.id} does not end with an assistant turn")
    return [{"role": turn.role, "content": turn.content} for turn in conversation.turns]


def mask_runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of ones as (first, one past the last)."""
    edges = [
        index for index in range(len(mask) + 1) if (mask[index - 1] if index else 0) != (mask[index] if index < len(mask) else 0)
    ]
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
