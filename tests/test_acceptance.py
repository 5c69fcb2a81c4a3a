"""The walk visits exactly the verifications an engine would make, and the counts become tau and acceptance as defined."""

from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import DrafterBatch, Features
from eval.acceptance import (
    Acceptance,
    Trajectory,
    TrajectoryPack,
    TrajectorySpan,
    chain_acceptance,
    count_near_ties,
    read_trajectories,
    trajectory_features,
    walk,
    write_trajectories,
)
from train.drafters.base import FeatureRequest

# n = 3 prompt tokens, m = 4 answer tokens, K = 2. Pairs by column: x0 x1 x2 y0 y1 y2 y3 e0; the walk begins at pair 2.
WALKS = {
    "everything agrees: y1 y2 and the bonus y3 end the answer": (["11111111", "11111111"], [2]),
    "nothing agrees: three verifications emit y1, y2, y3": (["00000000", "00000000"], [0, 0, 0]),
    "a later draft is void when an earlier one is wrong": (["00000000", "11111111"], [0, 0, 0]),
    "one accepted jumps from pair 2 to pair 4, which accepts past the end": (["00101000", "00001000"], [1, 2]),
    "pairs that are jumped over do not count": (["00110000", "00000000"], [1, 0]),
    "only pairs of the answer count": (["11000111", "11000111"], [0, 0, 0]),
}


@pytest.mark.parametrize("name", WALKS)
def test_walk_equals_hand_computed_verifications(name: str) -> None:
    rows, expected = WALKS[name]
    agreement = torch.tensor([[mark == "1" for mark in row] for row in rows])
    assert walk(agreement, first_pair=2, num_answer_tokens=4) == expected


def test_walk_of_a_one_token_answer_has_no_verification() -> None:
    assert walk(torch.ones(2, 8, dtype=torch.bool), first_pair=2, num_answer_tokens=1) == []


def test_acceptance_numbers_equal_hand_computation() -> None:
    # Prompt A: 2, 0, 0 accepted -> 5 tokens in 3; prompt B: 1 accepted -> 2 tokens in 1.
    acceptance = Acceptance.from_walks([[2, 0, 0], [1]], draft_length=3)
    assert acceptance.accepted_at == (2, 1, 0)
    assert (acceptance.num_tokens, acceptance.num_verifications, acceptance.num_prompts) == (7, 4, 2)
    assert acceptance.tau == 7 / 4
    assert acceptance.tau_macro == pytest.approx((5 / 3 + 2) / 2)
    assert acceptance.joint_acceptance == [0.5, 0.25, 0.0]
    assert acceptance.conditional_acceptance == [0.5, 0.5, 0.0]
    assert acceptance.tau == 1 + sum(acceptance.joint_acceptance)


def test_acceptance_adds_up_over_prompts() -> None:
    walks = [[2, 0, 0], [1], [], [3, 3]]
    parts = [Acceptance.from_walks([one], draft_length=3) for one in walks]
    assert parts[0] + parts[1] + parts[2] + parts[3] == Acceptance.from_walks(walks, draft_length=3)
    with pytest.raises(ValueError, match="chains of 3 and 2"):
        parts[0] + Acceptance.from_walks([[1]], draft_length=2)


def test_prompts_without_verifications_change_neither_average() -> None:
    with_empty = Acceptance.from_walks([[1], [], [0, 0]], draft_length=2)
    assert with_empty.tau == 4 / 3
    assert with_empty.tau_macro == 1.5
    assert with_empty.num_prompts == 3


def test_no_verification_at_all_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="none of the 2 answers has a second token"):
        _ = Acceptance.from_walks([[], []], draft_length=2).tau


def test_bootstrap_interval_is_reproducible_and_has_no_width_for_equal_prompts() -> None:
    equal = Acceptance.from_walks([[1, 0]] * 5, draft_length=2)
    assert equal.tau_interval() == (1.5, 1.5)
    # One prompt at tau 3 and one at tau 1, equally many verifications: the resampled tau is 3, 2 or 1 with 1/4, 1/2, 1/4.
    mixed = Acceptance.from_walks([[2, 2], [0, 0]], draft_length=2)
    assert mixed.tau_interval(seed=1) == mixed.tau_interval(seed=1) == (1.0, 3.0)


# --- from drafts to counts --------------------------------------------------------------------------------------------


class TableDrafter(torch.nn.Module):
    """Drafts the token that a table gives for the last known one."""

    def __init__(self, table: list[int]) -> None:
        super().__init__()
        self.table = torch.tensor(table)

    def feature_request(self) -> FeatureRequest:
        return FeatureRequest(aux_layers=(), last=False)

    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        return torch.stack([self.table[batch.known_tokens(step)] for step in range(num_drafts)])


class EchoTarget:
    """Stands for a target whose states nobody reads."""

    def features(self, input_ids_T: Tensor, loss_mask_T: Tensor, document_lengths: Any, aux_layers: Any, last: bool) -> Features:
        return Features(input_ids_T, loss_mask_T, tuple(document_lengths), None, None)


