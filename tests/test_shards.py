"""The store of hidden states: what is written comes back, and damage is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import data.shards as shards_module
from data.batch import Features
from data.shards import (
    FeatureStore,
    Shard,
    StoreHeader,
    cut_shards,
    discard_if_damaged,
    finished_shard,
    main,
    remove_strangers,
    stored_tensors,
    write_index,
    write_shard,
)
from data.storage import Storage

H = 4
STORAGES: tuple[Storage, ...] = ("lossless", "int8")
LENGTHS = [3, 5, 2, 6]
HEADER = StoreHeader(target="t@1", samples="s", aux_layers=(1, 3), has_last=True, dtype="float32", hidden_size=H, storage="lossless")


def document(index: int, has_aux: bool = True, has_last: bool = True) -> Features:
    """Document `index`: every number tells document, row and column."""
    length = LENGTHS[index]
    row_T = 100 * index + torch.arange(length)
    return Features(
        input_ids_T=row_T,
        loss_mask_T=row_T % 2 == 0,
        document_lengths=(length,),
        aux_TX=row_T[:, None] + torch.arange(2 * H) / 16 if has_aux else None,
        last_TH=-row_T[:, None] - torch.arange(H) / 16 if has_last else None,
    )


def joined(documents: list[Features], header: StoreHeader) -> dict[str, torch.Tensor]:
    """The tensors of a shard of these documents."""
    parts = [stored_tensors(part, header)[0] for part in documents]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def write_store(folder: Path, header: StoreHeader = HEADER) -> FeatureStore:
    """Four documents in two shards."""
    folder.mkdir()
    shards = cut_shards(LENGTHS, 8)
    entries = []
    for shard in shards:
        documents = [document(index, bool(header.aux_layers), header.has_last) for index in range(shard.first, shard.end)]
        write_shard(folder, shard, joined(documents, header))
        entry = finished_shard(folder, shard)
        assert entry is not None
        entries.append(entry)
    write_index(folder, header, LENGTHS, entries)
    return FeatureStore.open(folder)


def assert_same(found: Features, expected: list[Features]) -> None:
    assert found.document_lengths == tuple(part.document_lengths[0] for part in expected)
    assert found.input_ids_T.dtype == torch.int64 and found.loss_mask_T.dtype == torch.bool
    for name in ("input_ids_T", "loss_mask_T", "aux_TX", "last_TH"):
        parts = [getattr(part, name) for part in expected]
        if parts[0] is None:
            assert getattr(found, name) is None
        else:
            torch.testing.assert_close(getattr(found, name), torch.cat(parts), rtol=0, atol=0)


def test_shards_are_cut_at_whole_documents_within_the_budget() -> None:
    assert cut_shards([3, 5, 2, 6, 20, 1], 8) == [
        Shard("shard_00000.safetensors", 0, 2, 8),
        Shard("shard_00001.safetensors", 2, 4, 8),
        Shard("shard_00002.safetensors", 4, 5, 20),
        Shard("shard_00003.safetensors", 5, 6, 1),
    ]
    assert cut_shards([], 8) == []
    assert [(shard.first, shard.end) for shard in cut_shards([4, 0, 4, 0], 4)] == [(0, 2), (2, 4)], "an empty document is not lost either"


def test_documents_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    assert store.document_lengths.tolist() == LENGTHS
    assert_same(store.read([3, 0, 2]), [document(3), document(0), document(2)])
    assert_same(store.read([1]), [document(1)])


def test_only_the_wanted_states_are_read(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    found = store.read([2, 1], aux_layers=(3,), last=False)
    assert found.aux_TX is not None and found.last_TH is None
    expected = torch.cat([document(index).aux_TX[:, H:] for index in (2, 1)])  # type: ignore[index]
    torch.testing.assert_close(found.aux_TX, expected, rtol=0, atol=0)
    assert store.read([0], aux_layers=()).aux_TX is None


@pytest.mark.parametrize("aux_layers, has_last", [((), True), ((1, 3), False)])
def test_only_what_was_asked_for_is_stored(tmp_path: Path, aux_layers: tuple[int, ...], has_last: bool) -> None:
    store = write_store(tmp_path / "store", replace(HEADER, aux_layers=aux_layers, has_last=has_last))
    names = set(load_file(tmp_path / "store" / "shard_00000.safetensors"))
    assert names == {"input_ids", "loss_mask"} | ({"aux_hidden_states"} if aux_layers else set()) | ({"last_hidden_state"} if has_last else set())
    assert_same(store.read([3, 1]), [document(3, bool(aux_layers), has_last), document(1, bool(aux_layers), has_last)])


@pytest.mark.parametrize("storage", STORAGES)
def test_bytes_per_token_are_those_of_the_file(tmp_path: Path, storage: Storage) -> None:
    header = replace(HEADER, storage=storage)
    write_store(tmp_path / "store", header)
    tensors = load_file(tmp_path / "store" / "shard_00000.safetensors")
    assert header.bytes_per_token * 8 == sum(tensor.nbytes for tensor in tensors.values())


def test_eight_bits_take_at_most_55_hundredths_of_bfloat16() -> None:
    header = replace(HEADER, aux_layers=(2, 16, 29), dtype="bfloat16", hidden_size=4096)
    assert header.bytes_per_token == 4 * 2 * 4096 + 5
    assert replace(header, storage="int8").bytes_per_token == 4 * (4096 + 4096 // 32 * 2) + 5 <= 0.55 * header.bytes_per_token


def test_eight_bit_states_come_back_in_the_targets_dtype_and_the_same_at_every_reading(tmp_path: Path) -> None:
    """Within half of a scale: the largest value of a group, here of a state, is 127 of them."""
    store = write_store(tmp_path / "store", replace(HEADER, storage="int8"))
    found, again = store.read([3, 0]), store.read([3, 0])
    expected = [document(3), document(0)]
    assert found.input_ids_T.tolist() == [*expected[0].input_ids_T.tolist(), *expected[1].input_ids_T.tolist()]
    for name in ("aux_TX", "last_TH"):
        states_TX = torch.cat([getattr(part, name) for part in expected])
        found_TX = getattr(found, name)
        assert found_TX.dtype == torch.float32 and torch.equal(found_TX, getattr(again, name))
        largest_TX = states_TX.view(len(states_TX), -1, H).abs().amax(-1).repeat_interleave(H, 1)
        assert ((found_TX - states_TX).abs() <= 1.01 * largest_TX / 254).all(), name


@pytest.mark.parametrize("hidden_size", [4, 32, 40, 64, 80])
def test_layers_of_an_eight_bit_store_can_be_read_alone(tmp_path: Path, hidden_size: int) -> None:
    """Also where groups of 32 do not divide the hidden size."""
    header = replace(HEADER, aux_layers=(1, 3, 6), has_last=False, hidden_size=hidden_size, storage="int8")
    states_TX = torch.randn(8, 3 * hidden_size, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1e3, 1e-3]).repeat_interleave(
        hidden_size
    )
    pack = Features(torch.arange(8), torch.ones(8, dtype=torch.bool), (3, 5), states_TX, None)
    (shard,) = cut_shards([3, 5], 8)
    write_shard(tmp_path, shard, stored_tensors(pack, header)[0])
    entry = finished_shard(tmp_path, shard)
    assert entry is not None
    write_index(tmp_path, header, [3, 5], [entry])
    store = FeatureStore.open(tmp_path)
    whole_TX = store.read([0, 1]).aux_TX
    assert whole_TX is not None
    torch.testing.assert_close(whole_TX.view(8, 3, -1)[:, 1], states_TX.view(8, 3, -1)[:, 1], rtol=0, atol=3e3 / 254 * 1.5)
    for layers, columns in (((3,), slice(hidden_size, 2 * hidden_size)), ((3, 6), slice(hidden_size, 3 * hidden_size))):
        assert torch.equal(store.read([0, 1], aux_layers=layers).aux_TX, whole_TX[:, columns])  # type: ignore[arg-type]


def test_the_index_holds_the_checksum_of_each_shard(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    for shard in store.shards:
        assert shard.sha256 == hashlib.sha256((tmp_path / "store" / shard.name).read_bytes()).hexdigest()
    store.verify()


def test_a_flipped_byte_is_found_by_the_checksum(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    path = tmp_path / "store" / "shard_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard_00001.safetensors is damaged .*SHA-256.*delete .*index.json and run the recipe again"):
        store.verify()


def test_a_truncated_shard_is_named_when_the_store_is_opened(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    path = tmp_path / "store" / "shard_00001.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=rf"shard_00001.safetensors has {size - 3} bytes, expected {size} bytes: delete .*index.json and run"):
        FeatureStore.open(tmp_path / "store")


def test_a_missing_shard_is_named_when_the_store_is_opened(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    (tmp_path / "store" / "shard_00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard_00000.safetensors is missing, expected .* bytes: delete"):
        FeatureStore.open(tmp_path / "store")


def test_a_shard_with_a_mangled_header_is_named_when_it_is_read(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    path = tmp_path / "store" / "shard_00000.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ValueError, match=r"shard_00000.safetensors is damaged .*: delete .*index.json and run the recipe again"):
        store.read([0])


@pytest.mark.parametrize("content", ["", "{", '{"header": {}}', "[]"])
def test_a_mangled_index_is_named(tmp_path: Path, content: str) -> None:
    write_store(tmp_path / "store")
    (tmp_path / "store" / "index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index.json"):
        FeatureStore.open(tmp_path / "store")


@pytest.mark.parametrize("content", ["", "{", '{"name": "x"}', "[]"])
def test_a_shard_with_a_mangled_entry_is_not_finished(tmp_path: Path, content: str) -> None:
    store = write_store(tmp_path / "store")
    assert finished_shard(store.folder, store.shards[0]) == store.shards[0]
    (store.folder / "shard_00000.json").write_text(content)
    assert finished_shard(store.folder, store.shards[0]) is None


def test_a_shard_of_other_documents_is_not_finished(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    assert finished_shard(store.folder, replace(store.shards[0], end=3)) is None


def test_another_schema_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    path = tmp_path / "store" / "index.json"
    index = json.loads(path.read_text())
    index["header"]["schema_version"] = 99
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="schema version 99, this code reads 2"):
        FeatureStore.open(tmp_path / "store")


def test_an_unfinished_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no finished store .*index.json is missing"):
        FeatureStore.open(tmp_path)


def test_missing_layers_are_named(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    store.require((1,), True)
    store.require((1, 3), False)
    with pytest.raises(
        ValueError, match=r"holds layers \[1, 3\] and the last hidden state; the recipe wants layers \[1, 2, 4\], so layers 2, 4 must"
    ):
        store.require((1, 2, 4), False)
    without_last = write_store(tmp_path / "no_last", replace(HEADER, has_last=False))
    with pytest.raises(ValueError, match=r"and no last hidden state; .* so layers 2 and the last hidden state must be extracted"):
        without_last.require((1, 2), True)
    with pytest.raises(ValueError, match=r"so the last hidden state must be extracted: `python recipes"):
        without_last.require((1, 3), True)


def test_bfloat16_states_come_back_bit_for_bit(tmp_path: Path) -> None:
    """All 65,536 patterns, NaNs and infinities and subnormal numbers among them."""
    states_TH = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).reshape(-1, H)
    header = replace(HEADER, aux_layers=(), dtype="bfloat16")
    length = len(states_TH)
    pack = Features(torch.zeros(length, dtype=torch.int64), torch.ones(length, dtype=torch.bool), (length,), None, states_TH)
    (shard,) = cut_shards([length], 8)
    write_shard(tmp_path, shard, stored_tensors(pack, header)[0])
    entry = finished_shard(tmp_path, shard)
    assert entry is not None
    write_index(tmp_path, header, [length], [entry])
    found_TH = FeatureStore.open(tmp_path).read([0]).last_TH
    assert found_TH is not None and found_TH.dtype == torch.bfloat16
    assert torch.equal(found_TH.view(torch.int16), states_TH.view(torch.int16))


def test_two_ranks_together_verify_every_shard(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    path = store.folder / "shard_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store.verify(rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"shard_00001.safetensors is damaged"):
        store.verify(rank=1, world_size=2)


def test_a_damaged_shard_is_discarded_aloud_and_a_whole_one_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = write_store(tmp_path / "store")
    path = store.folder / "shard_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (store.folder / "shard_00000.safetensors.partial").write_text("left by a kill")
    for shard in store.shards:
        discard_if_damaged(store.folder, shard)
    assert finished_shard(store.folder, store.shards[0]) == store.shards[0]
    assert finished_shard(store.folder, store.shards[1]) is None
    assert "shard_00001.safetensors is damaged" in capsys.readouterr().out
    assert not list(store.folder.glob("*.partial"))


def test_shards_that_no_index_names_are_removed(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    shutil.copy(store.folder / "shard_00001.safetensors", store.folder / "shard_00009.safetensors")
    shutil.copy(store.folder / "shard_00001.json", store.folder / "shard_00009.json")
    (store.folder / "notes.txt").write_text("the user's own")
    remove_strangers(store.folder, store.shards)
    names = {path.name for path in store.folder.iterdir()}
    assert names == {"index.json", "notes.txt", *(f"shard_0000{index}.{end}" for index in (0, 1) for end in ("json", "safetensors"))}


def test_a_full_disk_is_one_clear_error_and_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(shards_module, "save_file", full)
    (shard,) = cut_shards([3], 8)
    with pytest.raises(ValueError, match=r"shard_00000.safetensors cannot be written \(No space left.*\): make room, then run the recipe again"):
        write_shard(tmp_path, shard, stored_tensors(document(0), HEADER)[0])
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_whole_or_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = write_store(tmp_path / "store")
    main([str(store.folder)])
    assert "2 shards, 4 documents" in capsys.readouterr().out
    path = store.folder / "shard_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for arguments, message in (([str(store.folder)], "error: .*shard_00001.safetensors is damaged"), ([], "usage: python -m data.shards FOLDER")):
        with pytest.raises(SystemExit, match=message):
            main(arguments)
