"""Trackers of a run: Weights & Biases and TensorBoard, beside metrics.jsonl, which is the truth.

Place in the flow: `MetricsLog` (train/metrics.py) and the last stage of train/run.py -> `Trackers` -> each tracker that is asked for; rank 0 only.

A tracker is told every step once and in order, also when the run was killed, when it was off for a while, or when it was asked for only later: what
it holds already is known (trackers.json, wandb's own files or its server), and what it lacks comes from metrics.jsonl. A tracker that
fails is dropped with one printed line; it never ends a run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from data.report import report_rows
from train.config import LogConfig, RunConfig, to_json
from train.wandb_files import mend_offline_runs

STATE_FILE = "trackers.json"
_FINISH_TIMEOUT_S = 60.0
_LOGIN_TIMEOUT_S = 60
_RESULTS = (
    *("tau", "tau_macro", "tau_interval_95", "tau_untrained", "joint_acceptance", "joint_acceptance_untrained", "conditional_acceptance"),
    *("speedup_reference_decoder", "train_seconds", "total_seconds", "num_train_tokens", "num_steps", "best_step"),
)


class Tracker(Protocol):
    """One place that numbers go to. Every method may raise: `Trackers` sees to it."""

    name: str

    def start(self, config: RunConfig, last_step: int, held_step: int) -> int:
        """Opens the tracker, or goes on in what it holds of this run.

        Args:
            config: of the run.
            last_step: the last step that metrics.jsonl holds; what the tracker holds beyond it was taken back.
            held_step: the last step that it was told by an earlier start; 0 for none.

        Returns:
            The last step that it need not be told again.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes all numbers of one step."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Takes a table about the whole run."""

    def results(self, values: Mapping[str, float]) -> None:
        """Takes the final numbers of the run."""

    def artifact(self, path: Path) -> None:
        """Takes a file, where it can keep files."""

    def close(self) -> None:
        """Waits, for a bounded time, until everything is sent or stored."""


def check_trackers(log: LogConfig) -> None:
    """Raises ValueError where a tracker that is asked for is not installed: before any work is done."""
    for name, is_wanted in (("wandb", log.wandb), ("tensorboard", log.tensorboard)):
        spec = importlib.util.find_spec(name) if is_wanted else None
        if is_wanted and (spec is None or spec.origin is None):  # a folder of that name has no origin
            raise ValueError(f"log.{name} needs the package {name!r}, which is not installed here: pip install {name}, or run without --log.{name}")


