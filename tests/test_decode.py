"""The decoding loop writes what plain decoding writes, hands a method the target's own states, and counts what the exact walk predicts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import eval.decode.speedup as speedup_module
from data.batch import DrafterBatch, drafter_batch
from data.target import Target, TargetHeads
from eval.acceptance import Acceptance, Trajectory, chain_acceptance, trajectory_features
from eval.decode.chain import Chain
from eval.decode.loop import Answer, Decoded, Method, Plain, Seen, decode
from eval.decode.session import TargetSession
from eval.decode.speedup import check_lossless, measure_speedup, top_two_gap
from eval.decode.tree import DraftTree
from eval.decode.verify import Greedy
from train.drafters.base import FeatureRequest, Guess, VerifiedStates
from train.drafters.eagle3 import Eagle3, Eagle3Config

V, H, L = 64, 32, 6
AUX_LAYERS = (2, 3, 6)
PROMPTS = [[5], [1, 2, 3], [7, 7, 20, 3, 9, 11, 40], [63, 0, 12, 12]]


@torch.no_grad()
def states(model: Any, token_ids_T: Tensor) -> list[Tensor]:
    """[L + 2] states: embeddings, each layer's output *before* the final norm, and after the final norm."""
    before_norm = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0][0]))
    hidden = [state[0] for state in model(token_ids_T[None], output_hidden_states=True).hidden_states]
    hook.remove()
    return [*hidden[:-1], before_norm[0], hidden[-1]]


SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # Large, so that the random model's continuations vary.
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama() -> Target:
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(LlamaConfig(**SIZES)), tokenizer=None)


@pytest.fixture(scope="module")
def target() -> Target:
    return llama()


@torch.no_grad()
def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation without any cache: the independent reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Scripted(Method):
    """Knows the target's continuations and drafts them right for the first `right[v]` drafts of verification v (cyclically), wrong
    after that.

    It also keeps everything that it was handed.
    """

    def __init__(self, continuations: list[list[int]], right: list[int], draft_length: int) -> None:
        self.continuations, self.right = continuations, right
        self.longest_path = self.most_nodes = draft_length

    def start(self, num_sequences: int, capacity: int) -> None:
        self.seen: list[VerifiedStates] = []
        self.going = list(range(num_sequences))
        self.num_drafted = 0

    def keep(self, rows: Any) -> None:
        self.going = [self.going[row] for row in rows]

    def draft(self, seen: Seen) -> list[DraftTree]:
        if not self.seen:
            self.num_prompt_tokens = [len(context) - 1 for context in seen.contexts]
        self.seen.append(seen.states)
        num_right = self.right[self.num_drafted % len(self.right)]
        self.num_drafted += 1
        trees = []
        for sequence, context in zip(self.going, seen.contexts, strict=True):
            known = len(context) - self.num_prompt_tokens[sequence]
            drafts = self.continuations[sequence][known : known + self.longest_path]
            drafts += [0] * (self.longest_path - len(drafts))
            trees.append(DraftTree.chain(tuple(token if place < num_right else (token + 1) % V for place, token in enumerate(drafts))))
        return trees


class BigramDrafter(torch.nn.Module):
    """Drafts by a table from the last known token alone, in both of a drafter's ways."""

    draft_ids_W = None

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table
        self.config = Eagle3Config()

    def feature_request(self) -> FeatureRequest:
        return FeatureRequest((), False)

    def new_cache(self, num_sequences: int, capacity: int) -> None:
        return None

    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        return torch.stack([self.table[batch.known_tokens(step)] for step in range(num_drafts)])

    def read(self, cache: None, verified: VerifiedStates, num_drafts: int) -> Guess:
        newest_B = verified.next_ids_Bn.gather(1, verified.num_new_B[:, None] - 1)
        return self.extend(cache, torch.zeros(len(newest_B), 1, 1), newest_B, None)

    def extend(self, cache: None, hidden_BnH: Tensor, token_ids_Bn: Tensor, sees_Bnm: Any) -> Guess:
        return Guess(torch.nn.functional.one_hot(self.table[token_ids_Bn], V).float(), hidden_BnH)


def answer(target: Target, method: Method, prompt: list[int], max_new_tokens: int, end_ids: Any = ()) -> Decoded:
    return decode(target, method, [prompt], Greedy(), max_new_tokens, end_ids)


def plain(target: Target, prompt: list[int], max_new_tokens: int, end_ids: Any = ()) -> Answer:
    return answer(target, Plain(), prompt, max_new_tokens, end_ids).answers[0]


