"""Chain speculation writes what plain decoding writes, hands the drafter the target's own states, and counts what the exact walk
predicts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import eval.decode.speedup as speedup_module
from data.batch import DrafterBatch, drafter_batch
from data.target import Target, TargetHeads
from eval.acceptance import Acceptance, Trajectory, chain_acceptance, trajectory_features
from eval.decode.cache import TargetSession
from eval.decode.chain import decode_chain, num_leading_equal
from eval.decode.plain import DecodeResult, decode_plain, top_two_gap
from eval.decode.speedup import check_lossless, measure_speedup
from train.drafters.base import FeatureRequest
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


class ScriptedDrafter(torch.nn.Module):
    """Knows the target's continuation and drafts it right for the first `right[v]` drafts of verification v (cyclically), wrong
    after that.

    It also keeps everything that it was handed.
    """

    def __init__(self, continuation: list[int], right: list[int], request: FeatureRequest = FeatureRequest((), False)) -> None:  # noqa: B008
        super().__init__()
        self.continuation, self.right, self.request = continuation, right, request
        self.aux: list[Tensor | None] = []
        self.last: list[Tensor | None] = []
        self.next_ids: list[list[int]] = []

    def feature_request(self) -> FeatureRequest:
        return self.request

    def new_state(self) -> None:
        self.aux, self.last, self.next_ids = [], [], []

    def propose(self, state: None, aux_nX: Tensor | None, last_nH: Tensor | None, next_ids_n: Tensor, num_drafts: int) -> Tensor:
        self.aux.append(aux_nX)
        self.last.append(last_nH)
        self.next_ids.append(next_ids_n.tolist())
        # Pairs handed over so far, less those inside the prompt: the number of known answer tokens.
        known = sum(len(ids) for ids in self.next_ids) - len(self.next_ids[0]) + 1
        num_right = self.right[(len(self.next_ids) - 1) % len(self.right)]
        drafts = self.continuation[known : known + num_drafts]
        return torch.tensor([token if place < num_right else (token + 1) % V for place, token in enumerate(drafts)])


class BigramDrafter(torch.nn.Module):
    """Drafts by a table from the last known token alone, in both of a drafter's ways."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def feature_request(self) -> FeatureRequest:
        return FeatureRequest((), False)

    def new_state(self) -> None:
        return None

    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        return torch.stack([self.table[batch.known_tokens(step)] for step in range(num_drafts)])

    def propose(self, state: None, aux_nX: Tensor | None, last_nH: Tensor | None, next_ids_n: Tensor, num_drafts: int) -> Tensor:
        drafts = [self.table[next_ids_n[-1]]]
        while len(drafts) < num_drafts:
            drafts.append(self.table[drafts[-1]])
        return torch.stack(drafts)


# --- the same tokens, the right counts --------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_decoding_equals_decoding_without_a_cache(target: Target, prompt: list[int]) -> None:
    result = decode_plain(target, prompt, 20, ())
    assert list(result.token_ids) == greedy(target, prompt, 20)
    assert result.num_verifications == result.num_verified_tokens == 19


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("draft_length", [1, 4])
def test_an_oracle_has_tau_of_exactly_k_plus_one(target: Target, prompt: list[int], draft_length: int) -> None:
    reference = greedy(target, prompt, 30)
    result = decode_chain(target, ScriptedDrafter(reference, [draft_length]), prompt, draft_length, 21, ())
    assert list(result.token_ids) == reference[:21]
    assert result.num_verifications == 20 / (draft_length + 1)
    assert result.acceptance.tau == draft_length + 1
    assert result.acceptance.conditional_acceptance == [1.0] * draft_length


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_drafter_that_is_always_wrong_has_tau_one(target: Target, prompt: list[int]) -> None:
    reference = greedy(target, prompt, 30)
    result = decode_chain(target, ScriptedDrafter(reference, [0]), prompt, 4, 20, ())
    assert list(result.token_ids) == reference[:20]
    assert (result.num_verifications, result.accepted_at, result.acceptance.tau) == (19, (0, 0, 0, 0), 1.0)


def test_a_scripted_pattern_gives_hand_computed_counts(target: Target) -> None:
    reference = greedy(target, PROMPTS[2], 30)
    # Accepting 2, 0, 3, 2, 0, 3 ... emits 3, 1, 4, 3, 1, 4 ...: after the prefill's token 1, 4, 5, 9, 12, 13, 17 tokens; 15 are
    # asked for.
    result = decode_chain(target, ScriptedDrafter(reference, [2, 0, 3]), PROMPTS[2], 3, 15, ())
    assert list(result.token_ids) == reference[:15]
    assert result.num_verifications == 6
    assert result.accepted_at == (4, 4, 2)
    assert result.num_verified_tokens == 16
    assert result.acceptance.tau == 16 / 6
    assert result.acceptance.conditional_acceptance == [4 / 6, 1.0, 0.5]


