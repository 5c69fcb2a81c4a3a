"""Lookahead decoding guesses with the paper's window and keeps its n-grams. That it is lossless is in test_untrained_methods.py."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from data.target import Target
from eval.decode.lookahead import Lookahead, NGramPool
from eval.decode.loop import Method, Seen, decode
from eval.decode.tree import ROOT, DraftTree, ancestors_of, depths_of
from eval.decode.verify import Greedy

V = 64
PROMPTS = [[5], [1, 2, 3], [7, 7, 20, 3, 9, 11, 40], [63, 0, 12, 12]]
NO_STATES: Any = None  # Lookahead reads none


def llama(initializer_range: float) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config), tokenizer=None)


@pytest.fixture(scope="module")
def target() -> Target:
    """A target whose answers vary."""
    return llama(0.3)


@pytest.fixture(scope="module")
def repeating() -> Target:
    """A target whose answers soon repeat themselves."""
    return llama(0.1)


@torch.no_grad()
def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation without any cache: the independent reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def logits_with_argmax(wanted: dict[int, int], num_rows: int) -> Tensor:
    """[1, R, V] whose rows have their maxima at these tokens."""
    logits = torch.zeros(1, num_rows, V)
    for row, token in wanted.items():
        logits[0, row, token] = 1
    return logits


def guesses_at(method: Method, tree: DraftTree, rows: list[int], guesses: list[int]) -> None:
    """The target says these guesses at these rows, and token 63 everywhere else."""
    wanted = dict.fromkeys(range(tree.num_nodes + 1), 63) | dict(zip(rows, guesses, strict=True))
    method.observe(logits_with_argmax(wanted, tree.num_nodes + 1))


def draft(method: Method, *contexts: list[int]) -> DraftTree:
    return method.draft(Seen(contexts, NO_STATES))[0]


def seen_nodes(tree: DraftTree) -> list[list[int]]:
    """For each node the nodes that it sees beside the text and itself, nearest last."""
    return [[other for other in range(node) if sees[other + 1]] for node, sees in enumerate(ancestors_of(tree.parents)[1:].tolist())]


# --- the window -------------------------------------------------------------------------------------------------------


def test_window_attention_and_positions_by_hand() -> None:
    """W = 3, N = 4: after two steps of warm-up a newest token and rows of 2, 3 and 3 guesses, as in figure 2 of the paper."""
    method = Lookahead(window=3, ngram=4, guesses=2)
    method.start(1, 100)
    tree = draft(method, [8, 8, 8])
    # Warm-up, first step: row 0 alone, N - 2 columns wider than W: the newest token and four guesses, all random tokens of the text.
    assert (tree.token_ids, tree.parents, tree.num_drafts) == ((8, 8, 8, 8), (-1, 0, 1, 2), 0)
    guesses_at(method, tree, [0, 1, 2, 3, 4], [63, 11, 12, 13, 14])
    # Second step: the first column has become the newest token. Row 0: newest 8 8 8; row 1: 11 12 13 14.
    tree = draft(method, [8, 8, 8, 9])
    assert tree.token_ids == (8, 8, 8, 11, 12, 13, 14)
    assert tree.parents == (-1, 0, 1, -1, 0, 1, 2)
    guesses_at(method, tree, [4, 5, 6, 7], [63, 21, 22, 23])
    # Full: row 0: newest 8 8; row 1: 12 13 14; row 2: 21 22 23. Nothing was put into the pool so far.
    tree = draft(method, [8, 8, 8, 9, 8])
    assert tree.num_drafts == 0
    assert tree.token_ids == (8, 8, 12, 13, 14, 21, 22, 23)
    assert depths_of(tree.parents) == (0, 1, 2, 1, 2, 3, 2, 3, 4)
    assert seen_nodes(tree) == [
        [],  # row 0 is causal
        [0],
        [],  # row 1, column 0: the newest token alone
        [0],
        [0, 1],
        [2],  # row 2: row 0 up to its column, and its column of row 1
        [0, 3],
        [0, 1, 4],
    ]
    # The columns and the new guesses 31 32 33 are n-grams: 8 12 21 31, 8 13 22 32, 8 14 23 33; the latest two of a first token are kept.
    guesses_at(method, tree, [6, 7, 8], [31, 32, 33])
    # Rows have moved up: row 0: newest 13 14; row 1: 21 22 23; row 2: 31 32 33.
    tree = draft(method, [8, 8, 8, 9, 8, 8])
    assert tree.num_drafts == 6
    assert tree.token_ids == (14, 23, 33, 13, 22, 32, 13, 14, 21, 22, 23, 31, 32, 33)
    assert seen_nodes(tree) == [[], [0], [0, 1], [], [3], [3, 4], [], [6], [], [6], [6, 7], [8], [6, 9], [6, 7, 10]]
    # The last row stands behind the candidates now.
    guesses_at(method, tree, [12, 13, 14], [41, 42, 43])
    assert draft(method, [8, 8, 8, 9, 8, 8, 13]).token_ids == (22, 32, 42, 22, 23, 31, 32, 33, 41, 42, 43)


def test_the_smallest_window_is_the_newest_token_and_its_bigrams() -> None:
    method = Lookahead(window=1, ngram=2, guesses=1)
    method.start(1, 10)
    assert draft(method, [4]) == DraftTree(num_drafts=0)
    guesses_at(method, DraftTree(), [0], [6])
    assert draft(method, [4, 6]).token_ids == ()
    guesses_at(method, DraftTree(), [0], [4])
    assert draft(method, [4, 6, 4]).token_ids == (6,)


def test_equal_beginnings_of_candidates_share_nodes_and_guesses_count_ngrams() -> None:
    method = Lookahead(window=1, ngram=4, guesses=3, has_prompt_pool=True)
    method.start(1, 100)
    text = [1, 9, 9, 9, 1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 7, 1]
    tree = draft(method, text)
    drafts = DraftTree(tree.token_ids[: tree.num_drafts], tree.parents[: tree.num_drafts])
    assert drafts == DraftTree((2, 6, 7, 3, 5, 4), (ROOT, 0, 1, 0, 3, 3))  # 2 6 7, 2 3 5, 2 3 4: three n-grams; 9 9 9 had to go


def test_w_n_and_g_are_what_the_paper_calls_so(repeating: Target) -> None:
    """Each in its own place: rows and depth by N, columns by W, candidates by G."""
    for window, ngram, guesses in itertools.permutations((2, 4, 7)):
        method = Lookahead(window, ngram, guesses)
        assert method.longest_path == ngram - 1
        trees = trees_of(repeating, method, PROMPTS[2], 60)
        for step, tree in enumerate(trees):
            own = tree.num_nodes - (tree.num_drafts or 0)
            num_rows = min(step + 1, ngram - 1)
            assert own + 1 == num_rows * (window + ngram - 1 - num_rows)
            assert tree.num_nodes <= method.most_nodes
        leaves = [set(range(tree.num_drafts or 0)) - set(tree.parents[: tree.num_drafts]) for tree in trees]
        assert max(map(len, leaves)) <= guesses
    assert (Lookahead().longest_path, Lookahead().most_nodes) == (4, 4 * 15 + 4 * 15 - 1)


def trees_of(target: Target, method: Method, prompt: list[int], max_new_tokens: int) -> list[DraftTree]:
    """All the trees of one answer."""
    trees: list[DraftTree] = []
    original = method.draft
    method.draft = lambda seen: [trees.append(tree) or tree for tree in original(seen)]  # type: ignore[func-returns-value, method-assign]
    decode(target, method, [prompt], Greedy(), max_new_tokens, ())
    return trees


@torch.no_grad()
def test_the_new_guesses_are_the_targets_own_after_each_path(target: Target) -> None:
    """Every n-gram of the pool ends with what the target says, without any cache, after the text and its column."""
    method = Lookahead(window=4, ngram=3, guesses=50)
    contexts: list[list[int]] = []
    windows: list[DraftTree] = []
    original = method.draft

    def recording(seen: Seen) -> list[DraftTree]:
        contexts.append(list(seen.contexts[0]))
        windows.extend(trees := original(seen))
        return trees

    method.draft = recording  # type: ignore[method-assign]
    decode(target, method, [PROMPTS[2]], Greedy(), 6, ())
    [lane] = method._lanes
    expected = []
    for context, tree in zip(contexts, windows, strict=True):
        first_of_last_row = tree.num_nodes - 4
        if depths_of(tree.parents)[1:] and len(tree.token_ids) - (tree.num_drafts or 0) == 7:
            for node in range(first_of_last_row, tree.num_nodes):
                path, at = [], node
                while at != ROOT:
                    path, at = [tree.token_ids[at], *path], tree.parents[at]
                guess = int(target.model(torch.tensor([context + path])).logits[0, -1].argmax())
                expected.append(tuple([context[-1], *path, guess][-3:]))
    assert len(expected) >= 12
    for ngram in expected:
        assert ngram[1:] in lane.pool.starting_with(ngram[0])


def test_the_window_moves_on_by_the_tokens_that_were_accepted() -> None:
    """Every guess stays at its position of the text; the far end begins anew with tokens of the text."""
    method = Lookahead(window=4, ngram=3, guesses=1)
    method.start(1, 100)
    tree = draft(method, [8])
    guesses_at(method, tree, [0, 1, 2, 3, 4], [63, 11, 12, 13, 14])
    tree = draft(method, [8, 9])
    assert tree.token_ids == (8, 8, 8, 11, 12, 13, 14)
    guesses_at(method, tree, [4, 5, 6, 7], [21, 22, 23, 24])
    # Rows after one token: 12 13 14 and 21 22 23 24. Two more tokens take two columns: the newest token stands where 13 was guessed.
    tree = draft(method, [8, 9, 8, 9, 9])
    assert tree.num_drafts == 2  # of 9 the pool knows 11 21
    row_0, row_1 = tree.token_ids[2:5], tree.token_ids[5:]
    assert row_0[:1] == (14,) and {*row_0[1:]} <= {8, 9}
    assert row_1[:2] == (23, 24) and {*row_1[2:]} <= {8, 9}
    # More tokens than columns: nothing of it is left.
    guesses_at(method, tree, [6, 7, 8, 9], [31, 32, 33, 34])
    tree = draft(method, [8, 9, 8, 9, 9, *[50] * 9])
    assert {*tree.token_ids[tree.num_drafts :]} <= {8, 9, 50}


def test_the_random_tokens_of_a_sequence_are_its_own_and_repeatable() -> None:
    texts = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]

    def windows(seed: int, *contexts: list[int]) -> list[DraftTree]:
        method = Lookahead(window=9, ngram=3, guesses=2, seed=seed)
        method.start(len(contexts), 100)
        return method.draft(Seen(contexts, NO_STATES))

    both = windows(0, *texts)
    assert both == [*windows(0, texts[0]), *windows(0, texts[1])]
    assert {*both[0].token_ids} <= {*texts[0]} and len({*both[0].token_ids}) > 2
    assert windows(1, texts[0]) != windows(0, texts[0])


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_the_pool_keeps_the_latest_ngrams_of_each_first_token() -> None:
    pool = NGramPool(guesses=2)
    for ngram in [(1, 2, 3), (1, 4, 5), (7, 8, 9), (1, 2, 3), (1, 6, 6)]:
        pool.add(ngram)
    assert pool.starting_with(1) == [(6, 6), (2, 3)]  # 1 4 5 was the longest unused; seeing 1 2 3 again had renewed it
    assert pool.starting_with(7) == [(8, 9)]
    assert pool.starting_with(2) == []


def test_the_prompt_pool_holds_the_text_and_nothing_else() -> None:
    method = Lookahead(window=2, ngram=3, guesses=5, has_prompt_pool=True)
    method.start(1, 100)
    draft(method, [1, 2, 3, 4])
    pool = method._lanes[0].pool
    assert [pool.starting_with(token) for token in (1, 2, 3)] == [[(2, 3)], [(3, 4)], []]
    tree = draft_after_any_guess(method, [1, 2, 3, 4, 2, 1])
    assert [pool.starting_with(token) for token in (1, 2, 3, 4)] == [[(2, 3)], [(3, 4)], [(4, 2)], [(2, 1)]]
    assert tree.token_ids[: tree.num_drafts] == (2, 3)


def draft_after_any_guess(method: Lookahead, context: list[int]) -> DraftTree:
    method.observe(torch.zeros(1, 20, V))
    return draft(method, context)


def test_pool_bytes_are_the_largest_of_any_sequence_and_forgotten_at_the_start(target: Target) -> None:
    method = Lookahead(window=4, ngram=3, guesses=4)
    assert method.pool_bytes < 100
    decode(target, method, PROMPTS, Greedy(), 40, ())
    many = method.pool_bytes
    assert many == max(lane.pool.num_bytes for lane in method._lanes) > 2000
    method.keep([])
    assert method.pool_bytes == many
    decode(target, method, PROMPTS, Greedy(), 8, ())
    assert method.pool_bytes < many / 2


# --- acceptance -------------------------------------------------------------------------------------------------------


def test_lookahead_finds_what_repeats_itself(repeating: Target) -> None:
    for prompt in PROMPTS:
        answer = greedy(repeating, prompt, 90)
        assert any(answer[-period:] == answer[-2 * period : -period] for period in range(1, 20)), "a periodic end"
    assert decode(repeating, Lookahead(), PROMPTS, Greedy(), 90, ()).acceptance.tau > 1.5


def test_the_prompt_pool_helps_where_the_answer_repeats_the_prompt(repeating: Target) -> None:
    """The prompts already repeat what their answers go on repeating."""
    prompts = [[*prompt, *greedy(repeating, prompt, 60)] for prompt in PROMPTS]
    without, with_pool = (decode(repeating, Lookahead(3, 4, 5, pool), prompts, Greedy(), 16, ()).acceptance.tau for pool in (False, True))
    assert with_pool > without + 0.5


@pytest.mark.parametrize("arguments", [(0, 5, 15), (15, 1, 15), (15, 5, 0)])
def test_a_window_of_nothing_is_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1, 2 and 1"):
        Lookahead(*arguments)
