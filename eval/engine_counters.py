"""What an engine's server has counted of speculative decoding, read from the Prometheus text of its /metrics.

Place in the flow: eval/sweep.py reads the counters before and after the prompts; the difference is the acceptance.

vLLM counts verifications and accepted drafts, also by position. SGLang counts neither: it counts verifications, tokens and requests when a request
ends, and of n tokens of a request the first comes from the prompt and one from each verification, so the rest are accepted drafts. Its gauge
sglang:spec_accept_length covers only the time since its last log line, so it is not used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from data.vllm_engine import EngineError

EngineName = Literal["vllm", "sglang"]

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')
_VLLM_DRAFTS = "vllm:spec_decode_num_drafts_total"
_VLLM_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_VLLM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_VLLM_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_SGLANG_VERIFICATIONS = "sglang:spec_verify_calls_total"
_SGLANG_TOKENS = "sglang:generation_tokens_total"
_SGLANG_REQUESTS = "sglang:num_requests_total"


@dataclass(frozen=True)
class DraftCounts:
    """Counted so far, over all engines behind the server.

    Attributes:
        num_verifications: forwards of the target that checked drafts, one for each request in a batch.
        num_drafted: drafts that were checked; None where the engine does not say.
        num_accepted: accepted drafts.
        accepted_at: verifications in which drafts 0..p were all accepted, for each p; empty where the engine does not say.
    """

    num_verifications: int
    num_drafted: int | None
    num_accepted: int
    accepted_at: tuple[int, ...]

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """What was counted after `earlier`.

        Raises:
            EngineError: if less is counted now: the server was started again in between.
        """
        if self.num_verifications < earlier.num_verifications:
            raise EngineError("the server's counters went back: it was started again in between, so measure again")
        return DraftCounts(
            self.num_verifications - earlier.num_verifications,
            None if self.num_drafted is None or earlier.num_drafted is None else self.num_drafted - earlier.num_drafted,
            self.num_accepted - earlier.num_accepted,
            tuple(now - then for now, then in zip(self.accepted_at, earlier.accepted_at, strict=True)),
        )


def draft_counts(text: str, engine: EngineName) -> DraftCounts:
    """The counters in the text of /metrics.

    Raises:
        EngineError: if they are not there.
    """
    values: dict[str, int] = defaultdict(int)
    by_position: dict[int, int] = defaultdict(int)
    for line in text.splitlines():
        if not (match := _SAMPLE.match(line)):
            continue
        name, value = match["name"], int(float(match["value"])) if match["name"].endswith("_total") else 0
        values[name] += value
        if name == _VLLM_PER_POSITION and (position := _POSITION.search(match["labels"] or "")):
            by_position[int(position[1])] += value
    return _vllm_counts(values, by_position) if engine == "vllm" else _sglang_counts(values)


def _vllm_counts(values: Mapping[str, int], by_position: Mapping[int, int]) -> DraftCounts:
    names = (_VLLM_DRAFTS, _VLLM_DRAFTED, _VLLM_ACCEPTED, _VLLM_PER_POSITION)
    _require(values, names, "it has no drafter, or runs with --disable-log-stats, or is another version")
    accepted_at = tuple(by_position[position] for position in sorted(by_position))
    return DraftCounts(values[_VLLM_DRAFTS], values[_VLLM_DRAFTED], values[_VLLM_ACCEPTED], accepted_at)


def _sglang_counts(values: Mapping[str, int]) -> DraftCounts:
    # Counters that have not counted yet are not in the text of a server that has just started.
    if not any(name.startswith("sglang:") for name in values):
        _require(values, (_SGLANG_VERIFICATIONS,), "start it with --enable-metrics")
    verifications = values.get(_SGLANG_VERIFICATIONS, 0)
    return DraftCounts(verifications, None, values.get(_SGLANG_TOKENS, 0) - values.get(_SGLANG_REQUESTS, 0) - verifications, ())


def _require(values: Mapping[str, int], names: tuple[str, ...], remedy: str) -> None:
    missing = [name for name in names if name not in values]
    if missing:
        raise EngineError(f"the server's /metrics has no {', '.join(missing)}: {remedy}")
