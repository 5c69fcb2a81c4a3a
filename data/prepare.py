"""Sources to tokenised train and held-out splits on disk.

Place in the flow: data/conversations.py and data/workers.py -> a `datasets` DatasetDict (columns conversation_id, input_ids,
loss_mask, prompt_ids) -> data/extract.py. The samples go to disk as they come, and the splits appear under their final name whole
or not at all.

Held out are whole conversations: ShareGPT cuts long ones in parts (`id_0`, `id_1`), and all parts of one fall on the same side.
Which ones depends on the ids and the seed only, not on the order or the number of the others.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from data.chat import ChatTokenizer
from data.columns import ColumnConfig
from data.conversations import Conversation, read_conversations
from data.description import describe
from data.report import DataError, DataReport, SplitStatistics, TokenStatistics
from data.workers import SCHEMA, TokenizedBatch, Workers, tokenize_batch

_BATCH_CONVERSATIONS = 128
_HERE_BATCHES = 4  # fewer are not worth the start of another process
_MOST_PENDING = 16  # results a process that wait for an earlier one
_PARTS = re.compile(r"(.+)_\d+")
_PROGRESS_S = 10.0
_SHARD_BYTES = 500_000_000
_PERCENTILES = (5, 25, 50, 75, 90, 95, 99, 100)


def _default_workers() -> int:
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclass(frozen=True)
class DataConfig:
    """Which conversations a run learns from.

    Attributes:
        sources: see data/sources.py; read one after the other.
        max_length: most tokens of a sample; the rest of a longer conversation is cut off.
        max_conversations: reading stops after so many usable conversations; None reads everything.
        num_heldout: conversations kept from training, all parts of each; they give the prompts that acceptance is measured on.
        group_parts: whether ids that differ only in a final `_<number>` are parts of one conversation.
        seed: of the choice of held-out conversations.
        strict: whether a damaged source is an error instead of a warning.
        num_workers: processes that tokenise, this one included.
        columns: which columns of the sources hold the conversation, where their names are not the usual ones.
        streaming: whether a Hub dataset is read as it comes; otherwise it is downloaded into the Hub client's cache first.
    """

    sources: tuple[str, ...]
    max_length: int = 2048
    max_conversations: int | None = None
    num_heldout: int = 256
    group_parts: bool = True
    seed: int = 0
    strict: bool = False
    num_workers: int = field(default_factory=_default_workers)
    columns: ColumnConfig = field(default_factory=ColumnConfig)
    streaming: bool = True

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty: name at least one file, folder, package:NAME or Hub dataset")
        for name, value, least in (
            ("max_length", self.max_length, 2),
            ("max_conversations", self.max_conversations, 1),
            ("num_heldout", self.num_heldout, 0),
            ("num_workers", self.num_workers, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"data.{name} is {value}, expected at least {least}")


def prepare(config: DataConfig, tokenizer: PreTrainedTokenizerBase, output_dir: Path) -> DataReport:
    """Reads, tokenises, splits and writes; an earlier `output_dir` is replaced.

    Args:
        config: what to read.
        tokenizer: the target's, fast, with its chat template.
        output_dir: for `datasets.load_from_disk`: splits `train` and `heldout`.

    Raises:
        DataError: if a source cannot be read, no sample is left, or there are too few conversations to hold some out.
        ValueError: if the tokenizer cannot serve.
    """
    ChatTokenizer(tokenizer)  # its errors before any reading
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = output_dir.with_name(f".{output_dir.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        report = DataReport()
        lengths = _write_samples(config, tokenizer, report, temporary / "samples.arrow")
        samples = Dataset.from_file(str(temporary / "samples.arrow"))
        splits = _split(samples, config)
        report.tokens = _statistics(splits, lengths, config)
        report.check()
        for split in splits.values():
            split.info.description = describe(report, tokenizer, config.max_length, config.num_heldout, config.seed)
        # Counted here because `datasets` writes an empty split to no file at all and then cannot load it.
        num_shards = {name: 1 + 4 * split.num_tokens // _SHARD_BYTES for name, split in report.tokens.splits.items()}
        splits.save_to_disk(str(temporary / "splits"), num_shards=num_shards)
        _replace(temporary / "splits", output_dir, temporary / "old")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return report


def heldout_groups(conversation_ids: Sequence[str], num_heldout: int, seed: int, group_parts: bool = True) -> set[str]:
    """The conversations to hold out: those whose hashed ids are the smallest.

    Raises:
        DataError: if there would be none left to train on.
    """
    groups = {group_of(conversation_id, group_parts) for conversation_id in conversation_ids}
    if len(groups) <= num_heldout:
        hint = ""
        if group_parts and len(groups) < len(conversation_ids):
            hint = "; if ids like x_0 and x_1 are not parts of one conversation here, set data.group_parts to false"
        raise DataError(
            f"{len(conversation_ids)} usable records are {len(groups)} conversations, too few to hold out {num_heldout} and "
            f"train on the rest: lower data.num_heldout or read more{hint}"
        )
    ranked = sorted(groups, key=lambda group: (hashlib.sha256(f"{seed}:{group}".encode()).digest(), group))
    return set(ranked[:num_heldout])


def group_of(conversation_id: str, group_parts: bool = True) -> str:
    """The conversation that a record is a part of: its id without ShareGPT's part number."""
    match = _PARTS.fullmatch(conversation_id) if group_parts else None
    return match.group(1) if match else conversation_id


