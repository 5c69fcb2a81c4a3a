"""Sends an object as data/workers.py sends it to another process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import TypeVar

T = TypeVar("T")


def sent(thing: T) -> T:
    """What comes out of the other end; a thread writes, since a pipe holds less than a tokenizer."""
    here, there = Pipe()
    with here, there, ThreadPoolExecutor(1) as thread:
        written = thread.submit(here.send, thing)
        received: T = there.recv()
        written.result()
    return received
