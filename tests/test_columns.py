"""Conversations are found under the names that people give their columns, or under those that the user says, and never guessed silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from data.columns import TURN_LIST_KEYS, ColumnConfig
from data.conversations import Conversation, read_conversations, read_opening
from data.prepare import DataConfig, prepare
from data.report import DataError, DataReport
from data.target import TargetConfig, load_tokenizer
from data.tokenize import show

HI_YO = ["uHi", "aYo"]


def read(source: object, **columns: str) -> tuple[list[Conversation], DataReport]:
    report = DataReport()
    conversations = list(read_conversations(str(source), report, columns=ColumnConfig(**columns)))
    return conversations, report


def turns(conversation: Conversation) -> list[str]:
    return [turn.role[0] + turn.content for turn in conversation.turns]


def read_row(folder: Path, row: Any, **columns: str) -> tuple[list[str], dict[str, int]]:
    """(turns, columns used) of one record, the same from JSON and from Parquet."""
    results = []
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    Dataset.from_list([row]).to_parquet(str(folder / "rows.parquet"))
    for name in ("rows.jsonl", "rows.parquet"):
        ((conversation,), report) = read(folder / name, **columns)
        results.append((turns(conversation), report.columns[str(folder / name)]))
    assert results[0] == results[1]
    return results[0]


USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}


@pytest.mark.parametrize("key", TURN_LIST_KEYS)
def test_a_list_of_turns_is_known_by_its_name(tmp_path: Path, key: str) -> None:
    assert read_row(tmp_path, {key: [USER, ASSISTANT]}) == (HI_YO, {key: 1})


@pytest.mark.parametrize(
    ("row", "expected", "names"),
    [
        ({"prompt": "Hi", "response": "Yo"}, HI_YO, "prompt -> response"),
        ({"prompt": "Hi", "completion": "Yo"}, HI_YO, "prompt -> completion"),
        ({"instruction": "Add", "input": "1 and 2", "output": "3"}, ["uAdd\n\n1 and 2", "a3"], "instruction, input -> output"),
        ({"instruction": "Hi", "input": "", "output": "Yo"}, HI_YO, "instruction, input -> output"),
        ({"instruction": "Sum up", "context": "Long.", "response": "Short."}, ["uSum up\n\nLong.", "aShort."], "instruction, context -> response"),
        ({"system_prompt": "Be kind.", "question": "Hi", "response": "Yo"}, ["sBe kind.", *HI_YO], "system_prompt, question -> response"),
        ({"system_prompt": "", "question": "Hi", "response": "Yo"}, HI_YO, "system_prompt, question -> response"),
        ({"question": "Hi", "answer": "Yo"}, HI_YO, "question -> answer"),
        ({"query": "Hi", "response": "Yo"}, HI_YO, "query -> response"),
        ({"problem": "Hi", "solution": "Yo"}, HI_YO, "problem -> solution"),
        ({"input": "Hi", "output": "Yo"}, HI_YO, "input -> output"),
        # Both sides as lists of turns, as preference and completion sets have them.
        ({"prompt": [USER], "completion": [ASSISTANT]}, HI_YO, "prompt -> completion"),
        # A list of turns says more than a pair that repeats its beginning.
        ({"prompt": "x", "response": "y", "messages": [USER, ASSISTANT]}, HI_YO, "messages"),
        # A column that is empty in this row is not the one that is meant.
        ({"prompt": "Hi", "response": None, "completion": "Yo"}, HI_YO, "prompt -> completion"),
    ],
)
def test_a_pair_is_known_by_its_names(tmp_path: Path, row: dict[str, Any], expected: list[str], names: str) -> None:
    assert read_row(tmp_path, row) == (expected, {names: 1})


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"chat": [USER, ASSISTANT]}, {"turns": "chat"}, HI_YO),
        (
            {"log": [{"who": "customer", "text": "Hi"}, {"who": "agent", "text": "Yo"}]},
            {"turns": "log", "role": "who", "content": "text", "user_role": "customer", "assistant_role": "agent"},
            HI_YO,
        ),
        ({"messages": [{"who": "user", "text": "Hi"}, {"who": "bot", "text": "Yo"}]}, {"role": "who", "content": "text"}, HI_YO),
        ({"messages": [{"role": 0, "content": "Hi"}, {"role": 1, "content": "Yo"}]}, {"user_role": "0", "assistant_role": "1"}, HI_YO),
        ({"dialogue": ["Hi", "Yo", "Ho", "Ya"]}, {"turns": "dialogue"}, [*HI_YO, "uHo", "aYa"]),
        ({"chat": json.dumps([USER, ASSISTANT])}, {"turns": "chat"}, HI_YO),
        ({"messages": [USER, ASSISTANT], "persona": "Be kind."}, {"system": "persona"}, ["sBe kind.", *HI_YO]),
        ({"messages": [{"role": "system", "content": "Own."}, USER, ASSISTANT], "persona": "x"}, {"system": "persona"}, ["sOwn.", *HI_YO]),
        ({"ask": "Hi", "reply": "Yo"}, {"prompt": "ask", "response": "reply"}, HI_YO),
        (
            {"ask": "Hi", "reply": "Yo", "doc": "D", "persona": "P"},
            {"prompt": "ask", "response": "reply", "context": "doc", "system": "persona"},
            ["sP", "uHi\n\nD", "aYo"],
        ),
        # What is named comes before what is known.
        ({"messages": [USER, {"role": "assistant", "content": "No"}], "chosen": [USER, ASSISTANT]}, {"turns": "chosen"}, HI_YO),
    ],
)
def test_named_columns_are_read(tmp_path: Path, row: dict[str, Any], columns: dict[str, str], expected: list[str]) -> None:
    assert read_row(tmp_path, row, **columns)[0] == expected


def test_a_named_id_is_the_conversation_s(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([{"id": "a", "ticket": 7, "messages": [USER, ASSISTANT]}]))
    assert read(tmp_path / "x.json")[0][0].id == "a"
    assert read(tmp_path / "x.json", id="ticket")[0][0].id == "7"


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_source_without_a_fitting_column_is_an_error_that_lists_its_columns(tmp_path: Path, suffix: str) -> None:
    rows = [{"ask": "Hi", "reply": "Yo", "n": number} for number in range(3)]
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text(json.dumps(rows) if suffix == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"has the columns ask, reply, n; expected one of conversations, messages.*--data\.columns\.prompt"):
        read(path)
    with pytest.raises(DataError, match=r"has the columns ask, reply, n; expected data.columns.prompt 'question' and response 'reply', or one of"):
        read(path, prompt="question", response="reply")
    assert turns(read(path, prompt="ask", response="reply")[0][0]) == HI_YO


def test_an_answer_that_is_missing_is_counted_and_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([{"prompt": "Hi", "response": None}, {"prompt": "Hi", "response": "Yo"}]))
    conversations, report = read(tmp_path / "x.json")
    assert len(conversations) == 1
    assert {reason: tally.count for reason, tally in report.left_out.items()} == {"empty_turn": 1}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"turns": "a", "prompt": "b"}, "names both turns and prompt"),
        ({"response": "a"}, "response has no effect without data.columns.prompt"),
        ({"context": "a"}, "context has no effect without data.columns.prompt"),
    ],
)
def test_names_that_exclude_each_other_are_an_error(columns: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ColumnConfig(**columns)


def test_pairs_behind_something_broken_are_found_again(tmp_path: Path) -> None:
    rows = [{"prompt": f"Hi {number}", "response": "Yo"} for number in range(3)]
    broken = json.dumps(rows).replace('"Hi 0"', '"Hi 0')
    (tmp_path / "x.json").write_text(broken)
    conversations, report = read(tmp_path / "x.json")
    assert [turns(conversation)[0] for conversation in conversations][-1] == "uHi 2"
    assert sum(tally.count for tally in report.left_out.values()) >= 1


def test_prompts_are_asked_from_pairs_too() -> None:
    assert [turn.content for turn in read_opening({"system": "S", "question": "Hi", "answer": "Yo"})] == ["S", "Hi"]


# --- through the pipeline -------------------------------------------------------------------------------------------------


def write_pairs(path: Path, num: int = 6) -> str:
    path.write_text("".join(json.dumps({"ask": f"Hi {number}", "reply": f"Yo {number}"}) + "\n" for number in range(num)))
    return str(path)


def test_sources_of_several_shapes_go_into_one_run_and_the_report_names_their_columns(
    tmp_path: Path, tiny_target: Path, sharegpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_pairs(tmp_path / "own.jsonl")
    config = DataConfig((own, str(sharegpt)), num_heldout=4, num_workers=1, columns=ColumnConfig(prompt="ask", response="reply"))
    report = prepare(config, load_tokenizer(TargetConfig(str(tiny_target))), tmp_path / "data")
    report.save(tmp_path / "data_report.json")
    saved = json.loads((tmp_path / "data_report.json").read_text())
    assert saved["columns"] == {own: {"ask -> reply": 6}, str(sharegpt): {"conversations": 60}}
    assert f"{sharegpt} has none of the columns that data.columns names: it is read by conversations" in capsys.readouterr().err


def test_named_columns_that_no_source_has_are_an_error(tmp_path: Path, tiny_target: Path, sharegpt: Path) -> None:
    config = DataConfig((str(sharegpt),), num_heldout=4, num_workers=1, columns=ColumnConfig(turns="conversatoins"))
    with pytest.raises(DataError, match=r"columns that data.columns names \('conversatoins'\): .*sharegpt.json was read by conversations"):
        prepare(config, load_tokenizer(TargetConfig(str(tiny_target))), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_the_mask_is_shown_for_named_columns(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(1, write_pairs(tmp_path / "own.jsonl"), str(tiny_target), columns=ColumnConfig(prompt="ask", response="reply"))
    assert "Yo 0" in capsys.readouterr().out
