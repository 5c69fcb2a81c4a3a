"""Methods that train nothing (Lookahead, prompt lookup, a draft model) are lossless, and the real vLLM counts of them what we count.

Greedy: token for token the target's own answer. Sampling: the exact joint distribution of several tokens, against hundreds of answers to one prompt.
"""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from data.target import Target, TargetConfig
from eval.decode.draft_model import DraftModel
from eval.decode.lookahead import Lookahead
from eval.decode.loop import Answer, Method, decode
from eval.decode.ngram import NGram, continuation_place
from eval.decode.verify import Greedy, RandomChance, Sampled, Sampling
from eval.serve import engine_python, run_worker

PROMPTS = [[5], [1, 2, 3], [7, 7, 20, 3, 9, 11, 40], [63, 0, 12, 12]]


def target_of(model: Any) -> Target:
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(model.config.vocab_size)}, unk_token="w0"))
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=words))


def sizes(vocab_size: int, num_layers: int, initializer_range: float) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": initializer_range,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def llama(vocab_size: int, num_layers: int, initializer_range: float) -> Target:
    torch.manual_seed(0)
    return target_of(LlamaForCausalLM(LlamaConfig(**sizes(vocab_size, num_layers, initializer_range))))


def mistral() -> Target:
    torch.manual_seed(1)
    return target_of(MistralForCausalLM(MistralConfig(**sizes(64, 3, 0.1), sliding_window=5)))


