"""A smaller model drafts with a cache of its own, which holds exactly the verified tokens. That it is lossless is in test_untrained_methods.py."""

import copy
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from data.target import Target
from eval.decode.draft_model import DraftModel, check_same_tokenizer
from eval.decode.loop import Seen, decode
from eval.decode.verify import Greedy, RandomChance, Sampled, Sampling

V = 64
PROMPTS = [[5], [1, 2, 3], [7, 7, 20, 3, 9, 11, 40], [63, 0, 12, 12]]
NO_STATES: Any = None  # the draft model reads none of the target's


def tokenizer(*words: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0])))


def words(count: int) -> list[str]:
    return [f"w{index}" for index in range(count)]


SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # Large, so that the random model's continuations vary.
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(vocab_size: int = V, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes | {"vocab_size": vocab_size}))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(llama(), tokenizer(*words(V)))


def similar(target: Target, noise: float, sliding_window: int | None) -> Target:
    """A draft model that agrees with the target at times."""
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=sliding_window))
    model.load_state_dict(target.model.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return Target(model, target.tokenizer)


@torch.no_grad()
def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation without any cache: the independent reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def accepted_by_hand(target: Target, draft: Target, prompt: list[int], draft_length: int, max_new_tokens: int) -> tuple[int, ...]:
    """Drafts accepted by each verification, every draft made anew from the whole text."""
    text = [*prompt, *greedy(target, prompt, max_new_tokens + draft_length)]
    known, accepted = len(prompt) + 1, []
    while known < len(prompt) + max_new_tokens:
        drafts = greedy(draft, text[:known], draft_length)
        pairs = zip(drafts, text[known : known + draft_length], strict=True)
        accepted.append(next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), draft_length))
        known += accepted[-1] + 1
    return tuple(accepted)


# --- what is accepted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [PROMPTS[2:3], PROMPTS], ids=["alone", "batch"])
@pytest.mark.parametrize("draft_length", [1, 3, 5])
def test_a_target_that_drafts_for_itself_has_tau_of_exactly_k_plus_one(target: Target, prompts: list[list[int]], draft_length: int) -> None:
    for chance in (None, RandomChance(1)):
        sampling = None if chance is None else Sampling(0.8, top_k=20)
        verifier = Greedy() if sampling is None or chance is None else Sampled(sampling, chance)
        decoded = decode(target, DraftModel(target, target, draft_length, sampling, chance), prompts, verifier, 30, ())
        assert decoded.acceptance.tau == draft_length + 1
        assert decoded.acceptance.conditional_acceptance == [1.0] * draft_length


@pytest.mark.parametrize("draft_length", [1, 2, 4])
@pytest.mark.parametrize("sliding_window", [None, 9])
def test_each_verification_accepts_what_drafts_from_the_whole_text_would(target: Target, draft_length: int, sliding_window: int | None) -> None:
    """The cache of the draft model holds the verified tokens and nothing else, whatever was accepted before, for each sequence of a batch."""
    draft = similar(target, 0.15, sliding_window)
    end_ids = (greedy(target, PROMPTS[2], 15)[-1],)
    expected = [accepted_by_hand(target, draft, prompt, draft_length, 30) for prompt in PROMPTS]
    assert all(len({*walk}) > 1 for walk in expected), "drafts should be right at times and wrong at times"
    decoded = decode(target, DraftModel(target, draft, draft_length), PROMPTS, Greedy(), 30, ())
    assert [answer.accepted for answer in decoded.answers] == expected
    ended = decode(target, DraftModel(target, draft, draft_length), PROMPTS, Greedy(), 30, end_ids)
    assert len({len(answer.token_ids) for answer in ended.answers}) > 1, "sequences should leave the batch early"
    for answer, walk in zip(ended.answers, expected, strict=True):
        assert answer.accepted == walk[: answer.num_verifications]


def test_k_drafts_take_k_forwards_of_the_draft_model_also_after_all_were_accepted(target: Target) -> None:
    draft = Target(copy.deepcopy(target.model), target.tokenizer)
    method = DraftModel(target, draft, 3)
    text = greedy(target, PROMPTS[2], 30)
    method.start(1, 100)
    calls: list[list[int]] = []
    draft.model.model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs["input_ids"][0].tolist()), with_kwargs=True)
    context = [*PROMPTS[2], text[0]]
    [tree] = method.draft(Seen([context], NO_STATES))
    assert list(tree.token_ids) == text[1:4]
    assert calls == [PROMPTS[2], text[0:1], text[1:2], text[2:3]]  # the last draft, text[3], is not read
    calls.clear()
    method.draft(Seen([[*context, *text[1:5]]], NO_STATES))
    assert calls == [text[3:5], text[5:6], text[6:7]]  # two tokens were unread
    calls.clear()
    method.draft(Seen([[*context, *text[1:6], 50]], NO_STATES))  # of the drafts text[5:8] one was accepted
    assert calls[0] == [50]


