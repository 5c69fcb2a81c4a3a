"""Verification is lossless: every outcome of the real verifiers enumerated with its probability, against the target's own distribution.

Legend: B sequences, R rows, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eval.decode import verify
from eval.decode.tree import ROOT, DraftTree
from eval.decode.verify import Chance, Greedy, RandomChance, Sampled, Sampling, Typical, Verdict, Verifier, first_accepted

Tokens = tuple[int, ...]
LENGTH = 3  # tokens whose joint distribution is compared
EXACT = 1e-9
BROKEN = 1e-3
T1 = Sampling(temperature=1.0)


# --- Greedy, on trees written by hand ---


def logits_with_argmax(*wanted: int, num_tokens: int = 6) -> Tensor:
    """[1, R, V] whose row r has its maximum at the r-th of these tokens."""
    return torch.nn.functional.one_hot(torch.tensor([wanted]), num_tokens).float()


def greedy(tree: DraftTree, *wanted: int) -> Verdict:
    return Greedy().verify([tree], logits_with_argmax(*wanted))[0]


def test_greedy_gives_just_the_argmax_for_an_empty_tree() -> None:
    assert greedy(DraftTree(), 4) == Verdict((), 4)


def test_greedy_accepts_a_whole_chain_and_adds_the_bonus_token() -> None:
    assert greedy(DraftTree.chain((1, 2, 3)), 1, 2, 3, 5) == Verdict((0, 1, 2), 5)


def test_greedy_stops_at_the_first_draft_that_is_not_the_argmax() -> None:
    # Node 2 would match its own row, but its parent was rejected.
    assert greedy(DraftTree.chain((1, 2, 3)), 1, 4, 3, 5) == Verdict((0,), 4)


def test_greedy_corrects_at_the_root_where_no_sibling_is_the_argmax() -> None:
    assert greedy(DraftTree((1, 2), (ROOT, ROOT)), 3, 1, 2) == Verdict((), 3)


def test_greedy_takes_the_matching_sibling_wherever_it_stands_and_reads_its_row() -> None:
    #  root -> 0:a1, 1:a2 ; 0 -> 2:b3, 3:b4 ; 1 -> 4:c3, 5:c5 ; 5 -> 6:d0
    tree = DraftTree((1, 2, 3, 4, 3, 5, 0), (ROOT, ROOT, 0, 0, 1, 1, 5))
    assert greedy(tree, 2, 3, 5, 1, 1, 1, 0, 4) == Verdict((1, 5, 6), 4)
    assert greedy(tree, 1, 4, 5, 1, 2, 1, 0, 4) == Verdict((0, 3), 2)
    assert greedy(tree, 2, 3, 1, 4, 4, 4, 4, 4) == Verdict((1,), 1)


def test_greedy_takes_the_first_of_two_equal_siblings() -> None:
    assert greedy(DraftTree((1, 1), (ROOT, ROOT)), 1, 2, 3) == Verdict((0,), 2)


@pytest.mark.parametrize("verifier", [Greedy(), Sampled(T1, RandomChance(0)), Typical(1.0, RandomChance(0))])
def test_nodes_that_only_ride_along_are_never_accepted(verifier: Verifier) -> None:
    tree = DraftTree((1, 2, 2), (ROOT, ROOT, 0), num_drafts=1)
    certain = 1000 * logits_with_argmax(1, 2, 3, 4)  # node 2 would be accepted
    assert verifier.verify([tree], certain) == [Verdict((0,), 2)]
    certain = 1000 * logits_with_argmax(2, 0, 3, 4)  # node 1 would be accepted
    assert verifier.verify([tree], certain) == [Verdict((), 2)]


@pytest.mark.parametrize("verifier", [Greedy(), Sampled(T1, RandomChance(0)), Typical(1.0, RandomChance(0))])
def test_each_sequence_of_a_batch_is_judged_by_its_own_rows_and_padding_is_not_read(verifier: Verifier) -> None:
    trees = [DraftTree.chain((1, 2)), DraftTree(), DraftTree((3, 4), (ROOT, ROOT))]
    logits_BRV = torch.cat([1000 * logits_with_argmax(1, 2, 5, 0), 1000 * logits_with_argmax(3, 0, 0, 0), 1000 * logits_with_argmax(4, 1, 2, 0)])
    for sequence, tree in enumerate(trees):
        logits_BRV[sequence, 1 + tree.num_nodes :] = math.nan
    assert verifier.verify(trees, logits_BRV) == [Verdict((0, 1), 5), Verdict((), 3), Verdict((1,), 2)]


# --- Every outcome, with its probability ---


class Branch(Chance):
    """Follows recorded decisions, then the first possible one each time, and notes the alternatives that it passed."""

    def __init__(self, decisions: Tokens) -> None:
        self.decisions, self.taken, self.alternatives, self.probability = decisions, (), [], 1.0

    def _decide(self, probabilities: list[float]) -> int:
        assert all(probability >= 0 for probability in probabilities), probabilities
        if len(self.taken) < len(self.decisions):
            choice = self.decisions[len(self.taken)]
        else:
            choice, *others = [option for option, probability in enumerate(probabilities) if probability > 0]
            self.alternatives += [(*self.taken, other) for other in others]
        self.taken = (*self.taken, choice)
        self.probability *= probabilities[choice]
        return choice

    def accept(self, probability: float) -> bool:
        return self._decide([1 - probability, probability]) == 1

    def sample(self, probs_V: Tensor) -> int:
        return self._decide(probs_V.tolist())  # taken as it is: a distribution that does not sum to one shows in the total


def outcomes(experiment: Callable[[Chance], Tokens]) -> Iterator[tuple[Tokens, float]]:
    unexplored: list[Tokens] = [()]
    while unexplored:
        branch = Branch(unexplored.pop())
        yield experiment(branch), branch.probability
        unexplored += branch.alternatives


@dataclass(frozen=True)
class Table:
    """A toy model: random logits for every prefix."""

    seed: int
    num_tokens: int

    def logits(self, prefix: Tokens) -> Tensor:
        key = sum((token + 1) * 7 ** (place + 1) for place, token in enumerate(prefix))
        return 1.5 * torch.randn(self.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * key + self.seed))

    def probs(self, prefix: Tokens) -> Tensor:
        return self.logits(prefix).softmax(-1)


def wanted_probs(logits_V: Tensor, settings: Sampling) -> list[float]:
    """What the settings mean, written out: scale, keep the top k, then the likeliest until top_p is reached, renormalise."""
    weights = [math.exp(logit / settings.temperature) for logit in logits_V.tolist()]
    kept = sorted(range(len(weights)), key=lambda token: -weights[token])[: settings.top_k]
    total, mass = sum(weights[token] for token in kept), 0.0
    nucleus = []
    for token in kept:
        if settings.top_p is not None and mass >= settings.top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(weights))]


Drafter = Callable[[Chance], DraftTree]


def one_step(target: Table, draft: Drafter, make_verifier: Callable[[Chance], Verifier]) -> Callable[[Chance], Tokens]:
    """Drafts, one forward of the target, the verdict: the emitted tokens."""

    def experiment(chance: Chance) -> Tokens:
        tree = draft(chance)
        prefixes: list[Tokens] = [()]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            prefixes.append((*prefixes[parent + 1], token))
        logits_RV = torch.stack([target.logits(prefix) for prefix in prefixes])
        [verdict] = make_verifier(chance).verify([tree], logits_RV[None])
        assert all(tree.parents[node] == parent for parent, node in itertools.pairwise((ROOT, *verdict.path)))
        return (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)

    return experiment


def largest_error(
    target: Table, draft: Drafter, settings: Sampling = T1, make_verifier: Callable[[Chance], Verifier] | None = None, min_outcomes: int = 2
) -> float:
    """Between the probability of each sequence of `LENGTH` tokens (the emitted ones, completed by the target) and the target's joint."""
    emitted: dict[Tokens, float] = defaultdict(float)
    count = 0
    for tokens, probability in outcomes(one_step(target, draft, make_verifier or (lambda chance: Sampled(settings, chance)))):
        assert len(tokens) <= LENGTH
        emitted[tokens] += probability
        count += 1
    assert count >= min_outcomes, f"only {count} outcomes: nothing was enumerated"
    errors = []
    for sequence in itertools.product(range(target.num_tokens), repeat=LENGTH):
        tails = [1.0]  # of the last so many tokens, given those before
        for place in reversed(range(LENGTH)):
            tails.append(tails[-1] * wanted_probs(target.logits(sequence[:place]), settings)[sequence[place]])
        got = sum(emitted.get(sequence[:place], 0.0) * tails[LENGTH - place] for place in range(1, LENGTH + 1))
        errors.append(abs(got - tails[LENGTH]))
    return max(errors)


