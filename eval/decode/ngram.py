"""Prompt lookup: the drafts are what followed the newest tokens the last time they stood together in the text. No model, no training.

Drafts exactly what vLLM 0.32.0's method "ngram" drafts (vllm/v1/spec_decode/ngram_proposer.py; its defaults are those of vllm/config/speculative.py),
so that the acceptance that we print is what the engine will count:

    text     the cat sat on the mat . the cat ran . then the cat          min_n = 1, max_n = 3, K = 3
    newest                                              "the cat" is found twice, "then the cat" never: n = 2
    drafts           sat on the                         of the two, the earliest counts

1. n is the largest number from min_n to max_n for which the last n tokens also stand at an earlier place, prompt and answer alike. The two places
   may overlap. Without such a place nothing is drafted: that verification is a plain step.
2. Of several such places the *earliest* of the text counts.
3. The drafts are the K tokens after it, or the fewer that there are until the end of the text.

vLLM also cuts the drafts at its `max_model_len`, which a reference decoder does not have.

What is counted: our tau is tokens per forward of the target, those without a draft included. vLLM's counter `num_drafts` leaves those forwards out
(`Scheduler.make_spec_decoding_stats`), and with it its "mean acceptance length": on text without repetitions that can be twice our tau, and
nothing is faster for it. `Answer.num_nodes` tells the two apart: it is 0 where nothing was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.decode.loop import Method, Seen
from eval.decode.tree import DraftTree


class NGram(Method):
    """A chain of up to K tokens that stood after the newest ones before."""

    def __init__(self, draft_length: int, min_n: int = 5, max_n: int = 5) -> None:
        """
        Args:
            draft_length: K, at least 1; vLLM's `num_speculative_tokens`.
            min_n, max_n: fewest and most tokens that must repeat; vLLM's `prompt_lookup_min` and `prompt_lookup_max`.

        Raises:
            ValueError: if one of them is out of range.
        """
        if draft_length < 1:
            raise ValueError(f"a chain of {draft_length} drafts is wanted, expected at least 1")
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-grams of {min_n} to {max_n} tokens are to be looked up, expected 1 <= min_n <= max_n")
        self.longest_path = self.most_nodes = draft_length
        self._min_n, self._max_n = min_n, max_n

    def start(self, num_sequences: int, capacity: int) -> None:
        pass  # everything is in the context

    def keep(self, rows: Sequence[int]) -> None:
        pass

    def draft(self, seen: Seen) -> list[DraftTree]:
        return [DraftTree.chain(self._continuation(context)) for context in seen.contexts]

    def _continuation(self, context: Sequence[int]) -> tuple[int, ...]:
        place = continuation_place(np.asarray(context), self._min_n, self._max_n)
        return () if place is None else tuple(context[place : place + self.longest_path])


def continuation_place(context_T: np.ndarray, min_n: int, max_n: int) -> int | None:
    """Index after the earliest earlier occurrence of the longest suffix of min_n to max_n tokens, or None where there is none."""
    place = None
    end_m = np.arange(len(context_T) - 1)  # where occurrences of the last n tokens end, for n = 0, 1, 2, ...
    for n in range(1, max_n + 1):
        end_m = end_m[end_m >= n - 1]
        end_m = end_m[context_T[end_m - (n - 1)] == context_T[-n]]
        if len(end_m) == 0:
            break
        if n >= min_n:
            place = int(end_m[0]) + 1
    return place
