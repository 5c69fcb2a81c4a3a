"""Batches of conversations to Arrow, here or in other processes.

Place in the flow: `Conversation` -> data/chat.py -> `TokenizedBatch` -> data/prepare.py writes it. What goes back and forth are a few
buffers a batch, not an object a token.

Not `multiprocessing`: forking does not survive the tokenizer's threads and torch, and spawning imports the main script again with all that
training needs, which takes longer than tokenising two thousand conversations. A process here is this module alone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.chat import ChatTokenizer, SampleError, TokenizedSample
from data.conversations import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = pa.schema(
    {
        "conversation_id": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "prompt_ids": pa.list_(pa.int32()),
    }
)


@dataclass(frozen=True)
class TokenizedBatch:
    """What became of a batch of conversations, in their order.

    Attributes:
        samples: a row each of those that can be used; columns as in `SCHEMA`.
        lengths: tokens of each before truncation.
        refused: (reason, conversation id, message) of the others; reasons as in data/report.py.
    """

    samples: pa.RecordBatch
    lengths: list[int]
    refused: list[tuple[str, str, str]]


def tokenize_batch(chat: ChatTokenizer, conversations: Sequence[Conversation], max_length: int) -> TokenizedBatch:
    """Tokenises a batch; see `ChatTokenizer.tokenize`."""
    samples, refused = [], []
    for conversation, result in zip(conversations, chat.tokenize(conversations, max_length), strict=True):
        if isinstance(result, SampleError):
            refused.append((result.reason, conversation.id, str(result)))
        else:
            samples.append(result)
    return TokenizedBatch(_record_batch(samples), [len(sample.input_ids) + sample.num_lost_tokens for sample in samples], refused)


def _record_batch(samples: list[TokenizedSample]) -> pa.RecordBatch:
    columns = [
        pa.array([sample.conversation_id for sample in samples], pa.string()),
        _lists([sample.input_ids for sample in samples], np.int32),
        _lists([sample.loss_mask for sample in samples], np.bool_),
        _lists([sample.prompt_ids for sample in samples], np.int32),
    ]
    return pa.record_batch(columns, schema=SCHEMA)


def _lists(rows: Sequence[npt.NDArray[Any]], kind: type) -> pa.ListArray:
    """One list a row, from the arrays' own memory."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows) if rows else np.zeros(0, kind)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


class Workers:
    """Processes that tokenise; a context manager, which starts and ends them.

    Raises:
        RuntimeError: from a batch's result, if a process ends before it has answered.
    """

    def __init__(self, num_workers: int, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self._num_workers = num_workers
        self._first_message = pickle.dumps((tokenizer, max_length))

    def __enter__(self) -> Workers:
        root = Path(__file__).resolve().parent.parent
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # the processes are the parallelism
        command = [sys.executable, "-c", "from data.workers import serve; serve()"]
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env=environment)
            for _ in range(self._num_workers)
        ]
        # A thread a process: it waits for the answer, and both do without the interpreter's lock meanwhile.
        self._threads = ThreadPoolExecutor(self._num_workers)
        for process in self._processes:
            self._threads.submit(self._start, process)
        return self

    def submit(self, conversations: list[Conversation]) -> Future[TokenizedBatch]:
        """Has a batch tokenised by the process that is free first."""
        return self._threads.submit(self._work, conversations)

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with contextlib.suppress(OSError):  # a batch that was still on its way
                process.communicate()

    def _start(self, process: subprocess.Popen[bytes]) -> None:
        try:
            assert process.stdin is not None
            process.stdin.write(self._first_message)
            process.stdin.flush()
        except OSError:
            pass  # its end is said by the first batch that it is given
        self._idle.put(process)

    def _work(self, conversations: list[Conversation]) -> TokenizedBatch:
        process = self._idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(conversations, process.stdin)
            process.stdin.flush()
            batch: TokenizedBatch = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise RuntimeError(
                f"a process that tokenises ended with exit code {process.wait()}; its message is above. -9 is a lack of memory: "
                "lower data.num_workers"
            ) from error
        finally:
            self._idle.put(process)
        return batch


def serve() -> None:
    """The process: a tokenizer and max_length from stdin, then batches, until stdin ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    try:
        tokenizer, max_length = pickle.load(requests)
        chat = ChatTokenizer(tokenizer)
        while True:
            pickle.dump(tokenize_batch(chat, pickle.load(requests), max_length), answers)
            answers.flush()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # nobody asks any more
