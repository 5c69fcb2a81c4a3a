"""Extraction writes the target's states of every document once, and goes on after a kill to the very same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

import data.extract as extract_module
from data.batch import Features
from data.extract import document_lengths, extract, finish_store, is_served_by
from data.shards import FeatureStore, StoreHeader, cut_shards
from data.target import Target, TargetConfig

ROOT = Path(__file__).resolve().parent.parent
SHARD_TOKENS = 40
HEADER = StoreHeader(target="t@1", samples="s", aux_layers=(2, 7), has_last=True, dtype="float32", hidden_size=32, storage="lossless")


def make_samples() -> Dataset:
    rng = random.Random(0)
    lengths = [rng.randint(1, 20) for _ in range(24)] + [50]
    return Dataset.from_dict(
        {
            "input_ids": [[rng.randrange(256) for _ in range(length)] for length in lengths],
            "loss_mask": [[rng.random() < 0.5 for _ in range(length)] for length in lengths],
        }
    )


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(TargetConfig(str(tiny_target)), "cpu")


@pytest.fixture(scope="module")
def samples() -> Dataset:
    return make_samples()


@pytest.fixture(scope="module")
def finished(target: Target, samples: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store extracted in one go; tests only read it, or copy it."""
    folder = tmp_path_factory.mktemp("store")
    complete(target, samples, folder)
    return folder


