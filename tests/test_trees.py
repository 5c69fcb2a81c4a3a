"""Trees of drafts: what plain decoding writes comes out, every node is what the drafter says after its path, and the right nodes are chosen.

Legend: B sequences, T tokens, K heads, k ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from data.batch import Features, drafter_batch
from data.target import Target, TargetHeads
from data.vocab import DraftVocabulary
from eval.acceptance import Trajectory, TrajectoryPack, TrajectorySpan, trajectory_features
from eval.decode.chain import Chain
from eval.decode.dynamic_tree import DynamicTree
from eval.decode.loop import Decoded, Method, Plain, Seen, decode
from eval.decode.medusa_tree import MedusaTree, calibrate_medusa_tree, measure_head_accuracies
from eval.decode.mtp import mtp_unavailable_reason
from eval.decode.static_tree import StaticTree, without_replacement
from eval.decode.tree import ROOT, DraftTree
from eval.decode.tree_shape import EAGLE_TREE, TreeShape
from eval.decode.verify import Greedy, RandomChance, Sampling
from train.drafters.base import FeatureRequest, Guess, VerifiedStates
from train.drafters.eagle1 import Eagle1, Eagle1Config
from train.drafters.eagle3 import Eagle3, Eagle3Config
from train.drafters.medusa1 import Medusa1, Medusa1Config

V, H = 48, 32
PROMPTS = [[5], [1, 2, 3], [7, 7, 20, 3, 9, 11, 40], [47, 0, 12, 12]]
NUM_NEW = 24
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # Large, so that the random model's continuations vary.
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
TARGETS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "sliding window": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2)
    ),
}
SMALL_TREE = TreeShape.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 0, 0)])
MEDUSA_TREE = TreeShape.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 2), (0, 0, 0), (0, 0, 1), (2, 2, 1)])


class World:
    """A random target, its greedy answers, and drafters that half learnt the first of these by heart."""

    def __init__(self, family: str) -> None:
        torch.manual_seed(0)
        self.target = Target(TARGETS[family](), tokenizer=None)
        self.answers = [self.plain(prompt) for prompt in PROMPTS]
        self._drafters: dict[str, Any] = {}

    def plain(self, prompt: list[int]) -> tuple[int, ...]:
        return decode(self.target, Plain(), [prompt], Greedy(), NUM_NEW, ()).answers[0].token_ids

    def drafter(self, name: str) -> Any:
        if name not in self._drafters:
            self._drafters[name] = self._learnt(name)
        return self._drafters[name]

    def packs(self, request: FeatureRequest) -> list[TrajectoryPack]:
        trajectories = [Trajectory(tuple(prompt), answer, ()) for prompt, answer in zip(PROMPTS, self.answers, strict=True)]
        return trajectory_features(self.target, trajectories, request, pack_tokens=1000)

    def random_drafter(self, name: str) -> Any:
        """One that believes in nothing, so that its trees are bushy, and whose every input tells on what it says."""
        drafter = self._made(name)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += 0.4 * torch.randn_like(parameter)
        return drafter

    def _made(self, name: str) -> Any:
        model = self.target.model
        heads = TargetHeads(model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach(), model.model.norm.weight.detach(), 1e-6)
        torch.manual_seed(1)
        if name == "eagle1":
            return Eagle1(Eagle1Config(token_weight=1.0, noise=0.0), model.config, heads, None)
        if name == "medusa":
            return Medusa1(Medusa1Config(num_heads=4), model.config, heads, None)
        vocabulary = DraftVocabulary(tuple(range(1, V, 2)), V, 0.5) if name == "eagle3, draft vocabulary" else None
        size = None if vocabulary is None else len(vocabulary.ids)
        return Eagle3(Eagle3Config(aux_layers=(1, 2, 3), draft_vocab_size=size, ttt_steps=3), model.config, heads, vocabulary)

    def _learnt(self, name: str) -> Any:
        drafter = self._made(name)
        batch = drafter_batch(self.packs(drafter.feature_request())[0].features)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            (drafter(batch).loss_sum / drafter.num_supervised(batch)).backward()
            optimizer.step()
        return drafter


WORLDS: dict[str, World] = {}


def world(family: str) -> World:
    if family not in WORLDS:
        WORLDS[family] = World(family)
    return WORLDS[family]


EAGLES = ("eagle1", "eagle3", "eagle3, draft vocabulary")
SAMPLING = Sampling(temperature=0.7)
METHODS: dict[str, Callable[[Any], Method]] = {
    "static": lambda drafter: StaticTree(drafter, SMALL_TREE),
    "static, EAGLE-1's": StaticTree,
    "static, sampled": lambda drafter: StaticTree(drafter, SMALL_TREE, SAMPLING, RandomChance(0)),
    "dynamic": lambda drafter: DynamicTree(drafter, total_tokens=16, depth=3, top_k=4),
    "dynamic, default": DynamicTree,
}
CASES = [(method, drafter) for method in ("static", "static, sampled", "dynamic") for drafter in EAGLES]
CASES += [("static, EAGLE-1's", "eagle1"), ("dynamic, default", "eagle3"), ("medusa", "medusa")]
METHODS["medusa"] = lambda drafter: MedusaTree(drafter, MEDUSA_TREE)
each_case = pytest.mark.parametrize(("method", "drafter"), CASES)


def run(world: World, method: Method, prompts: Sequence[list[int]] = PROMPTS) -> Decoded:
    return decode(world.target, method, prompts, Greedy(), NUM_NEW, ())


# --- lossless ---------------------------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("family", TARGETS)
def test_trees_write_what_plain_decoding_writes_alone_and_in_a_batch(family: str, method: str, drafter: str) -> None:
    here = world(family)
    batch = run(here, METHODS[method](here.drafter(drafter)))
    alone = [run(here, METHODS[method](here.drafter(drafter)), [prompt]).answers[0] for prompt in PROMPTS]
    assert [answer.token_ids for answer in batch.answers] == [answer.token_ids for answer in alone] == here.answers
    if "sampled" not in method:
        assert list(batch.answers) == alone
    if drafter != "eagle3, draft vocabulary":
        assert batch.acceptance.tau > 1.5, "the drafter should be right at times"
    assert batch.acceptance.joint_acceptance[1] > 0, "beyond the first level too"


@pytest.mark.parametrize(("method", "drafter"), [(method, drafter) for method, drafter in CASES if "sampled" not in method and method != "medusa"])
def test_a_tree_is_accepted_at_least_as_far_as_the_chain_of_its_depth(method: str, drafter: str) -> None:
    here = world("llama")
    tree = METHODS[method](here.drafter(drafter))
    assert run(here, tree).acceptance.tau >= run(here, Chain(here.drafter(drafter), tree.longest_path)).acceptance.tau


def test_a_medusa_tree_is_accepted_at_least_as_far_as_the_chain_of_its_depth() -> None:
    here = world("llama")
    tree, chain = MedusaTree(here.drafter("medusa"), MEDUSA_TREE), Chain(here.drafter("medusa"), 3)
    assert run(here, tree).acceptance.tau > run(here, chain).acceptance.tau


# --- every node is what the drafter says after its path -----------------------------------------------------------------


class Recorder(Method):
    """Passes everything on, and keeps what the method was handed and what it drafted until the first sequence leaves."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.longest_path, self.most_nodes, self.request = method.longest_path, method.most_nodes, method.request
        self.states: list[VerifiedStates] = []
        self.trees: list[list[DraftTree]] = []
        self.is_recording = True

    def start(self, num_sequences: int, capacity: int) -> None:
        self.capacity = capacity
        self.method.start(num_sequences, capacity)

    def keep(self, rows: Sequence[int]) -> None:
        self.is_recording = False
        self.method.keep(rows)

    def draft(self, seen: Seen) -> list[DraftTree]:
        trees = self.method.draft(seen)
        if self.is_recording:
            self.states.append(seen.states)
            self.trees.append(trees)
        return trees


