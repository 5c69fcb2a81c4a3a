"""JSON records out of a stream of bytes, in constant memory, with exact byte offsets, whatever state the file is in.

Place in the flow: file or gunzipped bytes -> `Record` | `Damage` -> data/conversations.py. Three layouts are told apart by
content, not by name: an array of records, records one after the other (each over as many lines as it likes), and JSON Lines. What
is not valid JSON becomes a `Damage`, never an exception, and reading goes on at the next whole record: in JSON Lines the next
line; elsewhere the next object that parses and can hold a conversation.

The standard library's scanner is used rather than an event parser because it can start again anywhere and knows where it stands.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from data.columns import KNOWN_COLUMNS, ColumnConfig
from data.report import DataError

_MAX_JSON_CHARS = 64 * 2**20  # the text of one record is never longer in memory
_PROBE_LINES = 100
_END_MARGIN = 12  # an error this close to the end of the window may be a literal or an escape that continues
_BEGUN_TOKEN = re.compile(r"[\\\w+.-]{1,12}")  # what such a literal, number or escape looks like where the stream ends
_SEPARATORS = re.compile(r"[\s,\ufeff]*")  # byte order marks too: files are joined with `cat`
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Record:
    """A value read from a source; `name` is `<file>:<index>`, the id of a record that has none."""

    value: Any
    name: str


@dataclass(frozen=True)
class Damage:
    """Something in a source that could not be read.

    Attributes:
        reason: the reason under which `count` records are left out, or None where no record is known to be lost.
        name: where, as the example of the count.
        message: one line for the user, with the byte offset.
        count: records lost.
        is_loud: whether to warn at once; single bad lines are only counted.
    """

    reason: str | None
    name: str
    message: str
    count: int = 1
    is_loud: bool = True


@dataclass(frozen=True)
class Note:
    """Something the user should know about a source that is not damage."""

    message: str


class TextReader:
    """Decoded text over a byte stream: a window that grows on demand and knows the byte offset of each of its characters."""

    def __init__(self, chunks: Iterator[bytes], where: str) -> None:
        self._chunks = chunks
        self._where = where
        head = b""
        while len(head) < 4 and (chunk := next(chunks, b"")):
            head += chunk
        encoding: str = json.detect_encoding(head)
        bom = next((mark for mark in (codecs.BOM_UTF8, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE) if head.startswith(mark)), b"")
        if not bom and encoding == "utf-16":
            bom = head[:2]
        if encoding in ("utf-16", "utf-32"):
            encoding += "-le" if bom[0] == 0xFF else "-be"
        self._encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        # Bytes that do not decode become lone surrogates: the record that holds them is counted, and offsets stay exact.
        self._errors = "surrogateescape" if self._encoding == "utf-8" else "surrogatepass"
        self._decoder = codecs.getincrementaldecoder(self._encoding)(self._errors)
        self._window_byte = len(bom)
        self.window = self._decode(head[len(bom) :], final=False)
        self.position = 0
        self.is_at_end = False

    def grow(self) -> None:
        """Drops what was read and at least doubles what was not, or sets `is_at_end`."""
        self._window_byte = self.byte_offset(self.position)
        parts = [self.window[self.position :]]
        wanted = 2 * len(parts[0])
        self.position = 0
        size = len(parts[0])
        while size <= wanted:
            chunk = next(self._chunks, b"")
            parts.append(self._decode(chunk, final=not chunk))
            size += len(parts[-1])
            if not chunk:
                self.is_at_end = True
                break
        self.window = "".join(parts)

    def byte_offset(self, position: int) -> int:
        """Offset in the (decompressed) stream of a character of the window."""
        return self._window_byte + len(self.window[:position].encode(self._encoding, self._errors))

    def skip_separators(self) -> bool:
        """Moves to the next character that is neither white space nor a comma; False at the end of the stream."""
        while True:
            match = _SEPARATORS.match(self.window, self.position)
            assert match is not None
            self.position = match.end()
            if self.position < len(self.window):
                return True
            if self.is_at_end:
                return False
            self.grow()

    def _decode(self, data: bytes, final: bool) -> str:
        try:
            return self._decoder.decode(data, final)
        except UnicodeDecodeError as error:
            if final and not data:
                return ""  # half a UTF-16 or UTF-32 unit at the end of the stream
            raise DataError(f"{self._where} looks like {self._encoding} but does not decode: {error.reason}") from error


def read_json_records(chunks: Iterator[bytes], where: str, columns: ColumnConfig = KNOWN_COLUMNS) -> Iterator[Record | Damage]:
    """All records of a JSON, JSON Lines or concatenated-JSON stream.

    Args:
        chunks: the bytes, in pieces of any size.
        where: the file's name for ids and messages.
        columns: what a record looks like; needed where reading begins again behind something broken.

    Raises:
        DataError: if there is nothing in it, or nothing that looks like JSON.
    """
    reader = TextReader(chunks, where)
    layout = _layout(reader, columns)
    if layout is None:
        if reader.is_at_end and not reader.window.strip():
            raise DataError(f"{where} is empty: expected JSON or JSON Lines with `conversations` or `messages`")
        raise DataError(
            f"{where} is not in a format that can be read: it begins with {reader.window[:24]!r}; "
            "expected a JSON array, JSON Lines, gzip of either, Parquet, or a folder written by datasets.save_to_disk"
        )
    yield from _lines(reader, where) if layout == "lines" else _values(reader, where, columns)


def _layout(reader: TextReader, columns: ColumnConfig) -> Literal["values", "lines"] | None:
    """How the stream lays out its records; None where none of its beginning is JSON."""
    if not reader.skip_separators():
        return None
    if reader.window[reader.position] == "[":
        # JSON Lines with a broken first line may begin so too; its records are then read as values one after the other.
        return "values"
    value, problem, end = _decode_value(reader)
    window, start = reader.window, reader.position
    if end and isinstance(value, dict):
        is_alone = not window[end:].split("\n", 1)[0].strip()
        return "lines" if is_alone and "\n" not in window[start:end] else "values"
    lines = window[start:].split("\n", _PROBE_LINES)[:_PROBE_LINES]
    if any(isinstance(_parse_line(line)[0], dict) for line in lines):
        return "lines"
    is_cut_off = window[start] == "{" and not end and not problem
    if is_cut_off or _find_record(window, start + 1, columns) is not None:
        return "values"
    return "lines" if window[start] == "{" else None


def _values(reader: TextReader, where: str, columns: ColumnConfig = KNOWN_COLUMNS) -> Iterator[Record | Damage]:
    """Records of an array, or records one after the other."""
    is_in_array = False
    index = 0
    while reader.skip_separators():
        first = reader.window[reader.position]
        if first == ("]" if is_in_array else "["):
            is_in_array = not is_in_array
            reader.position += 1
            continue
        value, problem, end = _decode_value(reader)
        if end:
            reader.position = end
            yield Record(value, f"{where}:{index}")
        else:
            damage = _skip_to_next_record(reader, where, f"{where}:{index}", problem, columns)
            yield damage
            if damage.reason == "cut_off":
                return
        index += 1
    if is_in_array:
        offset = reader.byte_offset(reader.position)
        message = f"{where} ends at byte {offset} without the `]` that closes its array: it may have been cut off"
        yield Damage(None, where, message)


def _skip_to_next_record(reader: TextReader, where: str, name: str, problem: str, columns: ColumnConfig) -> Damage:
    """Moves past an unreadable value and says what was skipped."""
    begin = reader.byte_offset(reader.position)
    is_cut = problem == "" and reader.is_at_end
    reader.position += 1
    while (found := _find_record(reader.window, reader.position, columns)) is None and not reader.is_at_end:
        # Keep from the last brace on: the record may begin there and go on beyond the window.
        last = reader.window.rfind("{", reader.position)
        if last < 0 or len(reader.window) - reader.position > _MAX_JSON_CHARS:
            reader.position = len(reader.window)
        reader.grow()
    reader.position = len(reader.window) if found is None else found
    end = reader.byte_offset(reader.position)
    if is_cut and found is None:
        message = f"{where} is cut off: it ends at byte {end}, in the middle of the record that begins at byte {begin}"
        return Damage("cut_off", name, message)
    message = f"{where} is not valid JSON at byte {begin} ({problem or 'it does not end'}): bytes {begin} to {end} were skipped"
    return Damage("malformed_json", name, message)


def _find_record(text: str, start: int, columns: ColumnConfig) -> int | None:
    """Position of the first object at or after `start` that parses and can hold a conversation."""
    position = text.find("{", start)
    while position >= 0:
        end = position + 1
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and columns.fits(value):
            return position
        position = text.find("{", end)
    return None


def _decode_value(reader: TextReader) -> tuple[Any, str, int]:
    """Decodes the value at the reader's position, reading on as far as it goes.

    Returns:
        value, "", and the position after it; or None, what is wrong ("" where the text ended too early), and 0.
    """
    while True:
        try:
            value, end = _DECODER.raw_decode(reader.window, reader.position)
        except json.JSONDecodeError as error:
            rest = reader.window[error.pos :].strip()
            is_unfinished = error.msg.startswith("Unterminated string") or not rest or bool(_BEGUN_TOKEN.fullmatch(rest))
            if reader.is_at_end or not (is_unfinished or error.pos >= len(reader.window) - _END_MARGIN):
                return None, "" if is_unfinished else error.msg, 0
        except RecursionError:
            return None, "nested too deeply", 0
        except ValueError as error:  # a number of thousands of digits
            return None, str(error), 0
        else:
            if end < len(reader.window) or reader.is_at_end or isinstance(value, (dict, list, str)):
                return value, "", end
        if len(reader.window) - reader.position > _MAX_JSON_CHARS:
            return None, f"more than {_MAX_JSON_CHARS} characters without an end", 0
        reader.grow()


def _lines(reader: TextReader, where: str) -> Iterator[Record | Damage]:
    """Records of JSON Lines; blank lines are not records."""
    index = number = 0
    while True:
        line, ending = _next_line(reader)
        if not line and ending == "end of stream":
            return
        number += 1
        begin = reader.position
        reader.position += len(line)
        if line.strip():
            value, problem = _parse_line(line) if ending != "none" else (None, f"more than {_MAX_JSON_CHARS} characters")
            name, at = f"{where}:{index}", f"line {number} (byte {reader.byte_offset(begin) if problem else 0})"
            if not problem:
                yield Record(value, name)
            elif ending == "end of stream":
                end = reader.byte_offset(reader.position)
                yield Damage("cut_off", name, f"{where} is cut off: it ends at byte {end}, in the middle of {at}")
            else:
                yield Damage("malformed_json", name, f"{where} {at} is not valid JSON: {problem}", is_loud=False)
            index += 1
        while ending == "none":
            line, ending = _next_line(reader)
            reader.position += len(line)
        reader.position += ending == "newline"


def _next_line(reader: TextReader) -> tuple[str, Literal["newline", "end of stream", "none"]]:
    """The line at the reader's position and what follows it: "none" where it is too long to be held and goes on."""
    while (end := reader.window.find("\n", reader.position)) < 0:
        if reader.is_at_end:
            return reader.window[reader.position :], "end of stream"
        if len(reader.window) - reader.position > _MAX_JSON_CHARS:
            return reader.window[reader.position :], "none"
        reader.grow()
    return reader.window[reader.position : end], "newline"


def _parse_line(line: str) -> tuple[Any, str]:
    """The line's value and "", or None and what is wrong."""
    try:
        return json.loads(line.lstrip("\ufeff")), ""
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        return None, str(error)
