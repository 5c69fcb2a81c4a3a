"""Sampling is lossless end to end: what methods write on a real (tiny) model is distributed as the target's own answers.

Verification alone is proved by enumeration in test_verify.py. Here whole methods decode thousands of answers of three tokens to one prompt, and a
G-test compares the counts of the last two, those that can be drafts, with their exact joint distribution: drafter, trees, caches, draft vocabulary,
roll-back and verifier together.

A further method is a further line of `METHODS`.

Legend: V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from data.batch import drafter_batch
from data.target import Target, TargetHeads
from data.vocab import DraftVocabulary
from eval.decode import loop, verify
from eval.decode.chain import Chain
from eval.decode.dynamic_tree import DynamicTree
from eval.decode.loop import Method, Plain, decode
from eval.decode.medusa_tree import MedusaTree
from eval.decode.session import TargetRows, TargetSession
from eval.decode.static_tree import StaticTree
from eval.decode.tree_shape import TreeShape
from eval.decode.verify import Chance, RandomChance, Sampled, Sampling, Typical, Verifier
from train.drafters.eagle1 import Eagle1, Eagle1Config
from train.drafters.eagle3 import Eagle3, Eagle3Config
from train.drafters.medusa1 import Medusa1, Medusa1Config

V, H, LENGTH = 8, 16, 3
PROMPT = [3, 1, 4]
BATCH, NUM_BATCHES = 512, 6
LOSSLESS, LOSSY = 1e-4, 1e-6  # p-values above and below
T1 = Sampling(temperature=1.0)
Pair = tuple[int, int]  # the second and the third token of an answer: those that can have been drafts
TREE = TreeShape.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (0, 1, 0)])


class Models:
    """A target whose every next token is uncertain, and drafters that agree with it now and then."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=V,
            hidden_size=H,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.target = Target(LlamaForCausalLM(config), tokenizer=None)
        model = self.target.model
        heads = TargetHeads(model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach(), model.model.norm.weight.detach(), 1e-6)
        self.eagle1 = self.taught(Eagle1(Eagle1Config(token_weight=1.0), config, heads, None))
        self.eagle3 = self.taught(Eagle3(Eagle3Config(aux_layers=(1, 2, 3), draft_vocab_size=None), config, heads, None))
        vocabulary = DraftVocabulary((0, 2, 3, 6, 7), V, 0.5)
        self.eagle3_of_five = self.taught(Eagle3(Eagle3Config(aux_layers=(1, 2, 3), draft_vocab_size=5), config, heads, vocabulary))
        self.medusa = self.taught(Medusa1(Medusa1Config(num_heads=3, labels="soft"), config, heads, None))

    @torch.no_grad()
    def joint(self, settings: Sampling) -> dict[Pair, float]:
        """Probability of every second and third token, from the model's logits without any cache."""
        answers = list(itertools.product(range(V), repeat=LENGTH))
        logits = self.target.model(torch.tensor([[*PROMPT, *answer] for answer in answers])).logits[:, len(PROMPT) - 1 : -1]
        chosen = torch.tensor(answers)[:, :, None]
        probs = torch.stack([settings.probabilities(logits_V) for logits_V in logits]).gather(2, chosen).prod(dim=1)[:, 0]
        joint: dict[Pair, float] = defaultdict(float)
        for (_, second, third), probability in zip(answers, probs.tolist(), strict=True):
            joint[second, third] += probability
        return joint

    def taught(self, drafter: Any) -> Any:
        """A few steps on random text: enough to agree with the target now and then."""
        ids_T = torch.randint(V, (400,), generator=torch.Generator().manual_seed(1))
        request = drafter.feature_request()
        features = self.target.features(ids_T, torch.ones(400, dtype=torch.bool), (20,) * 20, request.aux_layers, request.last)
        batch = drafter_batch(features)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            (drafter(batch).loss_sum / drafter.num_supervised(batch)).backward()
            optimizer.step()
        return drafter


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


class CopyingSession(TargetSession):
    """Reads the prompt once for all its copies, which is most of the time of an answer of three tokens."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> TargetRows:
        rows = super().prefill(prompts[:1])
        for layer in self._layers:
            layer.keys[1:], layer.values[1:] = layer.keys[:1], layer.values[:1]
        self.lengths = [len(prompts[0])] * len(prompts)
        copied = (None if value is None else value.expand(len(prompts), -1, -1) for value in (rows.logits_BRV, rows.aux_BRX, rows.last_BRH))
        return TargetRows(*copied)  # type: ignore[arg-type]


def g_test(counts: Counter[Pair], joint: dict[Pair, float]) -> float:
    """p-value of the counts under the joint distribution; outcomes expected less than five times are counted together."""
    total = sum(counts.values())
    cells = [(counts[outcome], total * probability) for outcome, probability in joint.items() if total * probability >= 5]
    rest = (total - sum(observed for observed, _ in cells), total - sum(expected for _, expected in cells))
    if rest[1] >= 5:
        cells.append(rest)
    assert len(cells) > 30, "too little of the distribution is tested"
    observed_N, expected_N = torch.tensor(cells, dtype=torch.float64).T
    g = 2 * (torch.special.xlogy(observed_N, observed_N / expected_N) - observed_N + expected_N).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), g / 2))


Make = Callable[[Models, Chance], Method]


class Result(NamedTuple):
    """p-value of a method's answers, and the share of first verifications that accepted a draft."""

    p_value: float
    acceptance: float


