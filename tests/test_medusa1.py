"""Medusa-1 against its definition, written out position by position and head by head: loss, gradients, drafts, checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from checkpoints.draft_config import draft_dimensions
from checkpoints.export import export_drafter, read_export
from checkpoints.provenance import Provenance
from data.batch import DrafterBatch, Features, drafter_batch
from data.heldout import EvalConfig
from data.prepare import DataConfig
from data.target import TargetConfig, TargetHeads
from train.config import RunConfig
from train.drafters.base import FeatureRequest, VerifiedStates, algorithms, load_drafter_class
from train.drafters.medusa1 import Medusa1, Medusa1Config

V, H, HEADS = 37, 16, 3
LENGTHS = (9, 2, 14)
CONFIG = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2)


def heads() -> TargetHeads:
    generator = torch.Generator().manual_seed(1)
    return TargetHeads(torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator), torch.ones(H), 1e-6)


def random_drafter(config: Medusa1Config) -> Medusa1:
    torch.manual_seed(2)
    drafter = Medusa1(config, CONFIG, heads(), None)
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.4)
    return drafter


def batch_of(mask_T: Tensor, lengths: tuple[int, ...]) -> DrafterBatch:
    generator = torch.Generator().manual_seed(3)
    total = sum(lengths)
    return drafter_batch(Features(torch.randint(V, (total,), generator=generator), mask_T, lengths, None, torch.randn(total, H, generator=generator)))


def random_batch(is_supervised: bool = True) -> DrafterBatch:
    """Three documents; the assistant's turns begin and end inside them, one of them too short for the last head."""
    mask_T = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    if is_supervised:
        mask_T[[3, 4, 5, 6, 7, 9, 10, 13, 14, 15, 18, 19, 20, 21, 22, 23, 24]] = True
    return batch_of(mask_T, LENGTHS)


def head_logits(drafter: Medusa1, k: int, h_H: Tensor) -> Tensor:
    """Head k = 1 .. K on one state."""
    for layer in drafter.blocks[k - 1].layers:
        h_H = h_H + nn.functional.silu(layer.weight @ h_H + layer.bias)
    matrix_VH = drafter.heads.lm_head_VH if drafter.config.shared_lm_head else drafter.lm_heads[k - 1].weight
    return matrix_VH @ h_H


def naive_loss(drafter: Medusa1, batch: DrafterBatch) -> Tensor:
    """sum over k and t of 0.8^k CE(x_{t+k+1}), where x_{t+1} .. x_{t+k+1} are all the assistant's."""
    total, start = torch.zeros(()), 0
    for length in LENGTHS:
        x = batch.features.input_ids_T[start : start + length]
        mask = batch.features.loss_mask_T[start : start + length]
        h = batch.features.last_TH[start : start + length]
        for k in range(1, HEADS + 1):
            for t in range(length - k - 1):
                if mask[t + 1 : t + k + 2].all():
                    log_q_V = head_logits(drafter, k, h[t]).log_softmax(-1)
                    p_V = nn.functional.one_hot(x[t + k + 1], V).float()
                    if drafter.config.labels == "soft":
                        p_V = (drafter.heads.lm_head_VH @ h[t + k]).softmax(-1)
                    total = total - 0.8**k * (p_V * log_q_V).sum()
        start += length
    return total


VARIANTS = [
    Medusa1Config(num_heads=HEADS),
    Medusa1Config(num_heads=HEADS, num_layers=2),
    Medusa1Config(num_heads=HEADS, labels="soft"),
    Medusa1Config(num_heads=HEADS, shared_lm_head=True),
    Medusa1Config(num_heads=HEADS, shared_lm_head=True, labels="soft"),
]


def test_the_file_name_is_the_registration() -> None:
    assert "medusa1" in algorithms()
    assert load_drafter_class("medusa1") is Medusa1
    assert Medusa1.feature_request_of(Medusa1Config(), CONFIG) == FeatureRequest(aux_layers=(), last=True)