# --- Drafters: two levels of drafts at most, so that LENGTH tokens hold the longest path and its bonus token ---


def sampled_chain(drafter: Table) -> Drafter:
    def draft(chance: Chance) -> DraftTree:
        first_V = drafter.probs(())
        first = chance.sample(first_V)
        second_V = drafter.probs((first,))
        second = chance.sample(second_V)
        return DraftTree.chain((first, second), torch.stack([first_V, second_V, torch.full_like(first_V, math.nan)]))

    return draft


def fixed(tree: DraftTree) -> Drafter:
    return lambda chance: tree


def without_replacement(probs_V: Tensor, num_siblings: int, chance: Chance) -> list[int]:
    siblings = []
    left_V = probs_V.clone()
    for _ in range(num_siblings):
        siblings.append(chance.sample(left_V / left_V.sum()))
        left_V[siblings[-1]] = 0
    return siblings


def sampled_tree(drafter: Table, num_children: tuple[int, ...]) -> Drafter:
    """EAGLE-1's: siblings drawn without replacement, as many under each node of the first level as `num_children[1:]` says."""

    def draft(chance: Chance) -> DraftTree:
        tokens = without_replacement(drafter.probs(()), num_children[0], chance)
        parents = [ROOT] * len(tokens)
        draft_probs_RV = torch.full((1 + num_children[0] + sum(num_children[1:]), drafter.num_tokens), math.nan, dtype=torch.float64)
        draft_probs_RV[0] = drafter.probs(())
        for node, num_siblings in enumerate(num_children[1:]):
            draft_probs_RV[node + 1] = drafter.probs((tokens[node],))
            siblings = without_replacement(draft_probs_RV[node + 1], num_siblings, chance)
            tokens += siblings
            parents += [node] * len(siblings)
        return DraftTree(tuple(tokens), tuple(parents), draft_probs_RV=draft_probs_RV)

    return draft