def with_noise(target: Target, noise: float) -> Target:
    """Another model that says similar things."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std().nan_to_num() * torch.randn(parameter.shape, generator=generator)
    return Target(model, target.tokenizer)


# --- greedy -----------------------------------------------------------------------------------------------------------

# Small random weights: answers that repeat themselves, so that there is something to find.
TARGETS = {"llama": lambda: llama(64, 3, 0.1), "sliding window": mistral}
METHODS: dict[str, Callable[[Target], Method]] = {
    "lookahead of the paper": lambda target: Lookahead(),
    "lookahead": lambda target: Lookahead(5, 4, 5),
    "smallest lookahead": lambda target: Lookahead(1, 2, 1),
    "narrow and deep lookahead": lambda target: Lookahead(2, 7, 3),
    "lookahead with the prompt": lambda target: Lookahead(4, 3, 3, has_prompt_pool=True),
    "n-gram": lambda target: NGram(4, 1, 3),
    "draft model": lambda target: DraftModel(target, with_noise(target, 0.2), 3),
    "draft model, one draft": lambda target: DraftModel(target, with_noise(target, 0.2), 1),
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]()


@torch.no_grad()
def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation without any cache: the independent reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def references(target: Target) -> list[list[int]]:
    return [greedy(target, prompt, 40) for prompt in PROMPTS]


def cut(reference: list[int], end_ids: tuple[int, ...]) -> list[int]:
    """Up to the end token, that included."""
    return reference[: next((place + 1 for place, token in enumerate(reference) if token in end_ids), len(reference))]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("has_end_token", [False, True])
def test_each_method_writes_the_targets_own_answer_alone_and_in_a_batch(
    target: Target, references: list[list[int]], name: str, has_end_token: bool
) -> None:
    end_ids = (references[2][9],) if has_end_token else ()
    expected = [cut(reference[:32], end_ids) for reference in references]
    assert has_end_token == (len({*map(len, expected)}) > 1)
    batch = decode(target, METHODS[name](target), PROMPTS, Greedy(), 32, end_ids)
    assert [list(answer.token_ids) for answer in batch.answers] == expected
    alone = [decode(target, METHODS[name](target), [prompt], Greedy(), 32, end_ids).answers[0] for prompt in PROMPTS]
    assert list(batch.answers) == alone  # what was accepted and the sizes of the trees as well
    assert batch.acceptance.tau > 1


# --- sampling ---------------------------------------------------------------------------------------------------------

SETTINGS = Sampling(temperature=0.7)
LONG_PROMPT = [1, 2, 3, 4, 5, 6, 7, 0, 1, 3, 5, 7]
SAMPLED: dict[str, Callable[[Target, RandomChance], Method]] = {
    "lookahead": lambda target, chance: Lookahead(6, 2, 3),
    "lookahead with the prompt": lambda target, chance: Lookahead(6, 3, 3, has_prompt_pool=True),
    "n-gram": lambda target, chance: NGram(3, 1, 2),
    "draft model": lambda target, chance: DraftModel(target, with_noise(target, 0.8), 2, SETTINGS, chance),
    "draft model, flatter than the target": lambda target, chance: DraftModel(target, with_noise(target, 0.4), 3, Sampling(1.5), chance),
    "greedy draft model": lambda target, chance: DraftModel(target, with_noise(target, 0.4), 2),
}


@torch.no_grad()
def joint_distribution(target: Target, prompt: list[int], count: int, settings: Sampling) -> Tensor:
    """[V] * count: probability of every continuation of `count` tokens, by one forward over each of them."""
    joint = torch.ones((), dtype=torch.float64)
    for length in range(count):
        texts = torch.tensor([[*prompt, *rest] for rest in itertools.product(range(target.vocab_size), repeat=length)])
        probs = settings.probabilities(target.model(texts).logits[:, -1])
        joint = joint[..., None] * probs.view(*joint.shape, target.vocab_size)
    return joint


def g_test(counts: Tensor, probabilities: Tensor) -> float:
    """Tail probability of the G statistic; cells that expect fewer than 5 are taken together."""
    expected, counts = probabilities.flatten() * counts.sum(), counts.flatten().double()
    rare = expected < 5
    if rare.any():
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    statistic = 2 * torch.special.xlogy(counts, counts / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, statistic.clamp(min=0) / 2).item()


def test_the_test_of_distributions_finds_a_small_difference() -> None:
    probabilities = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert g_test(torch.tensor([400, 600, 1000]), probabilities) == pytest.approx(1)
    # G = 2 (440 ln 1.1 + 560 ln 0.9333) = 6.60; with two degrees of freedom the tail is exp(-G / 2).
    assert g_test(torch.tensor([440, 560, 1000]), probabilities) == pytest.approx(0.0369, abs=1e-4)
    assert g_test(torch.tensor([500, 500, 1000]), probabilities) < 1e-8


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_is_lossless(name: str) -> None:
    """The joint of the second to the fourth token, which verifications emit, of 1,200 answers in batches of 400."""
    target = llama(8, 1, 0.15)
    exact = joint_distribution(target, LONG_PROMPT, 4, SETTINGS).sum(0)
    counts, accepted = torch.zeros(8, 8, 8), 0
    for seed in range(3):
        chance = RandomChance(seed)
        decoded = decode(target, SAMPLED[name](target, chance), [LONG_PROMPT] * 400, Sampled(SETTINGS, chance), 4, ())
        for answer in decoded.answers:
            counts[answer.token_ids[1:]] += 1
            accepted += sum(answer.accepted)
    assert accepted > 200, "there should be something to accept"
    assert g_test(counts, exact) > 1e-4


# --- the real vLLM ----------------------------------------------------------------------------------------------------

MAX_TOKENS, NUM_DRAFTS, NUM_PROMPTS = 48, 3, 16
SPECULATIVE: dict[str, dict[str, Any]] = {
    "n-gram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "n-gram by default": {"method": "ngram"},
    "draft model": {"method": "draft_model"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random Llama whose head dimension vLLM's CPU kernels know, and one that says similar things."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    shape = sizes(96, 4, 0.08) | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    target = target_of(LlamaForCausalLM(LlamaConfig(**shape)))
    found = {}
    for name, model in {"target": target, "draft": with_noise(target, 0.1)}.items():
        found[name] = root / name
        model.model.save_pretrained(found[name])
        model.tokenizer.save_pretrained(found[name])
    return found


def our_answers(folders: dict[str, Path], name: str, prompts: list[list[int]]) -> tuple[Answer, ...]:
    target = Target.load(TargetConfig(str(folders["target"]), dtype="float32"), "cpu")
    methods = {
        "n-gram": lambda: NGram(NUM_DRAFTS, 1, 3),
        "n-gram by default": lambda: NGram(NUM_DRAFTS),
        "draft model": lambda: DraftModel(target, Target.load(TargetConfig(str(folders["draft"]), dtype="float32"), "cpu"), NUM_DRAFTS),
    }
    return decode(target, methods[name](), prompts, Greedy(), MAX_TOKENS, ()).answers


def engine_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(96, (length,), generator=generator).tolist() for length in range(2, 2 + NUM_PROMPTS)]


@pytest.mark.parametrize("name", SPECULATIVE)
def test_the_engine_has_something_to_count(folders: dict[str, Path], name: str) -> None:
    """Drafts are accepted at every depth, and not always."""
    answers = our_answers(folders, name, engine_prompts())
    accepted = [number for answer in answers for number in answer.accepted]
    assert all(accepted.count(number) > 5 for number in range(NUM_DRAFTS + 1))
    assert name == "draft model" or sum(number == 0 for answer in answers for number in answer.num_nodes) > 20, "and not always made"


@pytest.mark.engine
@pytest.mark.parametrize("name", SPECULATIVE)
def test_vllm_accepts_what_we_count(tmp_path: Path, folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM counts as drafts only the steps that drafted something."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prompts = engine_prompts()
    answers = our_answers(folders, name, prompts)
    speculative = SPECULATIVE[name] | {"num_speculative_tokens": NUM_DRAFTS}
    job = {
        "target": str(folders["target"]),
        "revision": None,
        "dtype": "float32",
        "max_num_seqs": 1,
        "max_model_len": 128,
        "max_tokens": MAX_TOKENS,
        "stop_token_ids": [],
        "prompts": prompts,
        "speculative": speculative | ({"model": str(folders["draft"])} if name == "draft model" else {}),
        "reference_outputs": None,
    }
    served = run_worker(name, job, tmp_path / "log", 600, Console())
    steps = [step for answer in answers for step in zip(answer.accepted, answer.num_nodes, strict=True) if step[1] > 0]
    ours = [sum(accepted > place for accepted, _ in steps) / len(steps) for place in range(NUM_DRAFTS)]
    counters = served["counters"]
    assert served["outputs"] == [list(answer.token_ids) for answer in answers]
    assert [count / counters["num_drafts"] for count in counters["accepted_per_position"]] == pytest.approx(ours, abs=0.01)
    assert counters["num_drafts"] == pytest.approx(len(steps), rel=0.01)


@pytest.mark.engine
def test_prompt_lookup_is_vllms_function_on_random_texts(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    cases = []
    for _ in range(3000):
        max_n = int(chance.integers(1, 7))
        text = chance.integers(0, chance.integers(2, 9), chance.integers(1, 40))
        cases.append((text.tolist(), int(chance.integers(1, max_n + 1)), max_n, int(chance.integers(1, 7))))
    script = """
import json, sys
import numpy as np
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as propose
cases = json.load(open(sys.argv[1]))
json.dump([propose(np.array(text, dtype=np.int32), low, high, 10**6, k).tolist() for text, low, high, k in cases], open(sys.argv[2], "w"))
"""
    (tmp_path / "cases").write_text(json.dumps(cases))
    subprocess.run([str(engine_python()), "-I", "-c", script, str(tmp_path / "cases"), str(tmp_path / "drafts")], check=True, cwd=tmp_path)
    for (text, min_n, max_n, draft_length), drafts in zip(cases, json.loads((tmp_path / "drafts").read_text()), strict=True):
        place = continuation_place(np.array(text), min_n, max_n)
        assert drafts == ([] if place is None else text[place : place + draft_length])
