"""The draft vocabulary and its two maps."""

from __future__ import annotations

import numpy as np
import pytest

from data.vocab import DraftVocabulary, choose_draft_vocabulary, count_supervised_tokens


def test_only_supervised_tokens_are_counted():
    samples = [(np.array([1, 2, 2, 3]), np.array([False, True, True, False])), (np.array([3]), np.array([True]))]
    assert count_supervised_tokens(samples, 5).tolist() == [0, 0, 2, 1, 0]


def test_the_most_frequent_tokens_are_chosen_sorted_by_id_and_ties_go_to_the_lower_id():
    vocabulary = choose_draft_vocabulary(np.array([1, 5, 0, 5, 1, 8]), 4)
    assert vocabulary.ids == (0, 1, 3, 5)
    assert vocabulary.coverage == pytest.approx(19 / 20)


def test_d2t_is_an_offset_and_t2d_marks_the_same_tokens():
    vocabulary = DraftVocabulary(ids=(0, 1, 3, 5), target_vocab_size=6, coverage=1.0)
    assert vocabulary.d2t_W.tolist() == [0, 0, 1, 2]
    assert vocabulary.t2d_V.tolist() == [True, True, False, True, False, True]


def test_a_saved_vocabulary_comes_back(tmp_path):
    vocabulary = DraftVocabulary(ids=(0, 1, 3, 5), target_vocab_size=6, coverage=0.9)
    vocabulary.save(tmp_path / "draft_vocab.json")
    assert DraftVocabulary.load(tmp_path / "draft_vocab.json") == vocabulary


@pytest.mark.parametrize("ids", [(1, 1), (2, 1), (0, 6), (-1, 2), ()])
def test_ids_that_cannot_be_a_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="draft vocabulary ids must"):
        DraftVocabulary(ids=ids, target_vocab_size=6, coverage=1.0)


def test_sizes_out_of_range_and_empty_counts_are_refused():
    with pytest.raises(ValueError, match="size is 7, expected 1 to the target's 6"):
        choose_draft_vocabulary(np.ones(6, dtype=int), 7)
    with pytest.raises(ValueError, match="no supervised token"):
        choose_draft_vocabulary(np.zeros(6, dtype=int), 2)