# --- the same tokens, the right counts --------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_decoding_equals_decoding_without_a_cache(target: Target, prompt: list[int]) -> None:
    result = plain(target, prompt, 20)
    assert list(result.token_ids) == greedy(target, prompt, 20)
    assert result.accepted == (0,) * 19


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("draft_length", [1, 4])
def test_an_oracle_has_tau_of_exactly_k_plus_one(target: Target, prompt: list[int], draft_length: int) -> None:
    reference = greedy(target, prompt, 30)
    result = answer(target, Scripted([reference], [draft_length], draft_length), prompt, 21)
    assert list(result.answers[0].token_ids) == reference[:21]
    assert result.answers[0].num_verifications == 20 / (draft_length + 1)
    assert result.acceptance.tau == draft_length + 1
    assert result.acceptance.conditional_acceptance == [1.0] * draft_length


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_drafter_that_is_always_wrong_has_tau_one(target: Target, prompt: list[int]) -> None:
    reference = greedy(target, prompt, 30)
    result = answer(target, Scripted([reference], [0], 4), prompt, 20)
    assert list(result.answers[0].token_ids) == reference[:20]
    assert (result.acceptance.num_verifications, result.acceptance.accepted_at, result.acceptance.tau) == (19, (0, 0, 0, 0), 1.0)


def test_a_scripted_pattern_gives_hand_computed_counts(target: Target) -> None:
    reference = greedy(target, PROMPTS[2], 30)
    # Accepting 2, 0, 3, 2, 0, 3 ... emits 3, 1, 4, 3, 1, 4 ...: after the prefill's token 1, 4, 5, 9, 12, 13, 17 tokens; 15 are
    # asked for.
    result = answer(target, Scripted([reference], [2, 0, 3], 3), PROMPTS[2], 15)
    assert list(result.answers[0].token_ids) == reference[:15]
    assert result.answers[0].accepted == (2, 0, 3, 2, 0, 3)
    assert result.answers[0].num_nodes == (3,) * 6
    assert result.acceptance.accepted_at == (4, 4, 2)
    assert result.acceptance.num_tokens == 16
    assert result.acceptance.tau == 16 / 6
    assert result.acceptance.conditional_acceptance == [4 / 6, 1.0, 0.5]


@pytest.mark.parametrize("right", [[0], [1, 0], [4]])
def test_the_answer_ends_with_its_end_token_however_many_were_accepted_past_it(target: Target, right: list[int]) -> None:
    reference = greedy(target, PROMPTS[1], 40)
    place = next(index for index in range(3, 40) if reference[index] not in reference[:index])
    end_ids = {reference[place]}
    drafted = answer(target, Scripted([reference], right, 4), PROMPTS[1], 35, end_ids).answers[0]
    assert drafted.token_ids == plain(target, PROMPTS[1], 35, end_ids).token_ids == tuple(reference[: place + 1])


def test_one_token_answers_take_no_verification(target: Target) -> None:
    first = greedy(target, PROMPTS[1], 1)
    for method, max_new_tokens, end_ids in ((Scripted([[]], [0], 4), 1, ()), (Scripted([[]], [0], 4), 9, first), (Plain(), 9, first)):
        [result] = answer(target, method, PROMPTS[1], max_new_tokens, end_ids).answers
        assert (list(result.token_ids), result.num_verifications) == (first, 0)


def test_no_prompt_and_empty_prompts_are_refused(target: Target) -> None:
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="expected at least one token in each"):
            decode(target, Plain(), prompts, Greedy(), 4, ())


# --- trees ------------------------------------------------------------------------------------------------------------


class Bushy(Scripted):
    """Hides the right continuation in a tree: wrong siblings before and after it, with wrong children, up to `right` levels deep."""

    def __init__(self, continuations: list[list[int]], right: list[int], depth: int) -> None:
        super().__init__(continuations, right, depth)
        self.most_nodes = 4 * depth

    def draft(self, seen: Seen) -> list[DraftTree]:
        trees = []
        for chain in super().draft(seen):
            tokens, parents, parent = [], [], -1
            for token in chain.token_ids:
                first = len(tokens)
                tokens += [(token + 2) % V, (token + 3) % V, token, (token + 2) % V]
                parents += [parent, first, parent, parent]
                parent = first + 2
            trees.append(DraftTree(tuple(tokens), tuple(parents)))
        return trees