def sample(
    models: Models,
    make: Make,
    make_verifier: Callable[[Chance], Verifier] = lambda chance: Sampled(T1, chance),
    settings: Sampling = T1,
    num_batches: int = NUM_BATCHES,
) -> Result:
    counts: Counter[Pair] = Counter()
    accepted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "TargetSession", CopyingSession)
        for seed in range(num_batches):
            chance = RandomChance(seed)
            answers = decode(models.target, make(models, chance), [PROMPT] * BATCH, make_verifier(chance), LENGTH, ()).answers
            counts.update((answer.token_ids[1], answer.token_ids[2]) for answer in answers)
            accepted += [answer.accepted[0] > 0 for answer in answers]
    return Result(g_test(counts, models.joint(settings)), sum(accepted) / len(accepted))


METHODS: dict[str, Make] = {
    "chain, sampled": lambda models, chance: Chain(models.eagle3, 2, T1, chance),
    "chain, sampled from five tokens": lambda models, chance: Chain(models.eagle3_of_five, 2, T1, chance),
    "chain, greedy": lambda models, chance: Chain(models.eagle1, 2),
    "static tree, sampled": lambda models, chance: StaticTree(models.eagle1, TREE, T1, chance),
    "static tree, sampled from five tokens": lambda models, chance: StaticTree(models.eagle3_of_five, TREE, T1, chance),
    "static tree, greedy": lambda models, chance: StaticTree(models.eagle3, TREE),
    "dynamic tree": lambda models, chance: DynamicTree(models.eagle3_of_five, total_tokens=9, depth=2, top_k=3),
    "Medusa tree": lambda models, chance: MedusaTree(models.medusa, TREE),
}


def test_plain_sampling_follows_the_target(models: Models) -> None:
    assert sample(models, lambda models, chance: Plain()).p_value > LOSSLESS


@pytest.mark.parametrize("method", METHODS)
def test_sampling_with_drafts_follows_the_target(models: Models, method: str) -> None:
    result = sample(models, METHODS[method])
    assert result.p_value > LOSSLESS
    assert 0.1 < result.acceptance < 0.95, "drafts should be accepted at times and rejected at times"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_sampling_with_temperature_and_cut_offs_follows_the_target(models: Models, method: str) -> None:
    """Sampled drafts keep their own temperature of 1: any distribution will do, as long as it is the one they were drawn from."""
    settings = Sampling(temperature=1.2, top_p=0.9)
    assert sample(models, METHODS[method], lambda chance: Sampled(settings, chance), settings).p_value > LOSSLESS


# --- Negative controls: what the test must find -------------------------------------------------------------------------


def test_the_test_finds_typical_acceptance(models: Models) -> None:
    assert sample(models, METHODS["Medusa tree"], lambda chance: Typical(1.0, chance), num_batches=3).p_value < LOSSY


def test_the_test_finds_a_residual_that_is_not_renormalised(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
        return (p_V - q_V).clamp(min=0) if (p_V > q_V).any() else p_V

    monkeypatch.setattr(verify, "residual", residual)
    for method in ("static tree, sampled", "static tree, greedy"):
        assert sample(models, METHODS[method], num_batches=3).p_value < LOSSY


def test_the_test_finds_sampled_siblings_judged_by_another_distribution(models: Models) -> None:
    """Drafted at another temperature than they claim."""

    class Overconfident(StaticTree):
        def _drawn(self, level: Any, probs_BnV: Tensor) -> Tensor:
            sharper_BnV = probs_BnV**2
            return super()._drawn(level, sharper_BnV / sharper_BnV.sum(-1, keepdim=True))

    assert sample(models, lambda models, chance: Overconfident(models.eagle1, TREE, T1, chance), num_batches=3).p_value < LOSSY


def test_the_test_finds_another_target(models: Models) -> None:
    assert sample(models, METHODS["dynamic tree"], lambda chance: Sampled(Sampling(1.3), chance), num_batches=3).p_value < LOSSY
