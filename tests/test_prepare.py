"""Prepared splits: nothing lost, no conversation on both sides, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import DatasetDict, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import data.prepare
from data.chat import ChatTokenizer
from data.conversations import Conversation, Turn
from data.prepare import DataConfig, group_of, heldout_groups, prepare
from data.report import DataError
from data.tokenize import tokenize_conversation
from data.workers import Workers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, so that token counts can be had by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)


def row(record_id: str, prompt: str, answer: str) -> dict[str, Any]:
    return {"id": record_id, "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(item) for item in rows) + "\n")
    return str(path)


def parts(num_conversations: int, num_parts: int) -> list[dict[str, Any]]:
    return [
        row(f"c{number}_{part}", f"prompt {number}", f"answer {number} {part}")
        for number in range(num_conversations)
        for part in range(num_parts)
    ]


def loaded(folder: Path) -> DatasetDict:
    splits = load_from_disk(str(folder))
    assert isinstance(splits, DatasetDict)
    return splits


def test_splits_hold_the_stated_columns_and_the_counts_agree(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    # <|im_start|> user \n hi <|im_end|> \n: 1+4+1+2+1+1 = 10; <|im_start|> assistant \n: 11; answer + <|im_end|>; \n.
    rows = [row("a", "hi", "yes"), row("b", "hi", "y" * 20), row("c", "hi" * 20, "no"), {"id": "d"}, row("e", "ho", "ja")]
    config = DataConfig(sources=(write(tmp_path / "x.jsonl", rows),), max_length=30, num_heldout=1, num_workers=1)
    report = prepare(config, tokenizer, tmp_path / "data")
    splits = loaded(tmp_path / "data")
    assert splits["train"].features == splits["heldout"].features
    assert {name: str(kind) for name, kind in splits["train"].features.items()} == {
        "conversation_id": "Value('string')",
        "input_ids": "List(Value('int32'))",
        "loss_mask": "List(Value('bool'))",
        "prompt_ids": "List(Value('int32'))",
    }
    samples = {sample["conversation_id"]: sample for split in splits.values() for sample in split}
    assert {name: (len(sample["input_ids"]), sum(sample["loss_mask"])) for name, sample in samples.items()} == {
        "a": (26, 4),
        "b": (30, 9),
        "e": (25, 3),
    }
    assert all(len(sample["prompt_ids"]) == 21 for sample in samples.values())
    assert (report.num_read, report.num_kept) == (5, 3)
    assert {reason: tally.count for reason, tally in report.left_out.items()} == {"no_turn_list": 1, "no_supervised_tokens": 1}
    assert report.changes["truncated"].count == 1
    assert report.tokens is not None
    assert (report.tokens.num_tokens, report.tokens.num_supervised_tokens, report.tokens.num_tokens_lost) == (81, 16, 13)
    assert (report.tokens.length_percentiles["p50"], report.tokens.length_percentiles["p100"]) == (26, 43)
    assert {name: split.num_samples for name, split in report.tokens.splits.items()} == {"train": 2, "heldout": 1}
    report.print_table()


def test_parts_of_one_conversation_fall_on_the_same_side(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    config = DataConfig(sources=(write(tmp_path / "x.jsonl", parts(20, 3)),), num_heldout=5, num_workers=1)
    prepare(config, tokenizer, tmp_path / "data")
    splits = loaded(tmp_path / "data")
    groups = {name: {group_of(value) for value in split["conversation_id"]} for name, split in splits.items()}
    assert not groups["train"] & groups["heldout"]
    assert (len(groups["heldout"]), len(splits["heldout"]), len(splits["train"])) == (5, 15, 45)


def test_the_choice_depends_on_seed_and_ids_only() -> None:
    ids = [f"c{number}_{part}" for number in range(50) for part in range(2)]
    chosen = heldout_groups(ids, 10, seed=0)
    assert heldout_groups(ids[::-1], 10, seed=0) == chosen
    assert heldout_groups(ids, 10, seed=1) != chosen
    assert heldout_groups(ids, 11, seed=0) > chosen
    fewer = [value for value in ids if group_of(value) in chosen] + ids[:40]
    assert heldout_groups(fewer, 10, seed=0) == chosen


@pytest.mark.parametrize(
    "record_id, group",
    [("QWJhYvA_0", "QWJhYvA"), ("a_b_17", "a_b"), ("plain", "plain"), ("x.json:3", "x.json:3"), ("_1", "_1"), ("7", "7")],
)
def test_the_group_is_the_id_without_its_part_number(record_id: str, group: str) -> None:
    assert group_of(record_id) == group
    assert group_of(record_id, group_parts=False) == record_id


def test_too_few_conversations_to_hold_out_is_a_clear_error_that_knows_numbered_ids(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    source = write(tmp_path / "x.jsonl", parts(1, 30))
    with pytest.raises(DataError, match=r"30 usable records are 1 conversations.*set data\.group_parts to false"):
        prepare(DataConfig(sources=(source,), num_heldout=5, num_workers=1), tokenizer, tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl"]
    prepare(DataConfig(sources=(source,), num_heldout=5, group_parts=False, num_workers=1), tokenizer, tmp_path / "data")
    assert len(loaded(tmp_path / "data")["heldout"]) == 5


def test_reading_stops_at_max_conversations(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", [{"id": "bad"}, *parts(50, 1)])
    report = prepare(
        DataConfig(sources=(source,), max_conversations=8, num_heldout=2, num_workers=1), tokenizer, tmp_path / "data"
    )
    assert (report.num_read, report.num_kept) == (9, 8)


def test_sources_are_read_in_order_and_share_their_duplicates(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    sources = (write(tmp_path / "x.jsonl", parts(3, 1)), write(tmp_path / "y.jsonl", [*parts(3, 1), row("z", "new", "one")]))
    report = prepare(DataConfig(sources=sources, num_heldout=0, num_workers=1), tokenizer, tmp_path / "data")
    assert loaded(tmp_path / "data")["train"]["conversation_id"][:] == ["c0_0", "c1_0", "c2_0", "z"]
    assert report.left_out["duplicate"].count == 3
    assert len(loaded(tmp_path / "data")["heldout"]) == 0


def test_processes_give_what_one_process_gives(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.prepare, "_BATCH_CONVERSATIONS", 4)
    monkeypatch.setattr(data.prepare, "_HERE_BATCHES", 1)
    source = write(tmp_path / "x.jsonl", [*parts(30, 2), row("bad", "<|im_end|>", "x")])
    for num_workers in (1, 2):
        config = DataConfig(sources=(source,), num_heldout=6, num_workers=num_workers)
        report = prepare(config, tokenizer, tmp_path / str(num_workers))
        assert report.left_out["special_token_text"].count == 1
    one, two = loaded(tmp_path / "1"), loaded(tmp_path / "2")
    assert {name: split[:] for name, split in one.items()} == {name: split[:] for name, split in two.items()}


def test_a_process_that_ends_is_an_error_that_says_so(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = Conversation("x", (Turn("user", "hi"), Turn("assistant", "yes")))
    with Workers(1, ChatTokenizer(tokenizer), 99) as workers:
        assert workers.submit([conversation]).result().lengths == [len(tokenize_conversation(conversation, tokenizer, 99).input_ids)]
        workers._workers[0].process.kill()
        with pytest.raises(RuntimeError, match="a process that tokenises ended with exit code -9"):
            workers.submit([conversation]).result()


def test_a_failure_leaves_the_earlier_splits_as_they_were(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", parts(5, 1))
    prepare(DataConfig(sources=(good,), num_heldout=1, num_workers=1), tokenizer, tmp_path / "data")
    before = loaded(tmp_path / "data")["train"][:]
    with pytest.raises(DataError, match=r"no file or folder"):
        prepare(DataConfig(sources=(good, str(tmp_path / "missing.json")), num_workers=1), tokenizer, tmp_path / "data")
    assert loaded(tmp_path / "data")["train"][:] == before
    prepare(DataConfig(sources=(good,), num_heldout=2, num_workers=1), tokenizer, tmp_path / "data")
    assert len(loaded(tmp_path / "data")["train"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "good.jsonl"]


def test_when_nothing_is_left_the_error_says_why(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", [{"id": "a"}, row("b", "<|im_end|>", "x")])
    with pytest.raises(DataError, match=r"2 read, 0 kept.*no_turn_list 1 \(e.g. a\).*spells out '<\|im_end\|>'"):
        prepare(DataConfig(sources=(source,), num_workers=1), tokenizer, tmp_path / "data")


def test_conversations_that_do_not_fit_the_template_are_warned_of(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    refusing = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,  # type: ignore[attr-defined]
        eos_token="<|im_end|>",
        chat_template="{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
    )
    system = row("s", "hi", "yes")
    system["conversations"].insert(0, {"from": "system", "value": "S"})
    source = write(tmp_path / "x.jsonl", [*parts(3, 1), system])
    report = prepare(DataConfig(sources=(source,), num_heldout=1, num_workers=1), refusing, tmp_path / "data")
    assert report.left_out["template_refused"].count == 1
    assert "no system" in report.warnings[0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sources": ()}, "sources is empty"),
        ({"max_length": 1}, "max_length is 1, expected at least 2"),
        ({"max_conversations": 0}, "max_conversations is 0"),
        ({"num_heldout": -1}, "num_heldout is -1"),
        ({"num_workers": 0}, "num_workers is 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"sources": ("x",), **settings})
