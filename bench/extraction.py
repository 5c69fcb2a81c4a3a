"""How near extraction comes to the bare forward of the target: tokens/s of both on the same batches, in one run.

    .venv/bin/python bench/extraction.py --run runs/quickstart      # under 4 minutes on two cores; `make quickstart` makes the run

Alternates, after a warm-up, over the same documents: the target's forward alone, on batches that lie ready and of which nothing is kept, and
`extract` with each storage: reading the samples, the forward, encoding, copies, checksums, writing and flushing to disk, the index. Beside the ratio
of the clock stands that of processor time, of all threads, which other users of the machine disturb less. Prints hardware, versions and shapes, then
median and range; writes bench/results/extraction.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import tyro
from datasets import Dataset, load_from_disk

from bench.measure import about, peak_memory, reset_peak_memory, resident_memory, spread, write_results
from data.batch import Features
from data.extract import document_lengths, extract, finish_store, shard_packs
from data.loader import shuffled_once
from data.shards import StoreHeader, cut_shards
from data.storage import Storage
from data.target import Target, TargetConfig, default_aux_layers

STORAGES: tuple[Storage, ...] = get_args(Storage)


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        run: a finished run, for its data.
        target: its target; None is the one that the run names.
        tokens: extracted by each variant, about.
        shard_tokens: tokens of a shard: several, so that writing can overlap.
        repeats: rounds of the alternation.
        out: the result file's name in bench/results/; None writes nothing.
    """

    run: Path = Path("runs/quickstart")
    target: str | None = None
    tokens: int = 16384
    shard_tokens: int = 4096
    repeats: int = 4
    out: str | None = "extraction"


def main(settings: Settings) -> None:
    """Measures and writes."""
    target, samples = target_of(settings.run, settings.target), samples_of(settings.run, settings.tokens)
    lengths = document_lengths(samples)
    header = header_of(target, "lossless")
    shapes = {
        "tokens": int(lengths.sum()),
        "documents": len(lengths),
        "hidden_size": target.hidden_size,
        "layers": target.num_layers,
        "states": len(header.aux_layers) + 1,
        "dtype": header.dtype,
        "shard_tokens": settings.shard_tokens,
    }
    document: dict[str, Any] = {"about": about(("torch", "transformers", "safetensors")), "shapes": shapes}
    print(document, flush=True)
    packs = [pack for shard in cut_shards(lengths, settings.shard_tokens) for pack in shard_packs(target, samples, shard, lengths, header)]
    variants: dict[str, Callable[[], None]] = {"bare forward": partial(forward_only, target, packs)}
    for storage in STORAGES:
        variants[storage] = partial(extract_all, target, samples, replace(header, storage=storage), settings.shard_tokens)
    document["rows"] = rows(in_turn(variants, settings.repeats), int(lengths.sum()), header)
    for row in document["rows"]:
        print(row, flush=True)
    if settings.out is not None:
        write_results(settings.out, document)


def in_turn(variants: dict[str, Callable[[], None]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds, seconds of processors and peak bytes beyond those before, of every round of every variant, after one that is not counted."""
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "processor_s": [], "extra_bytes": []} for name in variants}
    for repeat in range(1 + repeats):
        for name, work in variants.items():
            reset_peak_memory()
            before, started, processor_started = resident_memory(), time.perf_counter(), time.process_time()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                found[name]["seconds"].append(time.perf_counter() - started)
                found[name]["processor_s"].append(time.process_time() - processor_started)
                found[name]["extra_bytes"].append(peak_memory() - before)
    return found


def rows(measured: dict[str, dict[str, list[float]]], num_tokens: int, header: StoreHeader) -> list[dict[str, Any]]:
    """A line a variant; ratios are of the two neighbours of a round."""
    bare = measured["bare forward"]
    bfloat16_bytes = replace(header, dtype="bfloat16", storage="lossless").bytes_per_token
    found = []
    for name, values in measured.items():
        row: dict[str, Any] = {
            "variant": name,
            "tokens_per_s": spread([num_tokens / value for value in values["seconds"]]),
            "speed_of_bare": spread([alone / value for alone, value in zip(bare["seconds"], values["seconds"], strict=True)]),
            "processor_time_of_bare": spread([value / alone for alone, value in zip(bare["processor_s"], values["processor_s"], strict=True)]),
            "extra_peak_mb": spread([value / 1e6 for value in values["extra_bytes"]]),
        }
        if name in STORAGES:
            num_bytes = replace(header, storage=name).bytes_per_token
            row["bytes_per_token"] = num_bytes
            row["of_bfloat16"] = round(num_bytes / bfloat16_bytes, 4)
            row["mb_per_s"] = spread([num_bytes * num_tokens / value / 1e6 for value in values["seconds"]])
        found.append(row)
    return found


@torch.no_grad()
def forward_only(target: Target, packs: list[Features]) -> None:
    """The base model's forward of every pack."""
    for pack in packs:
        target.last_states(pack.input_ids_T, pack.document_lengths)


def extract_all(target: Target, samples: Dataset, header: StoreHeader, shard_tokens: int) -> None:
    """A whole store, which is then removed."""
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        extract(target, samples, Path(folder), header=header, shard_tokens=shard_tokens)
        finish_store(samples, Path(folder), header, shard_tokens)


def header_of(target: Target, storage: Storage) -> StoreHeader:
    """What EAGLE-3 asks for."""
    layers = default_aux_layers(target.num_layers)
    return StoreHeader("bench", "bench", layers, True, str(target.dtype).removeprefix("torch."), target.hidden_size, storage)


def target_of(run: Path, model: str | None) -> Target:
    """A run's target, or the one that was asked for."""
    config = json.loads((run / "config.json").read_text())["target"]
    return Target.load(TargetConfig(**(config | ({"model": model} if model else {}))), "cuda" if torch.cuda.is_available() else "cpu")


def samples_of(run: Path, num_tokens: int) -> Dataset:
    """Documents of a run in their stored order, of so many tokens at most."""
    folder = run / "regenerated"
    loaded = load_from_disk(str(folder if folder.exists() else run / "data"))
    samples = shuffled_once(loaded if isinstance(loaded, Dataset) else loaded["train"])
    count = int(np.searchsorted(document_lengths(samples).cumsum(), num_tokens, side="right"))
    return samples.select(range(max(1, count)))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
