"""Text to token ids, each word encoded once and remembered.

Place in the flow: data/chat.py renders conversations -> `TextEncoder` -> ids and where characters are in them. A byte-level BPE
first splits a text into words, and encodes each by itself: what a word's neighbours are makes no difference to its ids. So a text is
cut at places where such a split is certain, whatever stands around them, and only pieces that were not met before are encoded:

    letter | other           "word|, next"     the other is visible ASCII, not an apostrophe
    visible | space visible  "word,| next"     one space, ASCII on both sides
    visible newline | visible  "end.\\n|Next"   one newline, ASCII on both sides
    around added tokens      "|<|im_end|>|"

Where that does not hold (`_can_be_cut`), the tokenizer encodes whole texts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IntArray = npt.NDArray[np.int32]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The patterns of Llama 3 and of Qwen 2 to 3; GPT-2's is built into the `ByteLevel` pre-tokenizer.
_KNOWN_PATTERNS = {f"{_CONTRACTIONS}{digits}{_REST}" for digits in (r"\p{N}{1,3}", r"\p{N}")}
_GROUP_PIECES = 1000
_MAX_CHARS = 2**23  # of remembered pieces: some 150 MB


@dataclass(frozen=True)
class Encoded:
    """The ids of a text.

    Attributes:
        ids: one a token, int32.
        is_lossless: whether it is known that the ids decode to the text, character by character.
        token_at: index of the token that holds a character of the text; None for one that the tokenizer drops.
        prefix: ids of the text's first so many characters by themselves; None where they cannot be told from these ids.
    """

    ids: IntArray
    is_lossless: bool
    token_at: Callable[[int], int | None]
    prefix: Callable[[int], IntArray | None]


class TextEncoder:
    """Encodes rendered chats as `tokenizer(text, add_special_tokens=False)` does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
        self._added_ids = {token: np.array([index], np.int32).tobytes() for token, index in added.items()}
        self._separator, self._separator_id = next(iter(added.items()), ("", -1))
        self.is_by_pieces = bool(added) and _can_be_cut(tokenizer)
        self._forget()

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Ids of each text, without special tokens but those that it spells out."""
        if not texts:
            return []
        if not self.is_by_pieces:
            encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
            return [
                Encoded(np.array(ids, np.int32), False, partial(encoded.char_to_token, row), lambda num_chars: None)
                for row, ids in enumerate(encoded["input_ids"])
            ]
        edges = [self._edges(text) for text in texts]
        pieces = [[text[a:b] for a, b in itertools.pairwise(places.tolist())] for text, places in zip(texts, edges, strict=True)]
        self._learn(pieces)
        return [self._assemble(row, places) for row, places in zip(pieces, edges, strict=True)]

    def _edges(self, text: str) -> npt.NDArray[np.int64]:
        """Where pieces begin, in characters, and the length of the text."""
        is_edge = _word_edges(text)
        for match in self._added.finditer(text):
            begin, end = match.span()
            is_edge[begin:end] = False
            is_edge[begin] = is_edge[end] = True
        is_edge[0] = is_edge[-1] = True
        return np.flatnonzero(is_edge)

    def _learn(self, pieces: list[list[str]]) -> None:
        """Encodes the pieces that are new."""
        if self._num_chars > _MAX_CHARS:
            self._forget()
        known = self._ids
        new = list({piece for row in pieces for piece in row if piece not in known})
        if not new:
            return
        groups = [new[begin : begin + _GROUP_PIECES] for begin in range(0, len(new), _GROUP_PIECES)]
        # Joined by an added token, because a call of the tokenizer costs more than a word.
        joined = [self._separator.join(group) for group in groups]
        for group, text, encoding in zip(groups, joined, self._backend.encode_batch_fast(joined, add_special_tokens=False), strict=True):
            found = _split(np.array(encoding.ids, np.int32), self._separator_id)
            known.update(zip(group, found, strict=True))
            # A byte-level BPE drops what it has no token for and changes nothing else: one comparison says it for all.
            if self._decode(encoding.ids) != text:
                self._lossy.update(piece for piece, ids in zip(group, found, strict=True) if self._decode(_ids(ids).tolist()) != piece)
        self._num_chars += sum(map(len, new))

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _assemble(self, pieces: list[str], edges: npt.NDArray[np.int64]) -> Encoded:
        known = self._ids
        parts = [known[piece] for piece in pieces]
        ids = _ids(b"".join(parts))
        first_tokens = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)) // ids.itemsize, out=first_tokens[1:])
        place = partial(_place, edges, first_tokens)
        return Encoded(
            ids, not self._lossy or self._lossy.isdisjoint(pieces), partial(self._token_at, pieces, place), partial(_prefix, ids, place)
        )

    def _token_at(self, pieces: list[str], place: Callable[[int], tuple[int, int, int]], char: int) -> int | None:
        piece, first_token, offset = place(char)
        if not offset and self._ids[pieces[piece]]:
            return first_token
        inside = self._backend.encode(pieces[piece], add_special_tokens=False).char_to_token(offset)
        return None if inside is None else first_token + inside

    def _forget(self) -> None:
        self._ids = dict(self._added_ids)
        self._lossy: set[str] = set()
        self._num_chars = 0


def _ids(buffer: bytes) -> IntArray:
    return np.frombuffer(buffer, np.int32)


def _split(ids: IntArray, separator: int) -> list[bytes]:
    """What stands between the separators, as buffers."""
    buffer, size = ids.tobytes(), ids.itemsize
    separators = size * np.flatnonzero(ids == separator)
    begins, ends = [0, *(separators + size).tolist()], [*separators.tolist(), len(buffer)]
    return [buffer[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _place(edges: npt.NDArray[np.int64], first_tokens: npt.NDArray[np.int64], char: int) -> tuple[int, int, int]:
    """(piece that holds the character, first token of the piece, the character's offset in it)."""
    piece = int(np.searchsorted(edges, char, side="right")) - 1
    return piece, int(first_tokens[piece]), char - int(edges[piece])


def _prefix(ids: IntArray, place: Callable[[int], tuple[int, int, int]], num_chars: int) -> IntArray | None:
    _, token, offset = place(num_chars)
    return None if offset else ids[:token]


def _word_edges(text: str) -> npt.NDArray[np.bool_]:
    """Whether a piece may begin at each character of the text, and false at its end."""
    # Unsigned: what is below the range wraps round to beyond it.
    codes: Any = np.frombuffer(text.encode("ascii"), np.uint8) if text.isascii() else np.frombuffer(text.encode("utf-32-le"), np.uint32)
    is_visible = codes - ord("!") < ord("~") - ord("!") + 1
    is_letter = (codes | 32) - ord("a") < 26
    is_edge = np.zeros(len(codes) + 1, np.bool_)
    is_edge[1:-1] = is_letter[:-1] & is_visible[1:] & ~is_letter[1:] & (codes[1:] != ord("'"))
    if len(codes) > 2:
        is_between = is_visible[:-2] & is_visible[2:]
        is_edge[1:-2] |= is_between & (codes[1:-1] == ord(" "))
        is_edge[2:-1] |= is_between & (codes[1:-1] == ord("\n"))
    return is_edge


def _can_be_cut(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the ids of a text are those of its pieces: a byte-level BPE whose words end where `_word_edges` cuts."""
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    normalizer, splitter, decoder = (_state(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder))
    steps = splitter.get("pretokenizers", [splitter])
    return (
        type(backend.model).__name__ == "BPE"
        and not backend.model.dropout
        and backend.truncation is None
        and backend.padding is None
        and not backend.encode_special_tokens
        and normalizer.get("type") in (None, "NFC")
        and decoder.get("type") == "ByteLevel"
        and all(map(_is_known_step, steps))
        and any(step["type"] == "ByteLevel" for step in steps)
        and any(step["type"] == "Split" or step.get("use_regex") for step in steps)
        and not any(
            token.lstrip or token.rstrip or token.single_word or token.normalized for token in tokenizer.added_tokens_decoder.values()
        )
    )


def _state(part: Any) -> dict[str, Any]:
    """What a tokenizer's normalizer, pre-tokenizer or decoder is, as tokenizer.json says it; empty where there is none."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _is_known_step(step: dict[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return not step["add_prefix_space"]
    if step.get("type") == "Split":
        is_isolated = step["behavior"] == "Isolated" and not step["invert"]
        return is_isolated and step["pattern"].get("Regex") in _KNOWN_PATTERNS
    return step.get("type") == "Digits"