def engine_walk(trajectory: Trajectory, table: list[int], draft_length: int) -> list[int]:
    """What an engine does, step by step: draft from the newest token, compare with the target's continuation, go on after the
    bonus token."""
    continuation = trajectory.answer_ids + trajectory.extra_ids
    emitted, accepted_counts = 1, []
    while emitted < len(trajectory.answer_ids):
        newest, accepted = continuation[emitted - 1], 0
        for _ in range(draft_length):
            newest = table[newest]
            if newest != continuation[emitted + accepted]:
                break
            accepted += 1
        accepted_counts.append(accepted)
        emitted += accepted + 1
    return accepted_counts


def random_trajectories(seed: int, num_extra: int) -> list[Trajectory]:
    """Sequences over four tokens, so that a table drafter is often right."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 4, (count,), generator=generator).tolist())

    lengths = torch.randint(1, 9, (6, 2), generator=generator).tolist()
    return [Trajectory(tokens(prompt), tokens(answer), tokens(num_extra)) for prompt, answer in lengths]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pack_tokens", [1, 30, 1000])
def test_chain_acceptance_of_packs_equals_an_engine_prompt_by_prompt(seed: int, pack_tokens: int) -> None:
    trajectories, table, draft_length = random_trajectories(seed, num_extra=2), [1, 2, 2, 0], 3
    packs = trajectory_features(EchoTarget(), trajectories, FeatureRequest((), False), pack_tokens)
    expected = Acceptance.from_walks([engine_walk(one, table, draft_length) for one in trajectories], draft_length)
    assert chain_acceptance(TableDrafter(table), packs, draft_length) == expected


def test_packs_keep_the_order_and_hold_whole_trajectories() -> None:
    trajectories = [Trajectory((1, 1), (2,), (3,)), Trajectory((4,), (5, 5), ()), Trajectory((6,) * 9, (7,), (8,))]
    packs = trajectory_features(EchoTarget(), trajectories, FeatureRequest((), False), pack_tokens=7)
    assert [pack.features.input_ids_T.tolist() for pack in packs] == [[1, 1, 2, 3, 4, 5, 5], [6] * 9 + [7, 8]]
    assert [pack.features.document_lengths for pack in packs] == [(4, 3), (11,)]
    assert packs[0].spans == (TrajectorySpan(0, 2, 1, 1), TrajectorySpan(4, 1, 2, 0))
    assert packs[0].features.loss_mask_T.tolist() == [False, False, True, False, False, True, True]


def test_too_few_tokens_past_the_end_are_an_error_not_a_lower_acceptance() -> None:
    packs = trajectory_features(EchoTarget(), [Trajectory((1,), (2, 2), (2,))], FeatureRequest((), False), 100)
    chain_acceptance(TableDrafter([0] * 4), packs, draft_length=2)
    with pytest.raises(ValueError, match="1 tokens past its answer, but a chain of 3 drafts looks 2 past"):
        chain_acceptance(TableDrafter([0] * 4), packs, draft_length=3)


# --- near ties --------------------------------------------------------------------------------------------------------


def test_near_ties_count_answer_and_extra_tokens_that_are_not_the_argmax() -> None:
    # Prompt 0 1, answer 2 3, extra 1. Rows 1, 2, 3 choose tokens 2, 3, 1; row 0 chooses a prompt token and does not count.
    logits_TV = torch.tensor([[9.0, 0, 0, 0], [0, 0, 5, 0], [0, 0, 2.5, 2.25], [0, 1, 0, 0], [7, 0, 0, 0]])
    features = Features(torch.tensor([0, 1, 2, 3, 1]), torch.tensor([0, 0, 1, 1, 0]).bool(), (5,), None, logits_TV)
    pack = TrajectoryPack(features, (TrajectorySpan(0, 2, 2, 1),))
    near_ties = count_near_ties([pack], torch.eye(4))
    assert (near_ties.num_tokens, near_ties.num_ties, near_ties.largest_gap) == (3, 1, 0.25)


# --- files ------------------------------------------------------------------------------------------------------------


def test_trajectories_survive_their_file(tmp_path: Any) -> None:
    trajectories = [Trajectory((1, 2), (3,), ()), Trajectory((4,), (5, 6), (7, 8))]
    write_trajectories(tmp_path / "answers.jsonl", trajectories)
    assert read_trajectories(tmp_path / "answers.jsonl") == trajectories


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_ids": [1]',
        "[1, 2]",
        '{"prompt_ids": [1], "answer_ids": [2]}',
        '{"prompt_ids": [], "answer_ids": [], "extra_ids": []}',
    ],
)
def test_a_broken_trajectory_names_file_and_line(tmp_path: Any, line: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt_ids": [1], "answer_ids": [2], "extra_ids": []}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 2 is no trajectory"):
        read_trajectories(path)
