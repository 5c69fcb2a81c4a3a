"""Prompt lookup drafts what vLLM's rule says. That it is lossless is in test_untrained_methods.py."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.target import Target
from eval.decode.loop import Seen, decode
from eval.decode.ngram import NGram, continuation_place
from eval.decode.tree import DraftTree
from eval.decode.verify import Greedy

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # Small enough for answers that repeat themselves.
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
NO_STATES: Any = None  # prompt lookup reads none


def drafts_of(context: list[int], draft_length: int, min_n: int, max_n: int) -> tuple[int, ...]:
    [tree] = NGram(draft_length, min_n, max_n).draft(Seen([context], NO_STATES))
    assert tree == DraftTree.chain(tree.token_ids)
    return tree.token_ids


# --- the rule ---------------------------------------------------------------------------------------------------------


def drafts_by_the_rule(context: list[int], draft_length: int, min_n: int, max_n: int) -> tuple[int, ...]:
    """Tries every length from the longest, and every place from the earliest."""
    for n in range(max_n, min_n - 1, -1):
        for first in range(len(context) - n):  # the suffix itself starts at len(context) - n
            if context[first : first + n] == context[len(context) - n :]:
                return tuple(context[first + n : first + n + draft_length])
    return ()


@pytest.mark.parametrize("num_tokens", [2, 3, 9])
def test_drafts_are_those_of_the_rule_written_out(num_tokens: int) -> None:
    chance = random.Random(num_tokens)
    num_drafted = 0
    for _ in range(4000):
        context = [chance.randrange(num_tokens) for _ in range(chance.randint(1, 30))]
        draft_length, max_n = chance.randint(1, 6), chance.randint(1, 6)
        settings = (draft_length, chance.randint(1, max_n), max_n)
        expected = drafts_by_the_rule(context, *settings)
        assert drafts_of(context, *settings) == expected, (context, settings)
        num_drafted += bool(expected)
    assert num_drafted > 800


def test_the_longest_suffix_wins_over_an_earlier_place_of_a_shorter_one() -> None:
    #          2 alone: 9 9 9          1 2: 8 8
    assert drafts_of([2, 9, 9, 9, 1, 2, 8, 8, 1, 2], 3, 1, 3) == (8, 8, 1)


def test_the_earliest_of_equally_long_places_counts() -> None:
    assert drafts_of([1, 2, 8, 1, 2, 9, 1, 2], 1, 1, 3) == (8,)


def test_max_n_ends_the_search_for_longer_suffixes() -> None:
    # With two tokens 1 2 the first place counts, though three would single out the second.
    assert drafts_of([1, 2, 8, 3, 1, 2, 9, 3, 1, 2], 1, 1, 2) == (8,)
    assert drafts_of([1, 2, 8, 3, 1, 2, 9, 3, 1, 2], 1, 1, 3) == (9,)


def test_fewer_repeated_tokens_than_min_n_draft_nothing() -> None:
    assert drafts_of([1, 2, 8, 1, 2], 3, 3, 5) == ()
    assert drafts_of([1, 2, 8, 1, 2], 3, 2, 5) == (8, 1, 2)
    assert drafts_of([1, 2, 3], 3, 1, 5) == ()
    assert drafts_of([4], 3, 1, 5) == ()


def test_places_overlap_and_drafts_end_with_the_text() -> None:
    assert drafts_of([6, 6, 6, 6], 5, 1, 2) == (6, 6)  # the first two; two tokens are left after them
    assert drafts_of([6, 6, 6, 6], 5, 1, 5) == (6,)  # the first three overlap the last three


def test_the_defaults_are_those_of_vllm() -> None:
    [tree] = NGram(2).draft(Seen([[1, 2, 3, 4, 5, 9, 9, 2, 3, 4, 5]], NO_STATES))
    assert tree.token_ids == ()
    [tree] = NGram(2).draft(Seen([[0, 1, 2, 3, 4, 5, 9, 9, 8, 1, 2, 3, 4, 5]], NO_STATES))
    assert tree.token_ids == (9, 9)


@pytest.mark.parametrize(("arguments", "message"), [((0,), "at least 1"), ((3, 0, 2), "1 <= min_n <= max_n"), ((3, 3, 2), "1 <= min_n <= max_n")])
def test_settings_out_of_range_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGram(*arguments)


def test_a_long_text_is_searched_quickly() -> None:
    """All equal tokens are the worst case: every place matches."""
    assert continuation_place(np.zeros(100_000, dtype=np.int64), 1, 5) == 5


# --- counting ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation without any cache: the independent reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_verification_without_drafts_counts_as_a_forward() -> None:
    """Step by step from the rule; tau is over all forwards, those without drafts included."""
    torch.manual_seed(0)
    target = Target(LlamaForCausalLM(LlamaConfig(**SIZES)), tokenizer=None)
    prompt = [1, 2, 3]
    reference = greedy(target, prompt, 40)
    context, accepted, num_nodes = [*prompt, reference[0]], [], []
    while len(context) < len(prompt) + 30:
        drafts = drafts_by_the_rule(context, 3, 2, 2)
        rest = [*prompt, *reference][len(context) :]
        right = next((place for place, (draft, token) in enumerate(zip(drafts, rest, strict=False)) if draft != token), len(drafts))
        context += rest[: right + 1]
        accepted.append(right)
        num_nodes.append(len(drafts))
    decoded = decode(target, NGram(3, 2, 2), [prompt], Greedy(), 30, ())
    assert (decoded.answers[0].accepted, decoded.answers[0].num_nodes) == (tuple(accepted), tuple(num_nodes))
    assert 0 in num_nodes and sum(accepted) > 5
    assert decoded.acceptance.tau == 1 + sum(accepted) / len(accepted)