# --- reading and tokenising -----------------------------------------------------------------------------------------------


def _write_samples(config: DataConfig, tokenizer: PreTrainedTokenizerBase, report: DataReport, path: Path) -> list[int]:
    """Writes every sample to an Arrow stream; returns their lengths before truncation."""
    read = itertools.chain.from_iterable(
        read_conversations(source, report, strict=config.strict, columns=config.columns, streaming=config.streaming) for source in config.sources
    )
    conversations = itertools.islice(read, config.max_conversations)
    lengths: list[int] = []
    first_error: dict[str, str] = {}
    last_said = time.monotonic()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
        for batch in _tokenized(conversations, tokenizer, config):
            for reason, conversation_id, message in batch.refused:
                first_error.setdefault(reason, message)
                report.withdraw(reason, conversation_id)
            for conversation_id, length in zip(batch.samples["conversation_id"].to_pylist(), batch.lengths, strict=True):
                if length > config.max_length:
                    report.change("truncated", conversation_id)
            lengths += batch.lengths
            writer.write_batch(batch.samples)
            if time.monotonic() - last_said > _PROGRESS_S:
                last_said = time.monotonic()
                print(f"{report.num_read:,} records read, {len(lengths):,} samples written", flush=True)
    report.check()
    config.columns.require_use(report.named_columns_used, report.columns)
    if not lengths:
        raise DataError(
            f"no conversation can be used: {report.summary()}" + "".join(f"; {message}" for message in first_error.values())
        )
    for reason in ("template_refused", "unstable_template", "words_lost"):
        if reason in first_error:
            report.warn(
                f"{report.left_out[reason].count} conversations do not fit the chat template ({reason}): {first_error[reason]}"
            )
    return lengths


def _tokenized(
    conversations: Iterator[Conversation], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Iterator[TokenizedBatch]:
    """Results by batch, in order: from this process and, when there are enough batches to be worth it, from others beside it."""
    batches = iter(lambda: list(itertools.islice(conversations, _BATCH_CONVERSATIONS)), [])
    chat = ChatTokenizer(tokenizer)
    for batch in batches if config.num_workers == 1 else itertools.islice(batches, _HERE_BATCHES):
        yield tokenize_batch(chat, batch, config.max_length)
    if (first := next(batches, None)) is None:
        return
    num_others = config.num_workers - 1
    with Workers(num_others, chat, config.max_length) as workers:
        pending: deque[Future[TokenizedBatch]] = deque()
        for batch in itertools.chain([first], batches):
            # While they start, or are all busy, this process does not wait for them.
            if sum(not result.done() for result in pending) < 2 * num_others:
                pending.append(workers.submit(batch))
            else:
                here: Future[TokenizedBatch] = Future()
                here.set_result(tokenize_batch(chat, batch, config.max_length))
                pending.append(here)
            while pending and (pending[0].done() or len(pending) > _MOST_PENDING * config.num_workers):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# --- splitting and writing ------------------------------------------------------------------------------------------------


def _split(samples: Dataset, config: DataConfig) -> DatasetDict:
    ids: list[str] = list(samples["conversation_id"])
    heldout = heldout_groups(ids, config.num_heldout, config.seed, config.group_parts)
    is_heldout = [group_of(conversation_id, config.group_parts) in heldout for conversation_id in ids]
    indices = {
        "train": [index for index, held in enumerate(is_heldout) if not held],
        "heldout": [index for index, held in enumerate(is_heldout) if held],
    }
    return DatasetDict({name: samples.select(rows, keep_in_memory=True) for name, rows in indices.items()})


def _statistics(splits: DatasetDict, lengths: list[int], config: DataConfig) -> TokenStatistics:
    by_split = {}
    for name, split in splits.items():
        num_tokens = num_supervised = 0
        for table in split.with_format("arrow").iter(1000):
            num_tokens += len(pc.list_flatten(table["input_ids"]))
            num_supervised += pc.sum(pc.list_flatten(table["loss_mask"])).as_py() or 0
        groups = {group_of(conversation_id, config.group_parts) for conversation_id in split["conversation_id"]}
        by_split[str(name)] = SplitStatistics(len(split), len(groups), num_tokens, num_supervised)
    return TokenStatistics(
        num_tokens=sum(split.num_tokens for split in by_split.values()),
        num_supervised_tokens=sum(split.num_supervised_tokens for split in by_split.values()),
        num_tokens_lost=sum(max(0, length - config.max_length) for length in lengths),
        length_percentiles={f"p{p}": int(np.percentile(lengths, p, method="lower")) for p in _PERCENTILES},
        splits=by_split,
    )


def _replace(new: Path, final: Path, aside: Path) -> None:
    """Puts `new` in the place of `final`; a crash leaves the one or the other."""
    if final.exists():
        os.replace(final, aside)
    os.replace(new, final)
