"""Records of `datasets` objects: saved on disk, laid out like a repository of the Hub, or on the Hub.

Place in the flow: a source that data/sources.py has told to be one of these -> `Record` | `Damage` | `Note`. A dataset of the Hub is streamed
(nothing but the records of the run is downloaded), or downloaded into the Hub client's cache first, which a second run then needs no network for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from data.columns import ColumnConfig
from data.json_records import Damage, Note, Record
from data.report import DataError, printable

# What reading Arrow and Parquet raises.
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)
BATCH_ROWS = 256

_SAVED_FILES = ("dataset_dict.json", "state.json")
_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:/(?P<config>[\w.-]+))?(?::(?P<split>\w+(?:\.\w+)*))?(?:@(?P<revision>[\w./-]+))?"
)
_SHARD_NAME = re.compile(r".+-\d{5}-of-\d{5}(-[0-9a-f]+)?\.\w+(\.\w+)?")


class HubName(NamedTuple):
    """A dataset of the Hub as a source names it: `OWNER/NAME[/CONFIG][:SPLIT][@REVISION]`."""

    name: str
    config: str | None
    split: str | None
    revision: str | None


def parse_hub_name(source: str) -> HubName | None:
    """The parts of a source's name; None where it cannot be one of a Hub dataset."""
    match = _HUB_NAME.fullmatch(source)
    return HubName(match["name"], match["config"], match["split"], match["revision"]) if match else None


def one_line(error: BaseException) -> str:
    """An error of another library in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


# --- saved on disk --------------------------------------------------------------------------------------------------------


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote the folder."""
    return any((folder / file).is_file() for file in _SAVED_FILES)


def read_saved_dataset(folder: Path, split: str, columns: ColumnConfig) -> Iterator[Record | Damage | Note]:
    """Rows of one split of what `datasets.save_to_disk` wrote; the split `train` where none is named.

    Raises:
        DataError: if it cannot be read, or has no such split.
    """
    from datasets import Dataset

    name = printable(folder.name)
    try:
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"] if (folder / "dataset_dict.json").is_file() else []
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
        raise DataError(f"{folder} cannot be read as a saved dataset: {one_line(error)}") from error
    if not split and (unread := [str(other) for other in splits if other != wanted]):
        yield Note(f"{folder}: only the split `train` is read, not {', '.join(unread)}; name another as {folder}:SPLIT")
    yield from _read_table(loaded, name, columns)


def _read_table(dataset: Any, name: str, columns: ColumnConfig) -> Iterator[Record | Damage]:
    """Rows of a `datasets.Dataset`, batch by batch; a damaged batch loses its own rows only."""
    table_view = dataset.select_columns(columns.wanted(dataset.column_names, name)).with_format("arrow")
    start = 0
    num_rows = len(dataset)
    while start < num_rows:
        size = min(BATCH_ROWS, num_rows - start)
        try:
            table = table_view[start : start + size]
            table.validate(full=True)  # offsets of a damaged file would otherwise be followed out of the mapped memory
            rows = table.to_pylist()
        except ARROW_ERRORS as error:
            message = f"{name}: rows {start} to {start + size - 1} cannot be read: {one_line(error)}"
            yield Damage("unreadable_row", f"{name}:{start}", message, count=size)
        else:
            yield from (Record(row, f"{name}:{start + offset}") for offset, row in enumerate(rows))
        start += size


# --- laid out like a repository, and on the Hub ---------------------------------------------------------------------------


def is_repository(folder: Path) -> bool:
    """Whether a folder is laid out like a dataset of the Hub, so that its splits must not be read together.

    Its README declares configurations or splits, or its files are named as the Hub's are: `train-00000-of-00002.parquet`.
    """
    try:
        head = (folder / "README.md").read_text(encoding="utf-8", errors="replace") if (folder / "README.md").is_file() else ""
    except OSError:
        head = ""
    front_matter = head.split("\n---", 1)[0] if head.startswith("---") else ""
    declares = any(line.startswith(("configs:", "dataset_info:")) for line in front_matter.splitlines())
    return declares or any(_SHARD_NAME.fullmatch(path.name) for place in (folder, folder / "data") if place.is_dir() for path in place.iterdir())


def read_repository(folder: Path, config: str | None, split: str, columns: ColumnConfig) -> Iterator[Record | Damage | Note]:
    """Rows of one split of a folder, found as `datasets.load_dataset` finds them; the split `train` where none is named.

    Raises:
        DataError: if it cannot be read, or has no such split or configuration.
    """
    from datasets import load_dataset

    try:
        splits = load_dataset(str(folder), config, streaming=True)
    except Exception as error:
        raise DataError(f"{folder} cannot be read as a dataset: {one_line(error)}; name a configuration as {folder}/CONFIG") from error
    wanted = split or "train"
    if wanted not in splits:
        raise DataError(f"{folder} has the splits {', '.join(map(str, splits))}, not {wanted!r}: name one as {folder}:SPLIT")
    if not split and (unread := [str(other) for other in splits if other != wanted]):
        yield Note(f"{folder}: only the split `train` is read, not {', '.join(unread)}; name another as {folder}:SPLIT")
    yield from _read_stream(splits[wanted], printable(folder.name), columns, f"{folder} cannot be read on")


def read_hub(source: str, columns: ColumnConfig, streaming: bool) -> Iterator[Record | Damage]:
    """Rows of a dataset of the Hub; the split `train` where none is named.

    Raises:
        DataError: if the Hub has no such dataset, configuration, split or revision, does not let this user read it, or stops giving it.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    named = parse_hub_name(source)
    assert named is not None, source
    try:
        dataset = load_dataset(named.name, named.config, split=named.split or "train", revision=named.revision, streaming=streaming)
    except Exception as error:
        # The Hub client raises what its HTTP, file and builder layers raise.
        hint = ""
        if isinstance(error, DatasetNotFoundError):
            hint = "; a private or gated one needs `hf auth login` or HF_TOKEN"
        elif isinstance(error, ConnectionError) and streaming:
            hint = "; one that was downloaded before is read without a network with --data.no-streaming"
        raise DataError(f"no file or folder is named {source!r}, and the Hub gave no dataset of that id: {one_line(error)}{hint}") from error
    if streaming:
        yield from _read_stream(dataset, named.name, columns, f"the Hub stopped giving {source}")
    else:
        yield from _read_table(dataset, named.name, columns)


def _read_stream(dataset: Any, name: str, columns: ColumnConfig, stopped: str) -> Iterator[Record]:
    """Rows of a `datasets.IterableDataset`; `stopped` begins the error where it does not come to its end."""
    if dataset.column_names:
        dataset = dataset.select_columns(columns.wanted(list(dataset.column_names), name))
    index = 0
    rows = iter(dataset)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise DataError(f"{stopped} after {index} records: {one_line(error)}") from error
        if index == 0:
            columns.wanted(list(row), name)  # where the columns were not known before
        yield Record(row, f"{name}:{index}")
        index += 1
