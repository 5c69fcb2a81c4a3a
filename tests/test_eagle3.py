"""EAGLE-3 trains what it will do: its training forward equals step-by-step decoding of the export, and a reference written out in full."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoints.draft_config import draft_dimensions
from checkpoints.export import export_drafter
from checkpoints.provenance import collect_provenance
from data.batch import Features, drafter_batch
from data.target import Target, TargetConfig, load_target_heads
from data.vocab import DraftVocabulary, choose_draft_vocabulary, count_supervised_tokens
from eval.decode.chain import Chain, draft_chain
from eval.decode.drafter import target_ids
from eval.decode.loop import Plain, decode
from eval.decode.verify import Greedy
from eval.evaluation import exported_drafter
from train.drafters.base import VerifiedStates
from train.drafters.eagle3 import Eagle3, Eagle3Config
from train.engine import Processes, StepRates, TorchEngine
from train.optim import OptimConfig

V, W, H, D, N, M, L = 96, 40, 32, 8, 4, 2, 7
AUX_LAYERS = (2, 3, 4)
THETA = {"rope_type": "default", "rope_theta": 300.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass
class Pair:
    """A random target on disk and in memory, and a drafter of which every weight is random."""

    folder: Path
    target: Target
    drafter: Eagle3

    def exported(self) -> Eagle3:
        """The drafter as the exported checkpoint has it."""
        export_drafter(
            self.drafter.export_tensors(),
            algorithm="eagle3",
            target_config=self.target.config,
            dimensions=draft_dimensions("eagle3", self.drafter.export_dimensions()),
            aux_layers=AUX_LAYERS,
            dtype=torch.float32,
            out_dir=self.folder / "export",
            provenance=collect_provenance("target", "0", {}),
            card="# a drafter",
        )
        drafter = exported_drafter(self.folder / "export", TargetConfig(str(self.folder), dtype="float32"), torch.device("cpu"))
        assert isinstance(drafter, Eagle3)
        return drafter


def make_target(folder: Path, rope: dict[str, Any], sharpness: float = 1.0) -> Target:
    """A random target; `sharpness` makes it surer of its tokens, as a trained model is."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=48,
        num_hidden_layers=L,
        num_attention_heads=N,
        num_key_value_heads=M,
        head_dim=D,
        max_position_embeddings=256,
        rope_parameters=rope,
        initializer_range=0.3,  # Large, so that the random model's continuations vary.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= sharpness
    model.save_pretrained(folder)
    return Target(model, tokenizer=None)  # type: ignore[arg-type]


def make_pair(folder: Path, vocabulary: DraftVocabulary | None, rope: dict[str, Any], outside: Any = "drop", num_steps: int = 4) -> Pair:
    target = make_target(folder, rope)
    size = None if vocabulary is None else len(vocabulary.ids)
    config = Eagle3Config(draft_vocab_size=size, ttt_steps=num_steps, outside_vocabulary=outside)
    heads = load_target_heads(TargetConfig(str(folder)), "cpu", torch.float32)
    drafter = Eagle3(config, target.config, heads, vocabulary)
    with torch.no_grad():
        for parameter in drafter.parameters():
            # Norm weights far from 1 and from each other, and attention that looks at single places.
            parameter += torch.randn_like(parameter) * (0.5 if parameter.ndim == 1 else 0.35)
    return Pair(folder, target, drafter)


def some_vocabulary() -> DraftVocabulary:
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:W].sort().values
    return DraftVocabulary(tuple(ids.tolist()), V, 1.0)


VOCABULARIES: dict[str, Callable[[], DraftVocabulary | None]] = {"full": lambda: None, "draft": some_vocabulary}
ROPES = {"theta": THETA, "llama3": LLAMA3}


# --- training is what decoding will be ------------------------------------------------------------------------------------


def decoded_chains(drafter: Eagle3, target: Target, num_drafts: int) -> list[tuple[list[int], list[int]]]:
    """(known tokens, drafts after them) of step-by-step decoding: verified positions come in one, two and three at a time."""
    chains = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(7):
        ids = torch.randint(0, V, (90,), generator=generator)
        aux_TX = target.features(ids, torch.ones_like(ids).bool(), (len(ids),), AUX_LAYERS, last=False).aux_TX
        assert aux_TX is not None
        cache, start = drafter.new_cache(1, 100), 0
        for turn in range(45):
            end = start + (4, 1, 2, 3)[turn % 4]
            if end + 1 > len(ids):
                break
            verified = VerifiedStates(aux_TX[None, start:end], None, ids[None, start + 1 : end + 1], torch.tensor([end - start]))
            drafts = draft_chain(drafter, cache, verified, num_drafts, lambda logits: target_ids(drafter, logits.argmax(-1)))
            chains.append((ids[: end + 1].tolist(), drafts[0].tolist()))
            start = end
    return chains