@pytest.mark.parametrize("right", [[0], [1, 0], [4]])
def test_the_answer_ends_with_its_end_token_however_many_were_accepted_past_it(target: Target, right: list[int]) -> None:
    reference = greedy(target, PROMPTS[1], 40)
    place = next(index for index in range(3, 40) if reference[index] not in reference[:index])
    chain = decode_chain(target, ScriptedDrafter(reference, right), PROMPTS[1], 4, 35, {reference[place]})
    assert chain.token_ids == decode_plain(target, PROMPTS[1], 35, {reference[place]}).token_ids == tuple(reference[: place + 1])


def test_one_token_answers_take_no_verification(target: Target) -> None:
    first = greedy(target, PROMPTS[1], 1)
    for result in (
        decode_chain(target, ScriptedDrafter([], [0]), PROMPTS[1], 4, 1, ()),
        decode_chain(target, ScriptedDrafter([], [0]), PROMPTS[1], 4, 9, first),
        decode_plain(target, PROMPTS[1], 9, first),
    ):
        assert (list(result.token_ids), result.num_verifications) == (first, 0)


def test_leading_agreement_stops_at_the_first_difference() -> None:
    assert num_leading_equal([1, 2, 3], [1, 2, 3, 4]) == 3
    assert num_leading_equal([1, 2, 3], [1, 9, 3, 4]) == 1
    assert num_leading_equal([1, 2], [2, 2, 2]) == 0


# --- cache and captured states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [[0], [4], [2, 0, 3, 1]])
def test_the_drafter_gets_the_target_states_of_every_verified_position_once(target: Target, right: list[int]) -> None:
    prompt = PROMPTS[2]
    reference = greedy(target, prompt, 30)
    drafter = ScriptedDrafter(reference, right, FeatureRequest(AUX_LAYERS, last=True))
    decode_chain(target, drafter, prompt, 4, 20, ())
    next_ids = [token for ids in drafter.next_ids for token in ids]
    sequence = [prompt[0], *next_ids]
    assert sequence == [*prompt, *reference][: len(sequence)]
    expected = states(target.model, torch.tensor(sequence[:-1]))
    torch.testing.assert_close(torch.cat(drafter.aux), torch.cat([expected[layer] for layer in AUX_LAYERS], dim=-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(drafter.last), expected[-1], rtol=1e-4, atol=1e-4)


def test_hooks_are_removed_and_nothing_is_captured_without_a_request(target: Target) -> None:
    def num_hooks() -> int:
        return sum(len(module._forward_hooks) for module in target.model.modules())

    before = num_hooks()
    TargetSession(target, FeatureRequest(AUX_LAYERS, last=True)).forward([1, 2], 1)
    assert num_hooks() == before
    step = TargetSession(target).forward([1, 2], 2)
    assert step.aux_nX is None and step.last_nH is None and step.logits_kV.shape == (2, V)


def test_a_rolled_back_cache_goes_on_as_if_the_tokens_had_never_been_there(target: Target) -> None:
    session = TargetSession(target)
    session.forward([1, 2, 3], 1)
    session.forward([9, 9, 9, 9], 4)
    session.rollback(4)
    assert session.num_tokens == 4
    expected = target.model(torch.tensor([[1, 2, 3, 9, 5, 6]])).logits[0, -2:]
    torch.testing.assert_close(session.forward([5, 6], 2).logits_kV, expected, rtol=1e-4, atol=1e-4)


def test_sliding_window_targets_roll_back_too() -> None:
    torch.manual_seed(1)
    target = Target(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)), tokenizer=None)
    reference = greedy(target, PROMPTS[2], 30)
    for right in ([0], [1, 3, 0]):
        assert list(decode_chain(target, ScriptedDrafter(reference, right), PROMPTS[2], 3, 24, ()).token_ids) == reference[:24]


# --- the walk predicts the decoder's counters -------------------------------------------------------------------------


