"""Encoding by pieces gives what encoding the whole text gives, for every tokenizer that it is used for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from through_pipe import sent
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import data.encode
from data.encode import TextEncoder

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(digits: str) -> Any:
    """The pattern of Llama 3 (digits in threes) and of Qwen 2 (each alone)."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Split(Regex(pattern), "isolated")


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITTERS = {
    "gpt2": GPT2,
    "smollm2": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama3": pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), BYTES]),
    "qwen2": pre_tokenizers.Sequence([split(r"\p{N}"), BYTES]),
}
TEXT = [
    "Hello, world! It's 2024: don't they'll we're; foo_bar(x) == 'y'\n\n  return 10.5 # end.\nNext line\n",
    "user\nassistant\nI am fine.  Thank you! grüne Bäume 🌱 你好世界\r\n\tif a: b['s'] ... \"quoted\"\n- item 1\n- item 2",
]


def tokenizer(splitter: Any, normalizer: Any = None, added: AddedToken | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with enough merges that a cut at a wrong place would show."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT * 3, trainer)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([added or AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


ENCODERS = {name: (made := tokenizer(splitter), TextEncoder(made)) for name, splitter in SPLITTERS.items()}
ENCODERS["qwen2, NFC"] = (made := tokenizer(SPLITTERS["qwen2"], normalizers.NFC()), TextEncoder(made))

FRAGMENTS = ["Hello", " world", "it's", "'S", "'", " ", "  ", "\n", "\r\n", "\t", ",", ".", "_", "12", "3", "\u00e9", "e\u0301", "\u4f60"]
FRAGMENTS += ["\U0001f331", "\u00a0", "\u2028", "\x13", "\x1c", "\ufb01", "\u0130", "\u200d", "\ufeff", "A", "l", "!\n", "))"]
FRAGMENTS += ["_bar", "(x", "[", "\"quoted", "== ", "# end", "- ", "<|im_end|>", "<|im_start|>", "<think>", "<", "|>", "assistant"]
NO_SURROGATES = st.characters(exclude_categories=["Cs"])
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(NO_SURROGATES, max_size=4)), min_size=1, max_size=30)


@given(TEXTS.map("".join).filter(bool), st.sampled_from(sorted(ENCODERS)))
@settings(max_examples=600, deadline=None)
def test_pieces_give_the_ids_and_places_of_the_whole_text(text: str, name: str) -> None:
    whole, encoder = ENCODERS[name]
    expected = whole(text, add_special_tokens=False)
    assert encoder.is_by_pieces
    (found,) = encoder.encode([text])
    assert found.ids.tolist() == expected["input_ids"]
    assert found.ids.dtype == np.int32
    if found.is_lossless:
        assert whole.decode(found.ids.tolist(), clean_up_tokenization_spaces=False) == text
    for char, letter in enumerate(text):
        if not letter.isspace():
            assert found.token_at(char) == expected.char_to_token(char), (char, letter)
        if (prefix := found.prefix(char)) is not None:
            assert prefix.tolist() == whole(text[:char], add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_ordinary_text_is_cut_at_words_and_known_by_its_prompt(name: str) -> None:
    whole, encoder = ENCODERS[name]
    prompt = "<|im_start|>user\nHello world, it's me.<|im_end|>\n<|im_start|>assistant\n"
    (found,) = encoder.encode([prompt + "I am fine, thank you.<|im_end|>\n"])
    prefix = found.prefix(len(prompt))
    assert prefix is not None and prefix.tolist() == whole(prompt, add_special_tokens=False)["input_ids"]
    assert {" world", ",", " am", " fine", " thank", "<|im_end|>"} <= set(encoder._numbers)


def test_a_tokenizer_that_drops_characters_is_not_called_lossless() -> None:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"x"})
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = GPT2, decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [found.is_lossless for found in encoder.encode(["a b<|end|>", "a xb<|end|>", "x"])] == [True, False, False]
    (found,) = encoder.encode(["x yes"])
    assert (found.token_at(0), found.token_at(2)) == (None, 1)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokenizer(GPT2)
    encoder = TextEncoder(whole)
    monkeypatch.setattr(data.encode, "_MAX_CHARS", 50)
    for number in range(40):
        text = f"word{number} again{number} and more <|im_end|>"
        assert encoder.encode([text])[0].ids.tolist() == whole(text, add_special_tokens=False)["input_ids"]
        assert len(encoder._numbers) < 40


def test_marks_are_cut_from_words_only_where_the_pattern_never_joins_them() -> None:
    for name, expected in {"smollm2": {" (", "soon", ");"}, "llama3": {" (soon", ");"}, "qwen2": {" (soon", ");"}}.items():
        encoder = TextEncoder(tokenizer(SPLITTERS[name]))
        encoder.encode(["see (soon); x"])
        assert expected <= set(encoder._numbers), name


def test_an_encoder_sent_to_another_process_knows_the_same_pieces() -> None:
    whole, encoder = tokenizer(GPT2), TextEncoder(tokenizer(GPT2))
    encoder.encode(["Hello, world! don't"])
    other = sent(encoder)
    assert list(other._numbers.items()) == list(encoder._numbers.items())
    for text in ("Hello, world! don't", "It's a new, world<|im_end|>"):
        assert other.encode([text])[0].ids.tolist() == whole(text, add_special_tokens=False)["input_ids"]


def test_pieces_of_an_encoding_that_failed_are_encoded_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokenizer(GPT2)
    encoder = TextEncoder(whole)
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.setattr(encoder, "_backend", None)
        encoder.encode(["Hello, world"])
    assert encoder.encode(["fine, world"])[0].ids.tolist() == whole("fine, world", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": BYTES},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+ \w+|."), "isolated"), BYTES])},
        {"normalizer": normalizers.Lowercase()},
        {"decoder": decoders.Fuse()},
        {"truncation": 5},
        {"encode_special_tokens": True},
    ],
)
def test_other_tokenizers_encode_whole_texts(change: dict[str, Any]) -> None:
    whole = tokenizer(GPT2)
    backend: Any = whole.backend_tokenizer
    for name, value in change.items():
        backend.enable_truncation(value) if name == "truncation" else setattr(backend, name, value)
    encoder = TextEncoder(whole)
    assert not encoder.is_by_pieces
    (found,) = encoder.encode(["Hello, world<|im_end|>"])
    expected = whole("Hello, world<|im_end|>", add_special_tokens=False)
    assert found.ids.tolist() == expected["input_ids"]
    assert [found.token_at(char) for char in range(12)] == [expected.char_to_token(char) for char in range(12)]
    assert (found.prefix(5), found.is_lossless) == (None, False)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_tokens_that_look_at_their_neighbours_are_not_cut_around(flag: str) -> None:
    assert not TextEncoder(tokenizer(GPT2, added=AddedToken("<think>", **{"normalized": False, flag: True}))).is_by_pieces
