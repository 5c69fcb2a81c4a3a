"""Where records come from: files, folders, installed packages, saved datasets and the Hub.

Place in the flow: a source named in the config -> `Record` | `Damage` -> data/conversations.py. A file's format is told by its
content, so a wrong or missing suffix does no harm. Sources:

    PATH                 a JSON array, JSON Lines or Parquet file, or gzip of the first two
    FOLDER               every such file in it, in the order of their names
    FOLDER[:SPLIT]       what `datasets.save_to_disk` wrote; SPLIT is "train" unless named
    package:NAME         the data files of an installed Python package
    OWNER/NAME[:SPLIT]   a dataset of the Hugging Face Hub, streamed
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.json_records import TURN_LIST_KEYS, Damage, Note, Record, read_json_records
from data.report import DataError, printable

ID_KEYS = ("id", "conversation_id", "uuid", "prompt_id")

_CHUNK_BYTES = 2**20
_GZIP_CHUNK_BYTES = 2**16
_BATCH_ROWS = 256
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".gz")
_DATASET_FILES = ("dataset_dict.json", "state.json")
_NOT_RECORDS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json", "package.json"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.]+)?")
_GZIP = b"\x1f\x8b"
_FOREIGN = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"ARROW1": "an Arrow file"}


def read_records(source: str) -> Iterator[Record | Damage | Note]:
    """Every record of a source, in order.

    Raises:
        DataError: if the source does not exist or cannot be read at all.
    """
    if source.startswith("package:"):
        files = _package_files(source.removeprefix("package:"))
        return (event for path, name in files for event in _read_file(path, name))
    path = os.path.expanduser(source)
    folder, _, split = path.rpartition(":")
    if os.path.isdir(path):
        return _read_folder(Path(path))
    if os.path.isfile(path):
        return _read_file(Path(path), Path(path).name)
    if os.path.isdir(folder):
        return _read_saved_dataset(Path(folder), split)
    if os.path.exists(path):
        raise DataError(f"{source} is neither a file nor a folder")
    if _HUB_ID.fullmatch(source) and not source.endswith(_SUFFIXES):
        return _read_hub(source)
    raise DataError(
        f"there is no file or folder {source!r}, and it is neither the id of a Hub dataset (OWNER/NAME) nor package:NAME"
    )


# --- files --------------------------------------------------------------------------------------------------------------


def _read_file(path: Path, name: str) -> Iterator[Record | Damage]:
    """Records of one file, by what its first bytes say it is."""
    name = printable(name)
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise DataError(f"{name} cannot be opened: {error.strerror}") from error
    if not head:
        raise DataError(f"{name} is empty: expected JSON, JSON Lines, gzip of either, or Parquet")
    if head.startswith(b"PAR1"):
        yield from _read_parquet(path, name)
    elif head.startswith(_GZIP):
        gunzip = _Gunzip(_file_chunks(path, name, _GZIP_CHUNK_BYTES))
        chunks = iter(gunzip)
        if not (begin := next(chunks, b"")):
            raise DataError(f"{name} holds no data: {gunzip.problem or 'it decompresses to nothing'}")
        _refuse_foreign(begin, f"the content of {name}")
        yield from read_json_records(itertools.chain([begin], chunks), name)
        if gunzip.problem:
            yield Damage(None, name, f"{name}: {gunzip.problem}, after {gunzip.num_bytes} decompressed bytes")
    else:
        _refuse_foreign(head, name)
        yield from read_json_records(_file_chunks(path, name, _CHUNK_BYTES), name)


def _refuse_foreign(head: bytes, what: str) -> None:
    if head.startswith((b"PAR1", _GZIP)):
        raise DataError(f"{what} is itself compressed or Parquet: unpack it once")
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{what} is {kind}: unpack or convert it to JSON, JSON Lines or Parquet")


def _file_chunks(path: Path, name: str, size: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(size):
                yield chunk
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from error


class _Gunzip:
    """Decompressed bytes of a gzip stream, all that can be had of a damaged one.

    Python's own reader throws away what it has decompressed when it meets the damage.

    Attributes:
        problem: what is wrong with the stream, empty while nothing is.
        num_bytes: decompressed bytes so far.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self.problem = ""
        self.num_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        member = zlib.decompressobj(wbits=31)
        for chunk in self._chunks:
            while chunk:
                if member.eof:  # another member follows, or padding
                    if not chunk.strip(b"\0"):
                        break
                    if not _GZIP.startswith(chunk[:2]):
                        self.problem = "bytes that are not gzip follow the compressed data"
                        return
                    member = zlib.decompressobj(wbits=31)
                yield from self._counted(self._decompress(member, chunk))
                if self.problem:
                    return
                chunk = member.unused_data
        if not member.eof:
            self.problem = "the gzip stream is cut off"

    def _decompress(self, member: Any, chunk: bytes) -> Iterator[bytes]:
        """What the member makes of a chunk, in bounded pieces; after an error, byte by byte up to it."""
        before = member.copy()
        pending = chunk
        num_done = 0
        is_done = False
        while not is_done:
            try:
                piece = member.decompress(pending, _CHUNK_BYTES)
            except zlib.error as error:
                self.problem = f"the gzip stream is damaged ({error})"
                piece = _up_to_error(before, chunk, num_done)
                is_done = True
            else:
                pending = member.unconsumed_tail
                is_done = member.eof or (not pending and len(piece) < _CHUNK_BYTES)
            num_done += len(piece)
            yield piece

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.num_bytes += len(piece)
            if piece:
                yield piece