def walked_and_counted(target: Target, drafter: Any, end_ids: tuple[int, ...]) -> tuple[Acceptance, Acceptance]:
    """Acceptance by the teacher-forced walk and by the decoder's own counters, over the same prompts."""
    draft_length, trajectories, counted = 3, [], []
    for prompt in PROMPTS:
        answer = decode_plain(target, prompt, 40, end_ids).token_ids
        extra = greedy(target, [*prompt, *answer], draft_length - 1)
        trajectories.append(Trajectory(tuple(prompt), answer, tuple(extra)))
        result = decode_chain(target, drafter, prompt, draft_length, 40, end_ids)
        assert result.token_ids == answer
        counted.append(result.acceptance)
    packs = trajectory_features(target, trajectories, drafter.feature_request(), pack_tokens=64)
    return chain_acceptance(drafter, packs, draft_length), sum(counted[1:], counted[0])


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

    def timed(kind: str, total_s: float) -> Any:
        def decode(*arguments: Any) -> DecodeResult:
            calls.append(kind)
            # Slower with every call, as on a machine that heats up; speculation is always 1.5 times as fast as the plain call
            # before it.
            seconds = total_s * (1 + len(calls) // 2 if kind == "plain" else len(calls) // 2)
            return DecodeResult((1, 2, 3), 1, () if kind == "plain" else (1, 1), 2, seconds, 0.0, seconds / 4, 0.0)

        return decode

    monkeypatch.setattr(speedup_module, "decode_plain", timed("plain", 3.0))
    monkeypatch.setattr(speedup_module, "decode_chain", timed("chain", 2.0))
    result = measure_speedup(target, ScriptedDrafter([], [0]), [[1], [2]], 2, 3, ())
    assert calls == ["plain", "chain"] * 5  # The warm-up, then two rounds of two prompts.
    assert result.ratio == pytest.approx(1.5) and result.ratio_range == pytest.approx((1.5, 1.5))
    assert result.tokens_per_s / result.tokens_per_s_plain == pytest.approx(1.5)
    assert result.drafting_share == pytest.approx(0.25)
    assert (result.num_outputs, result.num_identical, result.num_near_ties) == (2, 2, 0)
    assert (result.acceptance.num_prompts, result.acceptance.tau) == (2, 2.0)


def test_speedup_of_the_real_decoders_compares_equal_outputs(target: Target) -> None:
    drafter = BigramDrafter(torch.zeros(V, dtype=torch.long))
    result = measure_speedup(target, drafter, PROMPTS[:2], 2, 8, (), num_rounds=1)
    assert (result.num_outputs, result.num_identical) == (2, 2)
    assert result.ratio > 0 and result.acceptance.num_prompts == 2


def decode_with_one_wrong_token(target: Any, drafter: Any, prompt: Any, draft_length: int, max_new_tokens: int, end_ids: Any) -> DecodeResult:
    """A decoder that is not lossless at token 3."""
    result = decode_plain(target, prompt, max_new_tokens, end_ids)
    tokens = (*result.token_ids[:3], (result.token_ids[3] + 1) % V, *result.token_ids[4:])
    return DecodeResult(tokens, 5, (1, 0), 6, 1.0, 0.0, 0.0, 1.0)


def test_a_decoder_that_is_not_lossless_is_an_error(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedup_module, "decode_chain", decode_with_one_wrong_token)
    with pytest.raises(ValueError, match=r"prompt 0: .* differs from plain decoding at token 3"):
        measure_speedup(target, ScriptedDrafter([], [0]), [PROMPTS[1]], 2, 8, ())


def test_a_difference_at_a_near_tie_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = llama()
    with torch.no_grad():  # Every logit is there twice, so the two best always tie.
        tied.model.lm_head.weight[V // 2 :] = tied.model.lm_head.weight[: V // 2]
    monkeypatch.setattr(speedup_module, "decode_chain", decode_with_one_wrong_token)
    result = measure_speedup(tied, ScriptedDrafter([], [0]), [PROMPTS[1]], 2, 8, ())
    assert (result.num_identical, result.num_near_ties) == (0, 1)
    assert result.largest_tie_gap < 1e-5


def test_top_two_gap_is_that_of_the_step_which_chose_the_token(target: Target) -> None:
    answer = greedy(target, PROMPTS[1], 5)
    for index in (0, 3):
        logits = target.model(torch.tensor([PROMPTS[1] + answer[:index]])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        assert top_two_gap(target, PROMPTS[1], answer, index) == pytest.approx(best - second, abs=1e-4)


def test_losslessness_is_checked_against_given_answers(target: Target) -> None:
    answers = [decode_plain(target, prompt, 8, ()).token_ids for prompt in PROMPTS[:2]]
    trajectories = [Trajectory(tuple(prompt), tuple(answer), ()) for prompt, answer in zip(PROMPTS, answers, strict=False)]
    drafter = ScriptedDrafter([], [0])
    assert check_lossless(target, drafter, trajectories, 2, 8, ()) == {
        "dtype": "float32",
        "num_outputs": 2,
        "num_identical_outputs": 2,
        "num_near_ties": 0,
    }
    wrong = [Trajectory(trajectory.prompt_ids, (*trajectory.answer_ids[:-1], 1 - trajectory.answer_ids[-1] % 2), ()) for trajectory in trajectories]
    with pytest.raises(ValueError, match="not lossless"):
        check_lossless(target, drafter, wrong, 2, 8, ())
