"""An export holds exactly what the engines load, says where it comes from, and any damage to it is told in full."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from checkpoints.draft_config import DraftDimensions, MedusaDimensions, draft_dimensions, rope_fields
from checkpoints.export import export_drafter, read_export, validate_export
from checkpoints.provenance import Provenance, collect_provenance, config_digest

V, W, H, HEADS, KV_HEADS, HEAD_DIM, I, L = 50, 20, 16, 4, 2, 8, 24, 8  # noqa: E741
PROVENANCE = Provenance(commit="c0ffee", versions={"torch": "2"}, target="tiny", target_fingerprint="f00d", run_config_sha256="5eed")


def target_config(**changes: object) -> LlamaConfig:
    settings: dict = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": I,
        "num_hidden_layers": L,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    return LlamaConfig(**(settings | changes))


def drafter_tensors(draft_vocab: int = W) -> dict[str, torch.Tensor]:
    """Random tensors under the contract's names, shapes written out by hand; the draft vocabulary is every second token."""
    torch.manual_seed(0)
    tensors = {
        "fc.weight": torch.randn(16, 48),
        "midlayer.self_attn.q_proj.weight": torch.randn(32, 32),
        "midlayer.self_attn.k_proj.weight": torch.randn(16, 32),
        "midlayer.self_attn.v_proj.weight": torch.randn(16, 32),
        "midlayer.self_attn.o_proj.weight": torch.randn(16, 32),
        "midlayer.mlp.gate_proj.weight": torch.randn(24, 16),
        "midlayer.mlp.up_proj.weight": torch.randn(24, 16),
        "midlayer.mlp.down_proj.weight": torch.randn(16, 24),
        "midlayer.input_layernorm.weight": torch.randn(16),
        "midlayer.hidden_norm.weight": torch.randn(16),
        "midlayer.post_attention_layernorm.weight": torch.randn(16),
        "norm.weight": torch.randn(16),
        "lm_head.weight": torch.randn(draft_vocab, 16),
    }
    stride = 2 if draft_vocab == W else 1
    ids = torch.arange(0, draft_vocab * stride, stride)
    is_drafted = torch.zeros(V, dtype=torch.bool)
    is_drafted[ids] = True
    return {**tensors, "d2t": ids - torch.arange(draft_vocab), "t2d": is_drafted}


def export(tmp_path, tensors=None, *, target=None, aux_layers=(2, 4, 5), dtype=torch.float32):
    config = target_config() if target is None else target
    return export_drafter(
        drafter_tensors() if tensors is None else tensors,
        algorithm="eagle3",
        target_config=config,
        dimensions=DraftDimensions.of_target(config),
        aux_layers=aux_layers,
        dtype=dtype,
        out_dir=tmp_path / "export",
        provenance=PROVENANCE,
        card="# a drafter",
    )


def rewrite_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "REMOVE"}))


def test_tensors_come_back_bit_for_bit(tmp_path):
    tensors = drafter_tensors()
    _, reloaded = read_export(export(tmp_path, tensors))
    assert reloaded.keys() == tensors.keys()
    assert all(torch.equal(reloaded[name], tensors[name]) for name in tensors)
    assert reloaded["d2t"].dtype == torch.int64
    assert reloaded["t2d"].dtype == torch.bool