def trained_tokens(drafter: Eagle3, features: Features) -> dict[tuple[int, int], int]:
    """{(step, pair): the token that the training forward finds most likely}, read off at the head's own input."""
    seen: list[Any] = []
    hook = drafter.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    drafter(drafter_batch(features))
    hook.remove()
    student_KRH, _, weight_KR, _ = seen[0]
    logits_KRW = student_KRH @ drafter.lm_head.weight.T
    target_ids = drafter.draft_ids_W[logits_KRW.argmax(-1)]
    # Everything is supervised here, so every row but the first and the last of a document is judged.
    starts = torch.tensor((0, *features.document_lengths)).cumsum(0).tolist()
    rows = [row for start, end in itertools.pairwise(starts) for row in range(start + 1, end - 1)]
    steps, columns = weight_KR.nonzero(as_tuple=True)
    return {(step, rows[column] - 1 - step): int(target_ids[step, column]) for step, column in zip(steps.tolist(), columns.tolist(), strict=True)}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_training_step_drafts_what_the_exported_checkpoint_drafts_step_by_step(tmp_path: Path, vocabulary: str, rope: str) -> None:
    pair = make_pair(tmp_path, VOCABULARIES[vocabulary](), ROPES[rope], outside="drop" if vocabulary == "full" else "renormalise")
    chains = decoded_chains(pair.exported(), pair.target, num_drafts=4)
    # A document for each chain: what was known, the drafts themselves, and one token more, so that the last draft is judged too.
    documents = [[*known, *drafts, 0] for known, drafts in chains]
    ids = torch.tensor([token for document in documents for token in document])
    lengths = tuple(len(document) for document in documents)
    trained = trained_tokens(pair.drafter, pair.target.features(ids, torch.ones_like(ids).bool(), lengths, AUX_LAYERS, last=True))
    num_equal, num_all, start, distinct = 0, 0, 0, set()
    for (known, drafts), length in zip(chains, lengths, strict=True):
        pair_index = start + len(known) - 2
        for step, draft in enumerate(drafts):
            num_all += 1
            num_equal += trained[step, pair_index] == draft
            distinct.add(draft)
        start += length
    assert num_all > 900 and len(distinct) > 20
    assert num_equal / num_all >= 0.999


def test_teacher_forced_drafts_are_the_tokens_of_the_training_forward(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, some_vocabulary(), LLAMA3, outside="renormalise")
    ids = torch.randint(0, V, (60,), generator=torch.Generator().manual_seed(2))
    features = pair.target.features(ids, torch.ones_like(ids).bool(), (25, 35), AUX_LAYERS, last=True)
    drafts_KT = pair.drafter.teacher_forced_drafts(drafter_batch(features), 4)
    trained = trained_tokens(pair.drafter, features)
    assert len(trained) == sum(length - 2 - step for step in range(4) for length in (25, 35))
    assert all(int(drafts_KT[step, index]) == token for (step, index), token in trained.items())


# --- the loss, written out ------------------------------------------------------------------------------------------------


