"""The store of hidden states: what the target said about every training token, on disk.

Place in the flow: data/extract.py writes shards -> `FeatureStore.read` gives `Features` to the loader.

A store is a folder with one safetensors file a shard and `index.json`:

    index.json                 schema version, target, layers, storage, document lengths, and for each shard its documents, size and SHA-256
    shard_00000.safetensors    input_ids int32 [N], loss_mask bool [N], aux_hidden_states [N, X], last_hidden_state [N, H]; where these are
                               8-bit (data/storage.py), aux_scales and last_scales, bfloat16 [N, G]
    shard_00000.json           the shard's entry of the index; it appears after its file is whole on disk, so it marks the shard as done

Documents lie end to end, in the order of the samples, which data/loader.py has shuffled once, so that an epoch can read its shards nearly from
beginning to end. Only the states that were asked for are there. Shards are cut by a token budget from the lengths alone, so every process, and a run
that goes on after a kill, cuts the same ones.

Shapes: N tokens of a shard, X = A * H concatenated auxiliary states, H hidden size, G groups of values of a token that share a scale.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.batch import Features
from data.storage import Storage, bytes_per_state, decode, encode, num_groups

SCHEMA_VERSION = 2
INDEX_FILE = "index.json"
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class StoreHeader:
    """What a store holds.

    Attributes:
        target: fingerprint of the target, its tokenizer and template included.
        samples: fingerprint of the tokenised documents.
        aux_layers: HF hidden_states indices of the auxiliary states.
        has_last: whether the post-norm last hidden state is there.
        dtype: of the target's states, in which they are read again.
        hidden_size: H.
        storage: how the states are stored.
        schema_version: of this layout.
    """

    target: str
    samples: str
    aux_layers: tuple[int, ...]
    has_last: bool
    dtype: str
    hidden_size: int
    storage: Storage
    schema_version: int = SCHEMA_VERSION

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes: states, id and mask."""
        num_states = len(self.aux_layers) + self.has_last
        return num_states * bytes_per_state(self.storage, self.hidden_size, getattr(torch, self.dtype)) + 4 + 1


@dataclass(frozen=True)
class Shard:
    """One file: documents `first` to `end` - 1.

    Attributes:
        num_bytes, sha256: of the file, filled in when it is written.
    """

    name: str
    first: int
    end: int
    num_tokens: int
    num_bytes: int = 0
    sha256: str = ""


def cut_shards(lengths: Sequence[int] | np.ndarray, shard_tokens: int) -> list[Shard]:
    """Consecutive documents, up to `shard_tokens` tokens a shard (a longer document has one of its own)."""
    shards: list[Shard] = []
    first, tokens = 0, 0
    for index, length in enumerate([*lengths, None]):
        if index > first and (length is None or tokens + length > shard_tokens):
            shards.append(Shard(f"shard_{len(shards):05d}.safetensors", first, index, tokens))
            first, tokens = index, 0
        tokens += 0 if length is None else int(length)
    return shards


def stored_tensors(pack: Features, header: StoreHeader) -> tuple[dict[str, Tensor], Tensor]:
    """What a shard holds of a pack, by name, on the pack's device; and bool [T], false where a token's states are not finite."""
    tensors = {"input_ids": pack.input_ids_T.to(torch.int32), "loss_mask": pack.loss_mask_T}
    is_finite_T = torch.ones_like(pack.loss_mask_T)
    for name, scales_name, states in (("aux_hidden_states", "aux_scales", pack.aux_TX), ("last_hidden_state", "last_scales", pack.last_TH)):
        if states is not None:
            encoded = encode(states, header.storage, header.hidden_size)
            tensors[name] = encoded.values_NX
            if encoded.scales_NG is not None:
                tensors[scales_name] = encoded.scales_NG
            is_finite_T = is_finite_T & encoded.is_finite_N
    return tensors, is_finite_T


def write_shard(folder: Path, shard: Shard, tensors: Mapping[str, Tensor]) -> None:
    """Writes one shard and then its entry; a kill in between leaves no entry, and the shard is written again.

    Args:
        folder: the store.
        shard: from `cut_shards`.
        tensors: of `stored_tensors`, of all its documents in order, in CPU memory.

    Raises:
        ValueError: if the disk does not take it.
    """
    partial = folder / f"{shard.name}.partial"
    try:
        save_file(dict(tensors), partial)
    except (SafetensorError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"{folder / shard.name} cannot be written ({error}): make room, then run the recipe again; it goes on there") from error
    digest = _sha256(partial)
    entry = Shard(shard.name, shard.first, shard.end, shard.num_tokens, partial.stat().st_size, digest)
    _flush(partial)
    partial.replace(folder / shard.name)
    _write_json(folder / _entry_name(shard.name), asdict(entry))


