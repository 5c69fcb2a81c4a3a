"""Which stages of a run are done, and with which inputs: a stage runs when its output is missing or its inputs have changed.

A stage leaves `<run>/stages/<name>.json` with its inputs: once when it begins, without a duration, and again when its output is whole. A changed
input makes the stage, and every stage that reads its output, stale; the difference is printed, so that no work is repeated or skipped without a
reason one can read. What lies in the run's folder always belongs to the recorded inputs, also after a kill: what other inputs have left is put
away before the new ones are recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        name: also the name of its record.
        inputs: JSON values that its output depends on, those of the stages before it included through their fingerprints.
        output: what is there when its output is whole; a stage whose output has been removed runs again.
    """

    name: str
    inputs: dict[str, Any]
    output: Path

    @property
    def fingerprint(self) -> str:
        """Hash of the inputs."""
        return hashlib.sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()[:16]


class StageRecords:
    """The finished stages of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "stages"

    def read(self, stage: Stage) -> dict[str, Any] | None:
        """The record of the latest start, whatever its inputs, or None."""
        path = self._folder / f"{stage.name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def is_done(self, stage: Stage) -> bool:
        """Whether the stage has completed with these inputs, and its output is still there."""
        record = self.read(stage)
        if record is None or record["seconds"] is None or not stage.output.exists():
            return False
        return record["inputs"] == json.loads(json.dumps(stage.inputs))

    def changes(self, stage: Stage) -> list[str]:
        """What differs from the inputs of the latest start, as `name: old -> new`; empty if there was none."""
        record = self.read(stage)
        if record is None:
            return []
        return list(_differences(record["inputs"], json.loads(json.dumps(stage.inputs)), ""))

    def begin(self, stage: Stage) -> None:
        """Marks the stage as begun and not done, before its output is touched."""
        self._write(stage, None)

    def complete(self, stage: Stage, seconds: float) -> None:
        """Marks the stage as done; its output is whole on disk."""
        self._write(stage, round(seconds, 2))

    def _write(self, stage: Stage, seconds: float | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f"{stage.name}.tmp"
        temporary.write_text(json.dumps({"inputs": stage.inputs, "seconds": seconds}, indent=2))
        temporary.replace(self._folder / f"{stage.name}.json")

    def seconds(self, name: str) -> float:
        """How long a stage took when it ran; 0 for one that is not done."""
        path = self._folder / f"{name}.json"
        return float(json.loads(path.read_text())["seconds"] or 0.0) if path.exists() else 0.0

    def total_seconds(self) -> float:
        """Time of all finished stages together."""
        return sum(self.seconds(path.stem) for path in self._folder.glob("*.json"))


def source_identity(source: str, installed_version: Callable[[str], str]) -> dict[str, Any]:
    """What tells one state of a data source (data/sources.py) from another.

    Size and time of local files, of `FOLDER:SPLIT` and `FOLDER/CONFIG` too; the version of a package; of a Hub dataset only its name in the source,
    so that a new commit goes unnoticed unless the name says `@REVISION`.

    Raises:
        ValueError: if a package is not installed.
    """
    if source.startswith("package:"):
        package = source.removeprefix("package:")
        try:
            return {"source": source, "version": installed_version(package)}
        except (PackageNotFoundError, ValueError):
            raise ValueError(f"data.sources names package {package!r}, which is not installed in this environment: install it with pip") from None
    path = Path(os.path.expanduser(source))
    if not path.exists():
        path = path.with_name(path.name.rpartition(":")[0] or path.name)
    if not path.exists() and path.parent != Path() and (path.parent / "README.md").is_file():  # FOLDER/CONFIG
        path = path.parent
    if not path.exists():
        return {"source": source}
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [[str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return {"source": source, "files": hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]}


def _differences(old: Any, new: Any, prefix: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted(set(old) | set(new)):
            found += _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
        return found
    return [] if old == new else [f"{prefix}: {old} -> {new}"]
