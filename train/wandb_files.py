"""What the files of offline wandb runs hold, and their repair after a kill.

wandb's process writes them a block at a time. Killed with the run, it loses the latest steps, so what it was told says too much; and `wandb sync`
stops at a file that ends in the middle of a record, before all later ones of the run.

A file is a header of 7 bytes, then LevelDB's log format: blocks of 32 KiB, in them parts of a record, each a header of 7 bytes (checksum, length,
kind) and its content. The records are messages of wandb/proto/wandb_internal.proto.
"""

from __future__ import annotations

import importlib
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_HEADER = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4  # kinds that end a record; 2 begins and 3 continues one


def mend_offline_runs(wandb_dir: Path, run_id: str) -> int | None:
    """Cuts each offline file of a run back to its whole records, and removes a folder that holds none: nothing of them could be sent.

    No process may still be writing them.

    Returns:
        The last step that they hold, 0 for none; None where the run has no folder.
    """
    folders = list(wandb_dir.glob(f"offline-run-*-{run_id}"))
    last_step = 0
    for folder in folders:
        path = folder / f"run-{run_id}.wandb"
        data = path.read_bytes() if path.exists() else b""
        whole = list(_records(data))
        last_step = max([last_step, *(step for _, content in whole for step in _steps(content))])
        end = whole[-1][0] if whole else 0
        if not whole:
            shutil.rmtree(folder)
        elif end < len(data):
            os.truncate(path, end)
    return last_step if folders else None


def _steps(content: bytes) -> list[int]:
    """The step of a record, where it is one of the history."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    items = messages.Record.FromString(content).history.item
    return [int(item.value_json) for item in items if "_step" in (item.key, *item.nested_key)]


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The whole records of a file, each with the place where it ends."""
    place, parts = _HEADER.size, b""
    while place + _HEADER.size <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEADER.size:  # too short for a part: filled up with zeros
            place += left
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        content = data[place + _HEADER.size : place + _HEADER.size + length]
        if not kind or len(content) < length:
            return
        parts += content
        place += _HEADER.size + length
        if kind in (_WHOLE, _LAST):
            yield place, parts
            parts = b""
