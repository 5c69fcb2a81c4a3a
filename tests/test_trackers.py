"""A tracker holds every step once, whenever the run was killed and whenever it was asked for; one that fails never ends a run.

What wandb and TensorBoard really store is read back from their files: TensorBoard's with its own reader, wandb's by its records' own definitions.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loopback_wandb import KEY, LoopbackWandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from checkpoints.metrics import read_metrics
from recipes.eagle3 import recipe
from train.config import LogConfig, RunConfig, to_json
from train.engine import StepOutput
from train.metrics import MetricsLog
from train.trackers import Trackers, check_trackers, numbers
from train.wandb_files import mend_offline_runs

DATA_REPORT = {
    "sources": ["a.json"],
    "num_read": 3,
    "num_kept": 2,
    "left_out": {"empty": {"count": 1, "example_id": "c|7"}, "cut_off": {"count": 0, "example_id": ""}},
    "changes": {"truncated": {"count": 2, "example_id": "c1"}},
}
REPORT = {"tau": 1.75, "joint_acceptance": [0.5, 0.25], "speedup_reference_decoder": 1.25, "dtype": "float32", "lossless": {"num_outputs": 2}}


def config(tmp_path: Path, **log: Any) -> RunConfig:
    run = replace(recipe(), name="run", runs_dir=tmp_path, log=LogConfig(**log))
    run.run_dir.mkdir(exist_ok=True)
    (run.run_dir / "data_report.json").write_text(json.dumps(DATA_REPORT))
    (run.run_dir / "report.html").write_text("<!DOCTYPE html>")
    return run


def output(loss: float) -> StepOutput:
    sums = {"hits_0": 5.0, "rows_0": 10.0, "hits_1": 1.0, "rows_1": 8.0}
    return StepOutput(loss=loss, num_supervised=10, num_tokens=40, grad_norm=0.5, metrics=sums)


def next_second() -> None:
    """Both trackers order what several starts have written by the second in its name."""
    now = int(time.time())
    while int(time.time()) == now:
        time.sleep(0.02)


def train(run: RunConfig, first_step: int, last_step: int, loss: float, ends: bool = True) -> Trackers:
    """The steps after `first_step`, held-out acceptance after each third; as a killed run leaves it where it does not end."""
    next_second()
    trackers = Trackers(run, is_main=True)
    log = MetricsLog(run, num_steps=last_step, first_step=first_step, trackers=trackers)
    for step in range(first_step + 1, last_step + 1):
        log.step(step, output(loss), 0.1, 0.0)
        if step % 3 == 0:
            log.heldout(step, 1.0 + step / 100, [step / 200, step / 200], True)
    if ends:
        log.close()
        trackers.close()
    return trackers


def test_a_record_becomes_a_series_an_entry() -> None:
    record = {"event": "train", "step": 7, "loss": 1.5, "accuracy": [0.5, 0.125], "note": "text"}
    assert numbers(record, "train/") == {"train/loss": 1.5, "train/accuracy/0": 0.5, "train/accuracy/1": 0.125}


@pytest.mark.parametrize("setting", [{"wandb_project": "other"}, {"wandb_entity": "team"}, {"wandb_tags": ("a",)}])
def test_a_setting_of_a_tracker_that_is_off_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"log\.{next(iter(setting))} has no effect without log\.wandb"):
        LogConfig(**setting)
    LogConfig(wandb=True, **setting)


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_said_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(LogConfig(wandb=True, tensorboard=True))
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    check_trackers(LogConfig())
    with pytest.raises(ValueError, match=f"log.{name} needs the package '{name}', which is not installed here: pip install {name}"):
        check_trackers(LogConfig(**{name: True}))


def test_no_tracker_is_imported_or_leaves_a_file_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it would raise
    train(config(tmp_path), 0, 3, 1.0).finish(REPORT, tmp_path / "run" / "report.html")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["data_report.json", "metrics.jsonl", "report.html"]


def test_ranks_other_than_0_track_nothing(tmp_path: Path) -> None:
    trackers = Trackers(config(tmp_path, tensorboard=True), is_main=False)
    trackers.open([{"event": "train", "step": 1, "loss": 1.0}])
    trackers.close()
    assert not (tmp_path / "run" / "tensorboard").exists()


# --- TensorBoard ----------------------------------------------------------------------------------------------------------


def events(tmp_path: Path) -> EventAccumulator:
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return found.Reload()


def scalars(tmp_path: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 5)) for event in events(tmp_path).Scalars(tag)]


def test_tensorboard_holds_every_number_of_every_step(tmp_path: Path) -> None:
    train(config(tmp_path, tensorboard=True), 0, 4, 1.5)
    assert scalars(tmp_path, "train/loss") == [(step, 1.5) for step in (1, 2, 3, 4)]
    assert scalars(tmp_path, "train/accuracy/1") == [(step, 0.125) for step in (1, 2, 3, 4)]
    assert scalars(tmp_path, "heldout/tau") == [(3, 1.03)] and scalars(tmp_path, "heldout/joint_acceptance/1") == [(3, 0.015)]
    assert {"train/tokens_per_s", "train/learning_rate", "train/wait_share", "train/peak_rss_bytes"} <= set(events(tmp_path).Tags()["scalars"])


def test_a_killed_run_has_every_step_in_tensorboard_once_with_the_numbers_that_count(tmp_path: Path) -> None:
    run = config(tmp_path, tensorboard=True)
    killed = train(run, 0, 7, 1.0, ends=False)  # the last checkpoint is of step 4
    train(run, 4, 9, 2.0)
    assert scalars(tmp_path, "train/loss") == [(step, 1.0 if step <= 4 else 2.0) for step in range(1, 10)]
    assert [step for step, _ in scalars(tmp_path, "heldout/tau")] == [3, 6, 9]
    killed.close()


def test_what_tensorboard_missed_while_it_was_off_is_made_up_for(tmp_path: Path) -> None:
    on, off = config(tmp_path, tensorboard=True), config(tmp_path)
    train(off, 0, 2, 1.0)
    train(on, 2, 4, 2.0)
    train(off, 4, 6, 3.0)
    train(on, 6, 8, 4.0)
    assert scalars(tmp_path, "train/loss") == [(step, float((step + 1) // 2)) for step in range(1, 9)]
    assert [step for step, _ in scalars(tmp_path, "heldout/tau")] == [3, 6]


def test_results_of_a_later_evaluation_take_the_place_of_the_earlier_ones(tmp_path: Path) -> None:
    run = config(tmp_path, tensorboard=True)
    train(run, 0, 3, 1.0)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for tau in (1.5, 1.75):
        next_second()
        trackers = Trackers(run, is_main=True)
        trackers.open(records)
        trackers.finish(REPORT | {"tau": tau}, tmp_path / "run" / "report.html")
        trackers.close()
    assert scalars(tmp_path, "result/tau") == [(4, 1.75)] and scalars(tmp_path, "result/joint_acceptance/1") == [(4, 0.25)]
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_tensorboard_shows_the_data_report_and_the_settings(tmp_path: Path) -> None:
    train(config(tmp_path, tensorboard=True), 0, 1, 1.0)
    texts = {name: events(tmp_path).Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode() for name in ("data_report", "config")}
    assert "|left out: empty|1|c\\|7|" in texts["data_report"] and "cut_off" not in texts["data_report"]
    assert '"learning_rate": 0.0001' in texts["config"]


def test_a_tensorboard_that_cannot_write_never_ends_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config(tmp_path, tensorboard=True)
    (run.run_dir / "tensorboard").write_text("a file in the place of the folder")
    train(run, 0, 3, 1.0)
    assert "tensorboard failed (" in capsys.readouterr().out
    assert len((run.run_dir / "metrics.jsonl").read_text().splitlines()) == 4


# --- wandb ----------------------------------------------------------------------------------------------------------------


def stored_records(path: Path) -> Iterator[Record]:
    """The records of a .wandb file.

    A header of 7 bytes, then LevelDB's log format: blocks of 32 KiB; parts of crc, length, kind (1 whole, 2 first, 3 middle, 4 last) and content.
    """
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block that is too short for a header
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def wandb_files(tmp_path: Path) -> list[Path]:
    """In the order in which they were written; `wandb sync` takes them in this order."""
    return sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def history(path: Path) -> list[dict[str, Any]]:
    """Every logged row: name to value; `_step` is wandb's own name."""
    rows = []
    for record in stored_records(path):
        if record.WhichOneof("record_type") == "history":
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item})
    return rows


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One offline run of the real wandb: seven steps, then taken back to step 4, the end of it with results; about ten seconds."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_DATA_DIR", str(folder)), ("WANDB_CACHE_DIR", str(folder))):
            patch.setenv(name, value)
        run = config(folder, wandb=True, wandb_project="drafts", wandb_tags=("eagle3",))
        train(run, 0, 7, 1.0)
        trackers = train(run, 4, 9, 1.0, ends=False)
        trackers.finish(REPORT, run.run_dir / "report.html")
        trackers.close()
        deadline = time.monotonic() + 30  # its process ends a file a moment after `finish` has returned
        while time.monotonic() < deadline and [row["_step"] for row in history(wandb_files(folder)[-1])][-1:] != [9]:
            time.sleep(0.05)
        os.environ.pop("WANDB_SERVICE", None)  # else processes that later tests start would use this one's service
        yield folder


