"""Batched greedy decoding against transformers' own generation, one prompt at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

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
    "gemma3_two_windows": lambda: Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}
OWN_ATTENTION: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma2_softcap": lambda: Gemma2Config(**SIZES, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0),
    "gpt_oss_sinks": lambda: GptOssConfig(**SIZES, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    "qwen3_next_linear": lambda: Qwen3NextConfig(
        **SIZES,
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}
PROMPTS = [[5], [1, 2, 3], list(range(8, 33)), [9, 9], [3, 1, 4, 1, 5, 9, 2, 6], [30], [2, 7, 1, 8], [11, 12, 13], [39, 0, 39], [7]]


def make_target(name: str) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((CONFIGS | OWN_ATTENTION)[name]()).float()
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
    target.is_packable = False
    assert generate_greedy(target, PROMPTS, max_new_tokens=8, num_extra_tokens=3) == expected


@pytest.mark.parametrize("name", OWN_ATTENTION)
@torch.no_grad()
def test_targets_that_cannot_be_batched_decode_one_by_one(name: str) -> None:
    target = make_target(name)
    assert not target.is_packable
    answers = generate_greedy(target, PROMPTS[:5], max_new_tokens=9, num_extra_tokens=3)
    expected = [split_answer(reference(target, prompt, 12), 9, 3) for prompt in PROMPTS[:5]]
    assert [(answer.answer_ids, answer.extra_ids) for answer in answers] == expected


@pytest.mark.parametrize("is_packable", [True, False])
@torch.no_grad()
def test_sampling_settings_of_the_target_do_not_touch_greedy_answers(is_packable: bool) -> None:
    """Qwen's generation configs carry a repetition penalty and sampling; an engine that is asked for greedy takes neither."""
    target = make_target("llama")
    expected = [split_answer(reference(target, prompt, 9), 9, 0)[0] for prompt in PROMPTS]
    assert target.model.generation_config is not None
    target.model.generation_config.update(do_sample=True, temperature=0.7, top_k=5, repetition_penalty=5.0)
    target.is_packable = is_packable
    assert [answer.answer_ids for answer in generate_greedy(target, PROMPTS, max_new_tokens=9)] == expected


@torch.no_grad()
def test_no_extra_tokens_and_one_new_token() -> None:
    target = make_target("llama")
    answers = generate_greedy(target, PROMPTS, max_new_tokens=1, num_extra_tokens=0, batch_sequences=3)
    assert [(answer.answer_ids, answer.extra_ids) for answer in answers] == [(reference(target, prompt, 1), []) for prompt in PROMPTS]


@torch.no_grad()
def test_every_end_token_of_the_generation_config_ends_an_answer() -> None:
    target = make_target("llama")
    pairs = [(prompt, reference(target, prompt, 8)) for prompt in PROMPTS]
    prompt, continuation = next(pair for pair in pairs if len({END, *pair[1][:3]}) == 4)
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = [END, continuation[2]]
    (answer,) = generate_greedy(target, [prompt], max_new_tokens=8, num_extra_tokens=2)
    assert (answer.answer_ids, answer.extra_ids) == (continuation[:3], continuation[3:5])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 1, "batch_sequences": 0}, "batch_sequences 0"),
        ({"max_new_tokens": 1, "num_extra_tokens": -1}, "num_extra_tokens is -1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_greedy(make_target("llama"), PROMPTS, **settings)


def test_a_token_that_the_target_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="token id 40 is outside the target's vocabulary of 40"):
        generate_greedy(make_target("llama"), [[1, 40]], max_new_tokens=1)


def test_slots_are_no_more_than_fit_in_a_gpus_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B in bf16: 131,072 bytes a column, so 2,000 columns and 10 GB free for use make 38 slots."""
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    target: Any = SimpleNamespace(device=torch.device("cuda", 0), config=config, num_layers=32, hidden_size=4096, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(10e9 / 0.7), 0))
    assert generate._most_slots(target, 2000) == int(10e9 / 131072 / 2000) == 38
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 0))
    assert generate._most_slots(target, 2000) == 1