def _up_to_error(member: Any, chunk: bytes, num_done: int) -> bytes:
    """The output of a chunk up to the byte where it fails, without its first `num_done` bytes."""
    output = bytearray()
    try:
        for position in range(len(chunk)):
            output += member.decompress(chunk[position : position + 1])
    except zlib.error:
        pass
    return bytes(output[num_done:])


# --- Parquet and Arrow --------------------------------------------------------------------------------------------------

_ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)


def _read_parquet(path: Path, name: str) -> Iterator[Record | Damage]:
    """Rows of a Parquet file, row group by row group; a damaged group loses its own remaining rows only."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        columns = _wanted_columns(file.schema_arrow.names, name)
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        if min(sizes, default=0) < 0:
            raise DataError(f"{name} is a damaged Parquet file: a row group says that it has {min(sizes)} rows")
    except DataError:
        raise
    except _ARROW_ERRORS as error:
        raise DataError(f"{name} is a damaged Parquet file: {_one_line(error)}") from error
    start = 0
    for group, size in enumerate(sizes):
        done = 0
        try:
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                batch.validate(full=True)
                for row in batch.to_pylist():
                    yield Record(row, f"{name}:{start + done}")
                    done += 1
        except _ARROW_ERRORS as error:
            rows = f"rows {start + done} to {start + size - 1}"
            message = f"{name}: {rows} cannot be read, row group {group} is damaged: {_one_line(error)}"
            yield Damage("unreadable_row", f"{name}:{start + done}", message, count=size - done)
        else:
            if done != size:
                message = f"{name}: row group {group} says that it has {size} rows, but holds {done}"
                lost = max(0, size - done)
                yield Damage("unreadable_row" if lost else None, f"{name}:{start + done}", message, count=lost)
        start += size


def _read_saved_dataset(folder: Path, split: str) -> Iterator[Record | Damage | Note]:
    """Rows of one split of what `datasets.save_to_disk` wrote."""
    from datasets import Dataset

    name = printable(folder.name)
    try:
        splits = (
            json.loads((folder / "dataset_dict.json").read_text())["splits"] if (folder / "dataset_dict.json").is_file() else []
        )
        wanted = split or ("train" if splits else "")
        if splits and wanted not in splits:
            raise DataError(f"{folder} has the splits {', '.join(map(str, splits))}, not {wanted!r}: name one as {folder}:SPLIT")
        if wanted and not splits:
            raise DataError(f"{folder} holds one dataset without splits, but the source asks for the split {wanted!r}")
        # Only this split: `datasets` fails to load a set of which another split is empty.
        loaded = Dataset.load_from_disk(str(folder / wanted))
    except DataError:
        raise
    except Exception as error:
        # `datasets` raises whatever its JSON, Arrow and file layers raise.
        raise DataError(f"{folder} cannot be read as a saved dataset: {_one_line(error)}") from error
    if not split and (unread := [str(other) for other in splits if other != wanted]):
        yield Note(f"{folder}: only the split `train` is read, not {', '.join(unread)}; name another as {folder}:SPLIT")
    columns = _wanted_columns(loaded.column_names, name)
    yield from _read_arrow(loaded.select_columns(columns).with_format("arrow"), name)


def _read_arrow(dataset: Any, name: str) -> Iterator[Record | Damage]:
    start = 0
    num_rows = len(dataset)
    while start < num_rows:
        size = min(_BATCH_ROWS, num_rows - start)
        try:
            table = dataset[start : start + size]
            table.validate(full=True)  # offsets of a damaged file would otherwise be followed out of the mapped memory
            rows = table.to_pylist()
        except _ARROW_ERRORS as error:
            message = f"{name}: rows {start} to {start + size - 1} cannot be read: {_one_line(error)}"
            yield Damage("unreadable_row", f"{name}:{start}", message, count=size)
        else:
            yield from (Record(row, f"{name}:{start + offset}") for offset, row in enumerate(rows))
        start += size


def _wanted_columns(columns: list[str], name: str) -> list[str]:
    if not set(columns) & set(TURN_LIST_KEYS):
        raise DataError(f"{name} has the columns {', '.join(columns) or '(none)'}; expected one of {', '.join(TURN_LIST_KEYS)}")
    return [column for column in columns if column in TURN_LIST_KEYS + ID_KEYS]


# --- folders, packages, Hub -----------------------------------------------------------------------------------------------


def _read_folder(folder: Path) -> Iterator[Record | Damage | Note]:
    if any((folder / file).is_file() for file in _DATASET_FILES):
        return _read_saved_dataset(folder, "")
    paths = sorted(path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES) and path.name not in _NOT_RECORDS)
    named = [(path, path.relative_to(folder).as_posix()) for path in paths]
    files = [(path, name) for path, name in named if path.is_file() and "/." not in f"/{name}"]  # not .cache, .git
    if not files:
        raise DataError(
            f"{folder} holds no file that ends in {', '.join(_SUFFIXES)}, and was not written by datasets.save_to_disk"
        )
    return (event for path, name in files for event in _read_file(path, name))


def _package_files(package: str) -> list[tuple[Path, str]]:
    """The data files of an installed package, found without importing it."""
    try:
        listed = importlib.metadata.files(package)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise DataError(f"package {package!r} is not installed in this environment: run `pip install {package}`") from error
    files = [file for file in listed or [] if file.name.endswith(_SUFFIXES) and ".dist-info" not in file.parts[0]]
    found = [(Path(str(file.locate())), file.name) for file in sorted(files) if file.name not in _NOT_RECORDS]
    if not found:
        raise DataError(f"package {package!r} is installed but carries no file that ends in {', '.join(_SUFFIXES)}")
    return found


def _read_hub(source: str) -> Iterator[Record | Damage]:
    from datasets import load_dataset

    dataset_id, _, split = source.partition(":")
    try:
        dataset = load_dataset(dataset_id, split=split or "train", streaming=True)
        if dataset.column_names:
            dataset = dataset.select_columns(_wanted_columns(dataset.column_names, dataset_id))
    except DataError:
        raise
    except Exception as error:
        # The Hub client raises what its HTTP, file and builder layers raise.
        message = f"no file or folder is named {source!r}, and the Hub gave no dataset of that id: {_one_line(error)}"
        raise DataError(message) from error
    index = 0
    rows = iter(dataset)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise DataError(f"the Hub stopped giving {source} after {index} records: {_one_line(error)}") from error
        yield Record(row, f"{dataset_id}:{index}")
        index += 1


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