def finished_shard(folder: Path, shard: Shard) -> Shard | None:
    """The entry of a shard that is whole on disk and holds these very documents, or None."""
    path, entry_path = folder / shard.name, folder / _entry_name(shard.name)
    if not (path.exists() and entry_path.exists()):
        return None
    try:
        entry = Shard(**json.loads(entry_path.read_text()))
    except (TypeError, json.JSONDecodeError):
        return None  # mangled: the shard is written again
    same = (entry.first, entry.end, entry.num_tokens) == (shard.first, shard.end, shard.num_tokens)
    return entry if same and path.stat().st_size == entry.num_bytes else None


def discard_if_damaged(folder: Path, shard: Shard) -> None:
    """Forgets a finished shard whose bytes are not those of its checksum, so that it is written again; says so.

    What a shard's writer left of an earlier attempt goes too: it takes room.
    """
    (folder / f"{shard.name}.partial").unlink(missing_ok=True)
    entry = finished_shard(folder, shard)
    if entry is not None and _sha256(folder / shard.name) != entry.sha256:
        print(f"{folder / shard.name} is damaged (its SHA-256 is not the one it was written with): it is extracted again", flush=True)
        _entry_path(folder / shard.name).unlink()


def remove_strangers(folder: Path, shards: Sequence[Shard]) -> None:
    """Removes the shards of an earlier cut, which no index names any more."""
    kept = {name for shard in shards for name in (shard.name, _entry_name(shard.name))}
    for path in folder.glob("shard_*"):
        if path.name not in kept:
            path.unlink()


def write_index(folder: Path, header: StoreHeader, lengths: Sequence[int] | np.ndarray, shards: Sequence[Shard]) -> None:
    """Completes a store whose shards are all written."""
    document = {"header": asdict(header), "document_lengths": [int(length) for length in lengths], "shards": [asdict(shard) for shard in shards]}
    _write_json(folder / INDEX_FILE, document)