@pytest.mark.parametrize("right", [[4], [2, 0, 3, 1]])
def test_a_path_through_a_tree_is_accepted_as_a_chain_would_be(target: Target, right: list[int]) -> None:
    for prompt in PROMPTS:
        reference = greedy(target, prompt, 40)
        tree, chain = (answer(target, method([reference], right, 4), prompt, 25).answers[0] for method in (Bushy, Scripted))
        assert list(tree.token_ids) == reference[:25]
        assert tree.accepted == chain.accepted


@torch.no_grad()
def test_every_node_sees_its_ancestors_and_nothing_else(target: Target) -> None:
    """The logits of each node are those of the sequence that ends with its path."""
    session = TargetSession(target, 2, 40)
    prompts = [PROMPTS[2], PROMPTS[1]]
    session.prefill(prompts)
    trees = [DraftTree((4, 9, 4, 30, 1, 8), (-1, -1, 0, 1, 2, 1)), DraftTree((3, 3), (-1, 0))]
    for newest in ([6, 50], [7, 8]):
        rows = session.forward(newest, trees)
        for sequence, tree in enumerate(trees):
            for node in range(-1, tree.num_nodes):
                path, at = [], node
                while at >= 0:
                    path, at = [tree.token_ids[at], *path], tree.parents[at]
                text = torch.tensor([[*prompts[sequence], newest[sequence], *path]])
                torch.testing.assert_close(rows.logits_BRV[sequence, node + 1], target.model(text).logits[0, -1], rtol=1e-4, atol=1e-4)
        paths = [(1, 5), ()]
        session.accept(paths)
        prompts = [
            [*prompt, token, *(tree.token_ids[node] for node in path)]
            for prompt, token, tree, path in zip(prompts, newest, trees, paths, strict=True)
        ]


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Scripted, Bushy])
@pytest.mark.parametrize("has_end_token", [False, True])
def test_a_batch_writes_what_each_prompt_alone_writes(target: Target, method: Any, has_end_token: bool) -> None:
    references = [greedy(target, prompt, 40) for prompt in PROMPTS]
    end_ids = (references[2][9],) if has_end_token else ()
    batch = decode(target, method(references, [4, 0, 2], 4), PROMPTS, Greedy(), 25, end_ids)
    alone = [answer(target, method([reference], [4, 0, 2], 4), prompt, 25, end_ids) for reference, prompt in zip(references, PROMPTS, strict=True)]
    assert batch.answers == tuple(result.answers[0] for result in alone)
    assert batch.acceptance == sum((result.acceptance for result in alone[1:]), alone[0].acceptance)
    assert has_end_token == (len({len(result.token_ids) for result in batch.answers}) > 1)


# --- cache and captured states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Scripted, Bushy])
@pytest.mark.parametrize("right", [[0], [4], [2, 0, 3, 1]])
def test_the_method_gets_the_target_states_of_every_verified_position_once(target: Target, method: Any, right: list[int]) -> None:
    references = [greedy(target, prompt, 30) for prompt in PROMPTS]
    scripted = method(references, right, 4)
    scripted.request = FeatureRequest(AUX_LAYERS, last=True)
    decode(target, scripted, PROMPTS, Greedy(), 20, ())
    for sequence, (prompt, reference) in enumerate(zip(PROMPTS, references, strict=True)):
        aux, last, sequence_ids = [], [], [prompt[0]]
        for states_B in scripted.seen:
            num_new = int(states_B.num_new_B[sequence])
            aux.append(states_B.aux_BnX[sequence, :num_new])
            last.append(states_B.last_BnH[sequence, :num_new])
            sequence_ids += states_B.next_ids_Bn[sequence, :num_new].tolist()
        assert sequence_ids == [*prompt, *reference][: len(sequence_ids)]
        expected = states(target.model, torch.tensor(sequence_ids[:-1]))
        torch.testing.assert_close(torch.cat(aux), torch.cat([expected[layer] for layer in AUX_LAYERS], dim=-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.cat(last), expected[-1], rtol=1e-4, atol=1e-4)


def test_hooks_are_removed_and_nothing_is_captured_without_a_request(target: Target) -> None:
    def num_hooks() -> int:
        return sum(len(module._forward_hooks) for module in target.model.modules())

    before = num_hooks()
    TargetSession(target, 1, 8, FeatureRequest(AUX_LAYERS, last=True)).prefill([[1, 2]])
    assert num_hooks() == before
    rows = TargetSession(target, 1, 8).prefill([[1, 2]])
    assert rows.aux_BRX is None and rows.last_BRH is None and rows.logits_BRV.shape == (1, 1, V)


WINDOWED = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "qwen3, every second layer": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 3)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 3, query_pre_attn_scalar=8)
    ),
    "gpt-oss, with sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 3, num_local_experts=4)
    ),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_window_targets_read_trees_and_roll_back_too(family: str) -> None:
    torch.manual_seed(1)
    target = Target(WINDOWED[family](), tokenizer=None)
    references = [greedy(target, prompt, 30) for prompt in PROMPTS]
    for method in (Scripted(references, [1, 3, 0], 3), Bushy(references, [0, 2, 3], 3)):
        decoded = decode(target, method, PROMPTS, Greedy(), 24, ())
        assert [list(result.token_ids) for result in decoded.answers] == [reference[:24] for reference in references]
        assert decoded.acceptance.tau > 1.5