def recorded(world: World, method: Method) -> Recorder:
    recorder = Recorder(method)
    run(world, recorder)
    assert len(recorder.trees) >= 3
    return recorder


def one_sequence(states: VerifiedStates, row: int) -> VerifiedStates:
    count = int(states.num_new_B[row])
    aux, last, next_ids = (None if value is None else value[row : row + 1, :count] for value in states[:3])
    assert next_ids is not None
    return VerifiedStates(aux, last, next_ids, states.num_new_B[row : row + 1])


def logits_after(drafter: Any, capacity: int, states: Sequence[VerifiedStates], path: Sequence[int]) -> Tensor:
    """[W] what an EAGLE drafter says after a path, each token given to it alone: a chain."""
    cache = drafter.new_cache(1, capacity)
    for verified in states:
        guess = drafter.read(cache, verified, 1)
    for depth, token in enumerate(path, start=1):
        guess = drafter.extend(cache, guess.hidden_BnH, torch.tensor([[token]]), torch.ones(1, 1, depth, dtype=torch.bool))
    return guess.logits_BnW[0, 0]


def paths_of(tree: DraftTree) -> dict[int, list[int]]:
    """Token ids down to each node."""
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        paths[node] = [*paths[parent], token]
    return paths


@pytest.mark.parametrize("drafter_name", EAGLES)
@pytest.mark.parametrize("method", [StaticTree, lambda drafter: DynamicTree(drafter, total_tokens=40, depth=3, top_k=4)], ids=["static", "dynamic"])
def test_the_children_of_every_node_are_the_drafters_best_tokens_after_its_path(method: Callable[[Any], Method], drafter_name: str) -> None:
    drafter = world("llama").random_drafter(drafter_name)
    recorder = recorded(world("llama"), method(drafter))
    vocabulary = torch.arange(V) if drafter.draft_ids_W is None else drafter.draft_ids_W
    for row in range(len(PROMPTS)):
        states = [one_sequence(verified, row) for verified in recorder.states[:3]]
        for count in (1, 3):
            tree = recorder.trees[count - 1][row]
            paths = paths_of(tree)
            assert max(map(len, paths.values())) >= 4
            for parent, children in tree.children().items():
                logits_W = logits_after(drafter, 200, states[:count], paths[parent])
                best = vocabulary[logits_W.topk(len(children)).indices].tolist()
                assert [tree.token_ids[child] for child in children] == best


