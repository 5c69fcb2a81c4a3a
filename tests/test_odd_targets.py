"""Targets as people really have them: padded vocabularies, tokens without an embedding, lists of end tokens, quantised and multimodal ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, GptOssForCausalLM

from data.chat import ChatTokenizer
from data.target import Target, TargetConfig, load_target_heads, load_tokenizer, target_fingerprint, target_hf_config


def copied(tiny_target: Path, folder: Path, **fields: Any) -> TargetConfig:
    """The tiny target with other fields in its config.json."""
    shutil.copytree(tiny_target, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return TargetConfig(str(folder))


def test_a_vocabulary_padded_beyond_the_tokenizer_is_the_targets(tiny_target: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_target, tmp_path / "padded")
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    model.resize_token_embeddings(258, pad_to_multiple_of=64)
    model.save_pretrained(tmp_path / "padded")
    config = TargetConfig(str(tmp_path / "padded"))
    target = Target.load(config, "cpu")
    assert (target.vocab_size, len(target.tokenizer)) == (320, 258)
    assert load_target_heads(config, "cpu", torch.float32).lm_head_VH.shape[0] == 320
    features = target.features(torch.tensor([3, 257, 9]), torch.ones(3, dtype=torch.bool), [3], (2,), last=True)
    assert target.logits(features.last_TH).shape == (3, 320)


def test_tokens_that_were_added_without_resizing_the_embedding_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    config = copied(tiny_target, tmp_path / "grown")
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.add_tokens(["<tool>", "<think>"])
    tokenizer.save_pretrained(config.model)
    message = r"has 2 tokens from id 258 on \('<tool>'\), but the target has only 258: they were added without resizing its embedding"
    for read in (load_tokenizer, lambda config: Target.load(config, "cpu")):
        with pytest.raises(ValueError, match=message) as caught:
            read(config)
        assert "\n" not in str(caught.value)


def test_a_list_of_end_tokens_in_the_config_alone_ends_answers(tiny_target: Path, tmp_path: Path) -> None:
    config = copied(tiny_target, tmp_path / "ends", eos_token_id=[7, 9])
    (Path(config.model) / "generation_config.json").unlink()
    target = Target.load(config, "cpu")
    assert target.end_ids == {7, 9, target.tokenizer.eos_token_id}


def test_a_tokenizer_without_a_chat_template_is_one_clear_line(tiny_target: Path, tmp_path: Path) -> None:
    config = copied(tiny_target, tmp_path / "plain")
    (Path(config.model) / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"no chat template: set tokenizer.chat_template to the one that the target is served with"):
        ChatTokenizer(load_tokenizer(config))


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantised_targets_are_refused_before_anything_is_read(tiny_target: Path, tmp_path: Path, method: str) -> None:
    config = copied(tiny_target, tmp_path / "quantised", quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True})
    message = rf"\(llama\) is quantised \({method}\), expected float weights: name the checkpoint that it was made from"
    for read in (target_hf_config, target_fingerprint, lambda config: load_target_heads(config, "cpu", torch.float32)):
        with pytest.raises(ValueError, match=message):
            read(config)


def test_mxfp4_experts_are_read_as_the_floats_they_stand_for(tiny_target: Path, tmp_path: Path) -> None:
    """As GPT-OSS ships: blocks of 32 four-bit floats with one exponent each, decoded here by the table of the format."""
    size, num_experts = 64, 2
    sizes = {"num_hidden_layers": 2, "hidden_size": size, "intermediate_size": size, "vocab_size": 258, "num_attention_heads": 2, "head_dim": 32}
    config = GptOssConfig(**sizes, num_key_value_heads=1, num_local_experts=num_experts, num_experts_per_tok=2, eos_token_id=3, pad_token_id=None)
    torch.manual_seed(0)
    model: Any = GptOssForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_target).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for layer in range(2):
        experts = model.model.layers[layer].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            parameter = experts.get_parameter(name)  # [experts, in, out]
            codes = torch.randint(16, (num_experts, parameter.shape[2], size // 32, 32))
            scales = torch.randint(120, 124, (num_experts, parameter.shape[2], size // 32))
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{prefix}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            tensors[f"{prefix}_scales"] = scales.to(torch.uint8)
            del tensors[prefix]
            exact = values[codes] * torch.exp2(scales - 127.0)[..., None]
            parameter.data = exact.flatten(2).transpose(1, 2).to(torch.bfloat16).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((tmp_path / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    target = Target.load(TargetConfig(str(tmp_path)), "cpu")
    ids_T = torch.arange(12)
    features = target.features(ids_T, torch.ones(12, dtype=torch.bool), [12], (1,), last=True)
    with torch.no_grad():
        expected = model.eval()(ids_T[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(features.aux_TX, expected[1][0], atol=1e-2, rtol=2e-2)
    torch.testing.assert_close(features.last_TH, expected[2][0], atol=2e-2, rtol=2e-2)
    assert torch.equal(load_target_heads(TargetConfig(str(tmp_path)), "cpu", torch.bfloat16).lm_head_VH, model.lm_head.weight)


def test_the_language_model_of_a_multimodal_target_is_the_target(tiny_target: Path, tmp_path: Path) -> None:
    text = transformers.Gemma3TextConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=8, bos_token_id=None, eos_token_id=3, pad_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    outer = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=257)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(outer)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_target).save_pretrained(tmp_path)
    config = TargetConfig(str(tmp_path))
    target, heads = Target.load(config, "cpu"), load_target_heads(config, "cpu", torch.float32)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (3, 32, 258)
    ids_T = torch.arange(40, 60)
    features = target.features(ids_T, torch.ones(20, dtype=torch.bool), [12, 8], (1, 2), last=True)
    with torch.no_grad():
        alone = [model.eval()(document[None], output_hidden_states=True).hidden_states for document in (ids_T[:12], ids_T[12:])]
    for layer, columns in ((1, slice(0, 32)), (2, slice(32, 64))):
        torch.testing.assert_close(features.aux_TX[:, columns], torch.cat([states[layer][0] for states in alone]), atol=1e-4, rtol=1e-4)
    last_TH = torch.cat([states[3][0] for states in alone])
    torch.testing.assert_close(features.last_TH, last_TH, atol=1e-4, rtol=1e-4)
    assert torch.equal(heads.embed_VH, model.get_input_embeddings().weight)
    torch.testing.assert_close(features.last_TH @ heads.lm_head_VH.T, target.logits(features.last_TH), atol=1e-4, rtol=1e-4)
