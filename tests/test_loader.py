"""The stream of packs: every document once an epoch, the same for any number of ranks, resumable by step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from data.loader import PackPlan, check_divisible, load_steps

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


def test_prefetching_changes_nothing():
    lazy = take(load_steps(plan(), list, 0, 0, 1, is_prefetched=False), 8)
    assert take(load_steps(plan(), list, 0, 0, 1, is_prefetched=True), 8) == lazy


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
