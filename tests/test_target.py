"""The target's packed states are those of transformers, document by document; its shared parts and its identity come straight from its files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.target import (
    Target,
    TargetConfig,
    TargetHeads,
    check_plain_logits,
    default_aux_layers,
    load_target_heads,
    load_tokenizer,
    target_fingerprint,
    target_hf_config,
)

ROOT = Path(__file__).resolve().parent.parent
V, H, L = 64, 32, 4
LENGTHS = [7, 1, 12, 3]
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# The class names of transformers, and what makes each a case of its own.
PACKABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_wide_heads": ("Llama", {"head_dim": 16}),
    "llama_without_groups": ("Llama", {"num_key_value_heads": 4}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_partly_sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "mistral_sliding": ("Mistral", {"head_dim": 8, "sliding_window": 3}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 4}),
}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2_softcap": ("Gemma2", {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
    "gpt_oss_sinks": ("GptOss", {"head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen3_next_linear_attention": (
        "Qwen3Next",
        {
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "llama_dynamic_rope": (
        "Llama",
        {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
}


def model_of(name: str, changes: dict[str, Any]) -> Any:
    """A random model of a family, with every parameter random (sinks and norms too)."""
    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config_name)(**(SIZES | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def target_of(case: str) -> Target:
    return Target(model_of(*(PACKABLE | ALONE)[case]), tokenizer=None)


@torch.no_grad()
def plain_states(model: Any, ids_T: Tensor) -> tuple[list[Tensor], Tensor]:
    """Transformers' own states of one document: after each of the layers (the last one *before* the final norm), and after the final norm."""
    before_norm = []
    handle = model.get_decoder().norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0][0]))
    hidden = [state[0] for state in model(ids_T[None], output_hidden_states=True, use_cache=False).hidden_states]
    handle.remove()
    assert len(hidden) == L + 1
    return [*hidden[1:L], before_norm[0]], hidden[L]


def documents(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (length,), generator=generator) for length in LENGTHS]


def packed(target: Target, ids: list[Tensor], aux_layers: tuple[int, ...], last: bool = True) -> Any:
    ids_T = torch.cat(ids)
    return target.features(ids_T, torch.arange(len(ids_T)) % 2 == 0, [len(document) for document in ids], aux_layers, last)


@pytest.mark.parametrize("case", [*PACKABLE, *ALONE])
def test_packed_states_are_those_of_each_document_alone(case):
    target, ids = target_of(case), documents()
    features = packed(target, ids, (1, 2, 3, 4))
    alone = [plain_states(target.model, document) for document in ids]
    expected_TX = torch.cat([torch.cat(layers, dim=-1) for layers, _ in alone])
    torch.testing.assert_close(features.aux_TX, expected_TX, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features.last_TH, torch.cat([last_TH for _, last_TH in alone]), atol=1e-5, rtol=1e-5)
    assert features.document_lengths == tuple(LENGTHS)
    assert features.input_ids_T.tolist() == torch.cat(ids).tolist()
    assert features.loss_mask_T.tolist() == (torch.arange(sum(LENGTHS)) % 2 == 0).tolist()


@pytest.mark.parametrize("case", PACKABLE)
def test_targets_of_plain_attention_run_packed(case):
    assert target_of(case).is_packable


@pytest.mark.parametrize("case", ALONE)
def test_targets_that_mix_tokens_otherwise_run_one_document_at_a_time(case):
    assert not target_of(case).is_packable


def test_sliding_window_is_shorter_than_a_document_and_matters():
    """Guards the cases above: without the window the states would be others."""
    ids = documents()
    sliding, full = target_of("mistral_sliding"), Target(model_of("Mistral", {"head_dim": 8, "sliding_window": None}), tokenizer=None)
    difference_T = (packed(sliding, ids, (4,)).last_TH - packed(full, ids, (4,)).last_TH).abs().amax(-1)
    assert difference_T[: LENGTHS[0]].max() > 1e-2
    assert difference_T[LENGTHS[0]] < 1e-6  # the document of one token


@pytest.mark.parametrize("case", ["llama", "mistral_sliding", "gpt_oss_sinks", "qwen3_next_linear_attention"])
def test_documents_cannot_see_each_other(case):
    target, ids = target_of(case), documents()
    before = packed(target, ids, (1, 4))
    others = documents(seed=1)
    after = packed(target, [others[0], ids[1], others[2], ids[3]], (1, 4))
    starts = [sum(LENGTHS[:index]) for index in range(4)]
    for index in (1, 3):
        rows = slice(starts[index], starts[index] + LENGTHS[index])
        torch.testing.assert_close(after.last_TH[rows], before.last_TH[rows], atol=1e-6, rtol=0)
        torch.testing.assert_close(after.aux_TX[rows], before.aux_TX[rows], atol=1e-6, rtol=0)
    assert (after.last_TH - before.last_TH).abs().max() > 1e-2


