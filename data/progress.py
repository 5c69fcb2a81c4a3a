"""Progress lines of long work: how much, how fast, how long still. Plain lines, so that a log file reads as well as a terminal."""

from __future__ import annotations

import time

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts units of work and prints a line now and then.

    Args:
        label: what is being done.
        unit: what is counted, in the plural.
        total: how many there are.
        bytes_per_unit: shown as a rate when not zero.
        is_shown: false on ranks that stay silent.
    """

    def __init__(self, label: str, unit: str, total: int, bytes_per_unit: int = 0, is_shown: bool = True) -> None:
        self._label, self._unit, self._total = label, unit, total
        self._bytes_per_unit = bytes_per_unit
        self._is_shown = is_shown
        self._done = 0
        self._started = self._printed = time.monotonic()

    def advance(self, count: int) -> None:
        """Adds to what is done."""
        self._done += count
        if time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES:
            self._print()

    def close(self) -> None:
        """Prints the last line, if any work was done."""
        if self._done:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        if not self._is_shown:
            return
        rate = self._done / max(1e-9, self._printed - self._started)
        rate_text = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        parts = [f"{self._label}: {self._done:,}/{self._total:,} {self._unit}", f"{rate_text} {self._unit}/s"]
        if self._bytes_per_unit:
            parts.append(f"{rate * self._bytes_per_unit / 1e6:,.1f} MB/s")
        parts.append(f"{max(0, self._total - self._done) / max(1e-9, rate) / 60:.1f} min left")
        print("  ".join(parts), flush=True)
