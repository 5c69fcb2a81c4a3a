"""What a store of hidden states costs and keeps: bytes, speed of writing and reading, what 8 bits change, and whether a trainer waits for it.

    .venv/bin/python bench/store.py --run runs/quickstart      # under 4 minutes on two cores; `make quickstart` makes the run

quality   each 8-bit format on the target's own states of documents of the run, against those states: relative error (mean of the tokens'), cosine,
          the KL divergence of the target's distribution that training sees, and whether the run's trained drafter drafts the same. The formats that
          lost live here only. "bfloat16 noise" is the yardstick: random errors as large as those of rounding to bfloat16, which the states have
          anyway.
speed     the same states written as shards (encoded, hashed, flushed to disk) and read as packs in the order of an epoch (from the page cache,
          decoded), lossless and in 8 bits in turn
wait      the share of its time that a trainer waits whose steps take --step-s seconds, in which it keeps every core busy

Prints hardware, versions and shapes, then medians with their range; writes bench/results/store.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import tyro
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.extraction import STORAGES, header_of, samples_of, target_of
from bench.measure import about, spread, write_results
from data.batch import Features, drafter_batch
from data.extract import document_lengths, shard_packs
from data.loader import PackPlan, load_steps
from data.shards import FeatureStore, StoreHeader, cut_shards, finished_shard, stored_tensors, write_index, write_shard
from data.storage import decode, encode
from data.target import Target, TargetConfig, load_target_heads, target_hf_config
from data.vocab import DraftVocabulary
from train.best import best_weights
from train.drafters.base import Drafter, load_drafter_class

NUM_DRAFTS = 4
LOGIT_ROWS = 1024
Format = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        run: a finished run, for its data and its trained drafter.
        target: its target; None is the one that the run names.
        tokens: whose states quality is measured on, about.
        store_tokens: of the stores that are written and read: those states over and over.
        shard_tokens: of their shards.
        repeats: rounds of writing and reading.
        step_tokens, step_s: a trainer's step.
        num_steps: steps of it.
        out: the result file's name in bench/results/; None writes nothing.
    """

    run: Path = Path("runs/quickstart")
    target: str | None = None
    tokens: int = 4096
    store_tokens: int = 65536
    shard_tokens: int = 16384
    repeats: int = 5
    step_tokens: int = 2048
    step_s: float = 0.5
    num_steps: int = 40
    out: str | None = "store"


@torch.no_grad()
def main(settings: Settings) -> None:
    """Measures and writes."""
    target, samples = target_of(settings.run, settings.target), samples_of(settings.run, settings.tokens)
    header, lengths = header_of(target, "lossless"), document_lengths(samples)
    packs = [pack.to("cpu") for shard in cut_shards(lengths, 1 << 40) for pack in shard_packs(target, samples, shard, lengths, header)]
    pack = joined(packs)
    document: dict[str, Any] = {
        "about": about(("torch", "transformers", "safetensors")),
        "shapes": {"tokens": len(pack.input_ids_T), "hidden_size": target.hidden_size, "aux_layers": header.aux_layers, "dtype": header.dtype},
        "settings": {name: value for name, value in vars(settings).items() if name not in ("run", "target", "out")},
    }
    print(document, flush=True)
    document["quality"] = quality(settings, target, pack)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        document["speed"] = speed(settings, header, pack, Path(folder))
        document["wait"] = [wait(settings, FeatureStore.open(Path(folder) / storage)) for storage in STORAGES]
    if settings.out is not None:
        write_results(settings.out, document)


# --- quality ------------------------------------------------------------------------------------------------------------------


def formats(hidden_size: int, dtype: torch.dtype) -> dict[str, tuple[Format, float]]:
    """(what comes back of float32 [..., H] states, bytes a value) of each format."""

    def ours(states_NH: Tensor) -> Tensor:
        encoded = encode(states_NH.to(dtype), "int8", hidden_size)
        return decode(encoded.values_NX, encoded.scales_NG, hidden_size, dtype).float()

    found: dict[str, tuple[Format, float]] = {
        "bfloat16 noise": (noisy, 2.0),
        "int8, scale for 32 (ours)": (ours, 1 + 2 / 32),
        "int8, scale for 64": (partial(grouped, size=64, kind=torch.int8), 1 + 2 / 64),
        "int8, scale for 96": (partial(grouped, size=96, kind=torch.int8), 1 + 2 / 96),
        "int8, scale a state": (partial(grouped, size=hidden_size, kind=torch.int8), 1 + 2 / hidden_size),
        "fp8 e4m3, scale for 32": (partial(grouped, size=32, kind=torch.float8_e4m3fn), 1 + 2 / 32),
        "fp8 e4m3, scale a state": (partial(grouped, size=hidden_size, kind=torch.float8_e4m3fn), 1 + 2 / hidden_size),
        "fp8 e4m3, no scale": (lambda states_NH: states_NH.clamp(-448, 448).to(torch.float8_e4m3fn).float(), 1.0),
    }
    return found