def test_only_the_wanted_states_are_returned():
    target, ids = target_of("llama"), documents()
    everything = packed(target, ids, (1, 3))
    assert torch.equal(packed(target, ids, (3,), last=False).aux_TX, everything.aux_TX[:, H:])
    assert packed(target, ids, (3,), last=False).last_TH is None
    assert packed(target, ids, ()).aux_TX is None


def test_packing_leaves_the_target_as_it_was():
    target, ids = target_of("llama"), documents()
    usual = target.model.config._attn_implementation
    packed(target, ids, (2,))
    assert target.model.config._attn_implementation == usual
    assert not any(layer._forward_hooks for layer in target.layers)


def test_logits_of_the_last_state_are_the_models():
    target, ids = target_of("qwen2_tied"), documents()
    last_TH = packed(target, ids[:1], ()).last_TH
    torch.testing.assert_close(target.logits(last_TH), target.model(ids[0][None]).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 2, 5), (2, 1), (1, 1)])
def test_layers_that_the_target_lacks_are_refused(layers):
    with pytest.raises(ValueError, match=r"expected ascending indices from 1 to the target's 4"):
        packed(target_of("llama"), documents(), layers)


@pytest.mark.parametrize("token", [V, -1])
def test_tokens_that_the_target_lacks_are_refused(token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the target's vocabulary of {V}"):
        packed(target_of("llama"), [torch.tensor([1, token])], (1,))


def test_default_layers_are_the_engines_from_seven_layers_on():
    assert default_aux_layers(32) == (2, 16, 29)
    assert default_aux_layers(7) == (2, 3, 4)
    assert [default_aux_layers(num_layers) for num_layers in (4, 5, 6)] == [(1, 2, 3), (1, 2, 4), (1, 3, 5)]
    for num_layers in (1, 3):
        with pytest.raises(ValueError, match=r"for example --drafter.aux-layers 1$"):
            default_aux_layers(num_layers)


# --- the parts that drafters share ------------------------------------------------------------------------------------------


def saved(model: Any, folder: Path, is_sharded: bool = False) -> TargetConfig:
    model.save_pretrained(folder, max_shard_size="8KB" if is_sharded else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == is_sharded
    return TargetConfig(model=str(folder))


def heads_of(config: TargetConfig) -> TargetHeads:
    return load_target_heads(config, "cpu", torch.float32)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["one_file", "sharded"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_heads_are_those_of_the_loaded_model(is_tied, is_sharded, tmp_path):
    model = model_of("Llama", {"tie_word_embeddings": is_tied})
    heads = heads_of(saved(model, tmp_path, is_sharded))
    assert torch.equal(heads.embed_VH, model.get_input_embeddings().weight)
    assert torch.equal(heads.lm_head_VH, model.get_output_embeddings().weight)
    assert torch.equal(heads.norm_H, model.model.norm.weight)
    assert heads.norm_eps == model.config.rms_norm_eps
    assert (heads.lm_head_VH is heads.embed_VH) == is_tied
    moved = heads.to("cpu", torch.bfloat16)
    assert (moved.lm_head_VH is moved.embed_VH) == is_tied
    assert moved.norm_H.dtype == moved.embed_VH.dtype == torch.bfloat16


def saved_tied_with_a_head(folder: Path, head_of: Any) -> TargetConfig:
    """A tied target whose file holds a head nevertheless, made from its embedding."""
    config = saved(model_of("Llama", {"tie_word_embeddings": True}), folder)
    tensors = load_file(folder / "model.safetensors")
    head_VH = head_of(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": head_VH}, folder / "model.safetensors", metadata={"format": "pt"})
    return config


def test_a_copy_of_the_embedding_saved_as_head_stays_tied(tmp_path):
    """Qwen3-0.6B and others ship one."""
    heads = heads_of(saved_tied_with_a_head(tmp_path, torch.clone))
    assert heads.lm_head_VH is heads.embed_VH


def test_a_head_that_the_config_ties_but_that_differs_is_refused(tmp_path):
    """transformers would use it, as the first assertion shows, and vLLM would not."""
    config = saved_tied_with_a_head(tmp_path, torch.zeros_like)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.lm_head.weight.any()
    with pytest.raises(ValueError, match=r"ties the head to the embedding .* lm_head.weight that differs .* set tie_word_embeddings to false"):
        heads_of(config)


@pytest.mark.parametrize("case", ["gemma2_softcap", "gemma3", "qwen3_next_linear_attention", "qwen3", "llama"])
def test_norm_is_the_multiplier_that_the_target_applies(case, tmp_path):
    """Measured on the target's own norm module: some families store the multiplier less one."""
    model = model_of(*(PACKABLE | ALONE)[case])
    heads = heads_of(saved(model, tmp_path))
    states_TH = torch.randn(5, H)
    expected_TH = states_TH * torch.rsqrt(states_TH.square().mean(-1, keepdim=True) + heads.norm_eps) * heads.norm_H
    torch.testing.assert_close(model.get_decoder().norm(states_TH), expected_TH)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_one_clear_error(name, tmp_path):
    config = saved(model_of("Llama", {"tie_word_embeddings": False}), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name.removeprefix('model.')}.*its weight files are incomplete"):
        heads_of(config)


def test_a_missing_shard_is_named(tmp_path):
    config = saved(model_of("Llama", {}), tmp_path, is_sharded=True)
    lost = sorted(tmp_path.glob("model-*.safetensors"))[2]
    lost.unlink()
    for read in (heads_of, target_fingerprint):
        with pytest.raises(ValueError, match=f"names {lost.name}, which is missing"):
            read(config)


def test_a_shard_of_another_checkpoint_is_noticed(tmp_path):
    config = saved(model_of("Llama", {}), tmp_path, is_sharded=True)
    save_file({"something.else": torch.zeros(1)}, sorted(tmp_path.glob("model-*.safetensors"))[2])
    with pytest.raises(ValueError, match=r"lacks \d+ tensors that model.safetensors.index.json promises"):
        target_fingerprint(config)


def test_a_truncated_weight_file_is_named(tmp_path):
    config = saved(model_of("Llama", {}), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for read in (heads_of, target_fingerprint, lambda config: Target.load(config, "cpu")):
        with pytest.raises(ValueError, match=r"model.safetensors is damaged .*copy or download it again"):
            read(config)


def test_quantised_heads_and_heads_of_another_shape_are_refused(tmp_path):
    config = saved(model_of("Llama", {"tie_word_embeddings": False}), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(V, H, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight .* is torch.int8, expected a float tensor"):
        heads_of(config)
    save_file(tensors | {"lm_head.weight": torch.zeros(V + 1, H)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight .* has shape \[65, 32\], but the config says \[64, 32\]"):
        heads_of(config)


# --- loading ------------------------------------------------------------------------------------------------------------------


def test_a_loaded_target_knows_its_sizes_and_both_kinds_of_end_token(tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "target")
    generation = tmp_path / "target" / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [3, 5]}))
    target = Target.load(TargetConfig(str(tmp_path / "target")), "cpu")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (7, 32, 258)
    assert target.end_ids == {3, 5, target.tokenizer.eos_token_id}
    assert target.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert Target.load(TargetConfig(str(tmp_path / "target"), dtype="bfloat16"), "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "model", ["/nowhere/at/all", "./nowhere", "runs/targets/nowhere/x", "Not a model!"], ids=["absolute", "relative", "deep", "no_id"]
)
def test_a_missing_model_is_one_clear_line(model):
    for read in (target_hf_config, target_fingerprint, heads_of, lambda config: Target.load(config, "cpu")):
        with pytest.raises(ValueError, match="does not exist: expected a local directory or a Hub id") as caught:
            read(TargetConfig(model))
        assert "\n" not in str(caught.value)


def test_a_hub_id_without_network_is_one_clear_line():
    script = (
        "from data.target import *\nfor read in (target_fingerprint, load_tokenizer):\n"
        "    try: read(TargetConfig('nobody/nothing'))\n    except ValueError as error: print('LINE', error)"
    )
    environment = {"PATH": "/usr/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": "/nowhere", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("LINE") and "nobody/nothing" in line for line in lines), done.stdout


def test_directories_that_are_no_whole_model_are_one_clear_line(tiny_target, tmp_path):
    def variant(name: str, *removed: str) -> TargetConfig:
        folder = tmp_path / name
        shutil.copytree(tiny_target, folder)
        for file_name in removed:
            (folder / file_name).unlink()
        return TargetConfig(str(folder))

    no_config, no_weights = variant("a", "config.json"), variant("b", "model.safetensors")
    no_tokenizer = variant("c", "tokenizer.json", "tokenizer_config.json")
    only_bin = variant("d", "model.safetensors")
    torch.save({}, Path(only_bin.model) / "pytorch_model.bin")
    bad_config, alien = variant("e"), variant("f")
    (Path(bad_config.model) / "config.json").write_text('{"model_type": "lla')
    (Path(alien.model) / "config.json").write_text('{"model_type": "martian"}')
    cases = [
        (no_config, "is a directory without a config.json"),
        (no_weights, "has neither model.safetensors nor model.safetensors.index.json: save it as safetensors"),
        (only_bin, r"save it as safetensors .*\(found pytorch_model.bin\)"),
        (no_tokenizer, "the tokenizer of target.model .* cannot be read: expected tokenizer.json"),
        (bad_config, "cannot be read"),
        (alien, "cannot be read"),
        (TargetConfig(str(tiny_target), revision="main"), "target.revision 'main' has no effect on the local directory"),
    ]
    for config, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            Target.load(config, "cpu")
        assert "\n" not in str(caught.value)
    for config in (no_weights, only_bin):  # known before any work is done
        with pytest.raises(ValueError, match=r"save it as safetensors"):
            target_fingerprint(config)
    with pytest.raises(ValueError, match=r"the tokenizer of target.model"):
        load_tokenizer(no_tokenizer)


def test_a_target_that_lacks_a_layers_weights_is_refused_rather_than_filled_at_random(tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "target")
    path = tmp_path / "target" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 tensors \(model.layers.3.mlp.up_proj.weight\)"):
        Target.load(TargetConfig(str(tmp_path / "target")), "cpu")


def test_an_encoder_decoder_is_refused(tmp_path):
    transformers.T5Config(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is an encoder-decoder: expected a decoder-only"):
        target_hf_config(TargetConfig(str(tmp_path)))


def test_a_multimodal_target_gives_its_text_config(tmp_path):
    text = transformers.Gemma3TextConfig(**SIZES, head_dim=8).to_dict() | {"dtype": None}
    transformers.Gemma3Config(text_config=text, dtype="bfloat16").save_pretrained(tmp_path)
    config = target_hf_config(TargetConfig(str(tmp_path)))
    assert (config.model_type, config.hidden_size, config.dtype) == ("gemma3_text", H, torch.bfloat16)


# --- identity -----------------------------------------------------------------------------------------------------------------


def test_fingerprint_changes_with_weights_template_and_end_tokens_and_with_nothing_else(tiny_target, tmp_path):
    folder = tmp_path / tiny_target.name
    shutil.copytree(tiny_target, folder)
    config = TargetConfig(str(folder))
    seen = [target_fingerprint(config)]
    assert seen[0] == target_fingerprint(TargetConfig(str(tiny_target)))
    assert seen[0].startswith(f"{tiny_target.name}@")
    (folder / "README.md").write_text("notes")
    assert target_fingerprint(config) == seen[0]

    def expect_change() -> None:
        assert target_fingerprint(config) not in seen
        seen.append(target_fingerprint(config))

    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    for name in ("model.layers.3.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        tensors[name].view(-1)[0] += 1
        save_file(tensors, weights, metadata={"format": "pt"})
        expect_change()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    expect_change()
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    expect_change()
    (folder / "tokenizer_config.json").write_text("{}")
    expect_change()


def test_fingerprint_of_a_hub_model_is_its_commit(tmp_path):
    """A fake local cache of the Hub: the branch moves, and the fingerprint with it."""
    cache = tmp_path / "hub" / "models--owner--name"
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        (cache / "snapshots" / commit).mkdir(parents=True)
        transformers.LlamaConfig(**SIZES).save_pretrained(cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commits[0])
    (cache / "refs" / "v2").write_text(commits[1])
    script = "from data.target import *\nfor revision in (None, 'v2'): print(target_fingerprint(TargetConfig('owner/name', revision=revision)))"
    environment = {"PATH": "/usr/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"owner/name@{commit}" for commit in commits]


@pytest.mark.parametrize(
    ("config", "is_plain"),
    [
        (transformers.LlamaConfig(), True),
        (transformers.Gemma2Config(final_logit_softcapping=None), True),
        (transformers.Gemma2Config(final_logit_softcapping=30.0), True),  # the teacher of the losses is capped too
        (transformers.GraniteConfig(logits_scaling=1.0), True),
        (transformers.GraniteConfig(logits_scaling=8.0), False),
        (transformers.CohereConfig(logit_scale=0.0625), False),
    ],
)
def test_a_target_that_changes_its_logits_after_the_head_is_refused(config: transformers.PretrainedConfig, is_plain: bool) -> None:
    if is_plain:
        check_plain_logits(config)
    else:
        with pytest.raises(ValueError, match="changes its logits after the head"):
            check_plain_logits(config)
