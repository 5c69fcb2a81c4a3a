"""Batched greedy decoding against transformers' own generation, one prompt at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

import data.generate as generate
from data.generate import generate_greedy
from data.target import Target

END = 7
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "mistral_window": lambda: MistralConfig(**SIZES, sliding_window=6),
}
PROMPTS = [[5], [1, 2, 3], list(range(8, 33)), [9, 9], [3, 1, 4, 1, 5, 9, 2, 6], [30], [2, 7, 1, 8], [11, 12, 13], [39, 0, 39], [7]]


def make_target(name: str) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="sdpa").float()
    for parameter in model.parameters():  # large weights: no near-ties, varied text
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.25)
    return Target(model, SimpleNamespace(eos_token_id=END))  # type: ignore[arg-type]


def reference(target: Target, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of a forward over the whole sequence for every one of them: no cache, no batch."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def split_answer(continuation: list[int], max_new_tokens: int, num_extra_tokens: int) -> tuple[list[int], list[int]]:
    """Where the answer ends: after its first end token, or at the limit."""
    end = min(continuation.index(END) + 1 if END in continuation else max_new_tokens, max_new_tokens)
    return continuation[:end], continuation[end : end + num_extra_tokens]


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest) -> Target:
    return make_target(request.param)


@pytest.mark.parametrize("batch_sequences", [1, 3, 64])
@torch.no_grad()
def test_answers_equal_decoding_one_prompt_at_a_time(target: Target, batch_sequences: int) -> None:
    answers = generate_greedy(target, PROMPTS, max_new_tokens=12, num_extra_tokens=5, batch_sequences=batch_sequences)
    expected = [split_answer(reference(target, prompt, 17), 12, 5) for prompt in PROMPTS]
    assert [(answer.answer_ids, answer.extra_ids) for answer in answers] == expected


@torch.no_grad()
def test_both_ways_of_ending_occur_in_these_tests() -> None:
    ended = [END in reference(make_target(name), prompt, 12) for name in CONFIGS for prompt in PROMPTS]
    assert any(ended) and not all(ended)


@torch.no_grad()
def test_answers_do_not_change_when_columns_move(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama")
    expected = generate_greedy(target, PROMPTS, max_new_tokens=12, batch_sequences=2)
    monkeypatch.setattr(generate, "_SPARE_COLUMNS", 1)  # every step moves them
    assert generate_greedy(target, PROMPTS, max_new_tokens=12, batch_sequences=2) == expected


@torch.no_grad()
def test_prefills_larger_than_a_bundle_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("qwen3")
    expected = generate_greedy(target, PROMPTS, max_new_tokens=6)
    monkeypatch.setattr(generate, "_PREFILL_TOKENS", 9)
    assert generate_greedy(target, PROMPTS, max_new_tokens=6) == expected


def test_every_answer_is_reported_once_when_it_is_complete() -> None:
    target = make_target("llama")
    seen: dict[int, list[int]] = {}

    def on_answer(index: int, answer: generate.GeneratedAnswer) -> None:
        assert index not in seen
        seen[index] = list(answer.answer_ids)

    answers = generate_greedy(target, PROMPTS, max_new_tokens=9, batch_sequences=4, on_answer=on_answer)
    assert seen == {index: answer.answer_ids for index, answer in enumerate(answers)}


def test_no_prompts_give_no_answers() -> None:
    assert generate_greedy(make_target("llama"), [], max_new_tokens=9) == []


@pytest.mark.parametrize("prompts", [[[1], []]])
def test_an_empty_prompt_is_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate_greedy(make_target("llama"), prompts, max_new_tokens=9)


@torch.no_grad()
def test_a_target_with_its_own_attention_decodes_the_same_answers() -> None:
    target = make_target("llama")
    expected = generate_greedy(target, PROMPTS, max_new_tokens=8, num_extra_tokens=3)
    target.is_plain_softmax = False
    assert generate_greedy(target, PROMPTS, max_new_tokens=8, num_extra_tokens=3) == expected
