"""A recipe's training answers from a server, and `python -m data.regenerate --target`: both are the answers that the target itself would give."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from datasets import Dataset, load_from_disk
from openai_fake import END, FakeServer, Fault, completion_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data.generate import generate_greedy
from data.openai_client import ServerConfig, ServerError
from data.regenerate import main
from data.regenerate_stage import regenerate
from data.server_answers import ServerAnswers, end_token_ids
from data.target import Target, TargetConfig, load_tokenizer
from eval.evaluation import Evaluation
from recipes.eagle3 import recipe
from train.cli import CommandLine
from train.config import AnswersConfig
from train.engine import Processes
from train.run import Run

MAX_NEW = 5
PROMPTS = [[index, 3 * index % 250, 3] for index in range(1, 13)]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def make_samples(prompts: list[list[int]]) -> Dataset:
    return Dataset.from_dict(
        {
            "conversation_id": [f"c{index}" for index in range(len(prompts))],
            "input_ids": [[*prompt, 1] for prompt in prompts],
            "loss_mask": [[False] * len(prompt) + [True] for prompt in prompts],
            "prompt_ids": prompts,
        }
    )


def answers_of(server: FakeServer, tiny_target: Path) -> ServerAnswers:
    return ServerAnswers.of(TargetConfig(str(tiny_target)), ServerConfig(server.url, "tiny", 4, max_retries=2, first_wait_s=0.01))


def answer_all(answerer: ServerAnswers, folder: Path, prompts: list[list[int]] = PROMPTS) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Answers by conversation, and what regeneration.json counts."""
    regenerate(answerer, make_samples(prompts), folder, max_samples=None, max_prompt_tokens=99, max_new_tokens=MAX_NEW)
    answers = {}
    for row in load_from_disk(str(folder)):
        num_prompt_tokens = len(row["prompt_ids"])
        answers[row["conversation_id"]] = row["input_ids"][num_prompt_tokens:]
        assert row["loss_mask"] == [False] * num_prompt_tokens + [True] * len(answers[row["conversation_id"]])
    return answers, json.loads((folder / "regeneration.json").read_text())


# --- the stage ------------------------------------------------------------------------------------------------------------------


