"""Training data whose answers the target wrote itself: the stage of a recipe. For files there is `python -m data.regenerate`.

Place in the flow: the prepared train split -> `regenerate` -> a split with the same columns -> data/extract.py. ShareGPT's answers come from another
model; a drafter learns to foresee its own target, and learns it from far fewer tokens when the target has written them (algorithms.md section 9, 2).

The stage has each conversation's first user turn answered greedily, by transformers here or by a server (data/server_answers.py). Answers are
appended to a file as they are finished, so an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset, Features, Sequence, Value

from data.generate import GeneratedAnswer, generate_greedy
from data.progress import Progress
from data.target import Target

_COLUMNS = Features(
    {
        "conversation_id": Value("string"),
        "input_ids": Sequence(Value("int32")),
        "loss_mask": Sequence(Value("bool")),
        "prompt_ids": Sequence(Value("int32")),
    }
)
_ANSWERS_FILE = "answers.jsonl"


class Answers(Protocol):
    """Who answers prompts greedily: `LocalAnswers`, or `ServerAnswers` of data/server_answers.py."""

    counts: dict[str, int]

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def identity(self) -> dict[str, Any]:
        """What the answers depend on, beside prompts and length."""

    def answer(self, prompts: SequenceOf[SequenceOf[int]], max_new_tokens: int, on_answer: Callable[[int, list[int]], None]) -> None:
        """Calls `on_answer` with a prompt's index and its answer's ids as soon as they are there."""


@dataclass
class LocalAnswers:
    """The target itself, through transformers.

    Attributes:
        batch_sequences: prompts answered together.
    """

    target: Target
    batch_sequences: int = 128
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def end_ids(self) -> frozenset[int]:
        return self.target.end_ids

    def identity(self) -> dict[str, Any]:
        # A few values of every tensor tell one target, and one dtype, from another.
        values = torch.cat([_some_of(parameter.detach().flatten()) for parameter in self.target.model.parameters()])
        return {"weights": hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest(), "dtype": str(self.target.dtype)}

    def answer(self, prompts: SequenceOf[SequenceOf[int]], max_new_tokens: int, on_answer: Callable[[int, list[int]], None]) -> None:
        def take(index: int, answer: GeneratedAnswer) -> None:
            on_answer(index, answer.answer_ids)

        generate_greedy(self.target, prompts, max_new_tokens, batch_sequences=self.batch_sequences, on_answer=take)


def regenerate(
    answerer: Answers,
    samples: Dataset,
    folder: Path,
    *,
    max_samples: int | None,
    max_prompt_tokens: int,
    max_new_tokens: int,
) -> None:
    """Writes the regenerated split to `folder` (a `datasets` directory).

    Args:
        answerer: answers.
        samples: columns conversation_id and prompt_ids.
        folder: output; an interrupted run's answers beside it are used.
        max_samples: conversations to answer; None answers all.
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: longest answer; one that is cut off keeps no end token.

    Beside the split it writes regeneration.json: conversations, answered, left out as too long or as repeating an earlier prompt, cut off; of a
    server also how many answers were tokenised here, asked again, or refused.

    Raises:
        ValueError: if no conversation has a prompt that is short enough, none is answered, or a server cannot be worked with.
    """
    chosen, counts = _choose(samples, max_samples, max_prompt_tokens)
    work = folder.with_name(f"{folder.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    answers = _read_answers(work / _ANSWERS_FILE, _settings(answerer, chosen, max_new_tokens))
    if answers:
        print(f"regenerate: {len(answers):,} of {len(chosen):,} answers are there from an interrupted run", flush=True)
    missing = [index for index in range(len(chosen)) if index not in answers]
    progress = Progress("regenerate", "answers", len(missing))
    with (work / _ANSWERS_FILE).open("a") as file:

        def on_answer(position: int, answer_ids: list[int]) -> None:
            answers[missing[position]] = answer_ids
            file.write(json.dumps({"index": missing[position], "answer_ids": answer_ids}) + "\n")
            file.flush()
            progress.advance(1)

        answerer.answer([chosen[index]["prompt_ids"] for index in missing], max_new_tokens, on_answer)
    progress.close()
    rows = [_sample(chosen[index], answers[index]) for index in range(len(chosen)) if index in answers]
    if not rows:
        raise ValueError(f"none of {len(chosen)} prompts was answered: the server refused all of them")
    counts["answered"] = len(rows)
    counts["cut_off"] = sum(row["input_ids"][-1] not in answerer.end_ids for row in rows)
    counts |= answerer.counts
    _save(rows, counts, folder, work)
    print("regenerate: " + ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items()), flush=True)


def _save(rows: list[dict], counts: dict[str, int], folder: Path, work: Path) -> None:
    """Puts the whole split in the place of `folder`, and removes what an interruption would have needed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work / "split", ignore_errors=True)
    Dataset.from_list(rows, features=_COLUMNS).save_to_disk(str(work / "split"))
    (work / "split").replace(folder)
    (folder / "regeneration.json").write_text(json.dumps(counts, indent=2) + "\n")
    shutil.rmtree(work)


def _choose(samples: Dataset, max_samples: int | None, max_prompt_tokens: int) -> tuple[list[dict], dict[str, int]]:
    """The conversations to answer, and how many were passed over for which reason."""
    counts = {"conversations": 0, "prompt_too_long": 0, "prompt_repeated": 0}
    chosen: list[dict] = []
    seen: set[tuple[int, ...]] = set()
    for sample in samples.select_columns(["conversation_id", "prompt_ids"]):
        if max_samples is not None and len(chosen) == max_samples:
            break
        counts["conversations"] += 1
        prompt = tuple(sample["prompt_ids"])
        if len(prompt) > max_prompt_tokens:
            counts["prompt_too_long"] += 1
        elif prompt in seen:
            counts["prompt_repeated"] += 1
        else:
            seen.add(prompt)
            chosen.append(sample)
    if not chosen:
        raise ValueError(
            f"none of {counts['conversations']} conversations has a prompt of at most {max_prompt_tokens} tokens: raise answers.max_prompt_tokens"
        )
    return chosen, counts


def _settings(answerer: Answers, chosen: list[dict], max_new_tokens: int) -> dict[str, Any]:
    """What the answers depend on: an interrupted run's answers are used only where all of it is the same."""
    prompts = hashlib.sha256(json.dumps([sample["prompt_ids"] for sample in chosen]).encode()).hexdigest()
    return {"prompts": prompts, **answerer.identity(), "end_ids": sorted(answerer.end_ids), "max_new_tokens": max_new_tokens}


def _some_of(values: torch.Tensor) -> torch.Tensor:
    return values[:: max(1, len(values) // 64)].float()


def _read_answers(path: Path, settings: dict[str, Any]) -> dict[int, list[int]]:
    """Answers of an interrupted run with the same settings; a line that the kill cut off is dropped, and its prompt answered again."""
    records = [_record(line) for line in (path.read_text().splitlines() if path.exists() else [])]
    whole = [record for record in records[1:] if record is not None] if records and records[0] == settings else []
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(f"{json.dumps(record)}\n" for record in [settings, *whole]))
    partial.replace(path)
    return {record["index"]: record["answer_ids"] for record in whole}


def _record(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _sample(prompt: dict, answer_ids: list[int]) -> dict:
    prompt_ids = list(prompt["prompt_ids"])
    return {
        "conversation_id": prompt["conversation_id"],
        "input_ids": prompt_ids + answer_ids,
        "loss_mask": [False] * len(prompt_ids) + [True] * len(answer_ids),
        "prompt_ids": prompt_ids,
    }