def test_wandb_holds_every_step_once_and_in_order_after_a_run_was_taken_back(wandb_run: Path) -> None:
    first, second = (history(path) for path in wandb_files(wandb_run))
    steps = [[row["_step"] for row in rows if "train/loss" in row] for rows in (first, second)]
    assert steps == [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
    assert [row["_step"] for row in first + second if "heldout/tau" in row] == [3, 6, 9]
    row = next(row for row in first if row["_step"] == 3)
    assert row["train/loss"] == 1.0 and row["train/accuracy/1"] == 0.125 and row["heldout/joint_acceptance/0"] == 0.015
    assert {"train/tokens_per_s", "train/peak_rss_bytes", "train/wait_share", "train/learning_rate"} <= row.keys()


def test_both_starts_are_one_wandb_run_with_its_settings(wandb_run: Path) -> None:
    runs = [record.run for path in wandb_files(wandb_run) for record in stored_records(path) if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {(wandb_run / "run" / "wandb_id").read_text()}
    assert runs[0].project == "drafts" and list(runs[0].tags) == ["eagle3"] and runs[0].display_name == "run"
    configs = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert configs["optim"]["learning_rate"] == 1e-4 and configs["drafter"]["ttt_steps"] == to_json(recipe().drafter)["ttt_steps"]


def test_the_data_report_the_results_and_the_page_are_in_wandb(wandb_run: Path) -> None:
    first, second = wandb_files(wandb_run)
    paths = [row["data_report/path"] for row in history(first) + history(second) if "data_report/path" in row]
    assert len(paths) == 1
    table = json.loads((first.parent / "files" / paths[0]).read_text())
    assert table["columns"] == ["", "records", "example", "rule"] and table["data"][1][:3] == ["left out: empty", 1, "c|7"]
    summary: dict[str, Any] = {}
    for record in stored_records(second):
        if record.WhichOneof("record_type") == "summary":
            summary |= {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.summary.update}
    assert summary["tau"] == 1.75 and summary["joint_acceptance/1"] == 0.25 and summary["speedup_reference_decoder"] == 1.25
    artifacts = [record.artifact for record in stored_records(second) if record.WhichOneof("record_type") == "artifact"]
    assert [entry.path for artifact in artifacts for entry in artifact.manifest.contents if artifact.type == "report"] == ["report.html"]


def test_wandbs_files_are_cut_back_to_whole_records_wherever_a_kill_has_cut_them(wandb_run: Path, tmp_path: Path) -> None:
    run_id = (wandb_run / "run" / "wandb_id").read_text()
    first = wandb_files(wandb_run)[0]
    whole = first.read_bytes()
    assert mend_offline_runs(wandb_run / "run" / "wandb", run_id) == 9 and first.read_bytes() == whole
    assert mend_offline_runs(tmp_path, run_id) is None
    path = tmp_path / first.parent.name / first.name
    steps = []
    for share in range(101):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole[: len(whole) * share // 100])
        steps.append(mend_offline_runs(tmp_path, run_id))
        rows = history(path) if path.exists() else []
        assert max([0, *(row["_step"] for row in rows)]) == steps[-1] and path.parent.exists() == path.exists()
        assert not path.exists() or whole.startswith(path.read_bytes())
    assert steps[0] == 0 and steps[-1] == 7 and steps == sorted(steps) and set(steps) == set(range(8))
    path.unlink()
    assert mend_offline_runs(tmp_path, run_id) == 0 and not path.parent.exists()


class FakeWandb:
    """Stands for the package where it has to fail: fails where it is told to."""

    def __init__(self, fails_in: tuple[str, ...] = ()) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.id, self.offline, self.resumed, self.summary = "id", True, False, {}
        self._fails_in = fails_in
        self.Settings = self.Table = SimpleNamespace
        self.Artifact = lambda name, type: SimpleNamespace(add_file=lambda path: None)

    def _check(self, name: str) -> None:
        if name in self._fails_in:
            raise RuntimeError(f"{name} failed")

    def init(self, **arguments: Any) -> FakeWandb:
        self.inits.append(arguments)
        self._check("offline" if arguments.get("mode") == "offline" else "online")
        return self

    def define_metric(self, name: str, summary: str) -> None:
        self._check("define")

    def log(self, values: dict[str, Any], step: int, commit: bool) -> None:
        if step > 0:
            self._check("log")
            self.logged.append((values, step))

    def log_artifact(self, artifact: Any) -> None:
        self._check("artifact")

    def finish(self) -> None:
        self._check("finish")


def logged_with(fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_step: int = 0) -> None:
    """Three steps and the end of a run with wandb asked for."""
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    trackers = train(config(tmp_path, wandb=True), first_step, first_step + 3, 1.0, ends=False)
    trackers.finish(REPORT, tmp_path / "run" / "report.html")
    trackers.close()


def test_a_resumed_training_goes_on_in_the_same_wandb_run_and_a_fresh_one_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    logged_with(fake, tmp_path, monkeypatch)
    logged_with(fake, tmp_path, monkeypatch, first_step=3)
    for name in ("wandb_id", "metrics.jsonl", "trackers.json"):
        (tmp_path / "run" / name).unlink()  # as when the earlier steps are moved aside
    logged_with(fake, tmp_path, monkeypatch)
    first, resumed, fresh = (arguments["id"] for arguments in fake.inits)
    assert first == resumed != fresh
    assert all(arguments["resume"] == "allow" for arguments in fake.inits)
    assert [step for _, step in fake.logged] == [1, 2, 3, 4, 5, 6, 1, 2, 3]


def test_an_online_run_is_told_what_its_server_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The killed process had handed over six steps, of which two had arrived."""
    fake = FakeWandb()
    logged_with(fake, tmp_path, monkeypatch)
    logged_with(fake, tmp_path, monkeypatch, first_step=3)
    fake.logged.clear()
    fake.offline, fake.resumed, fake.starting_step = False, True, 3  # type: ignore[attr-defined]
    logged_with(fake, tmp_path, monkeypatch, first_step=4)
    assert [step for _, step in fake.logged] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("fails_in", "num_logged"),
    [
        (("online",), 3),
        (("online", "offline"), 0),
        (("define",), 0),
        (("log",), 0),
        (("artifact",), 3),
        (("finish",), 3),
        (("log", "finish"), 0),
    ],
)
def test_a_failing_wandb_never_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails_in: tuple[str, ...], num_logged: int
) -> None:
    fake = FakeWandb(fails_in)
    logged_with(fake, tmp_path, monkeypatch)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["event"] == "train"] == [1, 2, 3]
    assert len(fake.logged) == num_logged
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb")]) == 1 + ("offline" in fails_in)


@pytest.mark.parametrize("damage", ["{", "[]", "null", '{"tensorboard": "two"}', '{"tensorboard": -1}', '{"tensorboard": null}', "\udcff"])
def test_a_damaged_memory_of_what_was_told_tells_everything_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    run = config(tmp_path, tensorboard=True)
    train(run, 0, 3, 1.0)
    (run.run_dir / "trackers.json").write_bytes(damage.encode("utf-8", "surrogateescape"))
    train(run, 3, 4, 1.0)
    said = [line for line in capsys.readouterr().out.splitlines() if "trackers.json" in line]
    assert said == [f"{run.run_dir / 'trackers.json'} is damaged: tensorboard is told everything again"]
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == [1, 2, 3, 4]
    assert json.loads((run.run_dir / "trackers.json").read_text()) == {"tensorboard": 4}


def test_a_memory_that_cannot_be_read_never_ends_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config(tmp_path, tensorboard=True)
    (run.run_dir / "trackers.json").mkdir()
    train(run, 0, 3, 1.0)
    assert "trackers.json is damaged: tensorboard is told everything again" in capsys.readouterr().out
    assert len((run.run_dir / "metrics.jsonl").read_text().splitlines()) == 4


def test_damage_of_one_trackers_memory_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = config(tmp_path, wandb=True, tensorboard=True)
    train(run, 0, 3, 1.0)
    (run.run_dir / "trackers.json").write_text('{"tensorboard": [], "wandb": 3}')
    train(run, 3, 4, 1.0)
    assert [step for _, step in fake.logged] == [1, 2, 3, 4] and [step for step, _ in scalars(tmp_path, "train/loss")] == [1, 2, 3, 4]
    assert "trackers.json is damaged: tensorboard is told everything again" in capsys.readouterr().out


def test_an_id_of_a_wandb_run_that_a_kill_has_cut_off_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb()
    logged_with(fake, tmp_path, monkeypatch)
    (tmp_path / "run" / "wandb_id").write_bytes(b"\xff")
    logged_with(fake, tmp_path, monkeypatch, first_step=3)
    assert "wandb_id is damaged: a new wandb run is told everything again" in capsys.readouterr().out
    first, second = (arguments["id"] for arguments in fake.inits)
    assert first != second == (tmp_path / "run" / "wandb_id").read_text()
    assert [step for _, step in fake.logged] == [1, 2, 3, 1, 2, 3, 4, 5, 6]


# --- whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_has_every_step_once_in_both_real_trackers(launcher: Any) -> None:
    """kill -9 of the run and of wandb's own process with it."""
    flags = ("--log.wandb", "--log.tensorboard", "--train.max-steps", "40", "--train.save-every", "4", "--train.heldout-every", "8")
    folder = launcher.runs_dir
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DATA_DIR": str(folder), "WANDB_CACHE_DIR": str(folder)}
    process = launcher.start("python", "run", *flags, **variables)
    assert process.stdout is not None
    assert any(line.startswith("step 15/") for line in process.stdout)
    launcher.kill(process)
    code, text = launcher("python", "run", *flags, **variables)
    assert code == 0, text
    files = wandb_files(folder)
    assert all(path.stem.endswith((folder / "run" / "wandb_id").read_text()) for path in files)
    truth = read_metrics(folder / "run" / "metrics.jsonl")
    steps, measured = ([record["step"] for record in truth.of(event)] for event in ("train", "heldout"))
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 20 and measured[:3] == [8, 16, 24]
    assert [row["_step"] for path in files for row in history(path) if "train/loss" in row] == steps
    assert [row["_step"] for path in files for row in history(path) if "heldout/tau" in row] == measured
    assert [step for step, _ in scalars(folder, "train/loss")] == steps


def in_a_process(folder: Path, environment: dict[str, str], first_step: int, last_step: int, is_killed: bool) -> None:
    """A process that logs these steps; killed with wandb's own, or with its results at the end."""
    code = (
        "import os, sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]; import test_trackers as t\n"
        "run = t.config(Path(sys.argv[1]), wandb=True)\n"
        f"trackers = t.train(run, {first_step}, {last_step}, 1.0, ends=False)\n"
        f"{'os.killpg(0, 9)' if is_killed else ''}\n"
        "trackers.finish(t.REPORT, run.run_dir / 'report.html'); trackers.close()"
    )
    command = [sys.executable, "-c", code, str(folder), str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    clean = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    process = subprocess.run(command, env=clean | environment, start_new_session=True, capture_output=True, text=True, timeout=120)
    assert process.returncode == (-9 if is_killed else 0), process.stderr
    assert "wandb failed" not in process.stdout, process.stdout


@pytest.mark.slow
@pytest.mark.parametrize("steps", [7, 130])
def test_a_killed_offline_run_is_whole_on_the_server_after_wandb_sync(tmp_path: Path, steps: int) -> None:
    """Few steps: the kill leaves a file without a record, which `wandb sync` refuses; many: one that ends in the middle of a record."""
    with LoopbackWandb() as server:
        online = server.environment(str(tmp_path))
        offline = online | {"WANDB_MODE": "offline"}
        in_a_process(tmp_path, offline, 0, steps, is_killed=True)
        in_a_process(tmp_path, offline, steps - 3, steps + 2, is_killed=False)
        folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
        command = [str(Path(sys.executable).parent / "wandb"), "sync", *map(str, folders)]
        synced = subprocess.run(command, env=os.environ | online, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert synced.returncode == 0, synced.stderr
    rows = server.rows((tmp_path / "run" / "wandb_id").read_text())
    assert [row["_step"] for row in rows if "train/loss" in row] == list(range(1, steps + 3)), synced.stderr
    assert [row["_step"] for row in rows if "heldout/tau" in row] == list(range(3, steps + 3, 3))
    assert server.uploads["report.html"] == b"<!DOCTYPE html>"


@pytest.mark.slow
def test_a_killed_online_run_goes_on_in_the_same_run_on_the_server(tmp_path: Path) -> None:
    with LoopbackWandb() as server:
        environment = server.environment(str(tmp_path))
        in_a_process(tmp_path, environment, 0, 7, is_killed=True)
        in_a_process(tmp_path, environment, 4, 9, is_killed=False)
    assert len(server.history) == 1
    rows = server.rows((tmp_path / "run" / "wandb_id").read_text())
    assert [row["_step"] for row in rows if "train/loss" in row] == list(range(1, 10))
    assert [row["_step"] for row in rows if "heldout/tau" in row] == [3, 6, 9]
    assert server.uploads["report.html"] == b"<!DOCTYPE html>"


@pytest.mark.slow
def test_a_dead_server_costs_some_twenty_seconds_and_the_run_goes_on_offline(launcher: Any) -> None:
    settings = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY}
    started = time.monotonic()
    code, text = launcher("python", "run", "--log.wandb", **settings)
    assert code == 0, text
    assert "wandb is not reachable" in text and KEY not in text
    assert list((launcher.runs_dir / "run" / "wandb").glob("offline-run-*"))
    assert (launcher.runs_dir / "run" / "report.json").exists()
    assert time.monotonic() - started < 60, "includes the run itself"
