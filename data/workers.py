"""Batches of conversations to Arrow, here or in other processes.

Place in the flow: `Conversation` -> data/chat.py -> `TokenizedBatch` -> data/prepare.py writes it. What goes back and forth are a few
buffers a batch, not an object a token.

Not a pool of `multiprocessing`: forking does not survive the tokenizer's threads and torch, and spawning imports the main script again with all that
training needs, which takes longer than tokenising two thousand conversations. A process here is this module alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.chat import ChatTokenizer, SampleError, TokenizedSample
from data.conversations import Conversation

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
    """Processes that tokenise; a context manager, which starts and ends them. They begin with the words and roles that `chat` has met.

    Raises:
        RuntimeError: from a batch's result, if a process ends before it has answered.
    """

    def __init__(self, num_workers: int, chat: ChatTokenizer, max_length: int) -> None:
        self._num_workers = num_workers
        self._first_message = (chat, max_length)

    def __enter__(self) -> Workers:
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_start() for _ in range(self._num_workers)]
        # A thread a process: it waits for the answer, and both do without the interpreter's lock meanwhile.
        self._threads = ThreadPoolExecutor(self._num_workers)
        for worker in self._workers:
            self._threads.submit(self._welcome, worker)
        return self

    def submit(self, conversations: list[Conversation]) -> Future[TokenizedBatch]:
        """Has a batch tokenised by the process that is free first."""
        return self._threads.submit(self._work, conversations)

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.process.wait()
            worker.pipe.close()

    def _welcome(self, worker: _Worker) -> None:
        with contextlib.suppress(OSError):  # its end is said by the first batch that it is given
            worker.pipe.send(self._first_message)
        self._idle.put(worker)

    def _work(self, conversations: list[Conversation]) -> TokenizedBatch:
        worker = self._idle.get()
        try:
            worker.pipe.send(conversations)
            batch: TokenizedBatch = worker.pipe.recv()
        except (OSError, EOFError) as error:
            raise RuntimeError(
                f"a process that tokenises ended with exit code {worker.process.wait()}; what it said is above, and -9 is a lack of "
                "memory: lower data.num_workers"
            ) from error
        finally:
            self._idle.put(worker)
        return batch


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection


def _start() -> _Worker:
    here, there = Pipe()
    command = [sys.executable, "-c", "import sys; from data.workers import serve; serve(int(sys.argv[1]))", str(there.fileno())]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # the processes are the parallelism
    root = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], cwd=root, env=environment)
    there.close()
    return _Worker(process, here)


def serve(pipe_fd: int) -> None:
    """The process: a `ChatTokenizer` and max_length come through the pipe, then batches, until it is closed."""
    pipe = Connection(pipe_fd)
    try:
        chat, max_length = pipe.recv()
        while True:
            pipe.send(tokenize_batch(chat, pipe.recv(), max_length))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # nobody asks any more
