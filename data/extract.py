"""The target's hidden states of a split, written to a store: every token once, resumable shard by shard.

Place in the flow: tokenised samples -> `extract` -> data/shards.py. Each process of a launch extracts every w-th shard; a shard that is whole on disk
is never computed again, so an interrupted extraction goes on where it was.

Nothing waits but for the forward: states are encoded on the target's device and copied to host memory behind it, and a thread writes one shard while
the next is computed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from datasets import Dataset
from pyarrow import Table, compute
from torch import Tensor

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
    stored_tensors,
    write_index,
    write_shard,
)
from data.target import Target

_HEADER_FILE = "header.json"
_IS_FINITE = "is_finite"
_PACK_TOKENS = 2048
_LENGTHS_AT_ONCE = 8192


class Pack(NamedTuple):
    """Some documents of a shard, end to end.

    Attributes:
        input_ids_T: int64.
        loss_mask_T: bool.
        lengths: tokens of each document.
    """

    input_ids_T: Tensor
    loss_mask_T: Tensor
    lengths: list[int]


class StateSource(Protocol):
    """The target in another process, where this one only drives it."""

    def packs(
        self, samples: Dataset, shards: Sequence[Shard], lengths: np.ndarray, header: StoreHeader, folder: Path
    ) -> Generator[Features, None, None]:
        """Features of all documents of the shards, in order; no pack reaches over the end of a shard."""
        ...

    def scratch_bytes(self, header: StoreHeader) -> int:
        """Room that it takes in the store's folder meanwhile."""
        ...