def test_a_target_that_cannot_be_rolled_back_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "config", Qwen3Config(**SIZES, layer_types=["full_attention", "linear_attention"] * 3))
    with pytest.raises(ValueError, match="linear_attention: what they remember cannot be rolled back"):
        TargetSession(target, 1, 8)


# --- the walk predicts the decoder's counters -------------------------------------------------------------------------


def walked_and_counted(target: Target, drafter: Any, end_ids: tuple[int, ...]) -> tuple[Acceptance, Acceptance]:
    """Acceptance by the teacher-forced walk and by the decoder's own counters, over the same prompts decoded together."""
    draft_length, trajectories = 3, []
    for prompt in PROMPTS:
        tokens = plain(target, prompt, 40, end_ids).token_ids
        trajectories.append(Trajectory(tuple(prompt), tokens, tuple(greedy(target, [*prompt, *tokens], draft_length - 1))))
    decoded = decode(target, Chain(drafter, draft_length), PROMPTS, Greedy(), 40, end_ids)
    assert [result.token_ids for result in decoded.answers] == [trajectory.answer_ids for trajectory in trajectories]
    packs = trajectory_features(target, trajectories, drafter.feature_request(), pack_tokens=64)
    return chain_acceptance(drafter, packs, draft_length), decoded.acceptance


@pytest.mark.parametrize("has_end_token", [False, True])
def test_walk_equals_decoder_counters_for_a_bigram_drafter(target: Target, has_end_token: bool) -> None:
    table = torch.zeros(V, dtype=torch.long)
    for prompt in PROMPTS:  # Right for each token's latest successor.
        tokens = greedy(target, prompt, 44)
        table[tokens[:-1]] = torch.tensor(tokens[1:])
    end_ids = (greedy(target, PROMPTS[2], 15)[-1],) if has_end_token else ()
    walked, counted = walked_and_counted(target, BigramDrafter(table), end_ids)
    assert walked == counted
    assert 1.1 < walked.tau < 3.9, "the table should be right at times and wrong at times"


def learn_by_heart(target: Target, drafter: Eagle3, continuations: list[list[int]]) -> None:
    """A few optimizer steps on the first part of what the prompts will be answered with."""
    trajectories = [Trajectory(tuple(prompt), tuple(rest), ()) for prompt, rest in zip(PROMPTS, continuations, strict=True)]
    packs = trajectory_features(target, trajectories, drafter.feature_request(), pack_tokens=1000)
    batch = drafter_batch(packs[0].features)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (drafter(batch).loss_sum / drafter.num_supervised(batch)).backward()
        optimizer.step()


def test_walk_equals_decoder_counters_for_an_eagle3_drafter(target: Target) -> None:
    model = target.model
    heads = TargetHeads(model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach(), model.model.norm.weight.detach(), 1e-6)
    drafter = Eagle3(Eagle3Config(aux_layers=AUX_LAYERS, draft_vocab_size=None, ttt_steps=3), model.config, heads, None)
    learn_by_heart(target, drafter, [greedy(target, prompt, 30) for prompt in PROMPTS])
    walked, counted = walked_and_counted(target, drafter, ())
    assert walked == counted
    assert 1.5 < walked.tau < 3.9, "the drafter should be right at times, also at later positions, and wrong at times"
    assert walked.accepted_at[2] > 5


# --- speed-up ---------------------------------------------------------------------------------------------------------