def noisy(states_NH: Tensor) -> Tensor:
    """Each value up to half a unit in bfloat16's last place away, that is 2^-9 to 2^-8 of itself at most."""
    spread_NH = torch.rand(states_NH.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    return states_NH + spread_NH * 2.0**-7 * 2.0 ** states_NH.abs().clamp(min=1e-30).log2().floor()


def grouped(states_NH: Tensor, size: int, kind: torch.dtype) -> Tensor:
    """8 bits of this kind and a bfloat16 scale for each group of neighbours."""
    missing = -states_NH.shape[-1] % size
    groups = nn.functional.pad(states_NH, (0, missing)).view(len(states_NH), -1, size)
    largest = 127 if kind == torch.int8 else torch.finfo(kind).max
    scales = (groups.abs().amax(-1, keepdim=True) / largest).bfloat16().float()
    quotient = groups / torch.where(scales == 0, 1, scales)
    stored = (quotient.round() if kind == torch.int8 else quotient).clamp(-largest, largest).to(kind)
    return (stored.float() * scales).view(len(states_NH), -1)[:, : states_NH.shape[-1]]


def quality(settings: Settings, target: Target, pack: Features) -> list[dict[str, Any]]:
    """A line a format."""
    size = target.hidden_size
    drafter = trained_drafter(settings)
    assert pack.aux_TX is not None and pack.last_TH is not None
    aux_TAH, last_TH = pack.aux_TX.float().view(len(pack.input_ids_T), -1, size), pack.last_TH.float()
    head_VH = drafter.heads.lm_head_VH
    expected = drafts_and_loss(drafter, pack, aux_TAH, last_TH)
    rows = []
    for name, (convert, value_bytes) in formats(size, target.dtype).items():
        found_TAH = torch.stack([convert(aux_TAH[:, layer]) for layer in range(aux_TAH.shape[1])], dim=1)
        found_TH = convert(last_TH)
        drafts_KS, loss = drafts_and_loss(drafter, pack, found_TAH, found_TH)
        divergence_T, same_T = distribution_change(last_TH, found_TH, head_VH)
        error_TA = (found_TAH - aux_TAH).norm(dim=-1) / aux_TAH.norm(dim=-1)
        row = {
            "format": name,
            "bytes_of_bfloat16": round(value_bytes / 2, 4),
            "aux_relative_error": rounded(error_TA.mean(0)),
            "aux_largest_relative_error": rounded(error_TA.amax(0)),
            "aux_least_cosine": rounded(nn.functional.cosine_similarity(found_TAH, aux_TAH, dim=-1).amin(0)),
            "last_relative_error": round(float(((found_TH - last_TH).norm(dim=-1) / last_TH.norm(dim=-1)).mean()), 5),
            "target_kl_mean": float(divergence_T.mean()),
            "target_kl_max": float(divergence_T.max()),
            "target_same_argmax": round(float(same_T.float().mean()), 4),
            "same_drafts": rounded((drafts_KS == expected[0]).float().mean(1)),
            "drafter_loss": round(loss, 5),
            "drafter_loss_lossless": round(expected[1], 5),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def trained_drafter(settings: Settings) -> Drafter:
    """The run's best step, in float32, on the CPU."""
    config = json.loads((settings.run / "config.json").read_text())
    target = TargetConfig(**(config["target"] | ({"model": settings.target} if settings.target else {})))
    drafter_class = load_drafter_class("eagle3")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in config["drafter"].items()}
    vocabulary = DraftVocabulary.load(settings.run / "draft_vocab.json")
    heads = load_target_heads(target, "cpu", torch.float32)
    drafter = drafter_class(drafter_class.config_class(**values), target_hf_config(target), heads, vocabulary)
    drafter.load_trained(load_file(best_weights(settings.run)))
    return drafter


def drafts_and_loss(drafter: Drafter, pack: Features, aux_TAH: Tensor, last_TH: Tensor) -> tuple[Tensor, float]:
    """([drafts, supervised positions] greedy drafts, loss a supervised position) from these states."""
    batch = drafter_batch(replace(pack, aux_TX=aux_TAH.flatten(1), last_TH=last_TH))
    supervised_T = batch.supervised(0)
    loss_sum = float(drafter(batch).loss_sum)
    return drafter.teacher_forced_drafts(batch, NUM_DRAFTS)[:, supervised_T], loss_sum / int(supervised_T.sum())


def distribution_change(expected_TH: Tensor, found_TH: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor]:
    """(KL divergence in nats, whether the most likely token is the same) at every position."""
    parts = []
    for expected_RH, found_RH in zip(expected_TH.split(LOGIT_ROWS), found_TH.split(LOGIT_ROWS), strict=True):
        expected_RV, found_RV = (expected_RH @ head_VH.T).log_softmax(-1), (found_RH @ head_VH.T).log_softmax(-1)
        parts.append(((expected_RV.exp() * (expected_RV - found_RV)).sum(-1), expected_RV.argmax(-1) == found_RV.argmax(-1)))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def rounded(values: Tensor) -> list[float]:
    return [round(float(value), 5) for value in values]


# --- speed --------------------------------------------------------------------------------------------------------------------


def speed(settings: Settings, header: StoreHeader, pack: Features, folder: Path) -> list[dict[str, Any]]:
    """Writing and reading of each storage, in turn; leaves the stores in the folder."""
    seconds: dict[str, dict[str, list[float]]] = {storage: {"write": [], "read": []} for storage in STORAGES}
    for _ in range(1 + settings.repeats):
        for storage in STORAGES:
            started = time.perf_counter()
            store = write_store(folder / storage, replace(header, storage=storage), pack, settings)
            seconds[storage]["write"].append(time.perf_counter() - started)
            plan = plan_of(store, settings)
            started = time.perf_counter()
            for documents in plan.epoch_packs(0):
                store.read(documents)
            seconds[storage]["read"].append(time.perf_counter() - started)
    num_tokens = int(store.document_lengths.sum())
    rows = []
    for storage in STORAGES:
        num_bytes = replace(header, storage=storage).bytes_per_token
        row: dict[str, Any] = {
            "storage": storage,
            "bytes_per_token": num_bytes,
            "of_bfloat16": round(num_bytes / replace(header, dtype="bfloat16").bytes_per_token, 4),
        }
        for work, values in seconds[storage].items():
            row[f"{work}_tokens_per_s"] = spread([num_tokens / value for value in values[1:]])
            row[f"{work}_mb_per_s"] = spread([num_bytes * num_tokens / value / 1e6 for value in values[1:]])
        rows.append(row)
        print(row, flush=True)
    return rows


def write_store(folder: Path, header: StoreHeader, pack: Features, settings: Settings) -> FeatureStore:
    """A store of the pack's documents over and over."""
    folder.mkdir(exist_ok=True)
    lengths = list(pack.document_lengths) * max(1, settings.store_tokens // len(pack.input_ids_T))
    per_shard = max(1, settings.shard_tokens // len(pack.input_ids_T))
    entries = []
    for shard in cut_shards(lengths, per_shard * len(pack.input_ids_T)):
        tensors, _ = zip(*(stored_tensors(pack, header) for _ in range(shard.num_tokens // len(pack.input_ids_T))), strict=True)
        write_shard(folder, shard, {name: torch.cat([part[name] for part in tensors]) for name in tensors[0]})
        entry = finished_shard(folder, shard)
        assert entry is not None
        entries.append(entry)
    write_index(folder, header, lengths, entries)
    return FeatureStore.open(folder)


def joined(packs: list[Features]) -> Features:
    """Packs as one."""
    aux, last = ([pack.aux_TX for pack in packs], [pack.last_TH for pack in packs])
    return Features(
        input_ids_T=torch.cat([pack.input_ids_T for pack in packs]),
        loss_mask_T=torch.cat([pack.loss_mask_T for pack in packs]),
        document_lengths=tuple(length for pack in packs for length in pack.document_lengths),
        aux_TX=torch.cat([states for states in aux if states is not None]),
        last_TH=torch.cat([states for states in last if states is not None]),
    )


# --- wait ---------------------------------------------------------------------------------------------------------------------


def wait(settings: Settings, store: FeatureStore) -> dict[str, Any]:
    """The share of its time that a trainer waits; its first step waits for the first packs."""
    steps: Iterator[list[Features]] = load_steps(plan_of(store, settings), store.read, 0, 0, 1, is_prefetched=True)
    waits = []
    for _ in range(settings.num_steps):
        started = time.perf_counter()
        packs = next(steps)
        waits.append(time.perf_counter() - started)
        compute(settings.step_s, packs)
    row = {
        "storage": store.header.storage,
        "step_s": settings.step_s,
        "step_tokens": settings.step_tokens,
        "wait_share": round(sum(waits) / (sum(waits) + settings.num_steps * settings.step_s), 5),
        "first_wait_s": round(waits[0], 4),
        "longest_later_wait_s": round(max(waits[1:]), 4),
    }
    print(row, flush=True)
    return row


def compute(seconds: float, packs: list[Features]) -> None:
    """Keeps every core busy."""
    until = time.perf_counter() + seconds
    last_TH = packs[0].last_TH
    assert last_TH is not None
    states_TH = last_TH.float()
    while time.perf_counter() < until:
        states_TH @ states_TH.T


def plan_of(store: FeatureStore, settings: Settings) -> PackPlan:
    """One pack a step."""
    return PackPlan(store.document_lengths, pack_tokens=settings.step_tokens, packs_per_step=1, seed=0)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
