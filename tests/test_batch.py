"""The shifts, against index tables written by hand."""

from __future__ import annotations

import pytest
import torch

from data.batch import Features, drafter_batch

# Two documents: tokens 10..14 (assistant from the third token on) and 20..22 (assistant from the second on).
IDS = [10, 11, 12, 13, 14, 20, 21, 22]
MASK = [0, 0, 1, 1, 1, 0, 1, 1]


def batch():
    return drafter_batch(Features(torch.tensor(IDS), torch.tensor(MASK).bool(), (5, 3), None, None))


def test_positions_restart_at_each_document():
    assert batch().position_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch().remaining_T.tolist() == [4, 3, 2, 1, 0, 2, 1, 0]


@pytest.mark.parametrize(
    "step, known, predicted",
    [
        (0, [11, 12, 13, 14, 0, 21, 22, 0], [12, 13, 14, 0, 0, 22, 0, 0]),
        (1, [12, 13, 14, 0, 0, 22, 0, 0], [13, 14, 0, 0, 0, 0, 0, 0]),
        (2, [13, 14, 0, 0, 0, 0, 0, 0], [14, 0, 0, 0, 0, 0, 0, 0]),
        (6, [0] * 8, [0] * 8),
        (9, [0] * 8, [0] * 8),
    ],
)
def test_known_and_predicted_tokens_never_cross_a_document(step, known, predicted):
    assert batch().known_tokens(step).tolist() == known
    assert batch().predicted_tokens(step).tolist() == predicted


@pytest.mark.parametrize(
    "step, supervised",
    [
        # Pair 1 knows x2, the first assistant token, and predicts x3: the first draft of the answer is trained.
        (0, [0, 1, 1, 0, 0, 1, 0, 0]),
        (1, [1, 1, 0, 0, 0, 0, 0, 0]),
        (2, [1, 0, 0, 0, 0, 0, 0, 0]),
        (3, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_supervision_needs_known_and_predicted_token_in_the_answer(step, supervised):
    assert batch().supervised(step).int().tolist() == supervised


def test_teacher_row_is_the_position_that_chooses_the_predicted_token():
    rows, predicted = batch().teacher_rows(1), batch().predicted_tokens(1)
    for pair in batch().supervised(1).nonzero()[:, 0].tolist():
        assert IDS[rows[pair] + 1] == predicted[pair]


def test_features_whose_lengths_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="document lengths sum to 7, but the pack holds 8 tokens"):
        Features(torch.tensor(IDS), torch.tensor(MASK).bool(), (5, 2), None, None)
    with pytest.raises(ValueError, match="last_TH has 3 rows, expected 8"):
        Features(torch.tensor(IDS), torch.tensor(MASK).bool(), (5, 3), None, torch.zeros(3, 2))