@pytest.mark.parametrize("config", VARIANTS)
def test_loss_and_gradients_equal_the_definition(config: Medusa1Config) -> None:
    drafter, batch = random_drafter(config), random_batch()
    output, expected = drafter(batch), naive_loss(drafter, batch)
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-5, atol=1e-4)
    parameters = dict(drafter.named_parameters())
    grads = torch.autograd.grad(output.loss_sum * 0.25, list(parameters.values()))
    wanted = torch.autograd.grad(expected * 0.25, list(parameters.values()))
    for name, grad, expected_grad in zip(parameters, grads, wanted, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_head_is_never_trained_across_turns() -> None:
    """x1 x2 | user's x3 | x4 x5 x6: head 1 at t=0 (x2), 3 (x5), 4 (x6); head 2 at t=3 (x6); and never x2 -> x4 over the user's token."""
    mask_T = torch.tensor([False, True, True, False, True, True, True])
    metrics = random_drafter(Medusa1Config(num_heads=HEADS))(batch_of(mask_T, (7,))).metrics
    assert [int(metrics[f"rows_{step}"]) for step in range(HEADS)] == [3, 1, 0]


def test_hits_are_counted_against_the_labels() -> None:
    drafter, batch = Medusa1(Medusa1Config(num_heads=HEADS), CONFIG, heads(), None), random_batch()
    metrics = drafter(batch).metrics
    drafts_KT = drafter.teacher_forced_drafts(batch, HEADS)
    for step, is_supervised_T in enumerate(drafter._supervised(batch)):
        is_hit_T = is_supervised_T & (drafts_KT[step] == batch.predicted_tokens(step))
        assert int(metrics[f"hits_{step}"]) == int(is_hit_T.sum())
        assert int(metrics[f"rows_{step}"]) == int(is_supervised_T.sum())


@pytest.mark.parametrize("config", VARIANTS)
def test_untrained_heads_repeat_the_targets_own_prediction(config: Medusa1Config) -> None:
    drafter, batch = Medusa1(config, CONFIG, heads(), None), random_batch()
    expected_T = (batch.features.last_TH @ drafter.heads.lm_head_VH.T).argmax(-1)
    assert torch.equal(drafter.teacher_forced_drafts(batch, HEADS), expected_T.expand(HEADS, -1))


def test_every_block_has_weights_of_its_own() -> None:
    drafter = Medusa1(Medusa1Config(num_heads=2, num_layers=3), CONFIG, heads(), None)
    assert len({parameter.data_ptr() for parameter in drafter.parameters()}) == 2 * 3 * 2 + 2


def test_shared_heads_train_the_blocks_alone() -> None:
    drafter = Medusa1(Medusa1Config(num_heads=5, shared_lm_head=True), CONFIG, heads(), None)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == 5 * (H * H + H)


def exported(drafter: Medusa1, folder: Path) -> Path:
    return export_drafter(
        drafter.export_tensors(),
        algorithm="medusa1",
        target_config=CONFIG,
        dimensions=draft_dimensions("medusa1", drafter.export_dimensions()),
        aux_layers=(),
        dtype=torch.float32,
        out_dir=folder / "export",
        provenance=Provenance("c0ffee", {}, "tiny", "f00d", "5eed"),
        card="# a drafter",
    )


@pytest.mark.parametrize("config", VARIANTS)
def test_an_exported_drafter_proposes_what_it_is_measured_with(tmp_path: Path, config: Medusa1Config) -> None:
    """Draft s of pair i is head s + 1 on h_i, in one pass over everything and one verification at a time."""
    drafter, batch = random_drafter(config), random_batch()
    reloaded = Medusa1.from_export(*read_export(exported(drafter, tmp_path)), CONFIG, heads())
    ids_T, last_TH = batch.features.input_ids_T, batch.features.last_TH
    drafts_KT = reloaded.teacher_forced_drafts(batch, HEADS)
    fed = 0
    for end in (1, 3, 4, 8):
        verified = VerifiedStates(None, last_TH[None, fed:end], ids_T[None, fed + 1 : end + 1], torch.tensor([end - fed]))
        drafts = reloaded.read(None, verified, HEADS).logits_BnW[0].argmax(-1)
        expected = [int(head_logits(drafter, k, last_TH[end - 1]).argmax()) for k in range(1, HEADS + 1)]
        assert drafts.tolist() == drafts_KT[:, end - 1].tolist() == expected
        fed = end


def test_a_shared_head_is_read_from_the_file_as_the_engine_does(tmp_path: Path) -> None:
    config, tensors = read_export(exported(random_drafter(Medusa1Config(num_heads=HEADS, shared_lm_head=True)), tmp_path))
    assert torch.equal(tensors["lm_head.weight"], heads().lm_head_VH)
    other = TargetHeads(torch.zeros(V, H), torch.zeros(V, H), torch.ones(H), 1e-6)
    assert torch.equal(Medusa1.from_export(config, dict(tensors), CONFIG, other).heads.lm_head_VH, heads().lm_head_VH)


def test_more_drafts_than_heads_are_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"4 drafts are wanted of 3 Medusa heads"):
        random_drafter(Medusa1Config(num_heads=3)).teacher_forced_drafts(random_batch(), 4)
    with pytest.raises(ValueError, match=r"eval\.draft_length is 4, but this drafter makes 3"):
        RunConfig("x", TargetConfig("t"), DataConfig(("d",)), Medusa1Config(num_heads=3), eval=EvalConfig(draft_length=4))


@pytest.mark.parametrize("config", VARIANTS)
def test_a_batch_without_supervision_gives_zero_gradients_to_every_parameter(config: Medusa1Config) -> None:
    drafter = random_drafter(config)
    output = drafter(random_batch(is_supervised=False))
    output.loss_sum.backward()
    assert float(output.loss_sum) == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


def test_senseless_settings_are_refused_by_name() -> None:
    for settings, name in (({"num_heads": 0}, "num_heads"), ({"num_layers": 0}, "num_layers"), ({"head_decay": 0.0}, "head_decay")):
        with pytest.raises(ValueError, match=f"drafter.{name}"):
            Medusa1Config(**settings)
