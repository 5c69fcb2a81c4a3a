"""EAGLE-1 against transformers' own decoder layer, run one sequence at a time as an engine would: loss, gradients, drafts, checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from checkpoints.draft_config import draft_dimensions
from checkpoints.export import export_drafter, read_export
from checkpoints.provenance import Provenance
from data.batch import DrafterBatch, Features, drafter_batch
from data.target import TargetHeads
from eval.decode.chain import draft_chain
from train.drafters.base import FeatureRequest, VerifiedStates, algorithms, load_drafter_class
from train.drafters.eagle1 import Eagle1, Eagle1Config

V, H = 37, 16
LENGTHS = (9, 2, 14)
CONFIG = LlamaConfig(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=24,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    attn_implementation="eager",
)


def heads() -> TargetHeads:
    generator = torch.Generator().manual_seed(1)
    return TargetHeads(torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator), torch.ones(H), 1e-6)


def random_drafter(**settings: float) -> Eagle1:
    torch.manual_seed(2)
    drafter = Eagle1(Eagle1Config(**settings), CONFIG, heads(), None)
    for name, parameter in drafter.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "layernorm" in name else 0.0, std=0.3)
    return drafter


def random_batch(is_supervised: bool = True) -> DrafterBatch:
    """Three documents, one too short to train on; the assistant's turns begin and end inside them."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    mask_T = torch.zeros(total, dtype=torch.bool)
    if is_supervised:
        mask_T[[4, 5, 6, 9, 10, 15, 16, 17, 18, 22, 23, 24]] = True
    ids_T = torch.randint(V, (total,), generator=generator)
    return drafter_batch(Features(ids_T, mask_T, LENGTHS, None, torch.randn(total, H, generator=generator)))


class Reference:
    """fc and transformers' decoder layer without its input norm, with the drafter's weights."""

    def __init__(self, drafter: Eagle1) -> None:
        self.heads = drafter.heads
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.layer = LlamaDecoderLayer(CONFIG, layer_idx=0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(CONFIG)
        state = drafter.state_dict()
        self.fc.weight.data.copy_(state["fc.weight"])
        self.layer.load_state_dict({name.removeprefix("layers.0."): tensor for name, tensor in state.items() if name.startswith("layers.")})

    def input(self, token: int | Tensor, hidden_H: Tensor) -> Tensor:
        return self.fc(torch.cat([self.heads.embed_VH[token], hidden_H]))

    def outputs(self, inputs: list[Tensor]) -> Tensor:
        """[n, H] of a sequence at positions 0 .. n-1."""
        hidden_1nH = torch.stack(inputs)[None]
        count = len(inputs)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        return self.layer(hidden_1nH, attention_mask=mask, position_embeddings=self.rotary(hidden_1nH, torch.arange(count)[None]))[0]

    def loss(self, batch: DrafterBatch) -> Tensor:
        """Document by document, position by position, from the definition."""
        total, start = torch.zeros(()), 0
        for length in LENGTHS:
            ids = batch.features.input_ids_T[start : start + length]
            mask = batch.features.loss_mask_T[start : start + length]
            last = batch.features.last_TH[start : start + length]
            if length >= 2:
                outputs = self.outputs([self.input(ids[i + 1], last[i]) for i in range(length - 1)])
            for i in range(length - 2):
                if mask[i + 1] and mask[i + 2]:
                    total = total + nn.functional.smooth_l1_loss(outputs[i], last[i + 1])
                    p = (self.heads.lm_head_VH @ last[i + 1]).softmax(-1)
                    total = total - 0.1 * (p * (self.heads.lm_head_VH @ outputs[i]).log_softmax(-1)).sum()
            start += length
        return total

    @torch.no_grad()
    def chain(self, ids: Tensor, last: Tensor, pair: int, known: list[int] | None, num_drafts: int) -> list[int]:
        """Drafts after pairs 0..pair of one document; later drafts are fed `known` tokens, or their own where it is None."""
        inputs = [self.input(ids[i + 1], last[i]) for i in range(pair + 1)]
        drafts: list[int] = []
        for step in range(num_drafts):
            hidden_H = self.outputs(inputs)[-1]
            drafts.append(int((self.heads.lm_head_VH @ hidden_H).argmax()))
            inputs.append(self.input(drafts[-1] if known is None else known[step], hidden_H))
        return drafts


def test_the_file_name_is_the_registration() -> None:
    assert "eagle1" in algorithms()
    assert load_drafter_class("eagle1") is Eagle1
    assert Eagle1.feature_request_of(Eagle1Config(), CONFIG) == FeatureRequest(aux_layers=(), last=True)


def test_loss_and_gradients_equal_the_definition() -> None:
    drafter, batch = random_drafter(noise=0.0), random_batch()
    assert drafter.num_supervised(batch) == 2 + 0 + 3 + 2
    output, reference = drafter(batch), Reference(drafter)
    expected = reference.loss(batch)
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-5, atol=1e-4)
    (output.loss_sum * 0.25).backward()
    (expected * 0.25).backward()
    wanted = {"fc.weight": reference.fc.weight.grad}
    wanted |= {f"layers.0.{name}": parameter.grad for name, parameter in reference.layer.named_parameters()}
    found = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_the_regression_and_the_cross_entropy_have_the_weights_one_and_a_tenth() -> None:
    batch = random_batch()
    loss = {weight: float(random_drafter(noise=0.0, token_weight=weight)(batch).loss_sum.detach()) for weight in (0.0, 0.1, 1.0)}
    assert loss[0.1] == pytest.approx(0.9 * loss[0.0] + 0.1 * loss[1.0], rel=1e-5)