# Two levels, with siblings in an order that is neither that of the ids nor that of any probability.
FIXED_TREE = DraftTree((3, 0, 2, 1, 3, 0, 2, 2), (ROOT, ROOT, ROOT, 0, 0, 1, 2, 1))
EVERY_SETTING = [
    T1,
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, top_k=2),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.3, top_k=3, top_p=0.7),
]
each_setting = pytest.mark.parametrize("settings", EVERY_SETTING, ids=str)


@each_setting
def test_plain_decoding_and_the_token_after_the_prefill_follow_the_target(settings: Sampling) -> None:
    assert largest_error(Table(1, 4), fixed(DraftTree()), settings) < EXACT


@each_setting
def test_a_chain_sampled_from_a_drafter_is_lossless(settings: Sampling) -> None:
    assert largest_error(Table(1, 4), sampled_chain(Table(2, 4)), settings, min_outcomes=20) < EXACT


@each_setting
@pytest.mark.parametrize("tokens", list(itertools.product(range(3), repeat=2)), ids=str)
def test_any_chain_of_fixed_drafts_is_lossless(settings: Sampling, tokens: Tokens) -> None:
    assert largest_error(Table(3, 3), fixed(DraftTree.chain(tokens)), settings) < EXACT


@each_setting
def test_a_tree_of_fixed_drafts_is_lossless(settings: Sampling) -> None:
    assert largest_error(Table(1, 4), fixed(FIXED_TREE), settings) < EXACT