def extract(
    target: Target | StateSource,
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
        target: the frozen target, here or in another process.
        samples: columns input_ids and loss_mask.
        folder: the store; the shards that an interrupted extraction left there whole, by their checksums, are kept.
        header: what the store shall hold.
        shard_tokens: tokens of a shard.
        rank, world_size: this process among those that share the work.

    Raises:
        ValueError: if there is no document, the folder holds a store of something else, the disk has too little room, or a state is not finite.
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
    scratch_bytes = 0 if isinstance(target, Target) or not missing else target.scratch_bytes(header)
    _check_room(folder, header, sum(shard.num_tokens for shard in missing), scratch_bytes, is_shown=rank == 0)
    _mark_folder(folder, header)
    if missing:
        (folder / INDEX_FILE).unlink(missing_ok=True)  # of a store that was whole once: nobody may open it half replaced
    mine = [shard for shard in shards[rank::world_size] if finished_shard(folder, shard) is None]
    num_tokens = sum(shard.num_tokens for shard in mine)
    progress: Progress | None = None
    if isinstance(target, Target):
        packs = _target_packs(target, samples, mine, lengths, header)
    else:
        packs = target.packs(samples, mine, lengths, header, folder)
    with closing(packs), _ShardWriter(folder, header, samples, max((shard.num_tokens for shard in mine), default=0)) as writer:
        for shard in mine:
            remaining = shard.num_tokens
            while remaining:
                pack = next(packs)
                if progress is None:  # the clock starts here: before its first states an engine has to start
                    progress = Progress("extract", "tokens", num_tokens, bytes_per_unit=header.bytes_per_token, is_shown=rank == 0)
                writer.add(pack)
                remaining -= len(pack.input_ids_T)
                progress.advance(len(pack.input_ids_T))
            writer.finish(shard)
    if progress is not None:
        progress.close()


class _ShardWriter:
    """Host memory of two shards: one is written by a thread while the next fills up.

    On a GPU the memory is pinned, so copies into it are queued behind the forward; only the writing thread waits for them.

    Args:
        folder: the store.
        header: what it holds.
        samples: name the document of an error.
        max_tokens: of the largest shard.
    """

    def __init__(self, folder: Path, header: StoreHeader, samples: Dataset, max_tokens: int) -> None:
        self._folder, self._header, self._samples, self._max_tokens = folder, header, samples, max_tokens
        self._filling: dict[str, Tensor] = {}
        self._resting: dict[str, Tensor] = {}
        self._num_rows = 0
        self._device = torch.device("cpu")
        self._written: Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-writer")

    def __enter__(self) -> _ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if self._written is not None and kind is None:
            self._written.result()

    def add(self, pack: Features) -> None:
        """Appends a pack to the shard that fills up."""
        tensors, is_finite_T = stored_tensors(pack, self._header)
        self._device = is_finite_T.device
        end = self._num_rows + len(is_finite_T)
        for name, tensor in {**tensors, _IS_FINITE: is_finite_T}.items():
            if name not in self._filling:
                shape = (self._max_tokens, *tensor.shape[1:])
                self._filling[name] = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._filling[name][self._num_rows : end].copy_(tensor, non_blocking=True)
        self._num_rows = end

    def finish(self, shard: Shard) -> None:
        """Hands the filled shard to the thread, as soon as the one before it is on disk.

        Raises:
            ValueError: if a state is not finite, or the disk does not take a shard.
        """
        assert self._num_rows == shard.num_tokens
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))
        if self._written is not None:
            self._written.result()
        tensors = {name: tensor[: self._num_rows] for name, tensor in self._filling.items()}
        self._written = self._thread.submit(self._write, shard, tensors, copied)
        self._filling, self._resting = self._resting, self._filling
        self._num_rows = 0

    def _write(self, shard: Shard, tensors: dict[str, Tensor], copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        is_finite_N = tensors.pop(_IS_FINITE)
        if not is_finite_N.all():
            raise ValueError(self._not_finite(shard, is_finite_N))
        write_shard(self._folder, shard, tensors)

    def _not_finite(self, shard: Shard, is_finite_N: Tensor) -> str:
        """Which document it is and what to do."""
        lengths = document_lengths(self._samples.select(range(shard.first, shard.end)))
        first = int((~is_finite_N).nonzero()[0, 0])
        inside = int(np.searchsorted(lengths.cumsum(), first, side="right"))
        sample = self._samples[shard.first + inside]
        name = f"conversation {sample['conversation_id']!r}" if "conversation_id" in sample else f"document {shard.first + inside}"
        return (
            f"the target's states of {name} are not finite from its token {first - int(lengths[:inside].sum())} on, so nobody could train on them: "
            f"set --target.dtype float32 (it is {self._header.dtype}), or take that conversation out of the source"
        )


def is_served_by(folder: Path, header: StoreHeader, is_shown: bool = True) -> bool:
    """Whether the folder holds a finished store with at least these states of these documents: one store can serve several drafters.

    Lossless states serve who asked for 8-bit ones, and a line says so where `is_shown`; 8-bit states do not serve who asked for lossless ones.

    Raises:
        ValueError: if it holds a finished store that lacks states, or one of another target or other documents.
    """
    if not (folder / INDEX_FILE).exists():
        return False
    store = FeatureStore.open(folder)
    found = store.header
    if header.storage == "lossless" and found.storage != "lossless":
        raise ValueError(
            f"{folder} holds {found.storage} states, but features.storage is lossless: set --features.storage {found.storage} to train on them, "
            "or choose another --features.path to extract them again"
        )
    _check_folder(folder, replace(header, aux_layers=found.aux_layers, has_last=found.has_last, storage=found.storage))
    store.require(header.aux_layers, header.has_last)
    if is_shown and header.storage != found.storage:
        print(f"{folder} holds {found.storage} states already: they are read instead of extracting {header.storage} ones", flush=True)
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
    """int64 tokens of each document, from Arrow's own offsets."""
    column = samples.select_columns("input_ids").with_format("arrow")
    parts = [column[first : first + _LENGTHS_AT_ONCE]["input_ids"] for first in range(0, len(samples), _LENGTHS_AT_ONCE)]
    return np.concatenate([np.zeros(0, np.int64), *(compute.list_value_length(part).to_numpy() for part in parts)]).astype(np.int64)


def estimated_bytes(header: StoreHeader, num_tokens: int) -> int:
    """Bytes that the states of so many tokens take on disk."""
    return header.bytes_per_token * num_tokens


def shard_packs(target: Target, samples: Dataset, shard: Shard, lengths: np.ndarray, header: StoreHeader) -> Iterator[Features]:
    """Features of a shard's documents on the target's device, a few thousand tokens at a time, without padding."""
    for pack in document_packs(samples, shard, lengths):
        yield target.features(pack.input_ids_T, pack.loss_mask_T, pack.lengths, header.aux_layers, header.has_last)


def _target_packs(
    target: Target, samples: Dataset, shards: Sequence[Shard], lengths: np.ndarray, header: StoreHeader
) -> Generator[Features, None, None]:
    for shard in shards:
        yield from shard_packs(target, samples, shard, lengths, header)


def document_packs(samples: Dataset, shard: Shard, lengths: np.ndarray) -> Iterator[Pack]:
    """A shard's documents in order, a few thousand tokens at a time."""
    columns = samples.select_columns(["input_ids", "loss_mask"]).with_format("arrow")
    first = shard.first
    while first < shard.end:
        end, tokens = first, 0
        while end < shard.end and (end == first or tokens + lengths[end] <= _PACK_TOKENS):
            tokens += lengths[end]
            end += 1
        rows = columns[first:end]
        ids_T, mask_T = _joined(rows, "input_ids").to(torch.int64), _joined(rows, "loss_mask").to(torch.bool)
        yield Pack(ids_T, mask_T, lengths[first:end].tolist())
        first = end


def _joined(rows: Table, name: str) -> Tensor:
    """The lists of a column, end to end."""
    return torch.tensor(rows[name].combine_chunks().flatten().to_numpy(zero_copy_only=False))


def _check_folder(folder: Path, header: StoreHeader) -> None:
    """Refuses a folder that holds something else."""
    path = folder / _HEADER_FILE
    if not path.exists():
        return
    wanted = json.loads(json.dumps(asdict(header)))
    try:
        found = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete {folder} to extract it again") from error
    if found != wanted:
        names = sorted(set(wanted) | set(found))
        differences = ", ".join(f"{name} {found.get(name)} (wanted {wanted.get(name)})" for name in names if found.get(name) != wanted.get(name))
        raise ValueError(f"{folder} holds states of something else: {differences}; choose another --features.path or delete the folder")


def _mark_folder(folder: Path, header: StoreHeader) -> None:
    """Says in an empty folder what it will hold."""
    path = folder / _HEADER_FILE
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}.{time.time_ns()}.partial")
        partial.write_text(json.dumps(asdict(header)))
        partial.replace(path)


def _check_room(folder: Path, header: StoreHeader, num_tokens: int, scratch_bytes: int, is_shown: bool) -> None:
    """Says what will be written, and refuses what does not fit."""
    wanted, free = estimated_bytes(header, num_tokens), shutil.disk_usage(folder).free
    if wanted + scratch_bytes > free:
        smaller = "" if header.storage == "int8" else "--features.storage int8, "
        meanwhile = f", and {scratch_bytes / 1e9:,.1f} GB on their way" if scratch_bytes else ""
        raise ValueError(
            f"the hidden states take {wanted / 1e9:,.1f} GB ({header.bytes_per_token:,} bytes for each of {num_tokens:,} tokens){meanwhile}, but "
            f"{folder} has {free / 1e9:,.1f} GB free: set {smaller}--features.mode online, point --features.path at a larger disk, or train on "
            "fewer conversations"
        )
    if num_tokens and is_shown:
        print(
            f"extract: {num_tokens:,} tokens, {header.bytes_per_token:,} bytes each ({header.storage}): {wanted / 1e9:,.2f} GB to {folder}, "
            f"which has {free / 1e9:,.1f} GB free",
            flush=True,
        )
