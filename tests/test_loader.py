"""The stream of packs: every document once an epoch, the same for any number of ranks, resumable by step."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from datasets import Dataset

from data.loader import PackPlan, check_divisible, load_steps, shuffled_once

LENGTHS = np.array([5, 9, 3, 10, 1, 7, 7, 2, 6, 4, 8])


def plan(packs_per_step=2, seed=0):
    return PackPlan(lengths=LENGTHS, pack_tokens=10, packs_per_step=packs_per_step, seed=seed)


def take(steps, count):
    return list(itertools.islice(steps, count))


def test_an_epoch_holds_every_document_once_and_no_pack_is_over_budget():
    for epoch in range(5):
        packs = plan().epoch_packs(epoch)
        assert sorted(itertools.chain(*packs)) == list(range(len(LENGTHS)))
        assert all(LENGTHS[pack].sum() <= 10 for pack in packs)


def test_an_epoch_shuffles_within_windows_of_neighbouring_blocks():
    """100 documents of one token, blocks of 5, 8 blocks a window: two windows of 40 and one of 20, each of whole blocks."""
    many = PackPlan(np.ones(100, dtype=int), pack_tokens=10, packs_per_step=1, seed=0, block_tokens=5)
    orders = [many.epoch_order(epoch).tolist() for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(100))
        for first, end in ((0, 40), (40, 80), (80, 100)):
            blocks = {document // 5 for document in order[first:end]}
            assert len(blocks) == (end - first) // 5
            assert order[first:end] != sorted(order[first:end])
    windows = [{document // 5 for document in order[:40]} for order in orders]
    assert windows[0] != windows[1] != windows[2]


def test_what_fits_one_window_is_shuffled_wholly():
    """Every document comes first as often as any other: 11 documents, 2,200 epochs, 200 each; 7 standard deviations are 94."""
    firsts = np.bincount([plan().epoch_order(epoch)[0] for epoch in range(2200)], minlength=len(LENGTHS))
    assert (np.abs(firsts - 200) < 94).all()


def test_samples_are_shuffled_once_and_always_alike():
    samples = Dataset.from_dict({"number": list(range(50))})
    order = shuffled_once(samples)["number"][:]
    assert sorted(order) == list(range(50)) and order != list(range(50))
    assert shuffled_once(samples)["number"][:] == order


def test_epochs_and_seeds_differ_and_repeat():
    assert plan().epoch_packs(0) != plan().epoch_packs(1)
    assert plan().epoch_packs(0) != plan(seed=1).epoch_packs(0)
    assert plan().epoch_packs(3) == plan().epoch_packs(3)


@pytest.mark.parametrize("first_step", [0, 1, 2, 7, 23])
def test_a_resumed_stream_goes_on_exactly(first_step):
    whole = take(plan().steps(0), 30)
    assert take(plan().steps(first_step), 30 - first_step) == whole[first_step:]


def test_ranks_share_the_global_batch_of_one_process():
    def documents(rank, world_size):
        return take(load_steps(plan(packs_per_step=4), list, 3, rank, world_size, is_prefetched=False), 5)

    for step, (alone, first, second) in enumerate(zip(documents(0, 1), documents(0, 2), documents(1, 2), strict=True)):
        assert alone[0::2] == first and alone[1::2] == second, step


@pytest.mark.parametrize("packs_per_step", [1, 2, 20])
@pytest.mark.parametrize("first_step", [0, 5])
def test_prefetching_changes_nothing(packs_per_step, first_step):
    """Readers finish in any order; steps and packs keep theirs."""
    rng = random.Random(0)

    def slow(documents):
        time.sleep(rng.random() / 200)
        return list(documents)

    lazy = take(load_steps(plan(packs_per_step), list, first_step, 0, 1, is_prefetched=False), 8)
    assert take(load_steps(plan(packs_per_step), slow, first_step, 0, 1, is_prefetched=True), 8) == lazy


def test_reading_ahead_is_bounded():
    """8 packs ahead, here 4 steps of 2, beside the step that the trainer has."""
    read = []
    steps = load_steps(plan(), lambda documents: read.append(documents) or documents, 0, 0, 1, is_prefetched=True)
    next(steps)
    deadline = time.monotonic() + 5
    while len(read) < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(read) == 10
    steps.close()


def test_an_error_of_a_reader_reaches_the_trainer():
    def broken(documents):
        raise ValueError("shard 3 is damaged")

    with pytest.raises(ValueError, match="shard 3 is damaged"):
        next(load_steps(plan(), broken, 0, 0, 1, is_prefetched=True))


def test_steps_of_a_number_of_epochs_cover_them():
    num_packs = [len(plan().epoch_packs(epoch)) for epoch in range(2)]
    assert plan().num_steps(1) == -(-num_packs[0] // 2)
    assert plan().num_steps(2) == -(-sum(num_packs) // 2)
    assert plan(packs_per_step=100).num_steps(0.01) == 1


def test_impossible_plans_are_refused_with_what_to_change():
    with pytest.raises(ValueError, match="longest document has 10 tokens, but a pack holds 9"):
        PackPlan(LENGTHS, 9, 1, 0)
    with pytest.raises(ValueError, match="no document to train on"):
        PackPlan(np.array([], dtype=int), 9, 1, 0)
    with pytest.raises(ValueError, match=r"3 packs .* 2 ranks cannot share evenly"):
        check_divisible(3, 2)