@pytest.mark.parametrize("drafter_name", EAGLES)
def test_the_distribution_of_sampled_siblings_is_the_drafters_after_their_path(drafter_name: str) -> None:
    drafter = world("llama").drafter(drafter_name)
    recorder = recorded(world("llama"), METHODS["static, sampled"](drafter))
    ids = torch.arange(V) if drafter.draft_ids_W is None else drafter.draft_ids_W
    for row in range(len(PROMPTS)):
        states = [one_sequence(verified, row) for verified in recorder.states[:3]]
        tree = recorder.trees[2][row]
        assert tree.draft_probs_RV is not None and tree.draft_probs_RV.shape == (1 + SMALL_TREE.num_nodes, V)
        for parent, children in tree.children().items():
            expected_V = torch.zeros(V, dtype=torch.float64)
            expected_V[ids] = (logits_after(drafter, 200, states, paths_of(tree)[parent]).double() / 0.7).softmax(-1)
            torch.testing.assert_close(tree.draft_probs_RV[parent + 1], expected_V, rtol=1e-4, atol=1e-5)
            siblings = [tree.token_ids[child] for child in children]
            assert len(set(siblings)) == len(siblings) and set(siblings) <= set(ids.tolist())


def test_the_nodes_of_a_medusa_tree_are_the_ranks_of_their_heads() -> None:
    here = world("llama")
    drafter = here.drafter("medusa")
    recorder = recorded(here, METHODS["medusa"](drafter))
    for verified, trees in zip(recorder.states, recorder.trees, strict=True):
        for row, tree in enumerate(trees):
            last_H = verified.last_BnH[row, int(verified.num_new_B[row]) - 1]  # type: ignore[index]
            heads = [drafter.lm_heads[head](drafter.blocks[head](last_H)).argsort(descending=True).tolist() for head in range(3)]
            assert tree.token_ids == tuple(heads[len(path) - 1][path[-1]] for path in MEDUSA_TREE.paths)
            assert tree.parents == MEDUSA_TREE.parents


# --- shapes of static trees -----------------------------------------------------------------------------------------------


def test_a_shape_puts_its_nodes_level_by_level_and_siblings_by_rank() -> None:
    shape = TreeShape.of([(1, 0), (0,), (0, 2), (0, 0), (1,), (1, 0, 0)])
    assert shape.paths == ((0,), (1,), (0, 0), (0, 2), (1, 0), (1, 0, 0))
    assert shape.parents == (ROOT, ROOT, 0, 0, 1, 4)
    assert (shape.num_nodes, shape.depth, shape.num_ranks) == (6, 3, 3)