def frequencies(rope: dict[str, Any]) -> Tensor:
    """float64 [D/2] rotary frequencies, llama3 scaling by its published rule."""
    plain = [rope["rope_theta"] ** (-2 * index / D) for index in range(D // 2)]
    if rope["rope_type"] == "default":
        return torch.tensor(plain, dtype=torch.float64)
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        keep = min(1.0, max(0.0, (old / wavelength - low) / (high - low)))
        scaled.append(keep * frequency + (1 - keep) * frequency / rope["factor"])
    return torch.tensor(scaled, dtype=torch.float64)


def rotate(heads_TND: Tensor, positions: Tensor, rope: dict[str, Any]) -> Tensor:
    """Complex multiplication of the pairs (d, d + D/2)."""
    angle = positions.double()[:, None] * frequencies(rope)
    real, imaginary = heads_TND[..., : D // 2], heads_TND[..., D // 2 :]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def reference_loss(weights: dict[str, Tensor], pair: Pair, features: Features) -> Tensor:
    """The loss of algorithms.md section 3, one document at a time: full masks, full logits, float64; `weights` by their names in the checkpoint."""
    config, heads = pair.drafter.config, pair.drafter.heads
    embed, head = heads.embed_VH.double(), heads.lm_head_VH.double()
    assert features.aux_TX is not None and features.last_TH is not None
    ids_W = torch.arange(V) if pair.drafter.vocabulary is None else torch.tensor(pair.drafter.vocabulary.ids)
    total, start = torch.zeros((), dtype=torch.float64), 0
    for length in features.document_lengths:
        rows = slice(start, start + length)
        start += length
        ids, mask = features.input_ids_T[rows], features.loss_mask_T[rows]
        teacher = features.last_TH[rows].double() @ head.T
        state = features.aux_TX[rows].double() @ weights["fc.weight"].T
        positions, padded = torch.arange(length), torch.cat([ids, torch.zeros(config.ttt_steps, dtype=torch.long)])
        keys, values = [], []
        for step in range(config.ttt_steps):
            known = padded[1 + step : 1 + step + length]
            x = torch.cat(
                [rms_norm(embed[known], weights["midlayer.input_layernorm.weight"]), rms_norm(state, weights["midlayer.hidden_norm.weight"])], -1
            )
            q, k, v = ((x @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, D) for name in ("q", "k", "v"))
            q, k = rotate(q, positions + step, rope_of(pair)), rotate(k, positions + step, rope_of(pair))
            keys.append(k.repeat_interleave(N // M, 1))
            values.append(v.repeat_interleave(N // M, 1))
            # Step-0 keys causally, those of later steps at the same place only.
            mask_TS = torch.cat([torch.ones(length, length).tril(), *[torch.eye(length)] * step], -1).bool()
            scores = torch.einsum("ind,jnd->nij", q, torch.cat(keys)) / D**0.5
            attended = torch.einsum("nij,jnd->ind", scores.masked_fill(~mask_TS, -math.inf).softmax(-1), torch.cat(values))
            state = state + attended.flatten(1) @ weights["midlayer.self_attn.o_proj.weight"].T
            y = rms_norm(state, weights["midlayer.post_attention_layernorm.weight"])
            gate, up = y @ weights["midlayer.mlp.gate_proj.weight"].T, y @ weights["midlayer.mlp.up_proj.weight"].T
            state = state + (gate * gate.sigmoid() * up) @ weights["midlayer.mlp.down_proj.weight"].T
            log_q = (rms_norm(state, weights["norm.weight"]) @ weights["lm_head.weight"].T).log_softmax(-1)
            for i in range(length - 2 - step):
                if not (mask[i + 1 + step] and mask[i + 2 + step]):
                    continue
                if config.outside_vocabulary == "drop" and int(teacher[i + 1 + step].argmax()) not in ids_W.tolist():
                    continue
                p = teacher[i + 1 + step, ids_W].softmax(-1)
                total = total - config.step_decay**step * (p * log_q[i]).sum()
    return total


def rope_of(pair: Pair) -> dict[str, Any]:
    return dict(pair.target.config.rope_parameters)


@pytest.mark.parametrize(
    ("vocabulary", "outside", "rope"),
    [("full", "drop", "theta"), ("draft", "drop", "llama3"), ("draft", "renormalise", "theta")],
)
def test_loss_and_every_gradient_equal_a_reference_with_full_masks_and_logits(tmp_path: Path, vocabulary: str, outside: str, rope: str) -> None:
    pair = make_pair(tmp_path, VOCABULARIES[vocabulary](), ROPES[rope], outside, num_steps=3)
    generator = torch.Generator().manual_seed(3)
    lengths = (17, 1, 30, 2, 3, 11)
    ids = torch.randint(0, V, (sum(lengths),), generator=generator)
    mask = torch.rand(sum(lengths), generator=generator) < 0.7
    features = pair.target.features(ids, mask, lengths, AUX_LAYERS, last=True)
    weights = {name: tensor.detach().double().requires_grad_() for name, tensor in pair.drafter.state_dict().items()}
    expected = reference_loss(weights, pair, features)
    expected.backward()
    output = pair.drafter(drafter_batch(features))
    output.loss_sum.backward()
    torch.testing.assert_close(output.loss_sum.double(), expected, rtol=1e-5, atol=0)
    for name, parameter in pair.drafter.named_parameters():
        assert parameter.grad is not None
        scale = float(weights[name].grad.abs().max())  # type: ignore[union-attr]
        torch.testing.assert_close(parameter.grad.double(), weights[name].grad, rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_recomputing_activations_changes_no_bit_and_keeps_fewer_of_them(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, some_vocabulary(), THETA, num_steps=3)
    features = pair.target.features(torch.arange(40) % V, torch.ones(40).bool(), (25, 15), AUX_LAYERS, last=True)
    losses, grads, num_kept = [], [], []
    for recomputes in (False, True):
        pair.drafter.recomputes = recomputes
        pair.drafter.zero_grad()
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.setdefault(id(tensor), tensor.numel()) and tensor, lambda x: x):
            loss = pair.drafter(drafter_batch(features)).loss_sum
        loss.backward()
        losses.append(loss.detach())
        grads.append([parameter.grad for parameter in pair.drafter.parameters()])
        num_kept.append(sum(kept.values()))
    assert torch.equal(losses[0], losses[1])
    assert all(torch.equal(kept, recomputed) for kept, recomputed in zip(*grads, strict=True))
    assert num_kept[1] < 0.6 * num_kept[0]


def test_supervised_positions_are_counted_by_hand(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, None, THETA, num_steps=2)
    #            document 0: x0 x1 x2 x3 x4      document 1: x0 x1 x2
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1]).bool()
    features = pair.target.features(torch.arange(8), mask, (5, 3), AUX_LAYERS, last=True)
    batch = drafter_batch(features)
    # Step 0 needs x_{i+1} and x_{i+2}: i=0 of document 0, and i=0 of document 1. Step 1 needs x_{i+2} and x_{i+3}: nothing.
    assert pair.drafter.num_supervised(batch) == 2
    metrics = pair.drafter(batch).metrics
    assert [metrics[name].item() for name in ("rows_0", "rows_1")] == [2, 0]


def test_a_batch_that_supervises_nothing_has_zero_loss_and_zero_gradients_for_every_parameter(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, some_vocabulary(), THETA)
    features = pair.target.features(torch.arange(9), torch.zeros(9).bool(), (9,), AUX_LAYERS, last=True)
    output = pair.drafter(drafter_batch(features))
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0
    for name, parameter in pair.drafter.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_the_untrained_drafter_is_the_targets_head_on_its_highest_auxiliary_state(tmp_path: Path) -> None:
    target = make_target(tmp_path, THETA)
    heads = load_target_heads(TargetConfig(str(tmp_path)), "cpu", torch.float32)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=None), target.config, heads, None)
    features = target.features(torch.arange(20), torch.ones(20).bool(), (20,), AUX_LAYERS, last=True)
    assert features.aux_TX is not None
    expected_T = target.logits(target.model.model.norm(features.aux_TX[:, -H:])).argmax(-1)
    assert (drafter.teacher_forced_drafts(drafter_batch(features), 1)[0] == expected_T).all()


# --- it learns ------------------------------------------------------------------------------------------------------------


def test_eight_conversations_are_learned_by_heart_and_accepted_in_the_decoder(tmp_path: Path) -> None:
    target = make_target(tmp_path, LLAMA3, sharpness=5.0)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, V, (4,), generator=generator).tolist() for _ in range(8)]
    answers = decode(target, Plain(), prompts, Greedy(), 40, ()).answers
    documents = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.tensor([token for document in documents for token in document])
    mask = torch.tensor([index >= 4 for document in documents for index in range(len(document))])
    features = target.features(ids, mask, tuple(len(document) for document in documents), AUX_LAYERS, last=True)
    vocabulary = choose_draft_vocabulary(count_supervised_tokens([(ids.numpy(), mask.numpy())], V), 64)
    assert 0.97 < vocabulary.coverage < 1
    heads = load_target_heads(TargetConfig(str(tmp_path)), "cpu", torch.float32)
    drafter = Eagle3(Eagle3Config(draft_vocab_size=64, ttt_steps=3), target.config, heads, vocabulary)
    engine = TorchEngine(drafter, OptimConfig(max_grad_norm=1.0), "fp32", Processes("torch"))
    for step in range(150):
        engine.train_step([drafter_batch(features)], StepRates(1e-2 * (1 - step / 150), {"drafter": 1.0}))

    exported = Pair(tmp_path, target, drafter).exported()
    decoded = decode(target, Chain(exported, 3), prompts, Greedy(), 38, ())
    assert [answer.token_ids for answer in decoded.answers] == [tuple(document[4:42]) for document in documents]
    assert decoded.acceptance.joint_acceptance[0] >= 0.95
    assert decoded.acceptance.tau > 2.5