def complete(target: Target, samples: Dataset, folder: Path, shard_tokens: int = SHARD_TOKENS, header: StoreHeader = HEADER) -> None:
    extract(target, samples, folder, header=header, shard_tokens=shard_tokens)
    finish_store(samples, folder, header, shard_tokens)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def tokens_computed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the tokens that the target computes from here on."""
    counted: list[int] = []
    original = Target.features

    def counting(self: Target, input_ids_T: torch.Tensor, *rest: Any) -> Features:
        counted.append(len(input_ids_T))
        return original(self, input_ids_T, *rest)

    monkeypatch.setattr(Target, "features", counting)
    return lambda: sum(counted)


def test_a_store_holds_the_targets_states_of_every_document(target: Target, samples: Dataset, finished: Path) -> None:
    store = FeatureStore.open(finished)
    assert store.header == HEADER
    assert store.document_lengths.tolist() == [len(ids) for ids in samples["input_ids"]]
    assert len(store.shards) > 5
    store.verify()
    for index in range(len(samples)):
        found, sample = store.read([index]), samples[index]
        ids_1T = torch.tensor([sample["input_ids"]])
        hidden = target.model(ids_1T, output_hidden_states=True).hidden_states
        assert found.input_ids_T.tolist() == sample["input_ids"]
        assert found.loss_mask_T.tolist() == sample["loss_mask"]
        assert found.aux_TX is not None and found.last_TH is not None
        torch.testing.assert_close(found.aux_TX[:, :32], hidden[2][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.last_TH, hidden[7][0], atol=1e-5, rtol=1e-5)


def test_a_finished_store_is_computed_again_by_nobody(
    target: Target, samples: Dataset, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(finished, folder)
    count = tokens_computed(monkeypatch)
    complete(target, samples, folder)
    assert count() == 0
    assert contents(folder) == contents(finished)


def test_two_ranks_write_the_store_of_one(target: Target, samples: Dataset, finished: Path, tmp_path: Path) -> None:
    for rank in (1, 0):
        extract(target, samples, tmp_path, header=HEADER, shard_tokens=SHARD_TOKENS, rank=rank, world_size=2)
    finish_store(samples, tmp_path, HEADER, SHARD_TOKENS)
    assert contents(tmp_path) == contents(finished)


def test_ranks_share_the_shards(target: Target, samples: Dataset, tmp_path: Path) -> None:
    extract(target, samples, tmp_path, header=HEADER, shard_tokens=SHARD_TOKENS, rank=1, world_size=2)
    num_shards = len(cut_shards(document_lengths(samples), SHARD_TOKENS))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [f"shard_{index:05d}.safetensors" for index in range(1, num_shards, 2)]
    with pytest.raises(ValueError, match=r"shard_00000.safetensors is missing or not whole: run the recipe again"):
        finish_store(samples, tmp_path, HEADER, SHARD_TOKENS)


def slow_extraction(target_dir: str, folder: str) -> None:
    """What the killed process runs: the same extraction, slowly."""
    usual = Target.features

    def slow(self: Target, *arguments: Any) -> Features:
        time.sleep(0.1)
        return usual(self, *arguments)

    Target.features = slow  # type: ignore[method-assign]
    extract(Target.load(TargetConfig(target_dir), "cpu"), make_samples(), Path(folder), header=HEADER, shard_tokens=SHARD_TOKENS)


def test_a_killed_extraction_goes_on_to_the_same_bytes_and_repeats_no_finished_shard(
    target: Target, samples: Dataset, finished: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, __file__, str(tiny_target), str(folder)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 60
    while len(list(folder.glob("shard_*.json"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = {json.loads(path.read_text())["name"] for path in folder.glob("shard_*.json")}
    shards = cut_shards(document_lengths(samples), SHARD_TOKENS)
    assert 3 <= len(done) < len(shards)
    (folder / f"{shards[-1].name}.partial").write_text("half a shard")  # as a kill in the middle of writing leaves it
    with pytest.raises(ValueError, match=r"no finished store"):
        FeatureStore.open(folder)

    count = tokens_computed(monkeypatch)
    complete(target, samples, folder)
    assert count() == sum(shard.num_tokens for shard in shards if shard.name not in done)
    assert contents(folder) == contents(finished)


def test_shards_damaged_since_they_were_written_are_extracted_again(target: Target, samples: Dataset, finished: Path, tmp_path: Path) -> None:
    """One byte flipped, one cut short, one lost: each is a remedy of `delete index.json and run the recipe again`."""
    folder = tmp_path / "store"
    shutil.copytree(finished, folder)
    flipped, cut, lost = (folder / f"shard_0000{index}.safetensors" for index in (0, 2, 3))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    cut.write_bytes(cut.read_bytes()[:-5])
    lost.unlink()
    with pytest.raises(ValueError, match=r"delete .*index.json and run the recipe again"):
        FeatureStore.open(folder)
    (folder / "index.json").unlink()
    complete(target, samples, folder)
    assert contents(folder) == contents(finished)


def test_another_cut_replaces_the_store_and_leaves_no_old_shard(target: Target, samples: Dataset, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(finished, folder)
    extract(target, samples, folder, header=HEADER, shard_tokens=100)
    assert not (folder / "index.json").exists(), "the old index names shards that are gone"
    finish_store(samples, folder, HEADER, 100)
    complete(target, samples, tmp_path / "fresh", shard_tokens=100)
    assert contents(folder) == contents(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (replace(HEADER, target="t@2"), r"target t@1 \(wanted t@2\)"),
        (replace(HEADER, samples="other"), r"samples s \(wanted other\)"),
        (replace(HEADER, aux_layers=(1, 2)), r"aux_layers \[2, 7\] \(wanted \[1, 2\]\)"),
        (replace(HEADER, has_last=False), r"has_last True \(wanted False\)"),
        (replace(HEADER, dtype="bfloat16"), r"dtype float32 \(wanted bfloat16\)"),
        (replace(HEADER, storage="int8"), r"storage lossless \(wanted int8\)"),
    ],
)
def test_a_folder_of_other_states_is_refused_and_left_alone(
    changed: StoreHeader, message: str, target: Target, samples: Dataset, finished: Path
) -> None:
    before = contents(finished)
    with pytest.raises(ValueError, match=f"holds states of something else: {message}; choose another --features.path or delete the folder"):
        extract(target, samples, finished, header=changed, shard_tokens=SHARD_TOKENS)
    assert contents(finished) == before


def test_a_mangled_header_is_named(target: Target, samples: Dataset, tmp_path: Path) -> None:
    (tmp_path / "header.json").write_text('{"target": "t')
    with pytest.raises(ValueError, match=r"header.json is damaged .*: delete .* to extract it again"):
        extract(target, samples, tmp_path, header=HEADER, shard_tokens=SHARD_TOKENS)


def test_too_small_a_disk_is_refused_before_any_work(
    target: Target, samples: Dataset, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """389 bytes a token: 3 states of 32 float32, 4 of the id, 1 of the mask."""
    num_tokens = int(document_lengths(samples).sum())
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(extract_module.shutil, "disk_usage", lambda folder: usage(389 * num_tokens - 1))
    count = tokens_computed(monkeypatch)
    folder = tmp_path / "store"
    with pytest.raises(ValueError, match=rf"389 bytes for each of {num_tokens} tokens.* set --features.storage int8, --features.mode online, point"):
        extract(target, samples, folder, header=HEADER, shard_tokens=SHARD_TOKENS)
    assert count() == 0
    extract(target, samples, folder, header=replace(HEADER, storage="int8"), shard_tokens=SHARD_TOKENS)
    monkeypatch.setattr(extract_module.shutil, "disk_usage", lambda folder: usage(0))
    extract(target, samples, finished, header=HEADER, shard_tokens=SHARD_TOKENS)  # nothing is missing, so no room is needed


def test_what_will_be_written_is_said_first(target: Target, samples: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """107 bytes a token: 3 states of 32 values and a scale of 2 bytes each, 4 of the id, 1 of the mask."""
    num_tokens = int(document_lengths(samples).sum())
    extract(target, samples, tmp_path, header=replace(HEADER, storage="int8"), shard_tokens=SHARD_TOKENS)
    first, *others = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"extract: {num_tokens} tokens, 107 bytes each \(int8\): 0.00 GB to {tmp_path}, which has [\d,.]+ GB free", first)
    assert re.search(rf"extract: {num_tokens}/{num_tokens} tokens .*tokens/s .*MB/s .*min left", others[-1])


def test_eight_bit_states_are_near_the_targets(target: Target, samples: Dataset, finished: Path, tmp_path: Path) -> None:
    complete(target, samples, tmp_path, header=replace(HEADER, storage="int8"))
    found, expected = FeatureStore.open(tmp_path), FeatureStore.open(finished)
    found.verify()
    for document in range(len(samples)):
        for name in ("aux_TX", "last_TH"):
            found_TX, expected_TX = (getattr(store.read([document]), name) for store in (found, expected))
            assert found_TX.dtype == torch.float32
            assert ((found_TX - expected_TX).norm(dim=1) <= 0.02 * expected_TX.norm(dim=1)).all(), (document, name)


@pytest.mark.parametrize("storage", ["int8", "lossless"])
def test_states_that_are_not_finite_are_refused_by_name(
    target: Target, samples: Dataset, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target overflows at the third token of the sixth document; the shards before its own stay."""
    original = Target.features
    wanted = samples[5]["input_ids"]

    def overflowing(self: Target, input_ids_T: torch.Tensor, *rest: Any) -> Features:
        features = original(self, input_ids_T, *rest)
        ids = input_ids_T.tolist()
        for first in range(len(ids) - len(wanted) + 1):
            if ids[first : first + len(wanted)] == wanted:
                assert features.aux_TX is not None
                features.aux_TX[first + 2, 40] = float("inf")
        return features

    monkeypatch.setattr(Target, "features", overflowing)
    header = replace(HEADER, storage=storage)
    with pytest.raises(ValueError, match=r"states of document 5 are not finite from its token 2 on.* set --target.dtype float32 \(it is float32\)"):
        extract(target, samples, tmp_path / "unnamed", header=header, shard_tokens=SHARD_TOKENS)
    named = samples.add_column("conversation_id", [f"c{index}" for index in range(len(samples))])
    with pytest.raises(ValueError, match=r"states of conversation 'c5' are not finite"):
        extract(target, named, tmp_path / "named", header=header, shard_tokens=SHARD_TOKENS)
    shards = cut_shards(document_lengths(samples), SHARD_TOKENS)
    refused = next(index for index, shard in enumerate(shards) if shard.first <= 5 < shard.end)
    assert sorted(path.name for path in (tmp_path / "named").glob("*.safetensors")) == [shard.name for shard in shards[:refused]]


