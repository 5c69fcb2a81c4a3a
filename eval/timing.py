"""Timed decoding of many methods in alternation, on the same prompts, in the same loop.

Place in the flow: eval/methods.py (what) -> this (how long) -> eval/compare.py. A shared machine gets slower and faster while one measures. So every
prompt is decoded by all methods in turn, plain decoding first and last among them, in an order that moves on from prompt to prompt; a method's ratio
is against the plain decoding of the same prompts. Times include the prefill on both sides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from data.target import Target
from eval.acceptance import Acceptance
from eval.decode.loop import Decoded, Method, Plain, decode
from eval.decode.session import TargetSession
from eval.decode.tree import DraftTree
from eval.decode.verify import Verifier
from eval.measurement import Speed


@dataclass
class Timed:
    """The timed calls of one method, and plain decoding around each of them.

    Attributes:
        decoded: one for each batch of prompts.
        plain_rates: tokens/s of the two plain calls around it, of the same batch.
        cache_bytes, pool_bytes: of the method, at their largest.
    """

    decoded: list[Decoded] = field(default_factory=list)
    plain_rates: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    pool_bytes: int = 0

    def speed(self, calls: Sequence[int] | None = None) -> Speed:
        """Of all calls, or of these."""
        chosen = range(len(self.decoded)) if calls is None else calls
        decoded = [self.decoded[index] for index in chosen]
        rates = [result.num_tokens / result.total_s for result in decoded]
        ratios = [rate / self.plain_rates[index] for rate, index in zip(rates, chosen, strict=True)]
        num_tokens, total_s = sum(result.num_tokens for result in decoded), sum(result.total_s for result in decoded)
        # What plain decoding would have taken for the same tokens, prompt by prompt.
        plain_s = sum(result.num_tokens / self.plain_rates[index] for result, index in zip(decoded, chosen, strict=True))
        # Sequences of a batch are verified together: the longest tells how many forwards there were.
        num_forwards = max(1, sum(max(answer.num_verifications for answer in result.answers) for result in decoded))
        return Speed(
            ratio=plain_s / total_s,
            ratio_range=(min(ratios), max(ratios)),
            tokens_per_s=num_tokens / total_s,
            tokens_per_s_plain=num_tokens / plain_s,
            drafting_s=sum(result.drafting_s for result in decoded) / num_forwards,
            verification_s=sum(result.verification_s for result in decoded) / num_forwards,
        )

    def acceptance(self, calls: Sequence[int] | None = None) -> Acceptance:
        """Of all calls, or of these."""
        chosen = [self.decoded[index].acceptance for index in (range(len(self.decoded)) if calls is None else calls)]
        return sum(chosen[1:], chosen[0])


def time_methods(
    target: Target,
    methods: Mapping[str, tuple[Method, Verifier]],
    plain_verifier: Verifier,
    batches: Sequence[Sequence[Sequence[int]]],
    max_new_tokens: int,
    end_ids: Collection[int],
    on_call: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Timed], list[Decoded]]:
    """Decodes every batch of prompts by every method.

    Args:
        target: the frozen target.
        methods: by name, with the verifier of each.
        plain_verifier: of plain decoding.
        batches: prompts that are decoded together.
        max_new_tokens: longest answer.
        end_ids: tokens that end an answer.
        on_call: called after every call, the warm-ups left out; `num_calls` says how many there are.

    Returns:
        The calls of each method, and plain decoding's of each batch.
    """
    names = list(methods)
    plain = Plain()
    for method, verifier in [(plain, plain_verifier), *methods.values()]:
        decode(target, method, batches[0], verifier, min(8, max_new_tokens), end_ids)
    timed = {name: Timed() for name in names}
    plain_calls = []
    for index, batch in enumerate(batches):
        shift = index % max(1, len(names))
        first = decode(target, plain, batch, plain_verifier, max_new_tokens, end_ids)
        on_call()
        for name in names[shift:] + names[:shift]:
            method, verifier = methods[name]
            timed[name].decoded.append(decode(target, method, batch, verifier, max_new_tokens, end_ids))
            timed[name].cache_bytes = max(timed[name].cache_bytes, method.cache_bytes)
            timed[name].pool_bytes = max(timed[name].pool_bytes, method.pool_bytes)
            on_call()
        last = decode(target, plain, batch, plain_verifier, max_new_tokens, end_ids)
        on_call()
        rate = (first.num_tokens + last.num_tokens) / (first.total_s + last.total_s)
        for name in names:
            timed[name].plain_rates.append(rate)
        plain_calls.append(first)
    return timed, plain_calls


def num_calls(num_methods: int, num_batches: int) -> int:
    """How often `time_methods` calls `on_call`."""
    return (num_methods + 2) * num_batches


def forward_seconds(
    target: Target, batch_sizes: Sequence[int], num_tokens: Sequence[int], context: int, num_rounds: int = 5
) -> dict[int, dict[int, float]]:
    """The target's median seconds for one forward over n new tokens of each of B sequences, its argmax on the host included.

    Args:
        target: the frozen target.
        batch_sizes: each B.
        num_tokens: each n; measured in turn within a round, so that a slow moment slows all.
        context: tokens that every sequence holds already.
        num_rounds: the median is over them.
    """
    seconds: dict[int, dict[int, float]] = {}
    for batch_size in batch_sizes:
        session = TargetSession(target, batch_size, context + max(num_tokens))
        session.prefill([[index % target.vocab_size for index in range(context)]] * batch_size)
        rounds: dict[int, list[float]] = {count: [] for count in num_tokens}
        for is_warm_up in (True, *[False] * num_rounds):
            for count in num_tokens:
                trees = [DraftTree.chain(tuple(range(count - 1)))] * batch_size
                started = time.perf_counter()
                session.forward([0] * batch_size, trees).logits_BRV.argmax(-1).tolist()
                if not is_warm_up:
                    rounds[count].append(time.perf_counter() - started)
        seconds[batch_size] = {count: statistics.median(times) for count, times in rounds.items()}
    return seconds


@torch.no_grad()
def cache_bytes_per_token(target: Target) -> int:
    """Keys and values of one token, all layers."""
    session = TargetSession(target, 1, 1)
    session.prefill([[0]])
    return session.cache_bytes_per_token
