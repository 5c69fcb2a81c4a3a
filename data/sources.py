"""Where records come from: files, folders, installed packages, saved datasets and the Hub.

Place in the flow: a source named in the config -> `Record` | `Damage` -> data/conversations.py. A file's format is told by its
content, so a wrong or missing suffix does no harm. Sources:

    PATH                 a JSON array, JSON Lines or Parquet file, or gzip of the first two
    FOLDER               every such file in it, in the order of their names
    FOLDER[:SPLIT]       what `datasets.save_to_disk` wrote; SPLIT is "train" unless named
    FOLDER[/CONFIG][:SPLIT]                     a folder laid out like a dataset of the Hub
    package:NAME                                the data files of an installed Python package
    OWNER/NAME[/CONFIG][:SPLIT][@REVISION]      a dataset of the Hugging Face Hub; REVISION is a branch, tag or commit

Which columns of a record hold the conversation is the matter of data/columns.py.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data.columns import KNOWN_COLUMNS, ColumnConfig
from data.dataset_source import (
    ARROW_ERRORS,
    BATCH_ROWS,
    is_repository,
    is_saved_dataset,
    one_line,
    parse_hub_name,
    read_hub,
    read_repository,
    read_saved_dataset,
)
from data.json_records import Damage, Note, Record, read_json_records
from data.report import DataError, printable

_CHUNK_BYTES = 2**20
_GZIP_CHUNK_BYTES = 2**16
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".gz")
_NOT_RECORDS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json", "package.json"}
_GZIP = b"\x1f\x8b"
_FOREIGN = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"ARROW1": "an Arrow file"}


def read_records(source: str, columns: ColumnConfig = KNOWN_COLUMNS, streaming: bool = True) -> Iterator[Record | Damage | Note]:
    """Every record of a source, in order.

    Args:
        source: see above.
        columns: which columns of a table are read; the keys of JSON records are looked at by data/conversations.py.
        streaming: whether a dataset of the Hub is read as it comes, instead of being downloaded into the Hub client's cache first.

    Raises:
        DataError: if the source does not exist or cannot be read at all.
    """
    if source.startswith("package:"):
        files = _package_files(source.removeprefix("package:"))
        return (event for path, name in files for event in _read_file(path, name, columns))
    path = os.path.expanduser(source)
    folder, _, split = path.rpartition(":")
    if os.path.isdir(path):
        return _read_folder(Path(path), columns)
    if os.path.isfile(path):
        return _read_file(Path(path), Path(path).name, columns)
    if os.path.isdir(folder):
        return _read_split(Path(folder), split, columns)
    if os.path.exists(path):
        raise DataError(f"{source} is neither a file nor a folder")
    parent, config = os.path.split(folder or path)
    if parent and (Path(parent) / "README.md").is_file() and is_repository(Path(parent)):
        return read_repository(Path(parent), config, split if folder else "", columns)
    if parse_hub_name(source) is not None and not source.endswith(_SUFFIXES):
        return read_hub(source, columns, streaming)
    raise DataError(
        f"there is no file or folder {source!r}, and it is neither the id of a Hub dataset (OWNER/NAME) nor package:NAME"
    )


# --- files --------------------------------------------------------------------------------------------------------------


def _read_file(path: Path, name: str, columns: ColumnConfig) -> Iterator[Record | Damage]:
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
        yield from _read_parquet(path, name, columns)
    elif head.startswith(_GZIP):
        gunzip = _Gunzip(_file_chunks(path, name, _GZIP_CHUNK_BYTES))
        chunks = iter(gunzip)
        if not (begin := next(chunks, b"")):
            raise DataError(f"{name} holds no data: {gunzip.problem or 'it decompresses to nothing'}")
        _refuse_foreign(begin, f"the content of {name}")
        yield from read_json_records(itertools.chain([begin], chunks), name, columns)
        if gunzip.problem:
            yield Damage(None, name, f"{name}: {gunzip.problem}, after {gunzip.num_bytes} decompressed bytes")
    else:
        _refuse_foreign(head, name)
        yield from read_json_records(_file_chunks(path, name, _CHUNK_BYTES), name, columns)


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


# --- Parquet ------------------------------------------------------------------------------------------------------------

def _read_parquet(path: Path, name: str, columns: ColumnConfig) -> Iterator[Record | Damage]:
    """Rows of a Parquet file, row group by row group; a damaged group loses its own remaining rows only."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        wanted = columns.wanted(file.schema_arrow.names, name)
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        if min(sizes, default=0) < 0:
            raise DataError(f"{name} is a damaged Parquet file: a row group says that it has {min(sizes)} rows")
    except DataError:
        raise
    except ARROW_ERRORS as error:
        raise DataError(f"{name} is a damaged Parquet file: {one_line(error)}") from error
    start = 0
    for group, size in enumerate(sizes):
        done = 0
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=wanted):
                batch.validate(full=True)
                for row in batch.to_pylist():
                    yield Record(row, f"{name}:{start + done}")
                    done += 1
        except ARROW_ERRORS as error:
            rows = f"rows {start + done} to {start + size - 1}"
            message = f"{name}: {rows} cannot be read, row group {group} is damaged: {one_line(error)}"
            yield Damage("unreadable_row", f"{name}:{start + done}", message, count=size - done)
        else:
            if done != size:
                message = f"{name}: row group {group} says that it has {size} rows, but holds {done}"
                lost = max(0, size - done)
                yield Damage("unreadable_row" if lost else None, f"{name}:{start + done}", message, count=lost)
        start += size


# --- folders and packages -------------------------------------------------------------------------------------------------


def _read_split(folder: Path, split: str, columns: ColumnConfig) -> Iterator[Record | Damage | Note]:
    if is_saved_dataset(folder):
        return read_saved_dataset(folder, split, columns)
    return read_repository(folder, None, split, columns)


def _read_folder(folder: Path, columns: ColumnConfig) -> Iterator[Record | Damage | Note]:
    if is_saved_dataset(folder) or is_repository(folder):
        return _read_split(folder, "", columns)
    paths = sorted(path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES) and path.name not in _NOT_RECORDS)
    named = [(path, path.relative_to(folder).as_posix()) for path in paths]
    files = [(path, name) for path, name in named if path.is_file() and "/." not in f"/{name}"]  # not .cache, .git
    if not files:
        raise DataError(
            f"{folder} holds no file that ends in {', '.join(_SUFFIXES)}, and was not written by datasets.save_to_disk"
        )
    return (event for path, name in files for event in _read_file(path, name, columns))


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