def test_no_document_is_a_clear_error(target: Target, samples: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no document to extract the states of: look at data_report.json"):
        extract(target, samples.select([]), tmp_path, header=HEADER, shard_tokens=SHARD_TOKENS)


def test_lengths_follow_a_selection_of_the_split(samples: Dataset) -> None:
    expected = [len(ids) for ids in samples["input_ids"]]
    assert document_lengths(samples).tolist() == expected
    chosen = [7, 3, 24]
    assert document_lengths(samples.select(chosen)).tolist() == [expected[index] for index in chosen]
    assert document_lengths(samples.select([])).dtype == np.int64


def test_a_store_serves_a_drafter_that_wants_less_of_the_same(finished: Path, tmp_path: Path) -> None:
    assert is_served_by(finished, HEADER)
    assert is_served_by(finished, replace(HEADER, aux_layers=(7,), has_last=False))
    assert not is_served_by(tmp_path, HEADER)
    with pytest.raises(ValueError, match=r"layers 3 must be extracted"):
        is_served_by(finished, replace(HEADER, aux_layers=(3,)))
    with pytest.raises(ValueError, match="holds states of something else: samples"):
        is_served_by(finished, replace(HEADER, samples="other"))


def test_lossless_states_serve_who_wants_8_bits_aloud_and_not_the_reverse(
    target: Target, samples: Dataset, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    int8 = replace(HEADER, storage="int8")
    assert is_served_by(finished, replace(int8, aux_layers=(7,)))
    assert capsys.readouterr().out == f"{finished} holds lossless states already: they are read instead of extracting int8 ones\n"
    complete(target, samples, tmp_path, header=int8)
    capsys.readouterr()
    assert is_served_by(tmp_path, int8)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"holds int8 states, but features.storage is lossless: set --features.storage int8 to train on them, or"):
        is_served_by(tmp_path, HEADER)


if __name__ == "__main__":
    slow_extraction(*sys.argv[1:])