def test_eagles_tree_is_26_rows_of_the_target() -> None:
    assert 1 + EAGLE_TREE.num_nodes == 26
    assert [sum(len(path) == depth for path in EAGLE_TREE.paths) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert (0,) * 5 in EAGLE_TREE.paths


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "0 nodes"),
        ([(0,), (0,)], "2 nodes, 1 of them different"),
        ([(0,), (1, 0)], r"has the node \(1, 0\) but not \(1,\)"),
        ([()], "has the node"),
        ([(-1,)], "counted from 0"),
    ],
)
def test_a_shape_that_is_no_tree_is_refused(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape.of(paths)


def test_siblings_are_drawn_from_what_the_ones_before_left() -> None:
    asked = []

    class Lowest(RandomChance):
        def sample(self, probs_V: Tensor) -> int:
            asked.append([round(value, 9) for value in probs_V.tolist()])
            return int(probs_V.nonzero()[0])

    probs_V = torch.tensor([0.0, 0.5, 0.3, 0.2], dtype=torch.float64)
    # The third is drawn from the last token alone; then q has run out, and the last one is repeated.
    assert without_replacement(probs_V, 4, Lowest(0)) == [1, 2, 3, 3]
    assert asked == [[0, 0.5, 0.3, 0.2], [0, 0, 0.6, 0.4], [0, 0, 0, 1]]
    assert probs_V.tolist() == [0.0, 0.5, 0.3, 0.2]


def test_trees_that_a_drafter_cannot_fill_are_refused() -> None:
    here = world("llama")
    for method in (StaticTree, DynamicTree):
        with pytest.raises(ValueError, match=r"medusa1 says all its drafts at once .* MedusaTree"):
            method(here.drafter("medusa"))
    with pytest.raises(ValueError, match="eagle3 has no heads that guess several tokens at once"):
        MedusaTree(here.drafter("eagle3"), MEDUSA_TREE)
    with pytest.raises(ValueError, match="5 drafts is wanted of medusa1"):
        MedusaTree(here.drafter("medusa"), TreeShape.of([(0,) * depth for depth in range(1, 6)]))
    with pytest.raises(ValueError, match="25 guesses of a drafter that knows 24 tokens"):
        run(here, StaticTree(here.drafter("eagle3, draft vocabulary"), TreeShape.of([(rank,) for rank in range(25)])))
    for settings in ({"total_tokens": 1}, {"depth": -1}, {"top_k": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} is .*, expected at least"):
            DynamicTree(here.drafter("eagle3"), **settings)


def test_methods_know_what_they_hold() -> None:
    here = world("llama")
    drafter = here.drafter("eagle3")
    num_bytes = sum(tensor.numel() * 4 for tensor in drafter.state_dict().values())
    per_token = 2 * 2 * 8 * 4  # keys and values of two heads of eight float32
    for method, num_frontier in ((StaticTree(drafter, SMALL_TREE), 0), (DynamicTree(drafter, depth=3, top_k=5), 15)):
        method.start(2, 100)
        assert (method.weights_bytes, method.cache_bytes) == (num_bytes, (100 + num_frontier) * per_token)
    medusa = MedusaTree(here.drafter("medusa"), MEDUSA_TREE)
    medusa.start(2, 100)
    assert medusa.cache_bytes == 0 and medusa.weights_bytes > 0
    assert (DynamicTree(drafter).most_nodes, DynamicTree(drafter).longest_path) == (59, 7)
    assert (DynamicTree(drafter, 60, 1, 2).most_nodes, DynamicTree(drafter, 3, 6, 2).longest_path) == (6, 2)
    assert (StaticTree(drafter).most_nodes, StaticTree(drafter).longest_path) == (25, 5)


# --- EAGLE-2 chooses by hand-computed scores ----------------------------------------------------------------------------


class ScriptedDrafter(torch.nn.Module):
    """Says after each token what a table says, and keeps what it was asked."""

    draft_ids_W = None
    config = Eagle3Config()

    def __init__(self, probs: dict[int, dict[int, float]], num_tokens: int) -> None:
        super().__init__()
        self.logits_VV = torch.full((num_tokens, num_tokens), -1e4)
        for token, row in probs.items():
            for successor, probability in row.items():
                self.logits_VV[token, successor] = torch.tensor(probability).log()
        self.asked: list[list[list[int]]] = []

    def feature_request(self) -> FeatureRequest:
        return FeatureRequest((), False)

    def new_cache(self, num_sequences: int, capacity: int) -> None:
        return None

    def read(self, cache: None, verified: VerifiedStates, num_drafts: int) -> Guess:
        return Guess(self.logits_VV[verified.next_ids_Bn[:, -1:]], torch.zeros(len(verified.next_ids_Bn), 1, 1))

    def extend(self, cache: None, hidden_BnH: Tensor, token_ids_Bn: Tensor, sees_Bnm: Tensor) -> Guess:
        self.asked.append(token_ids_Bn.tolist())
        return Guess(self.logits_VV[token_ids_Bn], hidden_BnH)


def dynamic_trees(drafter: Any, newest: Sequence[int], total_tokens: int, depth: int, top_k: int) -> list[DraftTree]:
    method = DynamicTree(drafter, total_tokens, depth, top_k)
    method.start(len(newest), 10)
    states = VerifiedStates(None, None, torch.tensor([[token] for token in newest]), torch.ones(len(newest), dtype=torch.int64))
    return method.draft(Seen([[token] for token in newest], states))


#   after 0:  1 .55   2 .35   3 .1           top_k 2, so 3 is never a candidate
#   after 1:  4 .5    5 .3    6 .2           scores  4 .275   5 .165
#   after 2:  6 .9    4 .1                           6 .315   4 .035
#   frontier  6 .315  4 .275
#   after 6:  5 .7    2 .3                           5 .2205  2 .0945
#   after 4:  7 .8    1 .2                           7 .22    1 .055
PROBS = {
    0: {1: 0.55, 2: 0.35, 3: 0.1},
    1: {4: 0.5, 5: 0.3, 6: 0.2},
    2: {6: 0.9, 4: 0.1},
    4: {7: 0.8, 1: 0.2},
    6: {5: 0.7, 2: 0.3},
}


@pytest.mark.parametrize(
    ("total_tokens", "token_ids", "parents"),
    [
        (2, (1,), (ROOT,)),
        (3, (1, 2), (ROOT, ROOT)),
        (4, (1, 2, 6), (ROOT, ROOT, 1)),
        (5, (1, 2, 4, 6), (ROOT, ROOT, 0, 1)),
        (6, (1, 2, 4, 6, 5), (ROOT, ROOT, 0, 1, 3)),
        (7, (1, 2, 4, 6, 5, 7), (ROOT, ROOT, 0, 1, 3, 2)),
        (8, (1, 2, 4, 5, 6, 5, 7), (ROOT, ROOT, 0, 0, 1, 4, 2)),
        (9, (1, 2, 4, 5, 6, 5, 2, 7), (ROOT, ROOT, 0, 0, 1, 4, 4, 2)),
        (10, (1, 2, 4, 5, 6, 5, 2, 7, 1), (ROOT, ROOT, 0, 0, 1, 4, 4, 2, 2)),
        (11, (1, 2, 4, 5, 6, 4, 5, 2, 7, 1), (ROOT, ROOT, 0, 0, 1, 1, 4, 4, 2, 2)),
        (60, (1, 2, 4, 5, 6, 4, 5, 2, 7, 1), (ROOT, ROOT, 0, 0, 1, 1, 4, 4, 2, 2)),  # there are no more than 2 + 2 * 2^2
    ],
)
def test_the_candidates_with_the_best_products_are_kept(total_tokens: int, token_ids: tuple[int, ...], parents: tuple[int, ...]) -> None:
    drafter = ScriptedDrafter(PROBS, 8)
    [tree] = dynamic_trees(drafter, [0], total_tokens, depth=2, top_k=2)
    assert (tree.token_ids, tree.parents) == (token_ids, parents)
    assert drafter.asked == [[[1, 2]], [[6, 4]]]


def test_the_frontier_is_the_best_of_all_children_and_may_leave_a_parent_behind() -> None:
    # After 1: 4 .45 and 5 .45 of .9; after 2 at most .1: both nodes of the next frontier hang on 1.
    drafter = ScriptedDrafter({0: {1: 0.9, 2: 0.1}, 1: {4: 0.51, 5: 0.49}, 2: {3: 1.0}, 4: {6: 1.0}, 5: {7: 1.0}}, 8)
    [tree] = dynamic_trees(drafter, [0], 7, depth=2, top_k=2)
    assert drafter.asked == [[[1, 2]], [[4, 5]]]
    assert tree.token_ids[:4] == (1, 2, 4, 5) and (6, 2) in list(zip(tree.token_ids, tree.parents, strict=True))


def test_each_sequence_of_a_batch_grows_its_own_tree() -> None:
    trees = dynamic_trees(ScriptedDrafter(PROBS, 8), [0, 1, 2], 8, depth=2, top_k=2)
    assert trees == [dynamic_trees(ScriptedDrafter(PROBS, 8), [newest], 8, depth=2, top_k=2)[0] for newest in range(3)]
    assert len({tree.token_ids for tree in trees}) == 3


@pytest.mark.parametrize("total_tokens", range(2, 30))
@pytest.mark.parametrize("depth", [1, 4, 6])
def test_of_equal_scores_no_node_is_kept_without_its_parent(total_tokens: int, depth: int) -> None:
    # Every child has probability exactly 1, so that a path has one score from top to bottom; two such paths tie as a whole too.
    certain = {token: {(token + 2) % 16: 1.0} for token in range(1, 16)}
    for first in ({1: 1.0}, {1: 0.5, 2: 0.5}):
        [tree] = dynamic_trees(ScriptedDrafter({0: first, **certain}, 16), [0], total_tokens, depth, top_k=3)
        assert tree.num_nodes == min(total_tokens - 1, 3 + 9 * depth)
        depths = [len(path) for path in list(paths_of(tree).values())[1:]]
        assert depths == sorted(depths)
        # The certain paths come first: one node a level, or two.
        assert depths[0] == 1 and max(depths) == min(depth + 1, (tree.num_nodes + len(first) - 1) // len(first))


def test_siblings_stand_from_the_likeliest_on() -> None:
    here = world("llama")
    drafter = here.drafter("eagle3")
    recorder = recorded(here, DynamicTree(drafter, total_tokens=30, depth=2, top_k=6))
    states = [one_sequence(recorder.states[0], 2)]
    tree = recorder.trees[0][2]
    assert max(len(children) for children in tree.children().values()) >= 4
    for parent, children in tree.children().items():
        logits_W = logits_after(drafter, 200, states, paths_of(tree)[parent])
        said = logits_W[[tree.token_ids[child] for child in children]]
        assert bool((said.diff() < 0).all())


# --- Medusa's calibration -----------------------------------------------------------------------------------------------


def test_the_calibrated_tree_takes_the_greatest_products_computed_by_hand() -> None:
    # Products: (0) .6  (0,0) .30  (1) .2  (0,1) .18  (1,0) .10  (2) .1  (1,1) .06  (2,0) .05  (2,1) .03
    accuracies_Kk = torch.tensor([[0.6, 0.2, 0.1], [0.5, 0.3, 0.0]])
    in_order = [(0,), (0, 0), (1,), (0, 1), (2,), (1, 0), (1, 1), (2, 0), (2, 1)]
    for num_nodes in range(1, 10):
        assert calibrate_medusa_tree(accuracies_Kk, num_nodes) == TreeShape.of(in_order[:num_nodes])
    # With two children at most, rank 2 is never there.
    assert calibrate_medusa_tree(accuracies_Kk, 9, max_children=2) == TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])


def test_the_calibrated_tree_has_64_rows_and_ten_children_at_most() -> None:
    accuracies_Kk = torch.tensor([0.56, 0.32, 0.2, 0.15, 0.12])[:, None] * 0.6 ** torch.arange(12)
    shape = calibrate_medusa_tree(accuracies_Kk)
    assert shape.num_nodes == 63 and shape.num_ranks <= 10
    kept = {path: float(torch.stack([accuracies_Kk[place, rank] for place, rank in enumerate(path)]).prod()) for path in shape.paths}
    left_out = [
        probability * float(accuracies_Kk[len(path), rank])
        for path, probability in [((), 1.0), *kept.items()]
        if len(path) < 5
        for rank in range(10)
        if (*path, rank) not in kept
    ]
    assert min(kept.values()) >= max(left_out) - 1e-9
    assert calibrate_medusa_tree(torch.ones(1, 12)).num_nodes == 10
    with pytest.raises(ValueError, match="num_nodes is 0"):
        calibrate_medusa_tree(accuracies_Kk, 0)


class ScriptedHeads(torch.nn.Module):
    """Two heads that read their ranking off the state: head d at state h ranks h + d, h + d + 1, ... first (modulo V)."""

    config = Medusa1Config(num_heads=2)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def read(self, cache: None, verified: VerifiedStates, num_drafts: int) -> Guess:
        assert verified.last_BnH is not None
        rank_BKV = (torch.arange(V) - verified.last_BnH[:, :, :1] - torch.arange(num_drafts)[:, None]) % V
        return Guess(-rank_BKV, verified.last_BnH)


def test_the_measured_accuracies_are_counted_by_hand() -> None:
    #   position      0   1   2   3   4   5   6   7       two documents: prompt of 2, answer of 3, extra 0; prompt of 1, answer of 2, extra 0
    #   token        10  11  12  13  14 | 20  21  22
    #   state         .  12   .   .   . | 22
    #   pairs: 1 and 2 of the first (13, 14 after 1; 14 after 2), 0 of the second (22 after it, then its end)
    token_ids = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22])
    state_T = torch.tensor([0, 12, 14, 0, 0, 22, 0, 0])
    # Pair 1: head 0 ranks 12 13: token 13 has rank 1. Head 1 ranks 13 14: token 14 has rank 1.
    # Pair 2: head 0 ranks 14: rank 0. Head 1: past the end. Second document: head 0 ranks 22: rank 0. Head 1: past the end.
    features = Features(token_ids, torch.zeros(8, dtype=torch.bool), (5, 3), None, state_T[:, None].float())
    pack = TrajectoryPack(features, (TrajectorySpan(0, 2, 3, 0), TrajectorySpan(5, 1, 2, 0)))
    drafter: Any = ScriptedHeads()
    expected_Kk = torch.tensor([[2 / 3, 1 / 3, 0], [0, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(measure_head_accuracies(drafter, [pack], max_rank=3), expected_Kk)
    torch.testing.assert_close(measure_head_accuracies(drafter, [pack, pack], max_rank=3), expected_Kk)
    # With one more token of the second document known, its head 1, which ranks 23 first, is measured too.
    features = Features(
        torch.cat([token_ids, torch.tensor([23])]), torch.zeros(9, dtype=torch.bool), (5, 4), None, torch.cat([features.last_TH, torch.zeros(1, 1)])
    )  # type: ignore[list-item]
    pack = TrajectoryPack(features, (TrajectorySpan(0, 2, 3, 0), TrajectorySpan(5, 1, 2, 1)))
    expected_Kk = torch.tensor([[2 / 3, 1 / 3, 0], [0.5, 0.5, 0]], dtype=torch.float64)
    torch.testing.assert_close(measure_head_accuracies(drafter, [pack], max_rank=3), expected_Kk)


def test_answers_too_short_to_measure_the_last_head_are_refused() -> None:
    features = Features(torch.arange(4), torch.zeros(4, dtype=torch.bool), (4,), None, torch.zeros(4, 1))
    with pytest.raises(ValueError, match="2 Medusa heads look 3 tokens ahead"):
        measure_head_accuracies(ScriptedHeads(), [TrajectoryPack(features, (TrajectorySpan(0, 2, 2, 0),))])  # type: ignore[arg-type]


def test_measured_heads_make_a_tree_that_accepts_more_than_any_other_shape_of_its_size() -> None:
    here = world("llama")
    drafter = here.drafter("medusa")
    accuracies_Kk = measure_head_accuracies(drafter, here.packs(drafter.feature_request()))
    assert accuracies_Kk.shape == (4, 10) and bool((accuracies_Kk.sum(1) <= 1).all())
    calibrated = run(here, MedusaTree(drafter, calibrate_medusa_tree(accuracies_Kk, 12))).acceptance.tau
    wide = run(here, MedusaTree(drafter, TreeShape.of([(rank,) for rank in range(12)]))).acceptance.tau
    assert calibrated > wide


# --- multi-token prediction ---------------------------------------------------------------------------------------------


def test_the_reason_without_mtp_says_whether_the_target_has_such_layers() -> None:
    assert mtp_unavailable_reason(world("llama").target) == (
        "this target has no multi-token-prediction heads: its config has no num_nextn_predict_layers"
    )
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 4, "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16}
    ropes = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    target = Target(DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **ropes, **experts, num_nextn_predict_layers=2)), tokenizer=None)
    reason = mtp_unavailable_reason(target)
    assert f"names 2 multi-token-prediction layers, which transformers {transformers.__version__} leaves out of the model" in reason
    assert "vLLM's speculative method 'mtp'" in reason
    # True of the model: nothing of it is an MTP layer.
    assert len(target.layers) == 2 and not any("eh_proj" in name or "mtp" in name for name, _ in target.model.named_parameters())