class FeatureStore:
    """A complete store, read through memory maps."""

    def __init__(self, folder: Path, header: StoreHeader, document_lengths: np.ndarray, shards: list[Shard]) -> None:
        self.folder = folder
        self.header = header
        self.document_lengths = document_lengths
        self.shards = shards
        self._shard_firsts = np.array([shard.first for shard in shards])
        ends = document_lengths.cumsum()
        starts = ends - document_lengths
        self._offsets = starts - starts[np.repeat(self._shard_firsts, [shard.end - shard.first for shard in shards])]
        self._open = lru_cache(maxsize=64)(lambda name: safe_open(folder / name, framework="pt"))

    @classmethod
    def open(cls, folder: Path) -> FeatureStore:
        """Opens a store.

        Raises:
            ValueError: if it is missing, unfinished, mangled, of another schema, or a shard's file is missing or has changed its size.
        """
        index = folder / INDEX_FILE
        if not index.exists():
            raise ValueError(f"{folder} holds no finished store of hidden states ({INDEX_FILE} is missing): run the recipe again to extract it")
        header, lengths, shards = _read_index(index)
        for shard in shards:
            path = folder / shard.name
            size = path.stat().st_size if path.exists() else None
            if size != shard.num_bytes:
                state = "is missing" if size is None else f"has {size:,} bytes"
                raise ValueError(f"{path} {state}, expected {shard.num_bytes:,} bytes: {_again(folder)}")
        return cls(folder, header, lengths, shards)

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Compares this rank's share of the shards with their checksums: reads them wholly, so it takes as long as the disk does.

        `open` compares sizes only, and `extract` the checksums of what an interrupted run left; `python -m data.shards FOLDER` is this.

        Raises:
            ValueError: naming the first damaged shard.
        """
        for shard in self.shards[rank::world_size]:
            path = self.folder / shard.name
            if _sha256(path) != shard.sha256:
                raise ValueError(f"{path} is damaged (its SHA-256 is not that of the index): {_again(self.folder)}")

    def require(self, aux_layers: Sequence[int], last: bool) -> None:
        """Raises ValueError where the store lacks states that a drafter reads."""
        missing = [str(layer) for layer in aux_layers if layer not in self.header.aux_layers]
        lacks = " and ".join(
            ([f"layers {', '.join(missing)}"] if missing else []) + (["the last hidden state"] if last and not self.header.has_last else [])
        )
        if lacks:
            layers = f" --drafter.aux-layers {' '.join(map(str, aux_layers))}" if aux_layers else ""
            recipe = "eagle3" if aux_layers else "medusa1"
            raise ValueError(
                f"{self.folder} holds layers {list(self.header.aux_layers)} and {'the' if self.header.has_last else 'no'} last hidden state; "
                f"the recipe wants layers {list(aux_layers)}{' and the last hidden state' if last else ''}, so {lacks} must be extracted: "
                f"`python recipes/{recipe}.py --features.path {self.folder}_more{layers} ...` does it (with the same target and data), into a store "
                "of its own that this recipe can then read"
            )

    def read(self, documents: Sequence[int], aux_layers: Sequence[int] | None = None, last: bool = True) -> Features:
        """Documents as one pack, in the given order.

        Args:
            documents: indices into the split.
            aux_layers: the auxiliary states to read; None reads all that are there.
            last: whether to read the last hidden state, where it is there.

        Raises:
            ValueError: if a shard's file is damaged.
        """
        rows = [self._rows(document) for document in documents]
        wanted = self.header.aux_layers if aux_layers is None else tuple(aux_layers)
        return Features(
            input_ids_T=self._gather(rows, "input_ids").to(torch.int64),
            loss_mask_T=self._gather(rows, "loss_mask"),
            document_lengths=tuple(int(self.document_lengths[document]) for document in documents),
            aux_TX=self._states(rows, "aux_hidden_states", "aux_scales", wanted) if wanted else None,
            last_TH=self._states(rows, "last_hidden_state", "last_scales") if last and self.header.has_last else None,
        )

    def _states(self, rows: Sequence[tuple[str, slice]], name: str, scales_name: str, layers: tuple[int, ...] | None = None) -> Tensor:
        """[T, X] decoded states of some layers, or of all that the tensor holds."""
        header = self.header
        values_TX = self._gather(rows, name, self._columns(layers, header.hidden_size))
        if header.storage == "lossless":
            return values_TX
        scales_TG = self._gather(rows, scales_name, self._columns(layers, num_groups(header.hidden_size)))
        return decode(values_TX, scales_TG, header.hidden_size, getattr(torch, header.dtype))

    def _columns(self, layers: tuple[int, ...] | None, width: int) -> Tensor | None:
        """The columns of these auxiliary layers, of which each has `width`; None where all are wanted."""
        if layers is None or layers == self.header.aux_layers:
            return None
        starts = [self.header.aux_layers.index(layer) * width for layer in layers]
        return torch.cat([torch.arange(start, start + width) for start in starts])

    def _rows(self, document: int) -> tuple[str, slice]:
        shard = self.shards[int(np.searchsorted(self._shard_firsts, document, side="right")) - 1]
        start = int(self._offsets[document])
        return shard.name, slice(start, start + int(self.document_lengths[document]))

    def _gather(self, rows: Sequence[tuple[str, slice]], name: str, columns: Tensor | None = None) -> Tensor:
        """Rows of a tensor, copied out of the mapped files."""
        parts = [self._mapped(shard_name, name, part) for shard_name, part in rows]
        return torch.cat(parts if columns is None else [part[:, columns] for part in parts])

    def _mapped(self, shard_name: str, tensor_name: str, rows: slice) -> Tensor:
        try:
            return self._open(shard_name).get_slice(tensor_name)[rows]
        except (SafetensorError, OSError) as error:
            path = self.folder / shard_name
            raise ValueError(f"{path} is damaged ({error}): {_again(self.folder)}") from error


def _read_index(path: Path) -> tuple[StoreHeader, np.ndarray, list[Shard]]:
    again = f"delete {path.parent} to extract it again"
    try:
        document = json.loads(path.read_text())
        found = document["header"]["schema_version"]
        if found == SCHEMA_VERSION:
            header = StoreHeader(**{**document["header"], "aux_layers": tuple(document["header"]["aux_layers"])})
            lengths = np.array(document["document_lengths"], dtype=np.int64)
            return header, lengths, [Shard(**entry) for entry in document["shards"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): {again}") from error
    raise ValueError(f"{path} has schema version {found}, this code reads {SCHEMA_VERSION}: {again}")


def _again(folder: Path) -> str:
    """What to do about a damaged store: without its index it counts as unfinished, and what is damaged in it is extracted again."""
    return f"delete {folder / INDEX_FILE} and run the recipe again, which extracts what is damaged"


def _entry_name(shard_name: str) -> str:
    return shard_name.replace(".safetensors", ".json")


def _entry_path(shard_path: Path) -> Path:
    return shard_path.with_name(_entry_name(shard_path.name))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value))
    _flush(partial)
    partial.replace(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str]) -> None:
    """`python -m data.shards FOLDER`: checks a store against its checksums."""
    if len(arguments) != 1:
        raise SystemExit("usage: python -m data.shards FOLDER")
    try:
        store = FeatureStore.open(Path(arguments[0]))
        store.verify()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    num_bytes = sum(shard.num_bytes for shard in store.shards)
    print(f"{arguments[0]}: {len(store.shards):,} shards, {len(store.document_lengths):,} documents, {num_bytes / 1e9:,.2f} GB, all whole")


if __name__ == "__main__":
    main(sys.argv[1:])
