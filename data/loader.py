"""Which documents make up each training step, on every rank, reproducibly.

Place in the flow: document lengths -> packs -> `Features` of this rank's packs of a step, read ahead of the trainer.

Documents are shuffled once, before their states are stored (`shuffled_once`). Every epoch then cuts that order into blocks of neighbours, takes the
blocks in a fresh random order, a window of a few at a time, and shuffles the documents of a window: a disk is read in long runs, and what fits in one
window is shuffled wholly. Online the same documents come in the same order.

    stored     b0 b1 b2 b3 b4 b5            documents in an order shuffled once
    epoch 0    {b4 b1 b5} {b0 b3 b2}        windows; documents shuffled within { }
    epoch 1    {b2 b0 b4} {b5 b1 b3}

Packs form one endless stream: epoch after epoch, each shuffled by (seed, epoch) and packed whole documents at a time up to the token budget. Step n
of a run takes packs n*P .. (n+1)*P-1, whatever the number of ranks: rank r of w takes every w-th of them. So the data position of a run is its step
number, one process and many see the same global batches, and a resumed run goes on exactly.

    stream   p0 p1 p2 p3 | p4 p5 p6 p7 | ...      P = 4 packs a step
    2 ranks  r0 r1 r0 r1 | r0 r1 r0 r1 | ...
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset

from data.batch import Features
from data.shards import cut_shards
from data.target import Target

_OPEN_PACKS = 64
_WINDOW_BLOCKS = 8
_PACKS_AHEAD = 8
_NUM_READERS = 2
# A store serves runs of any seed, so its order is of no run.
_STORED_ORDER_SEED = 0


def shuffled_once(samples: Dataset) -> Dataset:
    """The samples in the order in which their states are stored: random, and always the same."""
    return samples.select(np.random.default_rng(_STORED_ORDER_SEED).permutation(len(samples)))


@dataclass(frozen=True)
class PackPlan:
    """How the stream of packs is formed.

    Attributes:
        lengths: tokens of each document.
        pack_tokens: most tokens of a pack (one micro-batch of one rank).
        packs_per_step: packs of a global step.
        seed: of the shuffles.
        block_tokens: tokens of a block of documents that are neighbours on disk: about a shard, but the same for every store.
    """

    lengths: np.ndarray
    pack_tokens: int
    packs_per_step: int
    seed: int
    block_tokens: int = 65536

    def __post_init__(self) -> None:
        if len(self.lengths) == 0:
            raise ValueError("there is no document to train on: look at data_report.json for the reasons records were left out")
        if self.lengths.max() > self.pack_tokens:
            raise ValueError(
                f"the longest document has {self.lengths.max()} tokens, but a pack holds {self.pack_tokens}: "
                "raise train.pack_tokens or lower data.max_length"
            )

    def epoch_order(self, epoch: int) -> np.ndarray:
        """int64: every document once, shuffled within windows of blocks that are in random order."""
        rng = np.random.default_rng((self.seed, epoch))
        blocks = cut_shards(self.lengths, self.block_tokens)
        documents = [np.arange(blocks[index].first, blocks[index].end) for index in rng.permutation(len(blocks))]
        windows = [np.concatenate(documents[first : first + _WINDOW_BLOCKS]) for first in range(0, len(documents), _WINDOW_BLOCKS)]
        return np.concatenate([rng.permutation(window) for window in windows])

    def epoch_packs(self, epoch: int) -> list[list[int]]:
        """The packs of one epoch: every document once, first-fit over a bounded number of open packs."""
        order = self.epoch_order(epoch)
        closed: list[list[int]] = []
        open_packs: list[tuple[int, list[int]]] = []  # (free tokens, documents), oldest first
        for document in order.tolist():
            length = int(self.lengths[document])
            for index, (free, documents) in enumerate(open_packs):
                if free >= length:
                    documents.append(document)
                    open_packs[index] = (free - length, documents)
                    break
            else:
                open_packs.append((self.pack_tokens - length, [document]))
                if len(open_packs) > _OPEN_PACKS:
                    closed.append(open_packs.pop(0)[1])
        return closed + [documents for _, documents in open_packs]

    def num_steps(self, num_epochs: float) -> int:
        """Steps that `num_epochs` take, rounded up; at least one."""
        whole = int(num_epochs)
        packs: float = sum(len(self.epoch_packs(epoch)) for epoch in range(whole))
        packs += (num_epochs - whole) * len(self.epoch_packs(whole)) if num_epochs > whole else 0
        return max(1, int(-(-packs // self.packs_per_step)))

    def steps(self, first_step: int) -> Iterator[list[list[int]]]:
        """The packs (lists of document indices) of each global step from `first_step` on, for ever."""
        starts, epoch, packs = [0], 0, self.epoch_packs(0)
        position = first_step * self.packs_per_step
        while starts[-1] + len(packs) <= position:
            starts.append(starts[-1] + len(packs))
            epoch += 1
            packs = self.epoch_packs(epoch)
        cursor = position - starts[bisect.bisect_right(starts, position) - 1]
        while True:
            step: list[list[int]] = []
            while len(step) < self.packs_per_step:
                if cursor == len(packs):
                    epoch, cursor = epoch + 1, 0
                    packs = self.epoch_packs(epoch)
                step.append(packs[cursor])
                cursor += 1
            yield step


def check_divisible(packs_per_step: int, world_size: int) -> None:
    """Raises ValueError where the packs of a step cannot be dealt evenly to the ranks."""
    if packs_per_step % world_size:
        raise ValueError(
            f"a step has {packs_per_step} packs (train.batch_tokens / train.pack_tokens), which {world_size} ranks cannot share evenly: "
            "change train.batch_tokens or train.pack_tokens"
        )


def token_reader(samples: Dataset, target: Target | None, aux_layers: Sequence[int], last: bool) -> Callable[[Sequence[int]], Features]:
    """A function that reads a pack of documents, with states that the target computes at once where any are wanted.

    Args:
        samples: tokenised documents.
        target: computes the states; None where the drafter wants none.
        aux_layers, last: the states that are wanted.
    """

    def read(documents: Sequence[int]) -> Features:
        chosen = [samples[document] for document in documents]
        ids_T = torch.tensor([token for sample in chosen for token in sample["input_ids"]])
        mask_T = torch.tensor([flag for sample in chosen for flag in sample["loss_mask"]])
        lengths = tuple(len(sample["input_ids"]) for sample in chosen)
        if target is None:
            return Features(ids_T, mask_T, lengths, aux_TX=None, last_TH=None)
        return target.features(ids_T, mask_T, lengths, aux_layers, last)

    return read


def load_steps(
    plan: PackPlan, read: Callable[[Sequence[int]], Features], first_step: int, rank: int, world_size: int, is_prefetched: bool
) -> Iterator[list[Features]]:
    """This rank's packs of each step, read ahead in threads where that helps.

    Args:
        plan: the stream.
        read: features of one pack of documents, from a store or from the online target.
        first_step: where a resumed run goes on.
        rank: this process among `world_size`.
        is_prefetched: true for a store, whose packs are read a few ahead, at least a step; an online target computes where the trainer does and
            gains nothing.
    """
    check_divisible(plan.packs_per_step, world_size)
    steps = (packs[rank::world_size] for packs in plan.steps(first_step))
    if not is_prefetched:
        for packs in steps:
            yield [read(documents) for documents in packs]
    steps_ahead = max(1, _PACKS_AHEAD * world_size // plan.packs_per_step)
    with ThreadPoolExecutor(1, "loader") as loader, ThreadPoolExecutor(_NUM_READERS, "reader") as readers:

        def read_step() -> list[Features]:
            return list(readers.map(read, next(steps)))

        ahead = deque(loader.submit(read_step) for _ in range(steps_ahead))
        try:
            while True:
                current = ahead.popleft().result()
                ahead.append(loader.submit(read_step))
                yield current
        finally:
            for step in ahead:
                step.cancel()