def test_samples_hold_exactly_the_servers_token_ids(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    answers, counts = answer_all(answers_of(server, tiny_target), tmp_path / "regenerated")
    assert answers == {f"c{index}": completion_ids(prompt, MAX_NEW) for index, prompt in enumerate(PROMPTS)}
    num_cut_off = sum(answer[-1] != END for answer in answers.values())
    assert 0 < num_cut_off < 12
    expected = {"conversations": 12, "prompt_too_long": 0, "prompt_repeated": 0, "answered": 12, "cut_off": num_cut_off}
    assert counts == {**expected, "retokenised": 0, "asked_again": 0, "failed": 0}
    body = server.bodies[0]
    assert (body["temperature"], body["max_tokens"], body["return_token_ids"], body["stop_token_ids"]) == (0.0, MAX_NEW, True, [END])
    assert body["repetition_penalty"] == 1.0, "else vLLM takes the generation config's, and the answers are not the target's greedy ones"
    assert server.most_in_flight <= 4


def test_text_is_tokenised_here_and_counted_where_the_server_gives_no_ids(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    server.gives_token_ids = False
    answers, counts = answer_all(answers_of(server, tiny_target), tmp_path / "regenerated")
    assert counts["retokenised"] == 12
    tokenizer = load_tokenizer(TargetConfig(str(tiny_target)))
    for index, prompt in enumerate(PROMPTS):
        ids = completion_ids(prompt, MAX_NEW)
        text = bytes(token for token in ids if token < 128).decode()
        assert answers[f"c{index}"] == tokenizer(text, add_special_tokens=False)["input_ids"] + [END] * (ids[-1] == END)


def test_refused_prompts_are_left_out_and_counted(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    server.fault = lambda body, count: Fault(status=400, message="prompt too long") if body and body["prompt"][0] == 3 else None
    answers, counts = answer_all(answers_of(server, tiny_target), tmp_path / "regenerated")
    assert len(answers) == 11 and "c2" not in answers and counts["failed"] == 1 and counts["answered"] == 11


def prompts_asked(server: FakeServer) -> Counter[int]:
    """How often each prompt was asked, by its first token."""
    return Counter(body["prompt"][0] for body in server.bodies)


def test_what_the_server_failed_at_is_asked_once_more_at_the_end(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    """Prompt 3 until everything else is answered, as with a server that is restarted in between; prompt 5 to the end; 7 is refused for good."""

    def fault(body: dict[str, Any], count: int) -> Fault | None:
        first = body["prompt"][0] if body else 0
        if first == 7:
            return Fault(status=400, message="no such token")
        return Fault(status=500) if first == 5 or (first == 3 and count < 3) else None

    server.fault = fault
    answers, counts = answer_all(answers_of(server, tiny_target), tmp_path / "regenerated")
    assert {f"c{index}" for index in range(12)} - answers.keys() == {"c4", "c6"} and answers["c2"] == completion_ids(PROMPTS[2], MAX_NEW)
    assert (counts["answered"], counts["failed"], counts["asked_again"]) == (10, 2, 6)
    asked = prompts_asked(server)
    assert (asked[3], asked[5], asked[7], asked[1]) == (4, 6, 1, 1)
    assert {body["prompt"][0] for body in server.bodies[-4:]} == {3, 5}


def test_prompts_that_fail_to_the_end_are_left_out_however_many_they_are(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    """Among answers nine failures are accidents of single prompts; asked once more they come in a row, which says nothing of the server."""
    prompts = [[index, 3, 3] for index in range(1, 41)]
    server.fault = lambda body, count: Fault(status=500) if body and body["prompt"][0] % 4 == 0 else None
    answers, counts = answer_all(answers_of(server, tiny_target), tmp_path / "regenerated", prompts)
    assert len(answers) == counts["answered"] == 30 and counts["failed"] == 10


def test_what_the_server_failed_at_is_asked_again_by_a_run_that_goes_on(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    """The stage was not complete: the server stopped answering after it had failed at prompt 1."""
    server.fault = lambda body, count: Fault(status=500) if body and (body["prompt"][0] == 1 or len(server.bodies) > 8) else None
    with pytest.raises(ServerError, match="has answered none of the last 8 requests"):
        answer_all(answers_of(server, tiny_target), tmp_path / "regenerated", [[index, 3, 3] for index in range(1, 41)])
    with FakeServer() as again:
        answers, counts = answer_all(answers_of(again, tiny_target), tmp_path / "regenerated", [[index, 3, 3] for index in range(1, 41)])
    assert len(answers) == 40 and counts["failed"] == 0 and prompts_asked(again)[1] == 1


def test_a_server_that_has_gone_when_it_is_asked_once_more_stops_the_stage(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    """Nothing is counted as refused by a server that is not there: the same command goes on with it."""

    def fault(body: dict[str, Any], count: int) -> Fault | None:
        if body and body["prompt"][0] == 3 and count == 3:
            server._server.socket.close()  # nobody listens any more
            return Fault("cut")
        return Fault(status=500) if body and body["prompt"][0] == 3 else None

    server.fault = fault
    with pytest.raises(ServerError, match="does not answer any more"):
        answer_all(answers_of(server, tiny_target), tmp_path / "regenerated")
    with FakeServer() as again:
        answers, counts = answer_all(answers_of(again, tiny_target), tmp_path / "regenerated")
        assert prompts_asked(again) == {3: 1} and len(answers) == 12 and counts["failed"] == 0


def test_a_server_that_adds_tokens_to_the_prompt_is_refused(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    server.choice = lambda body: {"prompt_token_ids": [0, *body["prompt"]]}
    with pytest.raises(ServerError, match="read 4 prompt tokens where 3 others were sent"):
        answer_all(answers_of(server, tiny_target), tmp_path / "regenerated")


def test_a_stage_goes_on_after_the_server_died(server: FakeServer, tiny_target: Path, tmp_path: Path) -> None:
    server.fault = lambda body, count: Fault(status=503) if len(server.bodies) > 6 else None
    with pytest.raises(ServerError, match="is overloaded"):
        answer_all(answers_of(server, tiny_target), tmp_path / "regenerated")
    done = {json.dumps(body["prompt"]) for body in server.bodies[:3]}
    with FakeServer() as again:
        answers, _ = answer_all(answers_of(again, tiny_target), tmp_path / "regenerated")
        assert not done & {json.dumps(body["prompt"]) for body in again.bodies}
    assert answers == {f"c{index}": completion_ids(prompt, MAX_NEW) for index, prompt in enumerate(PROMPTS)}


def test_end_tokens_are_known_without_the_model(tiny_target: Path) -> None:
    config = TargetConfig(str(tiny_target))
    assert end_token_ids(config, load_tokenizer(config)) == Target.load(config, "cpu").end_ids == frozenset({END})


# --- settings -------------------------------------------------------------------------------------------------------------------


def test_where_the_server_stands_and_how_fast_it_is_asked_do_not_make_answers_stale() -> None:
    target = TargetConfig("some/target")
    first = AnswersConfig(source="target", server="http://a:1/v1", model="x")
    assert dataclasses.replace(first, server="http://b:2/v1", concurrency=3).identity(target) == first.identity(target)
    assert dataclasses.replace(first, model="y").identity(target) != first.identity(target)
    assert dataclasses.replace(first, model=None).identity(target)["server_model"] == "some/target"
    local = AnswersConfig(source="target").identity(target)
    assert local != first.identity(target)
    assert local == {"source": "target", "max_conversations": None, "max_prompt_tokens": 1024, "max_new_tokens": 512}, "as runs before had it"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"server": "http://a/v1"}, "answers.server has no effect with answers.source dataset"),
        ({"source": "target", "model": "x"}, "have no effect without answers.server"),
        ({"source": "target", "concurrency": 3}, "have no effect without answers.server"),
        ({"source": "target", "max_conversations": 0}, "expected at least 1"),
        ({"source": "target", "server": "localhost:8000"}, "expected a URL"),
        ({"source": "target", "server": "http://me:secret@host:8000/v1"}, "^(?!.*secret).*OPENAI_API_KEY"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        AnswersConfig(**settings)


def test_a_recipe_trains_on_the_servers_tokens_and_does_not_ask_again_elsewhere(
    server: FakeServer, tiny_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stages(url: str) -> Run:
        options = ["--answers.source", "target", "--answers.server", url, "--answers.model", "tiny", "--answers.max-new-tokens", "24"]
        arguments = ["--name", "served", "--runs-dir", str(tmp_path), *tiny_arguments, *options]
        config = tyro.cli(CommandLine, default=CommandLine(config=recipe()), args=arguments).config
        run = Run(config, Evaluation(), Processes("torch"))
        run.prepare()
        run.regenerate()
        return run

    samples = load_from_disk(str(stages(server.url).samples_dir))
    assert len(samples) == len(server.bodies) > 20
    for row in samples:
        assert row["input_ids"] == row["prompt_ids"] + completion_ids(row["prompt_ids"], 24)
    with FakeServer() as elsewhere:
        stages(elsewhere.url)
        assert elsewhere.bodies == [] and "[regenerate] done before" in capsys.readouterr().out


# --- python -m data.regenerate --target -----------------------------------------------------------------------------------------


@torch.no_grad()
def greedy_text(model: LlamaForCausalLM, tokenizer: Any, messages: list[dict[str, str]], max_new_tokens: int) -> tuple[str, bool]:
    """Independent reference: the template, then token by token without a cache."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer: list[int] = []
    while len(answer) < max_new_tokens and (not answer or answer[-1] != END):
        answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return tokenizer.decode(answer, skip_special_tokens=True).strip(), answer[-1] == END


def test_the_target_answers_here_turn_by_turn_as_it_would_alone(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    users = [[f"{rng.randrange(1000)} cats" for _ in range(1 + number % 3)] for number in range(5)] + [["x" * 500]]
    turns = [[turn for user in asked for turn in ({"role": "user", "content": user}, {"role": "assistant", "content": "no"})] for asked in users]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"id": f"c{number}", "messages": messages}) + "\n" for number, messages in enumerate(turns)))
    arguments = [str(source), str(tmp_path / "out.jsonl"), "--target", str(tiny_target), "--dtype", "float32", "--max-new-tokens", "8"]
    assert main([*arguments, "--batch-sequences", "2"]) == 0
    found = {record["id"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny_target)
    num_cut_off = 0
    for number, asked in enumerate(users[:5]):
        messages: list[dict[str, str]] = []
        for user in asked:
            messages.append({"role": "user", "content": user})
            text, has_ended = greedy_text(model, tokenizer, messages, 8)
            if not text:
                messages.pop()
                break
            num_cut_off += not has_ended
            messages.append({"role": "assistant", "content": text})
        assert found.get(f"c{number}", {"messages": []})["messages"] == messages
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["num_cut_off"] == num_cut_off and report["num_turns"] >= 5
    assert report["failed"]["context_too_long"] == 1 and report["settings"]["target"] == str(tiny_target)
    assert main(arguments) == 0
    assert "6 of 6 conversations are done before" in capsys.readouterr().out


# --- the real vLLM --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a head size that vLLM's CPU build can do."""
    folder = tmp_path_factory.mktemp("engine_target")
    config = LlamaConfig.from_pretrained(tiny_target, head_dim=32, hidden_size=64, num_hidden_layers=3, dtype="float32")
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[94:END] = 0  # of the bytes only ASCII: vLLM holds back a character that is not complete
        model.lm_head.weight[END] *= 2.5  # it likes to end, so both ways of ending occur
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_target).save_pretrained(folder)
    return folder


@pytest.mark.engine
def test_the_real_vllm_gives_the_targets_own_greedy_token_ids_and_rewrites_conversations(
    engine_target: Path, sharegpt: Path, tmp_path: Path
) -> None:
    from eval.vllm_server import vllm_server

    config = TargetConfig(str(engine_target), dtype="float32")
    tokenizer = load_tokenizer(config)
    texts = [record["conversations"][0]["value"] for record in json.loads(sharegpt.read_text())[:24]]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for text in dict.fromkeys(texts)
    ]
    ours = generate_greedy(Target.load(config, "cpu"), prompts, MAX_NEW)
    with vllm_server(str(engine_target), log=tmp_path / "log", dtype="float32", arguments=("--enforce-eager", "--max-model-len", "256")) as server:
        url = f"{server.base_url}/v1"
        answerer = ServerAnswers.of(config, ServerConfig(url, server.model, concurrency=8))
        answers, counts = answer_all(answerer, tmp_path / "regenerated", prompts)
        assert answers == {f"c{index}": answer.answer_ids for index, answer in enumerate(ours)}
        assert counts["retokenised"] == counts["failed"] == 0 and 0 < counts["cut_off"] < len(prompts)

        arguments = ["--server", url, "--model", server.model, "--max-new-tokens", "12", "--max-conversations", "12"]
        assert main([str(sharegpt), str(tmp_path / "served.jsonl"), *arguments]) == 0
        assert main([str(sharegpt), str(tmp_path / "x.jsonl"), *arguments[:2], "--model", "another"]) == 2
    assert main([str(sharegpt), str(tmp_path / "here.jsonl"), "--target", str(engine_target), *arguments[4:]]) == 0
    served, here = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("served.jsonl", "here.jsonl"))
    assert {item["id"]: item["messages"] for item in served} == {item["id"]: item["messages"] for item in here}
    assert [item["regeneration"]["num_prompt_tokens"] for item in served] == [item["regeneration"]["num_prompt_tokens"] for item in here]
