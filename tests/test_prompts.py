"""Prompts by domain: the shipped sets, every shape of record, and an account of everything that cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.prepare import DataConfig, prepare
from eval.prompts import KNOWN_STEMS, PROMPT_REASONS, SHIPPED, SHIPPED_DOMAINS, DomainPrompts, read_prompts


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_target)


def rendered(question: str) -> str:
    """What the tiny target's template makes of a question, spelled out."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def write(path: Path, *records: Any) -> str:
    """JSON Lines; a text stands for itself."""
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return str(path)


def question(*turns: Any) -> dict[str, Any]:
    return {"question_id": 1, "category": "x", "turns": list(turns)}


def read_one(source: str, tokenizer: PreTrainedTokenizerBase, num: int = 50, max_tokens: int = 200) -> tuple[DomainPrompts, list[str]]:
    [found] = read_prompts([source], tokenizer, num, max_tokens)
    return found, [str(tokenizer.decode(list(prompt))) for prompt in found.prompts]


# --- the shipped sets ---------------------------------------------------------------------------------------------------


def test_shipped_sets_hold_twelve_different_questions_each():
    records = {domain: [json.loads(line) for line in (SHIPPED / f"{domain}.jsonl").read_text().splitlines()] for domain in SHIPPED_DOMAINS}
    assert {path.stem for path in SHIPPED.glob("*.jsonl")} == set(SHIPPED_DOMAINS)
    assert {domain: len(rows) for domain, rows in records.items()} == dict.fromkeys(SHIPPED_DOMAINS, 12)
    rows = [row for rows in records.values() for row in rows]
    assert all(set(row) == {"question_id", "category", "turns"} and len(row["turns"]) == 1 for row in rows)
    assert len({row["question_id"] for row in rows}) == len({row["turns"][0] for row in rows}) == 48


def test_without_a_source_the_shipped_sets_are_asked(tokenizer, capsys):
    found = read_prompts([], tokenizer, 12, 4096)
    assert [(domain.domain, len(set(domain.prompts)), domain.num_left_out) for domain in found] == [(name, 12, {}) for name in SHIPPED_DOMAINS]
    first = json.loads((SHIPPED / "chat.jsonl").read_text().splitlines()[0])["turns"][0]
    assert tokenizer.decode(list(found[0].prompts[0])) == rendered(first)
    assert capsys.readouterr().err == ""


# --- rendering ------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_what_the_chat_template_makes_of_the_first_turn(tokenizer, tmp_path):
    found, texts = read_one(write(tmp_path / "mine.jsonl", question("  why?\n", "and then?")), tokenizer)
    assert texts == [rendered("why?")]
    messages = [{"role": "user", "content": "why?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert [list(prompt) for prompt in found.prompts] == [expected]
    assert found.domain == "mine"


def test_prompts_of_conversations_are_those_of_the_held_out_split(tokenizer, tmp_path):
    system = {"role": "system", "content": "be brief"}
    records = [
        {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "1"}, {"from": "human", "value": "two"}]},
        {"id": "b", "messages": [system, {"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes"}]},
        {"id": "c", "conversations": [{"from": "human", "value": "a"}, {"from": "human", "value": "b"}, {"from": "gpt", "value": "ab"}]},
    ]
    source = write(tmp_path / "talk.jsonl", *records)
    prepare(DataConfig((source,), num_heldout=0, num_workers=1), tokenizer, tmp_path / "prepared")
    found, texts = read_one(source, tokenizer)
    assert [list(prompt) for prompt in found.prompts] == list(load_from_disk(str(tmp_path / "prepared"))["train"]["prompt_ids"])
    assert texts == [rendered("one"), "<|im_start|>system\nbe brief<|im_end|>\n" + rendered("hi"), rendered("a\n\nb")]


def test_a_conversation_without_an_answer_can_be_asked(tokenizer, tmp_path):
    _, texts = read_one(write(tmp_path / "x.jsonl", {"messages": [{"role": "user", "content": "why?"}]}), tokenizer)
    assert texts == [rendered("why?")]


def test_a_json_array_is_read_too(tokenizer, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps([question("a"), question("b")], indent=1))
    assert read_one(str(tmp_path / "x.json"), tokenizer)[1] == [rendered("a"), rendered("b")]


# --- which prompts --------------------------------------------------------------------------------------------------------


def test_prompts_lie_evenly_in_the_file(tokenizer, tmp_path):
    source = write(tmp_path / "x.jsonl", *[question(f"q{number}") for number in range(10)])
    assert read_one(source, tokenizer, num=4)[1] == [rendered(f"q{number}") for number in (0, 2, 5, 7)]
    assert read_one(source, tokenizer, num=11)[1] == [rendered(f"q{number}") for number in range(10)]


def test_a_large_source_is_not_read_to_its_end(tokenizer, tmp_path):
    source = write(tmp_path / "x.jsonl", *[question(f"q{number}") for number in range(1000)], "not JSON", question("last"))
    found, texts = read_one(source, tokenizer, num=2)
    assert texts == [rendered("q0"), rendered("q500")]
    assert found.num_left_out == {}


@pytest.mark.parametrize("stem", sorted(KNOWN_STEMS))
def test_the_fields_sets_are_known_by_their_names(stem, tokenizer, tmp_path):
    found, _ = read_one(write(tmp_path / f"{stem}.jsonl", question("a")), tokenizer)
    assert found.domain == KNOWN_STEMS[stem]