def test_speedup_alternates_after_a_warm_up_and_counts_tokens_on_both_sides(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def timed(target: Target, method: Method, *arguments: Any) -> Decoded:
        kind = "plain" if isinstance(method, Plain) else "method"
        calls.append(kind)
        # Slower with every call, as on a machine that heats up; speculation is always 1.5 times as fast as the plain call
        # before it.
        seconds = 3.0 * (1 + len(calls) // 2) if kind == "plain" else 2.0 * (len(calls) // 2)
        return Decoded((Answer((1, 2, 3), () if kind == "plain" else (1,), ()),), method.longest_path, seconds, 0.0, seconds / 4, 0.0)

    monkeypatch.setattr(speedup_module, "decode", timed)
    result = measure_speedup(target, Scripted([[]], [0], 2), [[1], [2]], 3, ())
    assert calls == ["plain", "method"] * 5  # The warm-up, then two rounds of two prompts.
    assert result.ratio == pytest.approx(1.5) and result.ratio_range == pytest.approx((1.5, 1.5))
    assert result.tokens_per_s / result.tokens_per_s_plain == pytest.approx(1.5)
    assert result.drafting_share == pytest.approx(0.25)
    assert (result.num_outputs, result.num_identical, result.num_near_ties) == (2, 2, 0)
    assert (result.acceptance.num_prompts, result.acceptance.tau) == (2, 2.0)


def test_speedup_of_the_real_decoders_compares_equal_outputs(target: Target) -> None:
    drafter: Any = BigramDrafter(torch.zeros(V, dtype=torch.long))
    result = measure_speedup(target, Chain(drafter, 2), PROMPTS[:2], 8, (), num_rounds=1)
    assert (result.num_outputs, result.num_identical) == (2, 2)
    assert result.ratio > 0 and result.acceptance.num_prompts == 2


def decode_with_one_wrong_token(target: Target, method: Method, prompts: Any, *arguments: Any) -> Decoded:
    """A decoder that is not lossless at token 3."""
    decoded = decode(target, Plain(), prompts, *arguments)
    if isinstance(method, Plain):
        return decoded
    tokens = decoded.answers[0].token_ids
    wrong = Answer((*tokens[:3], (tokens[3] + 1) % V, *tokens[4:]), (1, 0, 0, 0, 0), (2,) * 5)
    return Decoded((wrong,), 2, 1.0, 0.0, 0.0, 1.0)


def test_a_decoder_that_is_not_lossless_is_an_error(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedup_module, "decode", decode_with_one_wrong_token)
    with pytest.raises(ValueError, match=r"prompt 0: .* differs from plain decoding at token 3"):
        measure_speedup(target, Scripted([[]], [0], 2), [PROMPTS[1]], 8, ())


def test_a_difference_at_a_near_tie_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = llama()
    with torch.no_grad():  # Every logit is there twice, so the two best always tie.
        tied.model.lm_head.weight[V // 2 :] = tied.model.lm_head.weight[: V // 2]
    monkeypatch.setattr(speedup_module, "decode", decode_with_one_wrong_token)
    result = measure_speedup(tied, Scripted([[]], [0], 2), [PROMPTS[1]], 8, ())
    assert (result.num_identical, result.num_near_ties) == (0, 1)
    assert result.largest_tie_gap < 1e-5


def test_top_two_gap_is_that_of_the_step_which_chose_the_token(target: Target) -> None:
    tokens = greedy(target, PROMPTS[1], 5)
    for index in (0, 3):
        logits = target.model(torch.tensor([PROMPTS[1] + tokens[:index]])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        assert top_two_gap(target, PROMPTS[1], tokens, index) == pytest.approx(best - second, abs=1e-4)


def test_losslessness_is_checked_against_given_answers(target: Target) -> None:
    answers = [plain(target, prompt, 8).token_ids for prompt in PROMPTS[:2]]
    trajectories = [Trajectory(tuple(prompt), tokens, ()) for prompt, tokens in zip(PROMPTS, answers, strict=False)]
    method = Scripted([[], []], [0], 2)
    assert check_lossless(target, method, trajectories, 8, ()) == {
        "dtype": "float32",
        "num_outputs": 2,
        "num_identical_outputs": 2,
        "num_near_ties": 0,
    }
    wrong = [Trajectory(trajectory.prompt_ids, (*trajectory.answer_ids[:-1], 1 - trajectory.answer_ids[-1] % 2), ()) for trajectory in trajectories]
    with pytest.raises(ValueError, match="not lossless"):
        check_lossless(target, method, wrong, 8, ())