def test_a_draft_that_comes_back_as_the_token_after_a_rejection_is_read_once(target: Target) -> None:
    """A rule that is not lossless may reject a draft and then choose it: it is the newest token, and those are always unread."""
    draft = Target(copy.deepcopy(target.model), target.tokenizer)
    method = DraftModel(target, draft, 3)
    method.start(1, 100)
    context = [*PROMPTS[2], 9]
    first = method.draft(Seen([context], NO_STATES))[0].token_ids
    assert method.draft(Seen([[*context, first[0]]], NO_STATES))[0].token_ids == tuple(greedy(target, [*context, first[0]], 3))


# --- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocab_size", [V - 4, V + 8])
def test_embeddings_padded_to_another_size_draft_the_shared_tokens(draft_vocab_size: int) -> None:
    """The same rows, fewer or more of them behind the tokenizer's 60 tokens: the drafts are the same."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[60:] = 0
    target = Target(model, tokenizer(*words(60)))
    other = llama(draft_vocab_size)
    state = {name: tensor for name, tensor in model.state_dict().items() if "embed_tokens" not in name and "lm_head" not in name}
    other.load_state_dict(state, strict=False)
    with torch.no_grad():
        other.lm_head.weight.zero_()
        for theirs, ours in ((other.lm_head.weight, model.lm_head.weight), (other.model.embed_tokens.weight, model.model.embed_tokens.weight)):
            theirs[:60] = ours[:60]
    prompts = [[5], [1, 2, 3]]
    for sampling, chance in ((None, None), (Sampling(0.5), RandomChance(0))):
        method = DraftModel(target, Target(other, target.tokenizer), 3, sampling, chance)
        decoded = decode(target, method, prompts, Greedy() if sampling is None or chance is None else Sampled(sampling, chance), 20, ())
        assert decoded.acceptance.tau > (3.9 if sampling is None else 2)


def test_padding_beyond_the_targets_rows_is_never_drafted() -> None:
    target = Target(llama(), tokenizer(*words(60)))
    other = llama(V + 8)
    with torch.no_grad():
        other.lm_head.weight[V:] *= 100  # some of these logits are by far the largest
    method = DraftModel(target, Target(other, target.tokenizer), 4)
    method.start(1, 60)
    for prompt in PROMPTS:
        method.start(1, 60)
        assert max(method.draft(Seen([[*prompt, 3]], NO_STATES))[0].token_ids) < V


def test_tokens_that_the_draft_model_lacks_are_never_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small its own logits are."""
    draft = Target(llama(61), tokenizer(*words(60)))
    own = draft.logits
    monkeypatch.setattr(draft, "logits", lambda last: own(last) - 1000)
    method = DraftModel(Target(llama(), tokenizer(*words(60))), draft, 4)
    method.start(1, 60)
    assert max(method.draft(Seen([[1, 2, 3]], NO_STATES))[0].token_ids) < 61


def test_another_tokenizer_is_refused_with_what_differs(target: Target) -> None:
    swapped = Target(llama(), tokenizer(*words(7), "w8", "w7", *words(V)[9:]))
    with pytest.raises(ValueError, match=r"2 of 64 token ids differ, the first is 7, 'w8' in the draft model and 'w7' in the target"):
        DraftModel(target, swapped, 3)
    with pytest.raises(ValueError, match="2 of 64 token ids differ"):
        check_same_tokenizer(target, swapped)


def test_tokens_that_only_the_longer_tokenizer_has_are_no_difference(target: Target) -> None:
    check_same_tokenizer(target, Target(llama(V + 3), tokenizer(*words(V + 3))))
    check_same_tokenizer(Target(llama(), tokenizer(*words(V))), Target(llama(), tokenizer(*words(V - 3))))


def test_a_draft_model_that_cannot_read_the_targets_tokens_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="has 61 embeddings, but the target's tokenizer has 'w63' with id 63"):
        check_same_tokenizer(target, Target(llama(61), tokenizer(*words(61))))


def test_a_chain_of_no_drafts_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="chain of 0 drafts"):
        DraftModel(target, target, 0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_draft_model_and_its_cache(target: Target) -> None:
    draft = Target(llama(num_hidden_layers=2, tie_word_embeddings=True), target.tokenizer)
    method = DraftModel(target, draft, 3)
    # Embedding (the head is the same tensor), final norm; of each layer q, o, k, v, three MLP matrices, two norms; fp32.
    numbers = 64 * 32 + 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32)
    assert method.weights_bytes == 4 * numbers
    assert method.cache_bytes == 0
    decode(target, method, PROMPTS, Greedy(), 10, ())
    # Keys and values of two heads of 8, two layers, fp32; prompt 7, answer 10, path and nodes 3 each, and one.
    assert method.cache_bytes == 2 * 2 * 2 * 8 * 4 * (7 + 10 + 3 + 3 + 1)
    assert DraftModel(target, target, 3).weights_bytes == 0