class Trackers:
    """The trackers of one run behind one front, none on other ranks than 0."""

    def __init__(self, config: RunConfig, is_main: bool) -> None:
        log = config.log
        wanted: list[tuple[bool, Callable[[], Tracker]]] = [(log.wandb, WandbTracker), (log.tensorboard, TensorBoardTracker)]
        self._config = config
        self._trackers = [make() for is_wanted, make in wanted if is_wanted and is_main]
        self._path = config.run_dir / STATE_FILE
        self._held: dict[str, int] = {}
        self._step = 0
        self._row: dict[str, float] = {}
        self._is_open = False

    def open(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Starts what is asked for, once, and tells it what it lacks.

        Args:
            records: all that metrics.jsonl holds.
        """
        if self._is_open or not self._trackers:
            return
        self._is_open = True
        last_step = max((record["step"] for record in records), default=0)
        saved = self._read_state()
        for tracker in list(self._trackers):
            self._try(tracker, partial(self._start, tracker, last_step, saved[tracker.name]))
        for record in records:
            self.record(record)
        self._flush()

    def _start(self, tracker: Tracker, last_step: int, held_step: int) -> None:
        self._held[tracker.name] = tracker.start(self._config, last_step, held_step)
        report = self._config.run_dir / "data_report.json"
        if self._held[tracker.name] == 0 and report.exists():
            tracker.table("data_report", ("", "records", "example", "rule"), report_rows(json.loads(report.read_text())))

    def _read_state(self) -> dict[str, int]:
        """The last step that each tracker was told; what cannot be read counts as told nothing."""
        names = [tracker.name for tracker in self._trackers]
        try:
            found = json.loads(self._path.read_text()) if self._path.exists() else {}
            steps = {name: found.get(name, 0) for name in names}
        except (OSError, ValueError, AttributeError):
            steps = dict.fromkeys(names, -1)
        damaged = [name for name, step in steps.items() if type(step) is not int or step < 0]
        if damaged:
            verb = "is" if len(damaged) == 1 else "are"
            print(f"{self._path} is damaged: {' and '.join(damaged)} {verb} told everything again", flush=True)
        return {name: 0 if name in damaged else step for name, step in steps.items()}

    def record(self, record: Mapping[str, Any]) -> None:
        """Takes one record of metrics.jsonl; a step is passed on whole, when its last record or the next step has come."""
        if record["step"] != self._step:
            self._flush()
            self._step = record["step"]
        self._row |= numbers(record, f"{record['event']}/")
        if record["event"] == "heldout":
            self._flush()

    def _flush(self) -> None:
        """Passes the step on to every tracker that does not hold it."""
        step, row, self._row = self._step, self._row, {}
        for tracker in list(self._trackers):
            if row and step > self._held[tracker.name]:
                self._try(tracker, partial(self._tell, tracker, step, row))

    def _tell(self, tracker: Tracker, step: int, row: Mapping[str, float]) -> None:
        tracker.log(step, row)
        self._held[tracker.name] = step
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._held))
        temporary.replace(self._path)

    def finish(self, report: Mapping[str, Any], page: Path) -> None:
        """Takes report.json's main numbers, and report.html as a file."""
        values = numbers({name: report[name] for name in _RESULTS if name in report}, "")
        self._flush()
        for tracker in list(self._trackers):
            self._try(tracker, partial(tracker.results, values))
            self._try(tracker, partial(tracker.artifact, page))

    def close(self) -> None:
        """Waits until everything is sent or stored; the trackers can be opened again."""
        if self._is_open:
            self._flush()
            for tracker in list(self._trackers):
                self._try(tracker, tracker.close)
            self._is_open = False

    def _try(self, tracker: Tracker, action: Callable[[], object]) -> None:
        """Acts on a tracker as long as there is one; drops it at its first error."""
        if tracker not in self._trackers:
            return
        try:
            action()
        except Exception as error:
            self._trackers.remove(tracker)
            print(
                f"{tracker.name} failed ({type(error).__name__}: {_one_line(error)}); the run goes on without it, "
                f"all is in {self._config.run_dir / 'metrics.jsonl'}",
                flush=True,
            )


def numbers(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers of a record by name, and its lists as a series an entry: `accuracy/0`, `accuracy/1`."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            found |= {f"{prefix}{name}/{index}": item for index, item in enumerate(value)}
        elif isinstance(value, (int, float)) and name != "step":
            found[prefix + name] = value
    return found


class WandbTracker:
    """The wandb run of a training: the same one when a training goes on, another when it starts afresh."""

    name = "wandb"

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, config: RunConfig, last_step: int, held_step: int) -> int:
        """Online, or offline where there is no key or the server does not answer.

        wandb drops a step that is not above those that its server has. So what an online run still needs is asked of the server; of an offline run,
        which `wandb sync` will append, its files say it.
        """
        run_id, is_known = _wandb_id(config.run_dir / "wandb_id", config.name)
        stored_step = mend_offline_runs(config.run_dir / "wandb", run_id)
        self._run = start_wandb(config, run_id)
        self._run.define_metric("heldout/tau", summary="max")
        if not self._run.offline:
            return max(0, self._run.starting_step - 1) if self._run.resumed else 0
        if stored_step is None:  # none yet, or `wandb clean` has removed what was sent
            return held_step if is_known else 0
        return stored_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step, commit=True)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=0, commit=True)

    def results(self, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def artifact(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"{self._run.id}-{path.stem}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(path: Path, name: str) -> tuple[str, bool]:
    """The id in a file, and whether it was there; a new one where there is none, or what a kill has left."""
    try:
        known = path.read_text() if path.exists() else None
    except UnicodeDecodeError:
        known = ""
    if known is not None and re.fullmatch(r"[\w.-]+", known):
        return known, True
    if known is not None:
        print(f"{path} is damaged: a new wandb run is told everything again", flush=True)
    run_id = f"{_portable(name)[:64]}-{secrets.token_hex(4)}"
    path.write_text(run_id)
    return run_id, False


def start_wandb(config: RunConfig, run_id: str) -> Any:
    """A wandb run that goes on under its id.

    Raises:
        Exception: whatever wandb raises where it cannot even start offline.
    """
    import wandb

    log, run_dir, mode = config.log, config.run_dir, os.environ.get("WANDB_MODE")
    # Nothing here may wait for long: not for a server that is gone, nor for a key that nobody types.
    bounds: dict[str, Any] = {"finish_timeout": _FINISH_TIMEOUT_S, "login_timeout": _LOGIN_TIMEOUT_S}
    online = wandb.Settings(init_timeout=8, x_graphql_retry_max=1, x_graphql_timeout_seconds=5, **bounds)
    arguments: dict[str, Any] = {
        "project": log.wandb_project,
        "entity": log.wandb_entity,
        "tags": list(log.wandb_tags) or None,
        "name": config.name,
        "id": run_id,
        "resume": "allow",
        "dir": str(run_dir),
        "config": to_json(config),
    }
    if mode not in ("offline", "disabled", "dryrun"):
        try:
            return wandb.init(**arguments, settings=online)
        except Exception as error:
            print(f"wandb is not reachable ({_one_line(error)}); logging offline to {run_dir}/wandb: `wandb sync` it later", flush=True)
    return wandb.init(**arguments, settings=wandb.Settings(**bounds), mode="disabled" if mode == "disabled" else "offline")


class TensorBoardTracker:
    """Event files in <run>/tensorboard, for `tensorboard --logdir runs`."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None
        self._last_step = 0

    def start(self, config: RunConfig, last_step: int, held_step: int) -> int:
        from torch.utils.tensorboard import SummaryWriter

        folder = config.run_dir / "tensorboard"
        held_step = min(held_step, last_step) if folder.exists() else 0
        # Readers drop what earlier event files hold from this step on: a killed run's steps after its last checkpoint.
        self._writer = SummaryWriter(str(folder), purge_step=held_step + 1 if held_step else 0)
        self._last_step = held_step
        if held_step == 0:
            self._writer.add_text("config", f"```json\n{json.dumps(to_json(config), indent=2)}\n```", 0)
        return held_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a kill loses nothing that we count as told
        self._last_step = step

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join("|" + "|".join(_markdown(cell) for cell in line) + "|" for line in lines), 0)

    def results(self, values: Mapping[str, float]) -> None:
        """Beyond the last step, so that another evaluation takes their place."""
        for name, value in values.items():
            self._writer.add_scalar(f"result/{name}", value, self._last_step + 1)

    def artifact(self, path: Path) -> None:
        """TensorBoard keeps no files."""

    def close(self) -> None:
        self._writer.close()


def _markdown(cell: object) -> str:
    return str(cell).replace("|", "\\|").replace("\n", " ")


def _portable(name: str) -> str:
    """A name without the characters that wandb refuses in an id."""
    return re.sub(r"[^\w.-]", "-", name)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