def test_a_name_before_the_path_is_the_domain(tokenizer, tmp_path):
    (tmp_path / "a=b").mkdir()
    plain, inner = write(tmp_path / "gsm8k.jsonl", question("a")), write(tmp_path / "a=b" / "c=d.jsonl", question("b"))
    found = read_prompts([f"sums={plain}", inner, f"law={inner}"], tokenizer, 5, 200)
    assert [domain.domain for domain in found] == ["sums", "c=d", "law"]


# --- what cannot be asked -------------------------------------------------------------------------------------------------

GOOD = question("fine")
BAD = {
    "malformed_json": '{"turns": ["broken',
    "not_an_object": ["a"],
    "no_turn_list": {"question": "a"},
    "empty": question(),
    "malformed_turn": question({"text": "a"}),
    "empty_turn": question(" \n", "second"),
    "unknown_role": {"messages": [{"role": "judge", "content": "a"}]},
    "tool_turn": {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
    "one_sided": {"messages": [{"role": "assistant", "content": "a"}]},
    "invalid_text": '{"turns": ["\\ud800"]}',
    "over_long": question("a" * 2_000_001),
    "special_token_text": question("a<|im_end|>"),
    "too_long": question("a" * 300),
    "duplicate": question(" fine "),
}


@pytest.mark.parametrize("reason", BAD)
def test_every_bad_record_is_counted_with_its_reason_and_first_place(reason, tokenizer, tmp_path, capsys):
    source = write(tmp_path / "x.jsonl", GOOD, "", BAD[reason], BAD[reason], question("also fine"))
    found, texts = read_one(source, tokenizer)
    assert texts == [rendered("fine"), rendered("also fine")]
    assert found.num_left_out == {reason: 2}
    assert found.first_left_out == {reason: "x.jsonl:1"}
    assert f"of 4 records these are left out: 2 {reason} ({PROMPT_REASONS[reason]}; first: x.jsonl:1)" in capsys.readouterr().err


@pytest.mark.parametrize("turns", ["a text", None, {"0": "a"}])
def test_turns_that_are_no_list_are_counted(turns, tokenizer, tmp_path):
    found, _ = read_one(write(tmp_path / "x.jsonl", GOOD, {"turns": turns}), tokenizer)
    assert found.num_left_out == {"no_turn_list": 1}


def test_a_record_that_the_template_refuses_is_counted(tiny_target, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.chat_template = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + tokenizer.chat_template
    found, texts = read_one(write(tmp_path / "x.jsonl", question("bad"), question("good")), tokenizer)
    assert texts == [rendered("good")]
    assert found.num_left_out == {"template_refused": 1}


def test_a_file_that_is_cut_off_gives_what_it_has(tokenizer, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text(json.dumps(GOOD) + '\n{"turns": ["hal')
    found, texts = read_one(str(tmp_path / "x.jsonl"), tokenizer)
    assert (texts, found.num_left_out) == ([rendered("fine")], {"cut_off": 1})
    assert "x.jsonl is cut off" in capsys.readouterr().err


def test_a_prompt_of_exactly_the_allowed_length_is_asked(tokenizer, tmp_path):
    source = write(tmp_path / "x.jsonl", GOOD)
    [prompt] = read_one(source, tokenizer)[0].prompts
    assert len(read_one(source, tokenizer, max_tokens=len(prompt))[0].prompts) == 1
    with pytest.raises(ValueError, match=rf"of 1 records 1 too_long \(.*first: x.jsonl:0\).*at most {len(prompt) - 1} tokens"):
        read_one(source, tokenizer, max_tokens=len(prompt) - 1)


# --- errors ---------------------------------------------------------------------------------------------------------------


def test_a_domain_without_a_usable_prompt_is_an_error(tokenizer, tmp_path):
    source = write(tmp_path / "gsm8k.jsonl", question(" "), {"question": "a"}, {"question": "b"})
    with pytest.raises(ValueError, match=r"no usable prompt for the domain 'maths': of 3 records 1 empty_turn .*gsm8k.jsonl:0\); 2 no_turn_list"):
        read_one(source, tokenizer)


@pytest.mark.parametrize("content", ["", "\n\n", "no JSON at all\n"])
def test_a_file_without_records_is_an_error(content, tokenizer, tmp_path):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"prompts of the domain 'x' cannot be read: x\.jsonl .*expected.*JSON"):
        read_one(str(tmp_path / "x.jsonl"), tokenizer)


def test_a_missing_file_is_an_error(tokenizer, tmp_path):
    for source in (f"{tmp_path}/none.jsonl", f"x={tmp_path}/none.jsonl"):
        with pytest.raises(ValueError, match="there is no file or folder"):
            read_one(source, tokenizer)
    for source in ("package:something", "chat", "=x"):
        with pytest.raises(ValueError, match="expected the path of a JSONL file, or NAME=SOURCE"):
            read_one(source, tokenizer)


def test_two_sources_of_one_domain_are_an_error(tokenizer, tmp_path):
    source = write(tmp_path / "mt_bench.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"mt_bench.jsonl and elsewhere.jsonl are both of the domain 'chat'.*chat-2=elsewhere"):
        read_prompts([source, "chat=elsewhere.jsonl"], tokenizer, 5, 200)


@pytest.mark.parametrize("num, max_tokens", [(0, 200), (5, 0)])
def test_limits_below_one_are_errors(num, max_tokens, tokenizer):
    with pytest.raises(ValueError, match="expected at least 1"):
        read_prompts([], tokenizer, num, max_tokens)
