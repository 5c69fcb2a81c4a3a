"""A stage runs when its output is missing or its inputs have changed, and says why."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from train.stages import Stage, StageRecords, source_identity


def version_of(package: str) -> str:
    if package != "known":
        raise PackageNotFoundError(package)
    return "1.2"


def test_a_stage_is_done_only_when_completed_with_the_same_inputs(tmp_path: Path) -> None:
    records, stage = StageRecords(tmp_path), Stage("extract", {"layers": (2, 3), "dtype": "float32"}, tmp_path)
    assert not records.is_done(stage) and records.seconds("extract") == 0 and records.total_seconds() == 0
    records.begin(stage)
    assert not records.is_done(stage) and records.changes(stage) == [] and records.seconds("extract") == 0
    records.complete(stage, 1.234)
    assert records.is_done(stage) and records.seconds("extract") == 1.23
    assert not records.is_done(Stage("extract", {"layers": (2, 4), "dtype": "float32"}, tmp_path))


def test_a_stage_whose_output_was_removed_is_not_done(tmp_path: Path) -> None:
    output = tmp_path / "index.json"
    records, stage = StageRecords(tmp_path), Stage("extract", {"dtype": "float32"}, output)
    output.touch()
    records.complete(stage, 1.0)
    assert records.is_done(stage)
    output.unlink()
    assert not records.is_done(stage)


def test_what_changed_is_named_down_to_the_field(tmp_path: Path) -> None:
    records = StageRecords(tmp_path)
    records.complete(Stage("train", {"optim": {"learning_rate": 0.1, "betas": (0.9, 0.95)}, "seed": 0}, tmp_path), 1)
    changed = Stage("train", {"optim": {"learning_rate": 0.2, "betas": (0.9, 0.95)}, "steps": 3}, tmp_path)
    assert records.changes(changed) == ["optim.learning_rate: 0.1 -> 0.2", "seed: 0 -> None", "steps: None -> 3"]


def test_beginning_with_other_inputs_takes_the_earlier_completion_back(tmp_path: Path) -> None:
    records, first, second = StageRecords(tmp_path), Stage("train", {"seed": 0}, tmp_path), Stage("train", {"seed": 1}, tmp_path)
    records.complete(first, 1)
    records.begin(second)
    assert not records.is_done(first) and not records.is_done(second)
    assert records.changes(first) == ["seed: 1 -> 0"]


def test_a_stage_depends_on_those_before_it(tmp_path: Path) -> None:
    records = StageRecords(tmp_path)
    before, other = Stage("prepare", {"seed": 0}, tmp_path), Stage("prepare", {"seed": 1}, tmp_path)
    records.complete(Stage("extract", {"samples": before.fingerprint}, tmp_path), 1)
    assert records.is_done(Stage("extract", {"samples": Stage("prepare", {"seed": 0}, tmp_path).fingerprint}, tmp_path))
    assert not records.is_done(Stage("extract", {"samples": other.fingerprint}, tmp_path))


def test_a_changed_file_is_another_source_and_the_same_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[]")
    identity = source_identity(str(path), version_of)
    assert source_identity(str(path), version_of) == identity
    os.utime(path, ns=(1, 1))
    assert source_identity(str(path), version_of) != identity
    os.utime(path, ns=(2, 2))
    touched = source_identity(str(path), version_of)
    path.write_text("[{}]")
    os.utime(path, ns=(2, 2))
    assert source_identity(str(path), version_of) != touched


def test_a_file_added_or_moved_in_a_folder_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.json").write_text("[]")
    identities = [source_identity(str(tmp_path), version_of)]
    (tmp_path / "b.json").write_text("[]")
    identities.append(source_identity(str(tmp_path), version_of))
    (tmp_path / "b.json").rename(tmp_path / "sub" / "b.json")
    identities.append(source_identity(str(tmp_path), version_of))
    assert len({identity["files"] for identity in identities}) == 3


def test_a_split_of_a_saved_dataset_is_told_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"

    def save(text: str) -> dict[str, object]:
        DatasetDict({"train": Dataset.from_list([{"conversations": text}])}).save_to_disk(str(folder))
        return source_identity(f"{folder}:train", version_of)

    first, second = save("a"), save("longer")
    assert first["source"] == f"{folder}:train"
    assert first["files"] != second["files"]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.json").write_text("[]")
    assert "files" in source_identity("~/a.json", version_of)


@pytest.mark.parametrize("source", ["owner/name", "owner/name:test_sft", "name"])
def test_a_hub_dataset_is_told_by_its_id(source: str) -> None:
    assert source_identity(source, version_of) == {"source": source}


def test_a_package_is_told_by_its_version() -> None:
    assert source_identity("package:known", version_of) == {"source": "package:known", "version": "1.2"}


@pytest.mark.parametrize("package", ["missing", ""])
def test_a_package_that_is_not_installed_is_a_clear_error(package: str) -> None:
    with pytest.raises(ValueError, match=f"package '{package}', which is not installed in this environment"):
        source_identity(f"package:{package}", version_of)
