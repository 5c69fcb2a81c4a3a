"""metrics.jsonl read back, whatever a kill has left of it.

Place in the flow: train/metrics.py writes a JSON object a line, `{"event": "train" | "heldout", "step": N, ...}`; a training that goes on, the
trackers and eval/report_page.py read it here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Metrics:
    """What could be read.

    Attributes:
        records: in the file's order; each has an `event` and a `step`.
        num_damaged: lines that are none: half written by a killed run, or damaged later.
    """

    records: list[dict[str, Any]]
    num_damaged: int

    @property
    def last_step(self) -> int:
        """The highest step; 0 where there is none."""
        return max((record["step"] for record in self.records), default=0)

    def of(self, event: str) -> list[dict[str, Any]]:
        """The records of one event, by ascending step."""
        return sorted((record for record in self.records if record["event"] == event), key=lambda record: record["step"])


def read_metrics(path: Path) -> Metrics:
    """Reads metrics.jsonl; a file that is not there holds nothing."""
    if not path.exists():
        return Metrics([], 0)
    records, num_damaged = [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            record = _record(line)
            if record is None:
                num_damaged += 1
            else:
                records.append(record)
    return Metrics(records, num_damaged)


def _record(line: str) -> dict[str, Any] | None:
    """The object of a line; None for a line that is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("event"), str)
    return record if is_record else None
