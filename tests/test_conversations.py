"""Reading conversations: every format, every rule, and whatever happens to a file on its way."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data.sources
from data.conversations import ROLES, Conversation, DataError, DataReport, Turn, read_conversations
from data.json_records import read_json_records
from data.report import CHANGES, REASONS


def sharegpt(number: int) -> dict[str, Any]:
    return {
        "id": f"c{number}_0",
        "conversations": [
            {"from": "human", "value": f"Frage {number}: wie gehts?"},
            {"from": "gpt", "value": f"Gut, {number}mal grün 🌱"},
        ],
    }


ROWS = [sharegpt(number) for number in range(12)]


def read(source: object, strict: bool = False) -> tuple[list[Conversation], DataReport]:
    report = DataReport()
    conversations = list(read_conversations(str(source), report, strict=strict))
    report.check()
    assert report.num_kept == len(conversations)
    return conversations, report


def reasons(report: DataReport) -> dict[str, int]:
    return {reason: tally.count for reason, tally in report.left_out.items()}


def read_turns(path: Path, *turns: tuple[str, Any]) -> tuple[list[Conversation], DataReport]:
    return read_rows(path, {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]})


def read_rows(path: Path, *rows: Any) -> tuple[list[Conversation], DataReport]:
    file = path / "rows.json"
    file.write_text(json.dumps(rows))
    return read(file)


def write_every_format(folder: Path) -> dict[str, Path]:
    """The same rows in each format that is a file."""
    indented = json.dumps(ROWS, indent=2).encode()
    lines = "\n".join(json.dumps(row) for row in ROWS).encode()
    contents = {
        "array.json": indented,
        "one_line.json": json.dumps(ROWS).encode(),
        "objects.json": "\n".join(json.dumps(row, indent=1) for row in ROWS).encode(),
        "lines.jsonl": lines,
        "windows.jsonl": lines.replace(b"\n", b"\r\n"),
        "bom.json": b"\xef\xbb\xbf" + indented,
        "utf16.json": json.dumps(ROWS, ensure_ascii=False).encode("utf-16"),
        "utf16be.jsonl": lines.decode().encode("utf-16-be"),
        "array.json.gz": gzip.compress(indented),
        "lines.jsonl.gz": gzip.compress(lines[:900]) + gzip.compress(lines[900:]),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=5)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_every_format(tmp_path_factory.mktemp("formats"))


EXPECTED = [
    Conversation(f"c{number}_0", (Turn("user", f"Frage {number}: wie gehts?"), Turn("assistant", f"Gut, {number}mal grün 🌱")))
    for number in range(12)
]


# --- formats ----------------------------------------------------------------------------------------------------------------


def test_every_file_format_gives_the_same_conversations_in_order(files: dict[str, Path]) -> None:
    for name, path in files.items():
        conversations, report = read(path, strict=True)
        assert conversations == EXPECTED, name
        assert (report.num_read, report.num_left_out, report.num_warnings) == (12, 0, 0), name


def test_the_name_of_a_file_does_not_decide_its_format(files: dict[str, Path], tmp_path: Path) -> None:
    for name, path in files.items():
        for wrong in ("x.parquet", "x.jsonl", "x.gz", "x.json", "x"):
            (tmp_path / wrong).write_bytes(path.read_bytes())
            assert read(tmp_path / wrong)[0] == EXPECTED, (name, wrong)


def test_openai_records_give_what_sharegpt_records_give(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo"},
        ]
    }
    ((conversation,), _) = read_rows(tmp_path, row)
    assert conversation.turns == (Turn("system", "Be kind."), Turn("user", "Hi"), Turn("assistant", "Yo"))
    assert conversation.id == "rows.json:0"


def test_saved_datasets_are_read_by_split_and_unread_splits_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:2]))
    saved.save_to_disk(str(tmp_path / "both"))
    saved["train"].save_to_disk(str(tmp_path / "one"))
    assert read(tmp_path / "one", strict=True)[0] == EXPECTED
    assert read(f"{tmp_path / 'both'}:test")[0] == EXPECTED[:2]
    conversations, report = read(tmp_path / "both", strict=True)
    assert conversations == EXPECTED
    assert "test" in report.warnings[0]
    with pytest.raises(DataError, match=r"has the splits train, test, not 'dev'"):
        read(f"{tmp_path / 'both'}:dev")


def test_a_folder_is_its_files_by_name_and_ids_say_which(tmp_path: Path) -> None:
    turns = [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.jsonl").write_text(json.dumps({"conversations": turns}))
    (tmp_path / "a.json").write_text(json.dumps(ROWS[:1]))
    (tmp_path / "README.md").write_text("not data")
    conversations, _ = read(tmp_path)
    assert [conversation.id for conversation in conversations] == ["c0_0", "sub/b.jsonl:0"]


def test_old_struct_of_lists_and_text_columns_are_read(tmp_path: Path) -> None:
    struct = {"id": "s", "conversations": {"from": ["human", "gpt"], "value": ["a", "b"]}}
    text = {"id": "t", "conversations": json.dumps([{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}])}
    conversations, _ = read_rows(tmp_path, struct, text)
    assert [[turn.content for turn in conversation.turns] for conversation in conversations] == [["a", "b"], ["c", "d"]]


def test_package_data_is_found_without_importing_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "their_chats"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "chats.json").write_text(json.dumps(ROWS))
    info = tmp_path / "their_chats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-chats\nVersion: 1.0\n")
    (info / "RECORD").write_text("their_chats/__init__.py,,\ntheir_chats/chats.json,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read("package:their-chats")[0] == EXPECTED
    with pytest.raises(DataError, match="not installed"):
        read("package:no-such-chats")


def test_an_unreachable_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError) as raised:
        read("someone/chats:train_sft")
    assert "someone/chats" in str(raised.value) and "\n" not in str(raised.value)


def test_a_hub_dataset_is_streamed_and_ends_with_an_error_when_the_connection_does(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    class Stream:
        column_names = ("id", "conversations", "extra")

        def select_columns(self, columns: list[str]) -> Stream:
            assert columns == ["id", "conversations"]
            return self

        def __iter__(self) -> Any:
            yield ROWS[0]
            raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: Stream())
    report = DataReport()
    stream = read_conversations("someone/chats", report)
    assert next(stream) == EXPECTED[0]
    with pytest.raises(DataError, match="after 1 records"):
        next(stream)


def test_only_as_much_is_read_as_is_asked_for(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield b"[" + json.dumps(ROWS[0]).encode() + b"," + json.dumps(ROWS[1]).encode() + b","
        raise AssertionError("read too far")

    records = read_json_records(chunks(), "x")
    assert [next(records).value["id"] for _ in range(2)] == ["c0_0", "c1_0"]  # type: ignore[union-attr]


def test_memory_does_not_grow_with_the_number_of_records() -> None:
    row = json.dumps(ROWS[0]).encode() + b",\n"
    seen = []

    def chunks() -> Any:
        yield b"["
        for _ in range(2000):
            yield row * 10

    from data.json_records import TextReader, _values

    reader = TextReader(chunks(), "x")
    for record in _values(reader, "x"):
        seen.append(len(reader.window))
        assert record is not None
    assert len(seen) == 20_001  # and the array without its end
    assert max(seen) < 100 * len(row)


# --- rules ------------------------------------------------------------------------------------------------------------------

USER, GPT = ("human", "Hi"), ("gpt", "Hello")


@pytest.mark.parametrize("name, role", [*ROLES.items(), ("  GPT ", "assistant"), ("Human", "user")])
def test_role_names_are_known_without_case(name: str, role: str, tmp_path: Path) -> None:
    turns = {
        "system": [(name, "S"), USER, GPT],
        "user": [(name, "Hi"), GPT],
        "assistant": [USER, (name, "Hello")],
        "tool": [USER, (name, "1"), GPT],
    }
    conversations, report = read_turns(tmp_path, *turns[role])
    if role == "tool":
        assert reasons(report) == {"tool_turn": 1}
    else:
        (conversation,) = conversations
        assert conversation.turns[-2:] == (Turn("user", "Hi"), Turn("assistant", "Hello"))


@pytest.mark.parametrize(
    "turns, reason",
    [
        ([], "empty"),
        ([USER], "one_sided"),
        ([GPT], "one_sided"),
        ([("system", "S")], "one_sided"),
        ([GPT, USER], "one_sided"),
        ([USER, ("narrator", "x"), GPT], "unknown_role"),
        ([USER, ("gpt", " \n")], "empty_turn"),
        ([("human", ""), GPT], "empty_turn"),
        ([USER, ("gpt", None)], "malformed_turn"),
        ([USER, ("gpt", 3)], "malformed_turn"),
        ([USER, ("gpt", float("nan"))], "malformed_turn"),
        ([USER, ("gpt", {"a": 1})], "malformed_turn"),
        ([USER, (None, "x")], "malformed_turn"),
        ([USER, (7, "x")], "malformed_turn"),
        ([USER, ("gpt", [{"type": "image_url", "image_url": {"url": "x"}}])], "unsupported_content"),
        ([USER, ("gpt", [{"type": "text", "text": None}])], "malformed_turn"),
        ([USER, ("gpt", [3])], "malformed_turn"),
        ([USER, ("gpt", "half a pair \ud83d")], "invalid_text"),
        ([USER, ("gpt", "x" * 2_000_001)], "over_long"),
        ([USER, GPT, ("system", "late"), USER, GPT], "late_system_turn"),
    ],
)
def test_each_unusable_record_is_left_out_for_one_reason(turns: list[tuple[Any, Any]], reason: str, tmp_path: Path) -> None:
    conversations, report = read_turns(tmp_path, *turns)
    assert conversations == []
    assert reasons(report) == {reason: 1}
    assert report.left_out[reason].example_id == "x"


@pytest.mark.parametrize(
    "row, reason",
    [
        (None, "not_an_object"),
        ([1], "not_an_object"),
        ("text", "not_an_object"),
        (float("nan"), "not_an_object"),
        ({}, "no_turn_list"),
        ({"conversations": None}, "no_turn_list"),
        ({"conversations": "not json"}, "no_turn_list"),
        ({"messages": 3}, "no_turn_list"),
        ({"messages": {"role": ["user"], "content": []}}, "malformed_turn"),
        ({"conversations": ["hello", "you"]}, "malformed_turn"),
        ({"conversations": [None]}, "malformed_turn"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "tool_turn",
        ),
    ],
)
def test_each_malformed_record_is_left_out_for_one_reason(row: Any, reason: str, tmp_path: Path) -> None:
    assert reasons(read_rows(tmp_path, row, ROWS[0])[1]) == {reason: 1}


@pytest.mark.parametrize(
    "turns, kept, change",
    [
        ([GPT, GPT, USER, GPT], "uHi aHello", "leading_assistant_dropped"),
        ([("system", "S"), GPT, USER, GPT], "sS uHi aHello", "leading_assistant_dropped"),
        ([USER, GPT, USER], "uHi aHello", "trailing_user_dropped"),
        ([USER, GPT, ("human", "")], "uHi aHello", "trailing_user_dropped"),
        ([("system", "  "), USER, GPT], "uHi aHello", "empty_system_dropped"),
        ([USER, ("user", "Ho"), GPT], "uHi\n\nHo aHello", "same_role_joined"),
        ([USER, ("gpt", [{"type": "text", "text": "A"}, "B"])], "uHi aAB", None),
        ([USER, ("gpt", "\n padded \n")], "uHi apadded", None),
    ],
)
def test_records_are_mended_by_stated_rules(turns: list[tuple[Any, Any]], kept: str, change: str | None, tmp_path: Path) -> None:
    ((conversation,), report) = read_turns(tmp_path, *turns)
    assert " ".join(turn.role[0] + turn.content for turn in conversation.turns) == kept
    assert {name: tally.count for name, tally in report.changes.items()} == ({change: 1} if change else {})


def test_ids_are_text_and_a_record_without_a_usable_one_is_named_by_its_place(tmp_path: Path) -> None:
    ids = [7, "seven", None, "", True, 1.5, ["a"], float("nan"), "lone \ud800"]
    rows = [{"id": value, **{"conversations": sharegpt(number)["conversations"]}} for number, value in enumerate(ids)]
    conversations, _ = read_rows(tmp_path, *rows)
    places = [f"rows.json:{number}" for number in range(2, 8)]
    assert [conversation.id for conversation in conversations] == ["7", "seven", *places, "lone \\ud800"]


def test_the_same_turns_are_kept_once_and_the_same_id_with_other_turns_stays(tmp_path: Path) -> None:
    again = {"id": "other", "conversations": ROWS[0]["conversations"]}
    same_id = {"id": ROWS[0]["id"], "conversations": ROWS[1]["conversations"]}
    conversations, report = read_rows(tmp_path, ROWS[0], again, same_id)
    assert [conversation.id for conversation in conversations] == ["c0_0", "c0_0"]
    assert reasons(report) == {"duplicate": 1}
    assert list(read_conversations(str(tmp_path / "rows.json"), report)) == []  # nor from a second source


# --- damage -----------------------------------------------------------------------------------------------------------------


def test_a_file_cut_off_in_mid_record_gives_its_whole_records_and_the_byte_offset(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = files["one_line.json"].read_bytes()
    begin = whole.index(b'{"id": "c7_0"')
    (tmp_path / "cut.json").write_bytes(whole[: begin + 30])
    conversations, report = read(tmp_path / "cut.json")
    assert conversations == EXPECTED[:7]
    assert reasons(report) == {"cut_off": 1}
    assert f"ends at byte {begin + 30}" in report.warnings[0] and f"begins at byte {begin}" in report.warnings[0]
    assert report.warnings[0] in capsys.readouterr().err
    with pytest.raises(DataError, match=f"ends at byte {begin + 30}"):
        read(tmp_path / "cut.json", strict=True)


@pytest.mark.parametrize("name", ["array.json", "one_line.json", "lines.jsonl", "utf16.json", "objects.json", "array.json.gz"])
def test_a_file_cut_off_anywhere_loses_nothing_whole_and_never_stays_quiet(
    name: str, files: dict[str, Path], tmp_path: Path
) -> None:
    content = files[name].read_bytes()
    for size in range(1, len(content), max(1, len(content) // 60)):
        (tmp_path / "cut").write_bytes(content[:size])
        try:
            conversations, report = read(tmp_path / "cut")
        except DataError:
            assert size < len(content) / 3
            continue
        assert conversations == EXPECTED[: len(conversations)]
        is_at_a_boundary = name in ("lines.jsonl", "objects.json") and report.num_left_out == 0
        assert report.num_warnings or is_at_a_boundary


def test_a_cut_off_gzip_gives_all_that_its_bytes_hold(tmp_path: Path) -> None:
    rows = [sharegpt(number) for number in range(3000)]
    compressed = gzip.compress("\n".join(json.dumps(row) for row in rows).encode())
    (tmp_path / "cut.gz").write_bytes(compressed[: len(compressed) // 2])
    conversations, report = read(tmp_path / "cut.gz")
    assert len(conversations) > 1000
    assert any("gzip stream is cut off" in message for message in report.warnings)


def test_a_bad_line_is_counted_and_its_neighbours_kept(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    lines[3] = lines[3][:40]
    lines[5] = "[" * 100_000
    lines[8] = '{"id": ' + "9" * 5000 + "}"
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    conversations, report = read(tmp_path / "x.jsonl")
    assert [conversation.id for conversation in conversations] == [row["id"] for i, row in enumerate(ROWS) if i not in (3, 5, 8)]
    assert reasons(report) == {"malformed_json": 3}
    assert report.left_out["malformed_json"].example_id == "x.jsonl:3"
    with pytest.raises(DataError, match=r"line 4 \(byte \d+\)"):
        read(tmp_path / "x.jsonl", strict=True)


def test_after_a_broken_record_an_array_goes_on_at_the_next_whole_one(tmp_path: Path) -> None:
    text = json.dumps(ROWS)
    (tmp_path / "x.json").write_text(text.replace('"c4_0", ', '"c4_0" '))
    conversations, report = read(tmp_path / "x.json")
    assert conversations == EXPECTED[:4] + EXPECTED[5:]
    assert reasons(report) == {"malformed_json": 1}
    begin, end = text.index('{"id": "c4_0"'), text.index('{"id": "c5_0"') - 1
    assert f"bytes {begin} to {end} were skipped" in report.warnings[0]


def test_bytes_that_are_not_utf8_lose_only_their_own_record(files: dict[str, Path], tmp_path: Path) -> None:
    content = bytearray(files["array.json"].read_bytes())
    content[content.index(b"Frage 3")] = 0xFF
    (tmp_path / "x.json").write_bytes(content)
    conversations, report = read(tmp_path / "x.json")
    assert conversations == EXPECTED[:3] + EXPECTED[4:]
    assert reasons(report) == {"invalid_text": 1}


def test_a_damaged_parquet_row_group_loses_its_own_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=4, compression="zstd", write_page_checksum=True)
    column = pq.ParquetFile(path).metadata.row_group(1).column(2)
    content = bytearray(path.read_bytes())
    middle = column.dictionary_page_offset + column.total_compressed_size // 2
    content[middle] ^= 0xFF
    path.write_bytes(content)
    conversations, report = read(path)
    assert conversations == EXPECTED[:4] + EXPECTED[8:]
    assert reasons(report) == {"unreadable_row": 4}
    assert "rows 4 to 7" in report.warnings[0]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (bytes(range(1, 256)) * 9, "not in a format"),
        (b"id,text\n1,hello\n", "not in a format"),
        (b"PK\x03\x04....", "is zip"),
        (b"PAR1 and no more", "damaged Parquet"),
        (b"\x1f\x8b\x08 broken", "holds no data"),
        (gzip.compress(b"PAR1....", mtime=0), "itself compressed or Parquet"),
        (gzip.compress(gzip.compress(b"[]", mtime=0), mtime=0), "itself compressed or Parquet"),
    ],
)
def test_a_file_that_is_no_format_is_one_clear_error(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        read(tmp_path / "x.json")
    assert "\n" not in str(raised.value) and "x.json" in str(raised.value)


@pytest.mark.parametrize("source", ["nowhere.json", "./nowhere", "a/b/c/d", "", "bad\0name", "/dev/null", "x" * 5000, "package:"])
def test_a_source_that_is_not_there_is_one_clear_error(source: str) -> None:
    with pytest.raises(DataError):
        read(source)


def test_a_folder_without_data_and_a_table_without_turns_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no file"):
        read(tmp_path)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="has the columns text"):
        read(tmp_path)


def mangle(content: bytes, draw: Any) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        if not content:
            break
        at = draw(st.integers(0, len(content) - 1))
        kind = draw(st.sampled_from(("cut", "flip", "drop", "insert")))
        if kind == "cut":
            content = content[:at]
        elif kind == "flip":
            content = content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
        elif kind == "drop":
            content = content[:at] + content[at + draw(st.integers(1, 60)) :]
        else:
            content = content[:at] + draw(st.binary(min_size=1, max_size=20)) + content[at:]
    return content


FORMATS = [
    "array.json",
    "one_line.json",
    "objects.json",
    "lines.jsonl",
    "windows.jsonl",
    "bom.json",
    "utf16.json",
    "utf16be.jsonl",
    "array.json.gz",
    "lines.jsonl.gz",
    "rows.parquet",
]


@pytest.mark.parametrize("name", FORMATS)
@given(draw=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mangled_file_ends_in_kept_records_counted_reasons_or_one_error_line(
    name: str, draw: Any, files: dict[str, Path]
) -> None:
    content = mangle(files[name].read_bytes(), draw.draw)
    suffix = draw.draw(st.sampled_from((".json", ".jsonl", ".gz", ".parquet", "")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"mangled{suffix}"
        path.write_bytes(content)
        try:
            _, report = read(path)
        except DataError as error:
            assert "\n" not in str(error)
        else:
            json.dumps(report.to_json())


@given(draw=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mangled_saved_dataset_ends_so_too(draw: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    if not folder.exists():
        Dataset.from_list(ROWS).save_to_disk(str(folder))
    path = folder / draw.draw(st.sampled_from(("data-00000-of-00001.arrow", "dataset_info.json", "state.json")))
    original = path.read_bytes()
    mangled = mangle(original, draw.draw)
    path.unlink()  # not written over: an earlier example may still have it mapped
    path.write_bytes(mangled)
    try:
        read(folder)
    except DataError as error:
        assert "\n" not in str(error)
    finally:
        path.unlink()
        path.write_bytes(original)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(("id", "conversations", "messages", "from", "value", "role", "content")), inner, max_size=4
            )
        ),
        max_leaves=20,
    )
)
@settings(max_examples=150, deadline=None)
def test_any_json_value_is_kept_or_counted(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        path.write_text(json.dumps([value, ROWS[0]]))
        _, report = read(path)
        assert report.num_read == 2


# --- report -----------------------------------------------------------------------------------------------------------------


def test_the_report_lists_every_reason_and_refuses_to_lose_a_record(tmp_path: Path) -> None:
    _, report = read_turns(tmp_path, USER)
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert (saved["num_read"], saved["num_kept"], saved["num_left_out"]) == (1, 0, 1)
    assert saved["left_out"]["one_sided"] == {"count": 1, "example_id": "x"}
    assert set(saved["left_out"]) == set(REASONS) and set(saved["changes"]) == set(CHANGES)
    report.num_read += 1
    with pytest.raises(AssertionError, match="2 records read"):
        report.to_json()


def test_the_table_prints_ids_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = read_rows(tmp_path, {"id": "[red]x[/nope]", "messages": []})
    report.print_table()
    assert "[red]x[/nope]" in capsys.readouterr().out


def test_warnings_are_bounded_but_counted(capsys: pytest.CaptureFixture[str]) -> None:
    report = DataReport()
    for number in range(1000):
        report.warn(f"w{number}")
    assert (len(report.warnings), report.num_warnings) == (20, 1000)
    assert capsys.readouterr().err.count("\n") == 21


def test_file_suffixes_cover_the_formats() -> None:
    assert all(name.endswith(data.sources._SUFFIXES) for name in FORMATS)
