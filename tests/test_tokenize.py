"""The loss mask: exactly the assistant's words and end tokens, or a stated reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.chat import (
    ChatTokenizer,
    NoSupervisedTokensError,
    SampleError,
    SpecialTokenTextError,
    TemplateRefusedError,
    TokenizedSample,
    UnstableTemplateError,
    WordsLostError,
    mask_runs,
)
from data.conversations import Conversation, Turn
from data.tokenize import show, tokenize_conversation

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same text, with tags that also hold the newline after the end token.
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3 and DeepSeek: thoughts stay in the last answer only.
STRIPS_THINKING = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip())")
# Qwen3 without thoughts: an empty block in the last answer only.
EMPTY_THINKING = CHATML.replace(
    "m['content']", "('<think>\n\n</think>\n\n' if loop.last and m['role'] == 'assistant' else '') + m['content']"
)
# Llama-2: spaces around, and the sequence's end token as the turn's.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)

TEXT = [
    "system user assistant hello there, how are you?\n",
    "I am fine. Thank you! And 12 grüne Bäume 🌱 <think>",
    "<|im_start|>user\n",
]


def byte_level(template: str) -> PreTrainedTokenizerBase:
    """A small byte-level BPE, the kind that Llama-3, Qwen and SmolLM have."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def word_level(template: str = CHATML) -> PreTrainedTokenizerBase:
    """A tokenizer that does not know every word, and lowercases."""
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["[UNK]", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        ["user assistant hi hello"], trainers.WordLevelTrainer(special_tokens=specials, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="[UNK]", chat_template=template)


def chat(*turns: str, system: str = "") -> Conversation:
    """User and assistant in turn."""
    roles = [Turn("assistant" if index % 2 else "user", text) for index, text in enumerate(turns)]
    return Conversation("x", ((Turn("system", system),) if system else ()) + tuple(roles))


def values(sample: TokenizedSample | SampleError) -> tuple[Any, ...]:
    assert isinstance(sample, TokenizedSample)
    return sample.conversation_id, sample.input_ids.tolist(), sample.loss_mask.tolist(), sample.prompt_ids.tolist(), sample.num_lost_tokens


def supervised(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[str]:
    sample = tokenize_conversation(conversation, tokenizer, 4096)
    return [tokenizer.decode(sample.input_ids[begin:end]) for begin, end in mask_runs(sample.loss_mask)]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_the_mask_covers_the_assistants_words_and_end_tokens_and_nothing_else(template: str) -> None:
    tokenizer = byte_level(template)
    conversation = chat("hello there", "I am fine 🌱", "and 12?", "grün!", system="Be kind.")
    assert supervised(tokenizer, conversation) == ["I am fine 🌱<|im_end|>", "grün!<|im_end|>"]


def test_the_ids_are_those_of_the_rendered_template() -> None:
    tokenizer = byte_level(CHATML)
    sample = tokenize_conversation(chat("hello", "fine", system="S"), tokenizer, 4096)
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n"
    assert sample.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = text[: text.index("fine")]
    assert sample.prompt_ids.tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert sample.input_ids[: len(sample.prompt_ids)].tolist() == sample.prompt_ids.tolist()
    assert sample.loss_mask.tolist().index(True) == len(sample.prompt_ids)


def test_tags_and_boundaries_give_the_same_sample() -> None:
    conversation = chat("hello there", "<b>I</b> am", "x", "y 🌱🌱")
    by_boundaries, by_tags = (tokenize_conversation(conversation, byte_level(template), 99) for template in (CHATML, TAGGED))
    assert values(by_boundaries) == values(by_tags)


def test_an_answer_that_repeats_the_prompt_is_found_at_its_own_place() -> None:
    conversation = chat("user", "user", "assistant", "assistant")
    tokenizer = byte_level(CHATML)
    sample = tokenize_conversation(conversation, tokenizer, 4096)
    assert supervised(tokenizer, conversation) == ["user<|im_end|>", "assistant<|im_end|>"]
    assert sample.loss_mask.tolist().index(True) == len(sample.prompt_ids)


def test_white_space_of_the_template_around_the_words_is_allowed() -> None:
    assert [text.strip() for text in supervised(byte_level(LLAMA2), chat("hello", "fine", "and?", "12"))] == [
        "fine </s>",
        "12 </s>",
    ]


def test_text_between_generation_prompt_and_words_is_not_supervised() -> None:
    conversation = chat("hello", "fine", "and?", "12")
    assert supervised(byte_level(EMPTY_THINKING), conversation) == ["fine<|im_end|>", "12<|im_end|>"]


def test_a_template_that_changes_earlier_turns_is_unstable() -> None:
    tokenizer = byte_level(STRIPS_THINKING)
    assert supervised(tokenizer, chat("hello", "fine")) == ["fine<|im_end|>"]
    with pytest.raises(UnstableTemplateError, match=r"conversation x, turn 1"):
        tokenize_conversation(chat("hello", "<think>hm</think>\nfine", "and?", "12"), tokenizer, 4096)


def test_a_template_that_rewrites_the_prompt_later_is_unstable() -> None:
    numbered = CHATML.replace("m['role'] +", "m['role'] + messages | length | string +", 1)
    with pytest.raises(UnstableTemplateError, match="render of the turns before it"):
        tokenize_conversation(chat("hello", "fine"), byte_level(numbered), 4096)


@pytest.mark.parametrize("change", ["| upper", "| truncate(6, True, '')", "+ ' (sic)'"])
def test_a_template_that_changes_the_words_is_unstable(change: str) -> None:
    template = CHATML.replace("m['content']", f"(m['content'] {change})")
    with pytest.raises(UnstableTemplateError, match="changes the assistant's words"):
        tokenize_conversation(chat("hello", "fine thank you", "fine thank you", "fine thank you"), byte_level(template), 4096)


def test_words_that_stand_in_a_later_turn_are_not_taken_for_changed_ones() -> None:
    only_first = CHATML.replace("m['content']", "('changed' if loop.index == 2 else m['content'])")
    with pytest.raises(UnstableTemplateError):
        tokenize_conversation(chat("hello", "fine", "fine", "12"), byte_level(only_first), 4096)


def test_a_template_without_an_end_token_is_an_error() -> None:
    endless = CHATML.replace("<|im_start|>", "## ").replace("<|im_end|>", "")
    with pytest.raises(UnstableTemplateError, match="no special token after"):
        tokenize_conversation(chat("hello", "fine"), byte_level(endless), 4096)


def test_tags_without_the_end_token_are_an_error() -> None:
    tags = TAGGED.replace(
        "m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}", "m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    )
    with pytest.raises(WordsLostError, match="do not end with a special token"):
        tokenize_conversation(chat("hello", "fine"), byte_level(tags), 4096)


def test_tags_around_the_wrong_turns_are_an_error() -> None:
    with pytest.raises(WordsLostError, match="'hello' where the words are 'fine'"):
        tokenize_conversation(chat("hello", "fine"), byte_level(TAGGED.replace("== 'assistant'", "== 'user'")), 4096)
    with pytest.raises(UnstableTemplateError, match="mark 0 stretches, but there are 1"):
        tokenize_conversation(chat("hello", "fine"), byte_level(TAGGED.replace("== 'assistant'", "== 'nobody'")), 4096)


def test_words_that_the_tokenizer_cannot_hold_are_an_error() -> None:
    tokenizer = word_level()
    assert supervised(tokenizer, chat("hi", "hello hi")) == ["hello hi <|im_end|>"]
    for words in ("unheard", "HELLO"):
        with pytest.raises(WordsLostError, match="the supervised tokens decode to"):
            tokenize_conversation(chat("hi", words), tokenizer, 4096)


def test_text_that_spells_a_special_token_is_an_error() -> None:
    with pytest.raises(SpecialTokenTextError, match=re.escape("'<|im_end|>'")):
        tokenize_conversation(chat("hello<|im_end|>", "fine"), byte_level(CHATML), 4096)


def test_what_the_template_refuses_carries_its_message() -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role, please') }}{% endif %}" + CHATML
    with pytest.raises(TemplateRefusedError, match="no system role, please"):
        tokenize_conversation(chat("hello", "fine", system="S"), byte_level(refuses), 4096)


def test_truncation_counts_what_it_cuts_and_refuses_to_leave_nothing() -> None:
    tokenizer = byte_level(CHATML)
    whole = tokenize_conversation(chat("hello", "fine thank you"), tokenizer, 4096)
    first = whole.loss_mask.tolist().index(True)
    cut = tokenize_conversation(chat("hello", "fine thank you"), tokenizer, first + 1)
    assert cut.input_ids.tolist() == whole.input_ids[: first + 1].tolist()
    assert (sum(cut.loss_mask), cut.num_lost_tokens) == (1, len(whole.input_ids) - first - 1)
    with pytest.raises(NoSupervisedTokensError, match=f"begins at token {first}, max_length is {first}"):
        tokenize_conversation(chat("hello", "fine thank you"), tokenizer, first)


def test_one_bad_conversation_does_not_disturb_the_others_of_its_batch() -> None:
    tokenizer = byte_level(CHATML)
    good = [chat("hello", "fine"), chat("and?", "12"), chat("x", "y")]
    bad = chat("<s>", "fine")
    found = ChatTokenizer(tokenizer).tokenize([bad, good[0], good[1], bad, good[2]], 4096)
    assert [type(item).__name__ for item in found][::3] == ["SpecialTokenTextError"] * 2
    assert [values(found[index]) for index in (1, 2, 4)] == [values(tokenize_conversation(item, tokenizer, 4096)) for item in good]


@pytest.mark.parametrize("missing, message", [("template", "no chat template"), ("fast", "slow tokenizer")])
def test_a_tokenizer_that_cannot_serve_is_refused(missing: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = byte_level(CHATML)
    if missing == "template":
        tokenizer.chat_template = None
    else:
        monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match=message):
        ChatTokenizer(tokenizer)


BYTE_LEVEL = {"boundaries": ChatTokenizer(byte_level(CHATML)), "tags": ChatTokenizer(byte_level(TAGGED))}
WORDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30).map(str.strip).filter(bool)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.sampled_from(sorted(BYTE_LEVEL)))
@settings(max_examples=150, deadline=None)
def test_any_words_decode_from_the_mask_or_have_a_reason(pairs: list[tuple[str, str]], way: str) -> None:
    tokenizer = BYTE_LEVEL[way]
    conversation = chat(*(text for pair in pairs for text in pair))
    (sample,) = tokenizer.tokenize([conversation], 4096)
    if isinstance(sample, SampleError):
        assert isinstance(sample, SpecialTokenTextError)
        return
    found = [tokenizer.tokenizer.decode(sample.input_ids[begin:end]) for begin, end in mask_runs(sample.loss_mask)]
    assert found == [f"{answer}<|im_end|>" for _, answer in pairs]


def test_show_prints_conversations_and_counts(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level(CHATML).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "x.jsonl").write_text(
        '{"id": "a[b]", "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]}\n[]\n'
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    show(show=5, source=str(tmp_path / "x.jsonl"), tokenizer=str(tmp_path / "tokenizer"))
    printed = capsys.readouterr().out
    assert "\x1b[1;32mfine<|im_end|>\x1b[0m" in printed
    assert "a[b]" in printed and "2 read, 1 kept, left out: not_an_object 1" in printed


def test_show_without_a_tokenizer_is_one_clear_error(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="no tokenizer can be loaded") as raised:
        show(tokenizer=str(tmp_path / "nothing"))
    assert "\n" not in str(raised.value)
