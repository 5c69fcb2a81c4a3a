"""What became of every record: read, kept, changed, left out and why.

Place in the flow: readers and tokenizer count into one `DataReport` -> a printed table and data_report.json. The invariant is
`num_read == num_kept + sum(left out)`: no record vanishes uncounted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_RECORD_CHARS = 2_000_000
_MAX_STORED_WARNINGS = 20

# Why a record is left out, in the order in which the rules are tried. One rule each.
REASONS = {
    "cut_off": "the file ends in the middle of it",
    "malformed_json": "not valid JSON; reading goes on at the next whole record",
    "unreadable_row": "its part of the Parquet or Arrow file is damaged",
    "not_an_object": "a JSON value that is not an object",
    "no_turn_list": "no list of turns and no pair in its columns (data/columns.py lists the known names)",
    "empty": "the list of turns is empty",
    "malformed_turn": "a turn is not an object with a role and a text; plain texts in turn are read where columns.turns names their list",
    "tool_turn": "a turn of a tool or with tool calls: a chat of text only is supported",
    "unknown_role": "a turn whose role is not in the table of roles",
    "unsupported_content": "a turn with an image, audio or file",
    "invalid_text": "text with lone surrogates or bytes that do not decode",
    "over_long": f"more than {MAX_RECORD_CHARS:,} characters of text",
    "late_system_turn": "a system turn after the first user turn",
    "one_sided": "no user turn that an assistant turn follows",
    "empty_turn": "a user or assistant turn without text",
    "duplicate": "the same turns as an earlier record, under whatever id",
    "special_token_text": "a turn's text spells out a special token of the tokenizer",
    "template_refused": "the chat template raised an error for it",
    "unstable_template": "the chat template renders an earlier turn differently once later turns follow",
    "words_lost": "the supervised tokens do not decode to the assistant's words",
    "no_supervised_tokens": "no supervised token among the first max_length tokens",
}
# What is done to a record that is kept.
CHANGES = {
    "leading_assistant_dropped": "assistant turns before the first user turn are dropped",
    "trailing_user_dropped": "user turns after the last assistant turn are dropped",
    "same_role_joined": "neighbouring turns of one role are joined with a blank line",
    "empty_system_dropped": "a system turn without text is dropped",
    "truncated": "cut to max_length tokens",
}


class DataError(ValueError):
    """A source that cannot be read, or a damaged one under `strict`; its message is one line for the user."""


@dataclass
class Tally:
    """How often something happened, with one example to look up."""

    count: int = 0
    example_id: str = ""


@dataclass
class SplitStatistics:
    """Size of one split of the prepared data."""

    num_samples: int
    num_groups: int
    num_tokens: int
    num_supervised_tokens: int


@dataclass
class TokenStatistics:
    """Token counts of the kept samples.

    Attributes:
        num_tokens: tokens written.
        num_supervised_tokens: tokens with a true loss mask.
        num_tokens_lost: tokens of kept samples cut off at max_length.
        length_percentiles: tokens per conversation before truncation.
        splits: by split name.
    """

    num_tokens: int
    num_supervised_tokens: int
    num_tokens_lost: int
    length_percentiles: dict[str, int]
    splits: dict[str, SplitStatistics]


@dataclass
class DataReport:
    """The counts of one preparation; sources read into the same report are also deduplicated against each other.

    Attributes:
        columns: by source, the columns that its conversations were found in, with how many records.
        named_columns_used: whether those that the user names were found anywhere.
        num_read: records met, readable or not.
        num_kept: records that are still in.
        left_out: by reason, a key of `REASONS`.
        changes: by change, a key of `CHANGES`; in conversations.
        warnings: messages about damaged sources; the first 20 are stored, `num_warnings` counts all.
        tokens: filled in after tokenization.
        fingerprints: digests of the turns seen so far.
    """

    sources: list[str] = field(default_factory=list)
    columns: dict[str, dict[str, int]] = field(default_factory=dict)
    named_columns_used: bool = False
    num_read: int = 0
    num_kept: int = 0
    left_out: dict[str, Tally] = field(default_factory=dict)
    changes: dict[str, Tally] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    num_warnings: int = 0
    tokens: TokenStatistics | None = None
    fingerprints: set[bytes] = field(default_factory=set, repr=False)

    @property
    def num_left_out(self) -> int:
        return sum(tally.count for tally in self.left_out.values())

    def leave_out(self, reason: str, example_id: str, count: int = 1) -> None:
        """Counts records that were read and are not kept."""
        assert reason in REASONS, reason
        _add(self.left_out, reason, example_id, count)

    def withdraw(self, reason: str, example_id: str) -> None:
        """Leaves out a record that had been counted as kept."""
        self.num_kept -= 1
        self.leave_out(reason, example_id)

    def change(self, change: str, example_id: str) -> None:
        """Counts a conversation that is kept in altered form."""
        assert change in CHANGES, change
        _add(self.changes, change, example_id, 1)

    def warn(self, message: str) -> None:
        """Says a problem on stderr at once and keeps it for the report."""
        self.num_warnings += 1
        if self.num_warnings <= _MAX_STORED_WARNINGS:
            self.warnings.append(message)
            print(f"WARNING: {message}", file=sys.stderr, flush=True)
        elif self.num_warnings == _MAX_STORED_WARNINGS + 1:
            print("WARNING: more of these are counted in the data report, not printed", file=sys.stderr, flush=True)

    def check(self) -> None:
        """Asserts that every record read is either kept or counted under a reason."""
        assert self.num_read == self.num_kept + self.num_left_out, (
            f"{self.num_read} records read, but {self.num_kept} kept and {self.num_left_out} left out"
        )

    def summary(self) -> str:
        """The counts in one line."""
        reasons = ", ".join(f"{name} {tally.count} (e.g. {tally.example_id})" for name, tally in self.left_out.items())
        return f"{self.num_read} read, {self.num_kept} kept, left out: {reasons or 'none'}"

    def to_json(self) -> dict[str, object]:
        """The report as JSON values; reasons and changes that did not occur are listed with count 0."""
        self.check()
        return {
            "sources": self.sources,
            "columns": self.columns,
            "num_read": self.num_read,
            "num_kept": self.num_kept,
            "num_left_out": self.num_left_out,
            "left_out": {reason: asdict(self.left_out.get(reason, Tally())) for reason in REASONS},
            "changes": {change: asdict(self.changes.get(change, Tally())) for change in CHANGES},
            "tokens": None if self.tokens is None else asdict(self.tokens),
            "warnings": self.warnings,
            "num_warnings": self.num_warnings,
        }

    def save(self, path: Path) -> None:
        """Writes the report as JSON, atomically."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def print_table(self, console: Console | None = None) -> None:
        """Prints the report; ids are shown as plain text, whatever they contain."""
        self.check()
        console = console or Console()
        table = Table(title="Data", title_justify="left")
        for header, justify in (("", "left"), ("records", "right"), ("example", "left"), ("rule", "left")):
            table.add_column(header, justify=justify, overflow="fold")  # type: ignore[arg-type]
        table.add_row("read", f"{self.num_read:,}", "", Text(", ".join(self.sources)))
        for reason, rule in REASONS.items():
            if tally := self.left_out.get(reason):
                table.add_row(f"left out: {reason}", f"{tally.count:,}", Text(tally.example_id), Text(rule))
        table.add_row("kept", f"{self.num_kept:,}", "", "", style="bold")
        for change, rule in CHANGES.items():
            if tally := self.changes.get(change):
                table.add_row(f"of these: {change}", f"{tally.count:,}", Text(tally.example_id), Text(rule))
        console.print(table)
        for source, counts in self.columns.items():
            console.print(Text(f"columns of {source}: " + "; ".join(f"{names} ({count:,} records)" for names, count in counts.items())))
        self._print_tokens(console)
        for message in self.warnings:
            console.print(Text(f"WARNING: {message}", style="bold red"))
        if self.num_warnings > len(self.warnings):
            console.print(f"and {self.num_warnings - len(self.warnings):,} more warnings")

    def _print_tokens(self, console: Console) -> None:
        if (tokens := self.tokens) is None:
            return
        share = tokens.num_supervised_tokens / max(1, tokens.num_tokens)
        console.print(
            f"tokens: {tokens.num_tokens:,}, supervised {tokens.num_supervised_tokens:,} ({share:.1%}), "
            f"lost to truncation {tokens.num_tokens_lost:,}"
        )
        percentiles = ", ".join(f"{name} {length:,}" for name, length in tokens.length_percentiles.items())
        console.print(f"tokens per conversation before truncation: {percentiles}")
        for name, split in tokens.splits.items():
            console.print(
                f"{name}: {split.num_samples:,} samples of {split.num_groups:,} conversations, {split.num_tokens:,} tokens, "
                f"{split.num_supervised_tokens:,} supervised"
            )


def report_rows(report: Mapping[str, Any]) -> list[tuple[str, int, str, str]]:
    """data_report.json as the rows of a table: what, how many records, an example's id, the rule; what did not occur is left out."""
    rows = [("read", report["num_read"], "", ", ".join(report["sources"]))]
    rows += [(f"left out: {name}", tally["count"], tally["example_id"], REASONS.get(name, "")) for name, tally in _occurred(report["left_out"])]
    rows += [("kept", report["num_kept"], "", "")]
    return rows + [(f"of these: {name}", tally["count"], tally["example_id"], CHANGES.get(name, "")) for name, tally in _occurred(report["changes"])]


def _occurred(tallies: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, tally) for name, tally in tallies.items() if tally["count"]]


def _add(tallies: dict[str, Tally], name: str, example_id: str, count: int) -> None:
    tally = tallies.setdefault(name, Tally(example_id=example_id))
    tally.count += count


def printable(text: str) -> str:
    """The text with lone surrogates (names and ids that are not Unicode) spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
