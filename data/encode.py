"""Text to token ids, each word encoded once and remembered.

Place in the flow: data/chat.py renders conversations -> `TextEncoder` -> ids and where characters are in them. A byte-level BPE
first splits a text into words, and encodes each by itself: what a word's neighbours are makes no difference to its ids. So a text is
cut at places where such a split is certain, whatever stands around them, and only pieces that were not met before are encoded:

    letter | other, digit | other   "word|, next", "12|px"   the other is ASCII, and no letter or digit like it
    mark | digit                    "v.|2"                   a mark is visible ASCII, no letter and no digit
    visible | space visible         "word,| next"            one space, ASCII on both sides
    visible newline | visible       "end.\n|Next"           one newline, ASCII on both sides
    around added tokens             "|<|im_end|>|"
    mark | letter, mark | white     "(|word", "end;|\n\n"    for GPT-2's pattern only; no apostrophe before a letter

Where that does not hold (`_can_be_cut`), the tokenizer encodes whole texts.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections import defaultdict
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
_MAX_CHARS = 2**23  # of remembered pieces: some 120 MB
_OTHER, _LETTER, _DIGIT, _APOSTROPHE, _MARK, _SPACE, _NEWLINE, _BLANK = range(8)


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
        self._separator, self._separator_id = next(iter(added.items()), ("", -1))
        self._added_ids = added
        self.is_by_pieces = bool(added) and _can_be_cut(tokenizer)
        self._cuts = _pair_cuts(not any(step.get("type") == "Split" for step in _steps(self._backend.pre_tokenizer)))
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
        if self._num_chars > _MAX_CHARS:
            self._forget()
        cut = [self._cut(text) for text in texts]
        self._learn()
        return [self._assemble(text, edges, pieces) for text, (edges, pieces) in zip(texts, cut, strict=True)]

    def _cut(self, text: str) -> tuple[npt.NDArray[np.int64], IntArray]:
        """Where pieces begin, in characters, with the length of the text at the end; and each piece's number."""
        codes: Any = np.frombuffer(text.encode("ascii"), np.uint8) if text.isascii() else np.frombuffer(text.encode("utf-32-le"), np.uint32)
        is_edge = _word_edges(codes, self._cuts)
        for match in self._added.finditer(text):
            begin, end = match.span()
            is_edge[begin:end] = False
            is_edge[begin] = is_edge[end] = True
        is_edge[0] = is_edge[-1] = True
        edges = np.flatnonzero(is_edge)
        # A mark that the text does not hold at every edge: splitting there costs a third of slicing piece by piece.
        mark = next(code for code in itertools.count(0x80) if chr(code) not in text)
        marked = np.insert(codes, edges[1:-1], mark).tobytes().decode("latin-1" if text.isascii() else "utf-32-le")
        pieces = marked.split(chr(mark))
        return edges, np.fromiter(map(self._numbers.__getitem__, pieces), np.int32, len(pieces))

    def _learn(self) -> None:
        """Encodes the pieces that have a number but no ids yet."""
        num_new = len(self._numbers) - self._known.num_pieces
        new = list(itertools.islice(reversed(self._numbers), num_new))[::-1]
        if not new:
            return
        groups = [new[begin : begin + _GROUP_PIECES] for begin in range(0, len(new), _GROUP_PIECES)]
        # Joined by an added token, because a call of the tokenizer costs more than a word.
        joined = [self._separator.join(group) for group in groups]
        for group, text, encoding in zip(groups, joined, self._backend.encode_batch_fast(joined, add_special_tokens=False), strict=True):
            ids = np.array(encoding.ids, np.int32)
            is_separator = ids == self._separator_id
            ends = np.flatnonzero(np.append(is_separator, True)) - np.arange(len(group))
            lengths = np.diff(ends, prepend=0)
            ids = ids[~is_separator]
            # A byte-level BPE drops what it has no token for and changes nothing else: one comparison says it for all.
            is_lossy = np.zeros(len(group), np.bool_)
            if self._decode(encoding.ids) != text:
                own = np.split(ids, ends[:-1])
                is_lossy[:] = [self._decode(part.tolist()) != piece for part, piece in zip(own, group, strict=True)]
            self._known.append(ids, lengths, is_lossy)
        self._num_chars += sum(map(len, new))

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _assemble(self, text: str, edges: npt.NDArray[np.int64], pieces: IntArray) -> Encoded:
        ids, first_tokens, is_lossless = self._known.join(pieces)
        place = partial(_place, edges, first_tokens)
        return Encoded(ids, is_lossless, partial(self._token_at, text, edges, first_tokens), partial(_prefix, ids, place))

    def _token_at(self, text: str, edges: npt.NDArray[np.int64], first_tokens: npt.NDArray[np.int64], char: int) -> int | None:
        piece, first_token, offset = _place(edges, first_tokens, char)
        if not offset and first_tokens[piece + 1] > first_token:
            return first_token
        inside = self._backend.encode(text[edges[piece] : edges[piece + 1]], add_special_tokens=False).char_to_token(offset)
        return None if inside is None else first_token + inside

    def _forget(self) -> None:
        # The next number for whatever is not there: a look-up that finds and one that adds are the same call.
        self._numbers: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        self._known = _Pieces()
        for token, index in self._added_ids.items():
            assert self._numbers[token] == self._known.num_pieces
            self._known.append(np.array([index], np.int32), np.array([1]), np.array([False]))
        self._num_chars = 0

    def __getstate__(self) -> dict[str, Any]:
        # A defaultdict with a counter cannot be sent to another process by every Python.
        return {**self.__dict__, "_numbers": list(self._numbers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        counter = itertools.count(len(state["_numbers"]))
        self._numbers = defaultdict(counter.__next__, zip(state["_numbers"], range(len(state["_numbers"])), strict=True))


class _Pieces:
    """The ids of numbered pieces, one after the other; grows by doubling.

    Attributes:
        num_pieces: whose ids are here.
    """

    def __init__(self) -> None:
        self.num_pieces = 0
        self._ids = np.zeros(1024, np.int32)
        self._starts = np.zeros(1024, np.int64)  # in `_ids`, with the place of the next piece at the end
        self._is_lossy = np.zeros(1024, np.bool_)
        self._has_lossy = False

    def append(self, ids: IntArray, lengths: npt.NDArray[np.int64], is_lossy: npt.NDArray[np.bool_]) -> None:
        """Adds pieces: their ids joined, how many each has, and whether they do not decode to the piece."""
        first, last = self.num_pieces, self.num_pieces + len(lengths)
        begin = int(self._starts[first])
        self._ids = _grown(self._ids, begin + len(ids))
        self._starts, self._is_lossy = _grown(self._starts, last + 1), _grown(self._is_lossy, last)
        self._ids[begin : begin + len(ids)] = ids
        self._starts[first + 1 : last + 1] = begin + np.cumsum(lengths)
        self._is_lossy[first:last] = is_lossy
        self._has_lossy |= bool(is_lossy.any())
        self.num_pieces = last

    def join(self, pieces: IntArray) -> tuple[IntArray, npt.NDArray[np.int64], bool]:
        """(ids of the pieces one after the other, the first token of each and their number, whether they decode to the pieces)."""
        starts = self._starts[pieces]
        lengths = self._starts[pieces + 1] - starts
        first_tokens = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum(lengths, out=first_tokens[1:])
        places = np.repeat(starts - first_tokens[:-1], lengths)
        places += np.arange(len(places))
        return self._ids[places], first_tokens, not (self._has_lossy and self._is_lossy[pieces].any())


def _grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """The array, with room for so many items."""
    return array if size <= len(array) else np.concatenate([array, np.zeros(max(size, 2 * len(array)) - len(array), array.dtype)])


def _place(edges: npt.NDArray[np.int64], first_tokens: npt.NDArray[np.int64], char: int) -> tuple[int, int, int]:
    """(piece that holds the character, first token of the piece, the character's offset in it)."""
    piece = int(edges.searchsorted(char, side="right")) - 1
    return piece, int(first_tokens[piece]), char - int(edges[piece])


def _prefix(ids: IntArray, place: Callable[[int], tuple[int, int, int]], num_chars: int) -> IntArray | None:
    _, token, offset = place(num_chars)
    return None if offset else ids[:token]


def _kinds() -> bytes:
    """What each ASCII character is, and at 128 all others."""
    kinds = [_MARK if 32 < code < 127 else _OTHER for code in range(256)]
    for code in map(ord, string.ascii_letters + string.digits):
        kinds[code] = _DIGIT if chr(code).isdigit() else _LETTER
    for char, kind in (("'", _APOSTROPHE), (" ", _SPACE), ("\n", _NEWLINE), ("\t", _BLANK), ("\r", _BLANK)):
        kinds[ord(char)] = kind
    return bytes(kinds)


_KINDS = _kinds()
_IS_VISIBLE = bytes(kind in (_LETTER, _DIGIT, _APOSTROPHE, _MARK) for kind in range(256))


def _pair_cuts(is_gpt2: bool) -> bytes:
    """Whether two neighbours of the kinds a and b belong to different words, at 8 a + b."""
    white = (_SPACE, _NEWLINE, _BLANK)
    after = {_LETTER: (_DIGIT, _MARK, *white), _DIGIT: (_LETTER, _APOSTROPHE, _MARK, *white), _MARK: (_DIGIT,), _APOSTROPHE: (_DIGIT,)}
    if is_gpt2:  # its words never begin with a mark, and its marks never take white space along
        after |= {_MARK: (_DIGIT, _LETTER, *white), _APOSTROPHE: (_DIGIT, *white)}
    return bytes(code < 64 and code % 8 in after.get(code // 8, ()) for code in range(256))


def _word_edges(codes: Any, cuts: bytes) -> npt.NDArray[np.bool_]:
    """Whether a piece may begin at each character of a text, and false at its end."""
    kinds = np.frombuffer(np.minimum(codes, 128).astype(np.uint8).tobytes().translate(_KINDS), np.uint8)
    is_edge = np.zeros(len(codes) + 1, np.bool_)
    is_edge[1:-1] = np.frombuffer((kinds[:-1] * 8 + kinds[1:]).tobytes().translate(cuts), np.bool_)
    if len(codes) > 2:
        is_visible = np.frombuffer(kinds.tobytes().translate(_IS_VISIBLE), np.bool_)
        is_between = is_visible[:-2] & is_visible[2:]
        is_edge[1:-2] |= is_between & (kinds[1:-1] == _SPACE)
        is_edge[2:-1] |= is_between & (kinds[1:-1] == _NEWLINE)
    return is_edge


def _can_be_cut(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the ids of a text are those of its pieces: a byte-level BPE whose words end where `_word_edges` cuts."""
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    normalizer, decoder, steps = _state(backend.normalizer), _state(backend.decoder), _steps(backend.pre_tokenizer)
    return (
        type(backend.model).__name__ == "BPE"
        and not backend.model.dropout
        and backend.truncation is None
        and backend.padding is None
        and not backend.encode_special_tokens
        and normalizer.get("type") in (None, "NFC")
        and decoder.get("type") == "ByteLevel"
        and all(map(_is_known_step, steps))
        and any(step.get("type") == "ByteLevel" for step in steps)
        and any(step.get("type") == "Split" or step.get("use_regex") for step in steps)
        and not any(
            token.lstrip or token.rstrip or token.single_word or token.normalized for token in tokenizer.added_tokens_decoder.values()
        )
    )


def _state(part: Any) -> dict[str, Any]:
    """What a tokenizer's normalizer, pre-tokenizer or decoder is, as tokenizer.json says it; empty where there is none."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    state = _state(pre_tokenizer)
    return list(state.get("pretokenizers", [state]))


def _is_known_step(step: dict[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return not step["add_prefix_space"]
    if step.get("type") == "Split":
        is_isolated = step["behavior"] == "Isolated" and not step["invert"]
        return is_isolated and step["pattern"].get("Regex") in _KNOWN_PATTERNS
    return step.get("type") == "Digits"
