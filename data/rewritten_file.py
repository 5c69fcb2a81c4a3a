"""The output of `python -m data.regenerate`: records as they are finished, and what is needed to go on after any interruption.

Place in the flow: data/rewrite.py `Dialogue` -> OUT.jsonl -> `--data.sources OUT.jsonl`. Beside it:

    OUT.report.json   the settings, written before the first record, and the counts
    OUT.failed.jsonl  conversations without a record, with the reason; only if there are any

A record is one line, written at once when its conversation is finished. Going on, lines that a kill has cut off are dropped, and nothing is asked
that a record or a final failure stands for. In the end the records are put in the order of the source.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data.rewrite import ENDINGS, REFUSALS, Dialogue

_TALLIES = ("num_turns", "num_cut_off", "num_thinking", "num_tool_calls", "num_prompt_tokens", "num_new_tokens", "num_retries")


@dataclass
class Failure:
    """A conversation without a record.

    Attributes:
        is_final: whether asking again would give the same; the others are asked again by the next run.
    """

    key: str
    id: str
    reason: str
    message: str
    is_final: bool


@dataclass
class _Place:
    """Where a record's line stands, in bytes."""

    begin: int
    size: int


@dataclass
class RewrittenFile:
    """The output of one command; `open` goes on where an earlier one stopped.

    Attributes:
        path: OUT.jsonl.
        settings: what the answers depend on.
        failures: by key.
        num_dropped: lines that were not whole.
    """

    path: Path
    settings: dict[str, Any]
    failures: dict[str, Failure] = field(default_factory=dict)
    num_dropped: int = 0
    _places: dict[str, _Place] = field(default_factory=dict, repr=False)
    _tallies: Counter[str] = field(default_factory=Counter, repr=False)
    _endings: Counter[str] = field(default_factory=Counter, repr=False)
    _file: Any = field(default=None, repr=False)

    @property
    def report_path(self) -> Path:
        return self.path.with_suffix(".report.json")

    @property
    def failed_path(self) -> Path:
        return self.path.with_suffix(".failed.jsonl")

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any], starts_anew: bool = False) -> RewrittenFile:
        """Opens or creates the output.

        Args:
            path: ends in .jsonl.
            settings: JSON values.
            starts_anew: whether an earlier output is removed.

        Raises:
            ValueError: if the path cannot be written, is another process's now, or holds the records of other settings.
        """
        output = cls(path, json.loads(json.dumps(settings)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            output._file = _open_locked(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from error
        try:
            output._go_on(starts_anew)
        except BaseException:
            output._file.close()
            raise
        return output

    def _go_on(self, starts_anew: bool) -> None:
        if starts_anew or not os.fstat(self._file.fileno()).st_size:
            # Without a record there is nothing that other settings could mix with.
            self._file.truncate(0)
            if starts_anew or self._settings_before() != self.settings:
                for path in (self.report_path, self.failed_path):
                    path.unlink(missing_ok=True)
        else:
            self._check_settings()
            self._read_records()
        for failure in list(_read_failures(self.failed_path)):
            if failure.is_final and failure.key not in self._places:
                self.failures[failure.key] = failure
        self._write_failures()
        self.save_report(is_finished=False)

    def _settings_before(self) -> dict[str, Any] | None:
        """Those of the report; None where there is no whole one."""
        try:
            settings = json.loads(self.report_path.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return settings if isinstance(settings, dict) else None

    def _check_settings(self) -> None:
        before = self._settings_before()
        if before is None:
            raise ValueError(
                f"{self.path} is there, but no {self.report_path.name} that says with which settings it was written: name another output, or add "
                "--start-anew to replace it"
            )
        changed = [
            f"{name} was {json.dumps(before.get(name))} and is {json.dumps(self.settings.get(name))}"
            for name in sorted({*before, *self.settings})
            if before.get(name) != self.settings.get(name)
        ]
        if changed:
            raise ValueError(
                f"{self.path} was written with other settings ({'; '.join(changed)}): name another output, or add --start-anew to replace it"
            )

    def _read_records(self) -> None:
        """Finds the whole records; what is not whole is cut out of the file."""
        kept: list[tuple[str, _Place]] = []
        self._file.seek(0)
        begin = 0
        for line in self._file:
            facts = _facts(line)
            if facts is None or facts["key"] in self._places:
                self.num_dropped += 1
            else:
                self._count(facts)
                self._places[facts["key"]] = _Place(begin, len(line))
                kept.append((facts["key"], self._places[facts["key"]]))
            begin += len(line)
        if self.num_dropped:
            print(f"{self.path}: {self.num_dropped} cut-off line(s) dropped; what they belonged to is asked again", flush=True)
            self._rewrite([key for key, _ in kept])

    def _count(self, facts: Mapping[str, Any]) -> None:
        self._tallies.update({name: int(facts[name]) for name in _TALLIES})
        if facts["ended_by"]:
            self._endings[facts["ended_by"]] += 1

    # --- writing ------------------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        """Whether the conversation has a record, or will never have one."""
        return key in self._places or key in self.failures

    @property
    def num_records(self) -> int:
        return len(self._places)

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record with its `regeneration` facts."""
        line = _line(record).encode("utf-8")
        begin = self._file.seek(0, os.SEEK_END)
        self._file.write(line)
        self._file.flush()
        facts = record["regeneration"]
        self._places[facts["key"]] = _Place(begin, len(line))
        self._count(facts)

    def store(self, dialogue: Dialogue, message: str = "") -> None:
        """Adds a finished conversation: its record, or why there is none.

        Args:
            dialogue: done.
            message: what a server has said.
        """
        record = dialogue.record()
        if record is not None:
            self.append(record)
        else:
            self.fail(Failure(dialogue.questions.key, dialogue.questions.id, dialogue.ended_by, message or ENDINGS[dialogue.ended_by], True))

    def fail(self, failure: Failure) -> None:
        """Notes a conversation without a record."""
        self.failures[failure.key] = failure
        with self.failed_path.open("a", encoding="utf-8") as file:
            file.write(_line(vars(failure)))

    def _write_failures(self) -> None:
        if self.failures:
            _write(self.failed_path, "".join(_line(vars(failure)) for failure in self.failures.values()))
        else:
            self.failed_path.unlink(missing_ok=True)

    def finish(self, keys_in_order: Sequence[str], source: Mapping[str, Any]) -> dict[str, Any]:
        """Puts the records in the source's order, those of no key at the end; returns the report."""
        wanted = [key for key in keys_in_order if key in self._places]
        others = self._places.keys() - set(wanted)
        order = wanted + [key for key in self._places if key in others]
        if order != list(self._places):
            self._rewrite(order)
        self._write_failures()
        return self.save_report(is_finished=True, source=source)

    def _rewrite(self, order: Sequence[str]) -> None:
        """The same records in this order, atomically; the lock goes over to the new file."""
        temporary = self.path.with_suffix(".jsonl.tmp")
        places: dict[str, _Place] = {}
        new = temporary.open("w+b")
        _lock(new)
        for key in order:
            place = self._places[key]
            self._file.seek(place.begin)
            places[key] = _Place(new.tell(), place.size)
            new.write(self._file.read(place.size))
        new.flush()
        os.fsync(new.fileno())
        temporary.replace(self.path)
        self._file.close()
        self._file, self._places = new, places

    def close(self) -> None:
        """Lets another process go on."""
        self._file.close()

    # --- the report ---------------------------------------------------------------------------------------------------------

    def save_report(self, is_finished: bool, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Writes OUT.report.json, atomically."""
        failed = Counter(failure.reason for failure in self.failures.values())
        endings = self._endings + failed
        report = {
            "is_finished": is_finished,
            "settings": self.settings,
            "num_conversations": self.num_records,
            "num_refused": {reason: endings[reason] for reason in REFUSALS},
            **{name: self._tallies[name] for name in _TALLIES},
            "ended_early": dict(self._endings.most_common()),
            "failed": dict(failed.most_common()),
            "source": None if source is None else dict(source),
        }
        _write(self.report_path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        return report


def _open_locked(path: Path) -> BinaryIO:
    """Opens a file to append to, created where there is none, and locks it; the file that has the name when the lock is ours.

    Raises:
        OSError: if it cannot be opened.
        ValueError: if another process has it.
    """
    while True:
        file = path.open("a+b")
        if not _lock(file):
            file.close()
            raise ValueError(f"{path} is being written by another process: wait for it, or name another output")
        # Whoever had it until now may have put its records in order meanwhile, in a new file: this one would be nobody's.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def _lock(file: BinaryIO) -> bool:
    """Whether no other process has the file; not every file system has locks, and it is no worse there than without."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _facts(line: bytes) -> dict[str, Any] | None:
    """The facts of a whole record's line."""
    try:
        record = json.loads(line)
        facts = record["regeneration"]
        is_whole = line.endswith(b"\n") and bool(record["messages"]) and isinstance(facts["key"], str) and {*_TALLIES, "ended_by"} <= facts.keys()
        return facts if is_whole else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_failures(path: Path) -> Iterator[Failure]:
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        try:
            yield Failure(**json.loads(line))
        except (ValueError, TypeError):
            continue