def test_a_fixed_tree_with_equal_siblings_or_every_token_is_lossless() -> None:
    assert largest_error(Table(1, 5), fixed(DraftTree((2, 2, 1, 2, 3, 3), (ROOT, ROOT, ROOT, 0, 1, 1)))) < EXACT
    assert largest_error(Table(1, 3), fixed(DraftTree((2, 0, 1, 1, 2, 0), (ROOT, ROOT, ROOT, 0, 0, 0)))) < EXACT


def test_nodes_that_ride_along_leave_a_fixed_tree_lossless() -> None:
    assert largest_error(Table(1, 4), fixed(DraftTree((3, 0, 1, 2, 2), (ROOT, ROOT, 0, 0, ROOT), num_drafts=3))) < EXACT


@each_setting
def test_a_tree_of_siblings_sampled_without_replacement_is_lossless(settings: Sampling) -> None:
    assert largest_error(Table(4, 3), sampled_tree(Table(5, 3), (2, 2, 1)), settings, min_outcomes=100) < EXACT


def test_as_many_sampled_siblings_as_tokens_are_lossless() -> None:
    assert largest_error(Table(4, 4), sampled_tree(Table(5, 4), (4,)), min_outcomes=40) < EXACT


def test_siblings_beyond_the_support_of_q_and_repeated_ones_are_left_out_without_loss() -> None:
    """A drafter with top-k 2 that fills up its four siblings: one repeated, one that q does not hold."""
    q_V = torch.tensor([0.0, 0.7, 0.0, 0.3], dtype=torch.float64)

    def draft(chance: Chance) -> DraftTree:
        first, second = without_replacement(q_V, 2, chance)
        return DraftTree((first, first, second, 0), (ROOT,) * 4, draft_probs_RV=q_V.repeat(5, 1))

    assert largest_error(Table(4, 4), draft) < EXACT


def test_siblings_sampled_with_replacement_are_lossless() -> None:
    q_V = Table(2, 3).probs(())

    def draft(chance: Chance) -> DraftTree:
        return DraftTree(tuple(chance.sample(q_V) for _ in range(3)), (ROOT,) * 3, draft_probs_RV=q_V.repeat(4, 1))

    assert largest_error(Table(1, 3), draft, min_outcomes=50) < EXACT


def test_sampled_drafts_without_their_distribution_are_lossless() -> None:
    def draft(chance: Chance) -> DraftTree:
        return DraftTree(sampled_tree(Table(5, 3), (2, 1, 1))(chance).token_ids, (ROOT, ROOT, 0, 1))

    assert largest_error(Table(4, 3), draft, min_outcomes=50) < EXACT


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    target = Table(1, 4)
    experiment = one_step(target, sampled_chain(target), lambda chance: Sampled(T1, chance))
    assert sum(probability for tokens, probability in outcomes(experiment) if len(tokens) < LENGTH) < EXACT
    assert largest_error(target, sampled_chain(target)) < EXACT


def test_sampling_with_top_k_1_is_greedy_on_random_trees() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BRV = torch.randn(100, 13, 3, generator=generator)
    trees = []
    for _ in logits_BRV:
        parents = tuple(int(torch.randint(ROOT, max(node, 1), (), generator=generator)) if node else ROOT for node in range(12))
        trees.append(DraftTree(tuple(torch.randint(3, (12,), generator=generator).tolist()), parents))
    verdicts = Sampled(Sampling(1.0, top_k=1), RandomChance(0)).verify(trees, logits_BRV)
    assert verdicts == Greedy().verify(trees, logits_BRV)
    assert {len(verdict.path) for verdict in verdicts} >= {0, 1, 2, 3}


