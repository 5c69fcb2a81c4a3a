"""Conversations written anew through an OpenAI-compatible server: what is asked, what is written, and what every fault does.

The server is a real one on the loopback interface (tests/openai_fake.py); tests that kill or stop the command run it as a process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_fake import FakeServer, Fault, chat_answer

from data.conversations import read_conversations
from data.regenerate import main
from data.report import DataReport
from data.rewrite import Questions, RewriteChoices, split_thinking
from data.rewritten_file import RewrittenFile

ROOT = Path(__file__).resolve().parent.parent
SYSTEM = "Be kind."


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def write_source(path: Path, conversations: list[list[str]], system: str | None = None) -> Path:
    """ShareGPT records with these user turns; the other model's answers are there to be replaced."""
    records = []
    for number, users in enumerate(conversations):
        turns = [{"from": "system", "value": system}] if system else []
        for place, user in enumerate(users):
            turns += [{"from": "human", "value": user}, {"from": "gpt", "value": f"their answer {number} {place}"}]
        records.append({"id": f"c{number}", "conversations": turns})
    path.write_text(json.dumps(records))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twelve conversations of one to three user turns."""
    return write_source(tmp_path / "sharegpt.json", [[f"question {number}.{place}" for place in range(1 + number % 3)] for number in range(12)])


def command(server: FakeServer, source: Path, *options: str) -> list[str]:
    out = source.with_name("out.jsonl")
    return [str(source), str(out), "--server", server.url, "--model", "tiny", "--first-wait-s", "0.01", *options]


def regenerate(server: FakeServer, source: Path, *options: str) -> list[dict[str, Any]]:
    """The records that a successful command writes."""
    assert main(command(server, source, *options)) == 0
    return records(source)


def records(source: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in source.with_name("out.jsonl").read_text().splitlines()]


def report(source: Path) -> dict[str, Any]:
    return json.loads(source.with_name("out.report.json").read_text())


def failures(source: Path) -> list[dict[str, Any]]:
    path = source.with_name("out.failed.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rolled_forward(users: list[str], system: str | None = None) -> list[dict[str, str]]:
    """The reference: each user turn answered given the answers before it."""
    messages = [{"role": "system", "content": system}] if system else []
    for user in users:
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": chat_answer(messages)})
    return messages


def questions(number: int) -> list[str]:
    return [f"question {number}.{place}" for place in range(1 + number % 3)]


def messages_of(found: list[dict[str, Any]]) -> dict[str, list[dict[str, str]]]:
    return {record["id"]: record["messages"] for record in found}


EXPECTED = {f"c{number}": rolled_forward(questions(number)) for number in range(12)}


# --- what is asked and what is written ----------------------------------------------------------------------------------------


def test_every_user_turn_is_answered_given_the_targets_own_earlier_answers(server: FakeServer, source: Path) -> None:
    found = regenerate(server, source)
    assert messages_of(found) == EXPECTED
    assert list(messages_of(found)) == list(EXPECTED), "in the source's order"
    counts = report(source)
    assert (counts["num_conversations"], counts["num_turns"], counts["num_new_tokens"], counts["num_prompt_tokens"]) == (12, 24, 72, 240)
    assert counts["is_finished"] and counts["settings"]["model"] == "tiny" and not counts["failed"]
    assert not [path for path in source.parent.iterdir() if path.name not in (source.name, "out.jsonl", "out.report.json")]


def test_the_output_is_a_source_for_any_recipe(server: FakeServer, source: Path) -> None:
    regenerate(server, source)
    read = DataReport()
    conversations = list(read_conversations(str(source.with_name("out.jsonl")), read))
    assert {item.id: [{"role": turn.role, "content": turn.content} for turn in item.turns] for item in conversations} == EXPECTED
    assert not read.left_out and not read.changes


def test_the_system_turn_and_later_turns_are_kept_or_left_out_by_choice(server: FakeServer, tmp_path: Path) -> None:
    source = write_source(tmp_path / "s.json", [["a", "b"]], system=SYSTEM)
    assert regenerate(server, source)[0]["messages"] == rolled_forward(["a", "b"], SYSTEM)
    assert regenerate(server, source, "--system", "drop", "--turns", "first", "--start-anew")[0]["messages"] == rolled_forward(["a"])


def test_questions_that_come_again_are_asked_once(server: FakeServer, tmp_path: Path) -> None:
    source = write_source(tmp_path / "s.json", [["same"], ["other"], ["same"]])  # the answers differ, so the records are no duplicates
    assert list(messages_of(regenerate(server, source))) == ["c0", "c1"]
    assert report(source)["source"]["num_repeated_questions"] == 1 and server.asked == {"same": 1, "other": 1}


def test_sampling_settings_and_further_fields_reach_the_server_and_each_turn_has_a_seed_of_its_own(server: FakeServer, tmp_path: Path) -> None:
    source = write_source(tmp_path / "s.json", [["a", "b"], ["c"]])
    options = ("--temperature", "0.7", "--top-p", "0.9", "--seed", "5", "--max-new-tokens", "99", "--extra-body", '{"top_k": 3}')
    regenerate(server, source, *options)
    for body in server.bodies:
        assert (body["temperature"], body["top_p"], body["max_tokens"], body["top_k"], body["model"]) == (0.7, 0.9, 99, 3, "tiny")
    seeds = {json.dumps(body["messages"]): body["seed"] for body in server.bodies}
    assert len(set(seeds.values())) == 3
    server.bodies.clear()
    regenerate(server, source, *options, "--start-anew")
    assert {json.dumps(body["messages"]): body["seed"] for body in server.bodies} == seeds


def test_a_server_with_a_short_context_is_not_asked_for_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(max_model_len=128) as server:
        regenerate(server, write_source(tmp_path / "s.json", [["a"]]))
        assert server.bodies[0]["max_tokens"] == 127
    assert "context is 128 tokens, so answers are at most 127" in capsys.readouterr().out


def test_there_are_never_more_requests_in_flight_than_wanted(source: Path) -> None:
    with FakeServer(delay_s=0.03) as server:
        regenerate(server, source, "--concurrency", "4")
        assert server.most_in_flight == 4


# --- thinking, tools, refusals, cut-offs ---------------------------------------------------------------------------------------

THOUGHT = "<think>\nhm\n</think>\n\nwords"


@pytest.mark.parametrize(
    "message",
    [
        {"content": "words", "reasoning_content": "\nhm\n"},
        {"content": "words", "reasoning": "hm"},
        {"content": "<think>\nhm\n</think>\n\nwords"},
        {"content": "hm\n</think>\n\nwords"},  # the template has opened the thoughts
    ],
)
def test_thoughts_are_kept_or_left_out_by_choice_and_never_sent_back(server: FakeServer, tmp_path: Path, message: dict[str, str]) -> None:
    source = write_source(tmp_path / "s.json", [["a", "b"]])
    server.message = lambda body: message
    kept = regenerate(server, source, "--thinking", "keep")[0]["messages"]
    assert kept[1] == {"role": "assistant", "content": "words", "reasoning_content": "hm"}
    assert kept[3] == {"role": "assistant", "content": THOUGHT}
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "words"}
    assert report(source)["num_thinking"] == 2
    dropped = regenerate(server, source, "--thinking", "drop", "--start-anew")[0]["messages"]
    assert dropped[1] == dropped[3] == {"role": "assistant", "content": "words"}


def test_thoughts_that_never_end_are_no_words() -> None:
    assert split_thinking("<think>hm, <b>") == ("hm, <b>", "", True)
    assert split_thinking("a < b") == ("", "a < b", False)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(("choice", "expected"), [("keep", [["words", CALL]]), ("drop", [])])
def test_a_conversation_ends_with_a_tool_call_or_before_it(server: FakeServer, tmp_path: Path, choice: str, expected: list) -> None:
    source = write_source(tmp_path / "s.json", [["a", "use a tool", "c"]])

    def message(body: dict[str, Any]) -> dict[str, Any]:
        return {"content": "words", "tool_calls": [CALL]} if body["messages"][-1]["content"] == "use a tool" else {"content": "plain"}

    server.message = message
    [record] = regenerate(server, source, "--tool-calls", choice)
    assert [[item["content"], *item["tool_calls"]] for item in record["messages"] if "tool_calls" in item] == expected
    assert record["messages"][1]["content"] == "plain"
    assert server.asked == {"a": 1, "use a tool": 1}
    assert report(source)["ended_early"] == {"tool_call": 1}


def test_refusals_are_counted_by_kind_and_end_a_conversation_before_them(server: FakeServer, tmp_path: Path) -> None:
    source = write_source(tmp_path / "s.json", [["fine", "filter"], ["refuse"], ["empty", "never asked"], ["good"]])
    messages = {"refuse": {"content": None, "refusal": "I will not."}, "empty": {"content": " \n"}, "filter": {"content": "half an ans"}}
    server.message = lambda body: messages.get(body["messages"][-1]["content"], {"content": "ok"})
    server.choice = lambda body: {"finish_reason": "content_filter"} if body["messages"][-1]["content"] == "filter" else {}
    found = messages_of(regenerate(server, source))
    assert {name: [message["content"] for message in messages] for name, messages in found.items()} == {"c0": ["fine", "ok"], "c3": ["good", "ok"]}
    counts = report(source)
    assert counts["num_refused"] == {"content_filter": 1, "refusal": 1, "empty": 1}
    assert counts["ended_early"] == {"content_filter": 1} and counts["failed"] == {"refusal": 1, "empty": 1}
    assert "never asked" not in server.asked


@pytest.mark.parametrize(("choice", "num_answers"), [("keep", [2, 1]), ("drop", [0, 1])])
def test_cut_off_answers_are_counted_and_kept_or_left_out(server: FakeServer, tmp_path: Path, choice: str, num_answers: list[int]) -> None:
    source = write_source(tmp_path / "s.json", [["long", "then"], ["short"]])
    server.choice = lambda body: {"finish_reason": "length"} if body["messages"][-1]["content"] == "long" else {}
    found = {record["id"]: record["regeneration"]["num_turns"] for record in regenerate(server, source, "--cut-off", choice)}
    assert [found.get(name, 0) for name in ("c0", "c1")] == num_answers
    counts = report(source)
    assert (counts["num_cut_off"], counts["failed"].get("cut_off", 0)) == ((1, 0) if choice == "keep" else (0, 1))


def test_half_an_emoji_at_the_token_limit_harms_nothing(server: FakeServer, tmp_path: Path) -> None:
    server.message = lambda body: {"content": "a tree \ud83c"}
    assert regenerate(server, write_source(tmp_path / "s.json", [["a"]]))[0]["messages"][1]["content"] == "a tree ?"


# --- faults of single requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503), Fault(status=500), Fault(status=429), Fault("cut"), Fault("half"), Fault("garbage"), Fault("late", seconds=0.6)],
    ids=["503", "500", "429", "cut", "half", "garbage", "late"],
)
def test_a_fault_that_passes_is_asked_again_and_changes_nothing(server: FakeServer, source: Path, fault: Fault) -> None:
    server.fault = lambda body, count: fault if body and count == 0 and body["messages"][-1]["content"] in ("question 1.1", "question 4.0") else None
    assert messages_of(regenerate(server, source, "--timeout-s", "0.3")) == EXPECTED
    assert report(source)["num_retries"] == 2
    assert server.asked == {text: 2 if text in ("question 1.1", "question 4.0") else 1 for number in range(12) for text in questions(number)}


def test_a_reply_that_lacks_its_parts_is_asked_again(server: FakeServer, source: Path) -> None:
    seen: Counter[str] = Counter()

    def choice(body: dict[str, Any]) -> dict[str, Any]:
        seen["all"] += 1
        return {"message": None} if seen["all"] == 2 else {"finish_reason": "abort"} if seen["all"] == 3 else {}

    server.choice = choice
    assert messages_of(regenerate(server, source)) == EXPECTED
    assert report(source)["num_retries"] == 2


def test_the_server_says_when_it_wants_to_be_asked_again(server: FakeServer, tmp_path: Path) -> None:
    server.fault = lambda body, count: Fault(status=429, headers={"Retry-After": "1"}) if body and count == 0 else None
    regenerate(server, write_source(tmp_path / "s.json", [["a"]]))
    assert 1 <= server.times[1] - server.times[0] < 2, "ours would have been 0.01 s"


def test_a_refused_request_costs_its_own_turn_only(server: FakeServer, source: Path) -> None:
    """Conversation 2 has three turns and fails at its second; 3 has one turn; both reasons stand in the report."""
    replies = {
        "question 2.1": Fault(status=400, message="This model's maximum context length is 64 tokens. However, your prompt has 80."),
        "question 3.0": Fault(status=422, message="no such parameter"),
    }
    server.fault = lambda body, count: replies.get(body["messages"][-1]["content"]) if body else None
    found = messages_of(regenerate(server, source))
    assert found == {**{name: messages for name, messages in EXPECTED.items() if name != "c3"}, "c2": EXPECTED["c2"][:2]}
    counts = report(source)
    assert counts["ended_early"] == {"context_too_long": 1} and counts["failed"] == {"bad_request": 1}
    [failure] = failures(source)
    assert (failure["id"], failure["reason"], failure["message"], failure["is_final"]) == ("c3", "bad_request", "no such parameter", True)
    server.bodies.clear()
    regenerate(server, source)
    assert server.bodies == [], "what was refused would be refused again"


def test_what_the_server_failed_at_is_asked_again_by_the_next_run_only(server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.fault = lambda body, count: Fault(status=500) if body and body["messages"][-1]["content"] == "question 5.1" else None
    found = regenerate(server, source, "--max-retries", "2")
    assert messages_of(found) == {name: messages for name, messages in EXPECTED.items() if name != "c5"}
    assert server.asked["question 5.1"] == 3 and report(source)["failed"] == {"http_500": 1}
    assert "1 of them failed by the server's fault: the same command asks them again" in capsys.readouterr().out
    server.fault, server.bodies = (lambda body, count: None), []
    assert messages_of(regenerate(server, source, "--max-retries", "2")) == EXPECTED
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["question 5.0", "question 5.1", "question 5.2"]
    assert failures(source) == [] and list(messages_of(records(source))) == list(EXPECTED)


# --- what stops the run -------------------------------------------------------------------------------------------------------


def stopped(server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line of a command that ends with exit code 2."""
    assert main(command(server, source, *options)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    return captured.err


def test_another_model_is_noticed_before_anything_is_asked(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(model="some-other-7b") as server:
        assert "serves 'some-other-7b', not 'tiny': name one of these" in stopped(server, source, capsys)
        assert server.bodies == []


def test_a_key_is_sent_and_never_shown(server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.fault = lambda body, count: Fault(status=401, message="Incorrect API key: sk-secret-1")
    assert "answers 401: set OPENAI_API_KEY to the server's key" in stopped(server, source, capsys)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-1")
    message = stopped(server, source, capsys)
    assert server.headers["Authorization"] == "Bearer sk-secret-1"
    assert "the key in OPENAI_API_KEY is not accepted (Incorrect API key: ***)" in message
    for path in source.parent.iterdir():
        assert "sk-secret" not in path.read_text()


@pytest.mark.parametrize("key", ["sk-secret-1\nsk-secret-2", "sk-secret-\u20ac"])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(
    server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    message = stopped(server, source, capsys, "--max-retries", "0")
    assert "OPENAI_API_KEY holds characters that no key has" in message and "secret" not in message


def test_a_server_that_refuses_to_list_its_models_is_one_line(server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.fault = lambda body, count: None if body else Fault(status=400, message="The plain HTTP request was sent to HTTPS port")
    message = stopped(server, source, capsys)
    assert "answers 400 to /models: The plain HTTP request was sent to HTTPS port: is this an OpenAI-compatible server" in message


@pytest.mark.parametrize("way", ["dot", "link", "folder"])
def test_an_output_that_is_a_source_under_another_spelling_is_refused_and_kept(
    server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(source.parent)
    own = Path("own.jsonl")
    own.write_text(json.dumps(json.loads(source.read_text())[0]) + "\n")
    Path("link.jsonl").symlink_to(own.name)
    named = {"dot": ("./own.jsonl", "own.jsonl"), "link": ("own.jsonl", "link.jsonl"), "folder": (".", "own.jsonl")}[way]
    before = own.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        main([*named, "--server", server.url, "--model", "tiny", "--start-anew"])
    said = " ".join(capsys.readouterr().err.split())
    assert ("is in the source" if way == "folder" else "is both a source and the output") in said
    assert own.read_bytes() == before and server.bodies == []


def test_starting_anew_keeps_the_old_answers_where_nobody_can_give_new_ones(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        regenerate(server, source)
    before = source.with_name("out.jsonl").read_bytes()
    assert "does not answer" in stopped(server, source, capsys, "--start-anew", "--max-retries", "0")
    assert source.with_name("out.jsonl").read_bytes() == before


def test_records_of_questions_that_the_sources_have_no_more_are_told(server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regenerate(server, source)
    assert "no more" not in capsys.readouterr().out
    assert len(regenerate(server, source, "--max-conversations", "3")) == 12
    assert "9 records answer questions that are asked no more, and stay: --start-anew leaves them out" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_line(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        pass
    assert "does not answer (ConnectError" in stopped(server, source, capsys, "--max-retries", "1")


def test_an_address_without_v1_is_one_line(server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.url = server.url.removesuffix("/v1")
    assert "answers 404 to /models: no route /models; the URL usually ends in /v1" in stopped(server, source, capsys)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(status=503, message="busy"), "is overloaded (busy), asked 3 times: lower the concurrency, or run the same command later, it goes on"),
        (Fault(status=429, message="quota", headers={"Retry-After": "7200"}), "asks to come back in 7200 s (quota): run the same command then"),
        (Fault(status=400, message="unknown field top_q"), "has answered none of the last 8 requests, the last: unknown field top_q"),
        (Fault("garbage"), "has answered none of the last 8 requests, the last: JSONDecodeError"),
        (Fault(status=404, message="The model tiny does not exist."), "answers 404 to /chat/completions: The model tiny does not exist."),
    ],
    ids=["overload", "quota", "bad_field", "garbage", "model_gone"],
)
def test_a_server_that_answers_nobody_stops_the_run(
    server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str], fault: Fault, expected: str
) -> None:
    server.fault = lambda body, count: fault if body else None
    assert expected in stopped(server, source, capsys, "--max-retries", "2", "--concurrency", "2")


def test_a_server_that_dies_stops_the_run_and_the_same_command_goes_on(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:

        def die(body: dict[str, Any], count: int) -> Fault | None:
            if len(server.bodies) <= 10:
                return None
            server._server.socket.close()  # nobody listens any more
            return Fault("cut")

        server.fault = die
        message = stopped(server, source, capsys, "--concurrency", "2", "--max-retries", "2")
        assert "does not answer any more" in message and "asked 3 times: start it again and run the same command, it goes on" in message
    finished = messages_of(records(source))
    assert 0 < len(finished) < 12 and all(EXPECTED[name] == messages for name, messages in finished.items())
    assert not report(source)["is_finished"]
    with FakeServer() as again:  # at another port: where the server stands is no setting
        assert messages_of(regenerate(again, source, "--concurrency", "2", "--max-retries", "2")) == EXPECTED
        assert not {users for name in finished for users in questions(int(name[1:]))} & set(again.asked)


# --- going on -----------------------------------------------------------------------------------------------------------------


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """The command as a user types it."""
    how = [sys.executable, "-m", "data.regenerate"]
    return subprocess.Popen([*how, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "it ended too early"
        time.sleep(0.01)


@pytest.mark.parametrize("num_lost", [60, 1], ids=["in_a_line", "before_its_end"])
def test_a_killed_command_goes_on_asks_each_conversation_once_more_at_most_and_ends_the_same(source: Path, num_lost: int) -> None:
    out = source.with_name("out.jsonl")
    with FakeServer() as server:
        regenerate(server, source)
        whole = out.read_bytes()
        out.unlink(), source.with_name("out.report.json").unlink()
    with FakeServer(delay_s=0.1) as server:
        arguments = command(server, source, "--concurrency", "3")
        process = start(arguments)
        wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 4, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done = out.read_bytes()
        out.write_bytes(done + whole.splitlines(keepends=True)[-1][:-num_lost])  # as a kill in the middle of a line leaves it
        server.delay_s = 0.0
        regenerate(server, source, "--concurrency", "3")
        assert out.read_bytes() == whole
        assert max(server.asked.values()) <= 2
        finished = [json.loads(line)["id"] for line in done.splitlines()]
        assert all(server.asked[text] == 1 for name in finished for text in questions(int(name[1:])))


def test_an_interrupted_command_keeps_what_is_finished(source: Path) -> None:
    out = source.with_name("out.jsonl")
    with FakeServer(delay_s=1.0) as server:
        process = start(command(server, source, "--concurrency", "2"))
        wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == f"interrupted; what is finished is in {out}, and the same command goes on\n"
    assert all(EXPECTED[name] == messages for name, messages in messages_of(records(source)).items())


def test_other_settings_are_refused_or_start_anew(server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = regenerate(server, source)
    message = stopped(server, source, capsys, "--temperature", "0.5", "--thinking", "drop")
    assert 'was written with other settings (temperature was 0.0 and is 0.5; thinking was "keep" and is "drop")' in message
    assert "--start-anew" in message and records(source) == first
    num_asked = len(server.bodies)
    regenerate(server, source, "--temperature", "0.5", "--start-anew")
    assert len(server.bodies) == 2 * num_asked


def test_other_columns_are_another_setting_and_the_usual_ones_none(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs of before columns were settings have none, and are gone on with."""
    source = tmp_path / "s.json"
    turns = {name: [{"from": "human", "value": name}, {"from": "gpt", "value": "no"}] for name in ("first", "second")}
    source.write_text(json.dumps([{"id": "c0", **turns}]))
    assert regenerate(server, source, "--columns.turns", "first")[0]["messages"] == rolled_forward(["first"])
    assert report(source)["settings"]["columns"]["turns"] == "first"
    assert "was written with other settings (columns was {" in stopped(server, source, capsys, "--columns.turns", "second")
    assert len(regenerate(server, source, "--columns.turns", "first")) == 1 and server.asked == {"first": 1}
    usual = write_source(tmp_path / "u.json", [["a"]])
    regenerate(server, usual, "--start-anew")
    assert "columns" not in report(usual)["settings"]


def test_more_conversations_of_the_same_source_are_no_other_setting(server: FakeServer, source: Path) -> None:
    assert len(regenerate(server, source, "--max-conversations", "5")) == 5
    assert messages_of(regenerate(server, source)) == EXPECTED
    assert max(server.asked.values()) == 1
    assert len(regenerate(server, source, "--max-conversations", "2")) == 12, "nothing is lost by asking for less"


def test_a_file_of_somebody_else_is_never_written_to(server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source.with_name("out.jsonl")
    out.write_text('{"id": "mine"}\n')
    assert "is there, but no out.report.json that says with which settings it was written" in stopped(server, source, capsys)
    assert out.read_text() == '{"id": "mine"}\n'


def test_two_commands_do_not_write_the_same_output(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(delay_s=0.2) as server:
        process = start(command(server, source))
        wait_for(lambda: len(server.bodies) > 0, process)
        try:
            assert "is being written by another process" in stopped(server, source, capsys)
        finally:
            process.kill()
            process.communicate()


def test_an_output_that_another_process_replaces_while_it_is_opened_is_not_written_beside(
    server: FakeServer, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command ends by putting its records in order, in a new file of the same name: between our opening and our lock."""
    keys = {item.id: Questions.of(item, RewriteChoices()).key for item in read_conversations(str(source), DataReport())}
    regenerate(server, source, "--max-conversations", "6")
    out, lock = source.with_name("out.jsonl"), fcntl.flock
    first = RewrittenFile.open(out, report(source)["settings"])

    def ends_first(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.finish([keys[f"c{number}"] for number in sorted(range(12), reverse=not ends)], {})
        if ends:
            first.close()
        lock(file, operation)

    for ends in (False, True):
        monkeypatch.setattr(fcntl, "flock", ends_first)
        if not ends:
            assert "is being written by another process" in stopped(server, source, capsys)
        else:
            assert messages_of(regenerate(server, source)) == EXPECTED
    assert max(server.asked.values()) == 1


def test_a_file_system_without_locks_is_written_to_all_the_same(server: FakeServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert messages_of(regenerate(server, source)) == EXPECTED


# --- mistakes on the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.json"], "expected at least one source and the output"),
        (["a.json", "b.json"], "'b.json' does not end in .jsonl"),
        (["a.jsonl", "a.jsonl"], "is both a source and the output"),
        (["a.json", "b.jsonl"], "name either --server URL --model NAME or --target MODEL"),
        (["a.json", "b.jsonl", "--server", "http://x/v1"], "--server and --model go together"),
        (["a.json", "b.jsonl", "--target", "t", "--temperature", "1"], "--target answers greedily"),
        (["a.json", "b.jsonl", "--server", "x:8000", "--model", "m"], "the server is 'x:8000', expected a URL such as http://localhost:8000/v1"),
        (["a.json", "b.jsonl", "--server", "http://x/v1", "--model", "m", "--extra-body", "{"], "--extra-body is no JSON"),
        (["a.json", "b.jsonl", "--server", "http://x/v1", "--model", "m", "--extra-body", '{"n": 2}'], "--extra-body holds n"),
        (["a.json", "b.jsonl", "--server", "http://x/v1", "--model", "m", "--top-p", "0"], "top-p 0.0"),
        (["a.json", "b.jsonl", "--server", "http://x/v1", "--model", "m", "--max-conversations", "0"], "max-conversations is 0, expected at least 1"),
        (["a.json", "b.jsonl", "--server", "http://x/v1", "--model", "m", "--concurrency", "0"], "concurrency is 0"),
        (["nowhere.json", "b.jsonl", "--server", "http://x/v1", "--model", "m"], "there is no file or folder 'nowhere.json'"),
    ],
)
def test_mistakes_on_the_command_line_are_said_in_one_line(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = main(arguments)
    except SystemExit as ended:  # tyro's own ending
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2
    assert expected in " ".join((captured.out + captured.err).replace("│", " ").split())
