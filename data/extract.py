"""The target's hidden states of a split, written to a store: every token once, resumable shard by shard.

Place in the flow: tokenised samples -> `extract` -> data/shards.py. Each process of a launch extracts every w-th shard; a shard that is whole on disk
is never computed again, so an interrupted extraction goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from pyarrow import compute

from data.batch import Features
from data.progress import Progress
from data.shards import (
    INDEX_FILE,
    FeatureStore,
    Shard,
    StoreHeader,
    cut_shards,
    discard_if_damaged,
    finished_shard,
    remove_strangers,
    write_index,
    write_shard,
)
from data.target import Target

_HEADER_FILE = "header.json"
_PACK_TOKENS = 4096


def extract(
    target: Target,
    samples: Dataset,
    folder: Path,
    *,
    header: StoreHeader,
    shard_tokens: int,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Extracts this rank's shards. `finish_store` completes the store when every rank is done.

    Args:
        target: the frozen target.
        samples: columns input_ids and loss_mask.
        folder: the store; the shards that an interrupted extraction left there whole, by their checksums, are kept.
        header: what the store shall hold.
        shard_tokens: tokens of a shard.
        rank, world_size: this process among those that share the work.

    Raises:
        ValueError: if there is no document, the folder holds a store of something else, or the disk has too little room.
    """
    lengths = document_lengths(samples)
    if not len(lengths):
        raise ValueError("there is no document to extract the states of: look at data_report.json for the reasons records were left out")
    shards = cut_shards(lengths, shard_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    _check_folder(folder, header)
    for shard in shards[rank::world_size]:
        discard_if_damaged(folder, shard)
    missing = [shard for shard in shards if finished_shard(folder, shard) is None]
    if missing:
        (folder / INDEX_FILE).unlink(missing_ok=True)  # of a store that was whole once: nobody may open it half replaced
    _check_room(folder, header, sum(shard.num_tokens for shard in missing))
    mine = [shard for shard in shards[rank::world_size] if finished_shard(folder, shard) is None]
    progress = Progress("extract", "tokens", sum(shard.num_tokens for shard in mine), bytes_per_unit=header.bytes_per_token, is_shown=rank == 0)
    # Writing overlaps with computing: one shard is written while the next is computed.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-writer") as writer:
        written: Future[None] | None = None
        for shard in mine:
            packs = []
            for pack in _packs(target, samples, shard, lengths, header):
                packs.append(pack)
                progress.advance(len(pack.input_ids_T))
            if written is not None:
                written.result()
            written = writer.submit(write_shard, folder, shard, packs)
        if written is not None:
            written.result()
    progress.close()


def is_served_by(folder: Path, header: StoreHeader) -> bool:
    """Whether the folder holds a finished store with at least these states of these documents: one store can serve several drafters.

    Raises:
        ValueError: if it holds a finished store that lacks states, or one of another target or other documents.
    """
    if not (folder / INDEX_FILE).exists():
        return False
    store = FeatureStore.open(folder)
    as_far_as_wanted = replace(header, aux_layers=store.header.aux_layers, has_last=store.header.has_last)
    _check_folder(folder, as_far_as_wanted)
    store.require(header.aux_layers, header.has_last)
    return True


def finish_store(samples: Dataset, folder: Path, header: StoreHeader, shard_tokens: int) -> None:
    """Writes the index of a store whose shards are all there, and removes shards of another cut.

    Raises:
        ValueError: if a shard is missing.
    """
    lengths = document_lengths(samples)
    entries = []
    for shard in cut_shards(lengths, shard_tokens):
        entry = finished_shard(folder, shard)
        if entry is None:
            raise ValueError(f"{folder / shard.name} is missing or not whole: run the recipe again to extract it")
        entries.append(entry)
    remove_strangers(folder, entries)
    write_index(folder, header, lengths, entries)


def document_lengths(samples: Dataset) -> np.ndarray:
    """int64 tokens of each document, from Arrow's own offsets: the tokens are not read."""
    table = samples.select_columns("input_ids").with_format("arrow")[:]
    return compute.list_value_length(table["input_ids"]).to_numpy().astype(np.int64)


def estimated_bytes(header: StoreHeader, num_tokens: int) -> int:
    """Bytes that the states of so many tokens take on disk."""
    return header.bytes_per_token * num_tokens


def _packs(target: Target, samples: Dataset, shard: Shard, lengths: np.ndarray, header: StoreHeader) -> Iterator[Features]:
    """Features of a shard's documents, a few thousand tokens at a time, without padding."""
    first = shard.first
    while first < shard.end:
        end, tokens = first, 0
        while end < shard.end and (end == first or tokens + lengths[end] <= _PACK_TOKENS):
            tokens += lengths[end]
            end += 1
        chosen = samples[first:end]
        features = target.features(
            torch.tensor(_joined(chosen["input_ids"])),
            torch.tensor(_joined(chosen["loss_mask"])),
            lengths[first:end].tolist(),
            header.aux_layers,
            header.has_last,
        )
        yield features.to("cpu")
        first = end


def _joined(rows: Sequence[Sequence[int]]) -> list[int]:
    return [value for row in rows for value in row]


def _check_folder(folder: Path, header: StoreHeader) -> None:
    """Refuses a folder that holds something else; marks an empty one with what it will hold."""
    path = folder / _HEADER_FILE
    wanted = json.loads(json.dumps(asdict(header)))
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}.{time.time_ns()}.partial")
        partial.write_text(json.dumps(wanted))
        partial.replace(path)
        return
    try:
        found = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete {folder} to extract it again") from error
    if found != wanted:
        names = sorted(set(wanted) | set(found))
        differences = ", ".join(f"{name} {found.get(name)} (wanted {wanted.get(name)})" for name in names if found.get(name) != wanted.get(name))
        raise ValueError(f"{folder} holds states of something else: {differences}; choose another --features.path or delete the folder")


def _check_room(folder: Path, header: StoreHeader, num_tokens: int) -> None:
    wanted, free = estimated_bytes(header, num_tokens), shutil.disk_usage(folder).free
    if wanted > free:
        raise ValueError(
            f"the hidden states take {wanted / 1e9:,.1f} GB ({header.bytes_per_token:,} bytes for each of {num_tokens:,} tokens), but {folder} has "
            f"{free / 1e9:,.1f} GB free: set --features.mode online, point --features.path at a larger disk, or train on fewer conversations"
        )