# --- Negative controls: what the check above must find ---


def test_the_check_finds_a_correction_drawn_from_p_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda p_V, q_V: p_V)
    for draft in (sampled_chain(Table(2, 4)), fixed(DraftTree.chain((1, 2))), fixed(FIXED_TREE), sampled_tree(Table(5, 4), (3,))):
        assert largest_error(Table(1, 4), draft) > BROKEN


def test_the_check_finds_a_residual_that_is_not_renormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda p_V, q_V: (p_V - q_V).clamp(min=0) if (p_V > q_V).any() else p_V)
    monkeypatch.setattr(Branch, "sample", lambda self, probs_V: self._decide((probs_V / probs_V.sum()).tolist()))  # as multinomial does
    assert largest_error(Table(1, 4), sampled_chain(Table(2, 4))) < EXACT  # a chain samples at once, and that normalises
    for draft in (fixed(FIXED_TREE), sampled_tree(Table(5, 4), (3,))):
        assert largest_error(Table(1, 4), draft) > BROKEN


def test_the_check_finds_greedy_drafts_that_claim_to_be_sampled() -> None:
    drafter = Table(2, 4)
    first_V = drafter.probs(())
    tree = DraftTree.chain((int(first_V.argmax()),), torch.stack([first_V, first_V]))
    assert largest_error(Table(1, 4), fixed(tree)) > BROKEN


def test_the_check_finds_sampled_siblings_that_were_sorted() -> None:
    q_V = Table(2, 4).probs(())

    def draft(chance: Chance) -> DraftTree:
        siblings = sorted(without_replacement(q_V, 2, chance), key=lambda token: -q_V[token].item())
        return DraftTree(tuple(siblings), (ROOT, ROOT), draft_probs_RV=q_V.repeat(3, 1))

    assert largest_error(Table(1, 4), draft) > BROKEN


def test_the_check_finds_drafts_judged_at_another_temperature() -> None:
    assert largest_error(Table(1, 4), fixed(FIXED_TREE), Sampling(0.6), lambda chance: Sampled(T1, chance)) > BROKEN


def test_typical_acceptance_is_lossy_and_says_so() -> None:
    for draft in (sampled_chain(Table(2, 4)), fixed(FIXED_TREE)):
        assert largest_error(Table(1, 4), draft, make_verifier=lambda chance: Typical(1.0, chance)) > BROKEN
    assert not Typical.is_lossless
    assert Greedy.is_lossless and Sampled.is_lossless


# --- Corner cases of the rule ---