def test_config_says_what_both_engines_read(tmp_path):
    config, _ = read_export(export(tmp_path))
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 50,
        "draft_vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ],
)
def test_transformers_reads_the_targets_rotation_from_the_export(tmp_path, rope):
    """vLLM and SGLang both build their draft config with transformers 5."""
    config, _ = read_export(export(tmp_path, target=target_config(rope_parameters=dict(rope))))
    assert LlamaConfig(**config).rope_parameters == rope
    older = {"rope_theta": rope["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    assert older == rope


def test_of_two_rotations_a_draft_has_that_of_the_layers_that_see_everything(tmp_path):
    nested = target_config()
    nested.rope_parameters = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    expected = {"rope_type": "default", "rope_theta": 1e6}
    assert rope_fields(nested) == {"rope_parameters": expected, "rope_theta": 1e6, "rope_scaling": None}


def test_a_rotation_that_one_layer_cannot_have_is_refused(tmp_path):
    nested = target_config()
    nested.rope_parameters = {"rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    with pytest.raises(ValueError, match=r"expected a rope_theta and no sections: EAGLE heads for such a target are not supported"):
        export(tmp_path, target=nested)


def test_custom_layers_reach_the_config(tmp_path):
    config, _ = read_export(export(tmp_path, aux_layers=(1, 3, 5)))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]


def test_full_vocabulary_leaves_the_maps_out_and_keeps_the_size(tmp_path):
    config, tensors = read_export(export(tmp_path, drafter_tensors(draft_vocab=V)))
    assert config["draft_vocab_size"] == V
    assert "d2t" not in tensors
    assert "t2d" not in tensors


def test_dtype_is_that_of_the_file(tmp_path):
    config, tensors = read_export(export(tmp_path, dtype=torch.bfloat16))
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64


def test_provenance_is_beside_the_checkpoint(tmp_path):
    written = json.loads((export(tmp_path) / "headstart.json").read_text())
    assert written == {
        "algorithm": "eagle3",
        "engine_limits": {},
        "commit": "c0ffee",
        "versions": {"torch": "2"},
        "target": "tiny",
        "target_fingerprint": "f00d",
        "run_config_sha256": "5eed",
        "adapter": None,
    }


def test_provenance_holds_no_path(tmp_path):
    provenance = collect_provenance(str(tmp_path / "my-target"), "f00d", {"name": "x"})
    assert provenance.target == "my-target"
    assert str(tmp_path.parent) not in json.dumps(provenance.to_json())
    assert collect_provenance("org/model", "f00d", {}).target == "org/model"


def test_config_digest_ignores_key_order():
    assert config_digest({"a": 1, "b": [2]}) == config_digest({"b": [2], "a": 1})
    assert config_digest({"a": 1}) != config_digest({"a": 2})


@pytest.mark.parametrize("name", [name for name in drafter_tensors() if name != "lm_head.weight"])
def test_each_missing_tensor_is_refused_by_name(tmp_path, name):
    tensors = drafter_tensors()
    del tensors[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        export(tmp_path, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_export_lists_every_problem_with_found_and_expected(tmp_path):
    directory = export(tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    tensors["midlayer.mlp.up_proj.bias"] = torch.zeros(I)
    del tensors["norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError) as caught:
        validate_export(directory)
    message = str(caught.value)
    assert "fc.weight is [48, 16] float32, expected [16, 48] float32" in message
    assert "d2t is [20] I32, expected [20] int64" in message
    assert "norm.weight is missing, expected [16] float32" in message
    assert "midlayer.mlp.up_proj.bias is unexpected" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": "REMOVE"}, "lacks 'draft_vocab_size'.*AttributeError"),
        ({"draft_vocab_size": None}, "draft_vocab_size = null, expected a value of type int"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true, expected false"),
        ({"target_hidden_size": None}, "target_hidden_size"),
        ({"rope_parameters": "REMOVE"}, "theta 10000"),
        ({"model_type": "qwen3"}, 'model_type = "qwen3", expected "llama"'),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "LlamaForCausalLMEagle3"),
        ({"num_aux_hidden_states": 4}, r"fc.weight is \[16, 48\] float32, expected \[16, 64\]"),
        ({"dtype": "bfloat16"}, "float32, expected .* bfloat16"),
    ],
)
def test_a_wrong_config_field_is_refused(tmp_path, changes, message):
    directory = export(tmp_path)
    rewrite_config(directory, **changes)
    with pytest.raises(ValueError, match=message):
        validate_export(directory)


def test_ids_in_the_place_of_offsets_are_refused(tmp_path):
    tensors = drafter_tensors()
    tensors["d2t"] = tensors["d2t"] + torch.arange(W)
    with pytest.raises(ValueError, match="offsets"):
        export(tmp_path, tensors)


def test_maps_that_disagree_are_refused(tmp_path):
    tensors = drafter_tensors()
    tensors["t2d"][1] = True
    with pytest.raises(ValueError, match="t2d marks 21"):
        export(tmp_path, tensors)


def test_a_diverged_drafter_is_refused(tmp_path):
    tensors = drafter_tensors()
    tensors["norm.weight"][3] = float("nan")
    with pytest.raises(ValueError, match=r"norm\.weight holds values that are not finite"):
        export(tmp_path, tensors)


def test_an_earlier_export_is_replaced_and_nothing_else_ever(tmp_path):
    export(tmp_path)
    directory = export(tmp_path, aux_layers=(1, 3, 5))
    assert validate_export(directory)["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert [entry.name for entry in tmp_path.iterdir()] == ["export"]
    (directory / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        export(tmp_path)
    assert (directory / "thesis.txt").read_text() == "years of work"


# --- EAGLE-1 and Medusa -----------------------------------------------------------------------------------------------


def eagle1_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "fc.weight": torch.randn(16, 32),
        "fc.bias": torch.zeros(16),
        "layers.0.self_attn.q_proj.weight": torch.randn(32, 16),
        "layers.0.self_attn.k_proj.weight": torch.randn(16, 16),
        "layers.0.self_attn.v_proj.weight": torch.randn(16, 16),
        "layers.0.self_attn.o_proj.weight": torch.randn(16, 32),
        "layers.0.mlp.gate_proj.weight": torch.randn(24, 16),
        "layers.0.mlp.up_proj.weight": torch.randn(24, 16),
        "layers.0.mlp.down_proj.weight": torch.randn(16, 24),
        "layers.0.post_attention_layernorm.weight": torch.randn(16),
    }


def medusa_tensors(num_heads: int = 2, num_layers: int = 2, is_shared: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"lm_head.weight": torch.randn(V, H)} if is_shared else {f"lm_heads.{head}.weight": torch.randn(V, H) for head in range(num_heads)}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = torch.randn(H, H)
            tensors[f"blocks.{head}.layers.{layer}.bias"] = torch.randn(H)
    return tensors


def export_other(tmp_path, algorithm, tensors, dimensions):
    return export_drafter(
        tensors,
        algorithm=algorithm,
        target_config=target_config(),
        dimensions=dimensions,
        aux_layers=(),
        dtype=torch.float32,
        out_dir=tmp_path / "export",
        provenance=PROVENANCE,
        card="# a drafter",
    )


def test_an_eagle1_export_says_what_both_engines_read(tmp_path):
    tensors = eagle1_tensors()
    config, reloaded = read_export(export_other(tmp_path, "eagle1", tensors, DraftDimensions.of_target(target_config())))
    assert reloaded.keys() == tensors.keys()
    assert config == {
        "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize("name", ["lm_head.weight", "layers.0.input_layernorm.weight", "fc_norm.weight"])
def test_tensors_on_which_vllm_raises_are_refused_in_an_eagle1_export(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} is unexpected"):
        export_other(tmp_path, "eagle1", eagle1_tensors() | {name: torch.ones(16)}, DraftDimensions.of_target(target_config()))


@pytest.mark.parametrize("name", list(eagle1_tensors()))
def test_each_missing_tensor_of_eagle1_is_refused_by_name(tmp_path, name):
    tensors = eagle1_tensors()
    del tensors[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        export_other(tmp_path, "eagle1", tensors, DraftDimensions.of_target(target_config()))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_medusa_export_says_what_vllm_reads(tmp_path, is_shared):
    tensors = medusa_tensors(is_shared=is_shared)
    config, reloaded = read_export(export_other(tmp_path, "medusa1", tensors, MedusaDimensions(H, 2, 2, is_shared)))
    assert reloaded.keys() == tensors.keys()
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "vocab_size": 50,
        "hidden_size": 16,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": is_shared,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def test_medusa_heads_that_are_too_few_or_too_many_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"lm_heads\.2\.weight is missing"):
        export_other(tmp_path, "medusa1", medusa_tensors(), MedusaDimensions(H, 3, 2, False))
    with pytest.raises(ValueError, match=r"blocks\.1\.layers\.0\.bias is unexpected"):
        export_other(tmp_path, "medusa1", medusa_tensors(), MedusaDimensions(H, 1, 2, False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "REMOVE"}, "lacks 'hidden_size'.*4096"),
        ({"medusa_fc_bias": False}, "medusa_fc_bias = false, expected true .*drops the biases"),
        ({"medusa_fc_bias": "REMOVE"}, "lacks 'medusa_fc_bias'.*drops the biases"),
        ({"num_heads": 3}, r"lm_heads\.2\.weight is missing"),
        ({"original_lm_head": True}, r"lm_head\.weight is missing"),
        ({"original_lm_head": None}, "original_lm_head = null"),
    ],
)
def test_a_wrong_field_of_a_medusa_config_is_refused(tmp_path, changes, message):
    directory = export_other(tmp_path, "medusa1", medusa_tensors(), MedusaDimensions(H, 2, 2, False))
    rewrite_config(directory, **changes)
    with pytest.raises(ValueError, match=message):
        validate_export(directory)


def test_a_drafters_sizes_become_those_of_its_format():
    sizes = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1, "original_lm_head": False}
    assert draft_dimensions("medusa1", sizes) == MedusaDimensions(16, 2, 1, False)


def test_files_that_are_no_export_give_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="not an exported drafter"):
        validate_export(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        validate_export(tmp_path)
    directory = export(tmp_path / "other")
    (directory / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="safetensors"):
        validate_export(directory)