def test_teacher_forced_drafts_equal_drafting_one_sequence_at_a_time() -> None:
    drafter, batch = random_drafter(), random_batch()
    drafts_KT = drafter.teacher_forced_drafts(batch, 4)
    reference, start = Reference(drafter), 0
    for length in LENGTHS:
        ids, last = batch.features.input_ids_T[start : start + length], batch.features.last_TH[start : start + length]
        for pair in range(length - 5):
            known = ids[pair + 2 :].tolist()
            assert drafts_KT[:, start + pair].tolist() == reference.chain(ids, last, pair, known, 4)
        start += length


def exported(drafter: Eagle1, folder: Path) -> Path:
    return export_drafter(
        drafter.export_tensors(),
        algorithm="eagle1",
        target_config=CONFIG,
        dimensions=draft_dimensions("eagle1", drafter.export_dimensions()),
        aux_layers=(),
        dtype=torch.float32,
        out_dir=folder / "export",
        provenance=Provenance("c0ffee", {}, "tiny", "f00d", "5eed"),
        card="# a drafter",
    )


def test_an_exported_drafter_proposes_what_it_would_be_measured_with(tmp_path: Path) -> None:
    """Fed in pieces, as verification does; the measured drafts come from one pass over a text that the drafts themselves continue."""
    drafter = random_drafter()
    reloaded = Eagle1.from_export(*read_export(exported(drafter, tmp_path)), CONFIG, heads())
    batch = random_batch()
    ids, last = batch.features.input_ids_T[-14:], batch.features.last_TH[-14:]
    cache, fed = drafter.new_cache(1, 40), 0
    for end in (3, 4, 7, 9):
        verified = VerifiedStates(None, last[None, fed:end], ids[None, fed + 1 : end + 1], torch.tensor([end - fed]))
        [drafts] = draft_chain(reloaded, cache, verified, 4, lambda logits: logits.argmax(-1))
        fed = end
        assert drafts.tolist() == Reference(drafter).chain(ids, last, end - 1, None, 4)
        text = torch.cat([ids[: end + 1], drafts])
        states = torch.cat([last[:end], torch.randn(len(text) - end, H)])
        continued = drafter_batch(Features(text, torch.ones(len(text), dtype=torch.bool), (len(text),), None, states))
        assert reloaded.teacher_forced_drafts(continued, 4)[:, end - 1].tolist() == drafts.tolist()


def test_the_export_has_a_bias_of_zeros_and_no_other_is_taken_back(tmp_path: Path) -> None:
    config, tensors = read_export(exported(random_drafter(), tmp_path))
    assert torch.equal(tensors["fc.bias"], torch.zeros(H))
    tensors["fc.bias"][3] = 0.5
    with pytest.raises(ValueError, match=r"fc\.bias is not zero"):
        Eagle1.from_export(config, tensors, CONFIG, heads())


def test_an_untrained_drafter_starts_as_the_targets_state_and_the_token_equally_loud() -> None:
    """Whatever the scale of the target's embedding."""
    parts, size = heads(), CONFIG.hidden_size
    parts = dataclasses.replace(parts, embed_VH=parts.embed_VH / 50, norm_H=torch.full((size,), 3.0))
    torch.manual_seed(0)
    drafter, batch = Eagle1(Eagle1Config(), CONFIG, parts, None), random_batch()
    token_TH = parts.embed_VH[batch.features.input_ids_T] @ drafter.fc.weight[:, :size].T
    assert float(token_TH.detach().square().mean().sqrt()) == pytest.approx(3.0, rel=0.2)
    with torch.no_grad():
        drafter.fc.weight[:, :size] = 0
    expected_T = (batch.features.last_TH @ drafter.heads.lm_head_VH.T).argmax(-1)
    assert torch.equal(drafter.teacher_forced_drafts(batch, 2), torch.stack([expected_T, expected_T]))


def test_the_noise_is_uniform_and_a_function_of_the_pack() -> None:
    drafter, batch = random_drafter(noise=0.1), random_batch()
    noise_TH = drafter._noise_TH(batch)
    assert noise_TH.abs().max() <= 0.1
    assert noise_TH.std() == pytest.approx(0.2 / 12**0.5, rel=0.1)
    torch.manual_seed(99)
    assert torch.equal(drafter._noise_TH(random_batch()), noise_TH)
    swapped = batch.features.input_ids_T.flip(0)
    other = drafter_batch(Features(swapped, batch.features.loss_mask_T, LENGTHS, None, batch.features.last_TH))
    assert not torch.equal(drafter._noise_TH(other), noise_TH)
    assert not torch.equal(drafter(batch).loss_sum, random_drafter(noise=0.0)(batch).loss_sum)


def test_a_batch_without_supervision_gives_zero_gradients_to_every_parameter() -> None:
    drafter = random_drafter()
    output = drafter(random_batch(is_supervised=False))
    output.loss_sum.backward()
    assert float(output.loss_sum.detach()) == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


def test_senseless_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"drafter\.noise is -1"):
        Eagle1Config(noise=-1)
    with pytest.raises(ValueError, match=r"drafter\.token_weight is -1"):
        Eagle1Config(token_weight=-1)