class Rejects(Chance):
    """Rejects everything that it may, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def accept(self, probability: float) -> bool:
        self.asked.append(probability)
        return False

    def sample(self, probs_V: Tensor) -> int:
        self.asked.append(probs_V.sum().item())
        return int(probs_V.argmax())


def probs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rejected_siblings_leave_the_residual_computed_by_hand() -> None:
    chance = Rejects()
    accepted, left_V = first_accepted([1, 0], probs(0.5, 0.3, 0.2), probs(0.2, 0.6, 0.2), chance)
    # 0.3 / 0.6; then p = (0.3, 0, 0) / 0.3 = (1, 0, 0), q = (0.5, 0, 0.5): min(1, 1 / 0.5) = 1.
    assert chance.asked == pytest.approx([0.5, 1.0])
    assert accepted is None
    torch.testing.assert_close(left_V, probs(1, 0, 0))
    chance = Rejects()
    _, left_V = first_accepted([1, 0], probs(0.5, 0.3, 0.2), None, chance)
    assert chance.asked == pytest.approx([0.3, 0.5 / 0.7])
    torch.testing.assert_close(left_V, probs(0, 0, 1))


def test_where_rounding_leaves_no_mass_the_target_is_still_followed() -> None:
    p_V = probs(0.0, 0.25, 0.75)
    _, left_V = first_accepted([1, 2], p_V, p_V.clone(), Rejects())  # p = q: rejections without probability
    assert left_V.isfinite().all() and left_V.sum() == 1 and left_V[0] == 0
    _, left_V = first_accepted([2, 1], probs(0, 0, 1), None, Rejects())
    assert left_V.tolist() == [0, 0, 1]


def test_a_tiny_q_is_accepted_wherever_the_target_wants_the_token() -> None:
    chance = Rejects()
    first_accepted([0], probs(0.5, 0.5), probs(5e-324, 1.0), chance)
    first_accepted([0], probs(0.0, 1.0), probs(5e-324, 1.0), chance)
    assert chance.asked == [1.0, 0.0]


def test_a_repeated_sibling_does_not_keep_the_ones_after_it_from_being_tried() -> None:
    chance = Rejects()
    first_accepted([1, 1, 0], probs(0.5, 0.3, 0.2), probs(0.2, 0.6, 0.2), chance)
    assert chance.asked == pytest.approx([0.5, 1.0])


def test_a_row_that_holds_no_numbers_is_refused() -> None:
    with pytest.raises(AssertionError, match="p / q of token 1 is nan"):
        first_accepted([1], probs(0.5, 0.5), probs(math.nan, math.nan), Rejects())
    with pytest.raises(AssertionError, match="p / q of token 1 is nan"):
        first_accepted([1], probs(math.nan, math.nan), None, Rejects())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_drafters_probabilities_are_not_changed_and_may_be_unnormalised(dtype: torch.dtype) -> None:
    q_V = torch.tensor([1.0, 3.0], dtype=dtype)
    chance = Rejects()
    first_accepted([1, 0], probs(0.6, 0.4), q_V, chance)
    assert q_V.tolist() == [1.0, 3.0]
    assert chance.asked == pytest.approx([0.4 / 0.75, 1.0])


# --- Typical acceptance, by hand ---


def typical(tree: DraftTree, rows: list[Tensor], **thresholds: float) -> Verdict:
    return Typical(1.0, Rejects(), **thresholds).verify([tree], torch.stack(rows).log()[None])[0]


def test_typical_accepts_above_the_smaller_of_epsilon_and_the_entropys_threshold() -> None:
    flat = probs(0.25, 0.25, 0.25, 0.25)  # exp(-H) = 1/4
    tree = DraftTree((0,), (ROOT,))
    assert typical(tree, [flat, flat], epsilon=0.5, delta=0.99).path == (0,)
    assert typical(tree, [flat, flat], epsilon=0.5, delta=1.01).path == ()
    assert typical(tree, [flat, flat], epsilon=0.24, delta=9.0).path == (0,)
    assert typical(tree, [flat, flat], epsilon=0.26, delta=9.0).path == ()
    sharp = probs(0.08, 0.92 - 2e-9, 1e-9, 1e-9)  # exp(-H) is about 0.757: the defaults ask for more than min(0.09, 0.227)
    assert typical(tree, [sharp, flat]).path == ()
    assert typical(DraftTree((1,), (ROOT,)), [sharp, flat]).path == (0,)


def test_typical_takes_the_longest_path_then_the_likeliest_and_samples_after_it() -> None:
    #  root -> 0:t0, 1:t1 ; 0 -> 2:t0 ; 1 -> 3:t1, 4:t2
    tree = DraftTree((0, 1, 0, 1, 2), (ROOT, ROOT, 0, 1, 1))
    root, wants_1, wants_2 = probs(0.5, 0.4, 0.1), probs(0.01, 0.98, 0.01), probs(0.1, 0.1, 0.8)
    half = probs(0.6, 0.2, 0.2)
    assert typical(tree, [root, wants_1, wants_2, wants_1, wants_1, half]) == Verdict((1, 4), 0)  # longest, though t0 alone is likelier
    assert typical(tree, [root, half, probs(0.1, 0.2, 0.7), wants_1, wants_2, wants_2]) == Verdict((0, 2), 1)  # 0.5 * 0.6 against 0.4 * 0.7
    assert typical(tree, [root, half, wants_2, wants_1, wants_2, half]) == Verdict((1, 4), 0)  # 0.5 * 0.6 against 0.4 * 0.8
    rejected = probs(0.01, 0.01, 0.98)  # neither child of the root, so nothing below them
    assert typical(tree, [rejected, half, half, half, half, half]) == Verdict((), 2)


def test_typical_scales_by_its_temperature() -> None:
    logits_BRV = probs(0.05, 0.95).log().expand(1, 2, 2)
    assert Typical(1.0, RandomChance(0)).verify([DraftTree((0,), (ROOT,))], logits_BRV)[0].path == ()
    assert Typical(3.0, RandomChance(0)).verify([DraftTree((0,), (ROOT,))], logits_BRV)[0].path == (0,)  # 0.27


# --- Settings and chance ---


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", value) for value in (0.0, -1.0, math.nan, math.inf)]
    + [("top_k", value) for value in (0, -1)]
    + [("top_p", value) for value in (0.0, 1.0, -0.1, 1.5, math.nan)],
)
def test_a_sampling_setting_that_means_nothing_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
        Sampling(**{"temperature": 1.0, name: value})


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("epsilon", 0.0), ("epsilon", 1.1), ("delta", 0.0)])
def test_a_threshold_that_means_nothing_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
        Typical(**{"temperature": 1.0, "chance": RandomChance(0), name: value})


def test_probabilities_agree_with_a_computation_by_hand() -> None:
    logits_NV = probs(0.4, 0.1, 0.3, 0.2).log()[None]

    def is_close(settings: Sampling, *wanted: float) -> bool:
        return torch.allclose(settings.probabilities(logits_NV), probs(*wanted)[None], rtol=1e-12)

    assert is_close(Sampling(1.0), 0.4, 0.1, 0.3, 0.2)
    assert is_close(Sampling(0.5), 16 / 30, 1 / 30, 9 / 30, 4 / 30)
    assert is_close(Sampling(1.0, top_k=2), 4 / 7, 0, 3 / 7, 0)
    assert is_close(Sampling(1.0, top_k=9), 0.4, 0.1, 0.3, 0.2)
    assert is_close(Sampling(1.0, top_p=0.65), 4 / 7, 0, 3 / 7, 0)
    assert is_close(Sampling(0.5, top_p=0.65), 16 / 25, 0, 9 / 25, 0)  # 16/30 alone is below 0.65: temperature comes first
    assert is_close(Sampling(1.0, top_k=3, top_p=0.75), 4 / 7, 0, 3 / 7, 0)  # 4/9 + 3/9 = 0.78 of what top-k left, not 0.7
    assert T1.probabilities(logits_NV.bfloat16()).dtype == torch.float64


def test_random_chance_follows_its_probabilities_and_its_seed() -> None:
    chance, twin, other = RandomChance(1), RandomChance(1), RandomChance(2)
    p_V = probs(0.0, 0.2, 0.5, 0.3)
    drawn = torch.tensor([[chance.sample(p_V), chance.accept(0.3)] for _ in range(4000)], dtype=torch.float64)
    assert torch.allclose(torch.bincount(drawn[:, 0].long(), minlength=4) / 4000, p_V.float(), atol=0.04)  # 5 standard deviations
    assert not (drawn[:, 0] == 0).any()
    assert abs(drawn[:, 1].mean() - 0.3) < 0.04
    assert drawn[:200].tolist() == [[twin.sample(p_V), twin.accept(0.3)] for _ in range(200)]
    assert drawn[:200].tolist() != [[other.sample(p_V), other.accept(0.3)] for _ in range(200)]
    assert all(chance.accept(1.0) and not chance.accept(0.0) for _ in range(200))
