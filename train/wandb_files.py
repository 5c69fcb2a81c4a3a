"""What the files of offline wandb runs hold.

wandb's process writes them a block at a time: killed with the run, it loses the latest steps, so what it was told says too much.

A file is a header of 7 bytes, then LevelDB's log format: blocks of 32 KiB, in them parts of a record, each a header of 7 bytes (checksum, length,
kind) and its content. The records are messages of wandb/proto/wandb_internal.proto.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_HEADER = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4  # kinds that end a record; 2 begins and 3 continues one


def last_stored_step(wandb_dir: Path, run_id: str) -> int | None:
    """The last step in the offline files of a run; None where it has no folder, 0 where there is no step or not even a file yet."""
    from google.protobuf.message import DecodeError

    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    folders = list(wandb_dir.glob(f"offline-run-*-{run_id}"))
    last = 0
    for path in (folder / f"run-{run_id}.wandb" for folder in folders):
        try:
            for content in _records(path.read_bytes() if path.exists() else b""):
                record = messages.Record.FromString(content)
                last = max([last, *(int(item.value_json) for item in record.history.item if "_step" in (item.key, *item.nested_key))])
        except DecodeError:  # the kill was in the middle of it; nothing comes after
            continue
    return last if folders else None


def _records(data: bytes) -> Iterator[bytes]:
    """The whole records of a file."""
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
            yield parts
            parts = b""
