"""The contract's rows say what serving-contract.md says, and the off-by-one of explicit layer ids is written for each engine."""

import shlex

import pytest

from checkpoints.serving import (
    FORMATS,
    aux_layer_fields,
    aux_layers_of_config,
    config_problems,
    engine_limits,
    expected_shape,
    format_of_config,
    serving_format,
    shape_numbers,
    tensor_rules,
    vllm_serve_command,
)

# The key set of serving-contract.md section 3, written out by hand.
EAGLE3_KEYS = {
    "fc.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
}


def test_eagle3_key_set_is_the_contracts():
    rules = FORMATS["eagle3"].tensors
    assert {rule.name for rule in rules if rule.presence in ("always", "draft_vocab")} == EAGLE3_KEYS
    assert {rule.name for rule in rules if rule.presence == "optional"} == {"embed_tokens.weight"}


# Section 4: no lm_head and no input_layernorm, on which vLLM raises; fc.bias for SGLang.
EAGLE1_KEYS = {
    "fc.weight",
    "fc.bias",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}


def test_eagle1_key_set_and_shapes_are_the_contracts():
    """H 10, 4 heads of 5, 2 kv heads, I 7: every number differs, so a swap shows."""
    rules = FORMATS["eagle1"].tensors
    assert {rule.name for rule in rules if rule.presence != "optional"} == EAGLE1_KEYS
    assert {rule.name for rule in rules if rule.presence == "optional"} == {"embed_tokens.weight"}
    numbers = {
        "hidden_size": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 5,
        "intermediate_size": 7,
        "vocab_size": 100,
    }
    shapes = {rule.name: expected_shape(rule, shape_numbers(numbers)) for rule in rules}
    assert shapes["fc.weight"] == (10, 20)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (20, 10)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (10, 10)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (10, 20)
    assert shapes["layers.0.mlp.down_proj.weight"] == (10, 7)


MEDUSA_CONFIG = {"vocab_size": 100, "hidden_size": 10, "num_heads": 2, "num_hidden_layers": 2, "original_lm_head": False}
MEDUSA_BLOCKS = {f"blocks.{head}.layers.{layer}.{kind}" for head in (0, 1) for layer in (0, 1) for kind in ("weight", "bias")}


def test_medusa_key_set_and_shapes_follow_heads_and_layers():
    rules = {rule.name: expected_shape(rule, shape_numbers(MEDUSA_CONFIG)) for rule in tensor_rules(FORMATS["medusa1"], MEDUSA_CONFIG)}
    assert rules.keys() == MEDUSA_BLOCKS | {"lm_heads.0.weight", "lm_heads.1.weight"}
    assert rules["blocks.1.layers.1.weight"] == (10, 10)
    assert rules["blocks.1.layers.1.bias"] == (10,)
    assert rules["lm_heads.1.weight"] == (100, 10)


def test_medusa_heads_that_share_the_targets_are_one_tensor():
    rules = tensor_rules(FORMATS["medusa1"], MEDUSA_CONFIG | {"original_lm_head": True})
    assert {rule.name for rule in rules} == MEDUSA_BLOCKS | {"lm_head.weight"}


def test_medusa_is_for_vllm_alone():
    assert FORMATS["medusa1"].engines.keys() == {"vllm"}
    assert FORMATS["eagle1"].engines.keys() == {"vllm", "sglang"}


@pytest.mark.parametrize(("algorithm", "method"), [("eagle3", "eagle3"), ("eagle1", "eagle"), ("medusa1", "medusa")])
def test_vllm_is_always_told_the_method(algorithm, method):
    assert FORMATS[algorithm].vllm_method == method
    assert f'"method": "{method}"' in vllm_serve_command(algorithm, "t", "d", 3)
    assert format_of_config({"architectures": list(FORMATS[algorithm].architectures)}) is FORMATS[algorithm]


def test_shapes_follow_the_drafters_own_sizes():
    """H 10, target H 12, 3 states, 4 heads of 5, 2 kv heads, I 7, V 100, W 20: every number differs, so a swap shows."""
    config = {
        "hidden_size": 10,
        "target_hidden_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 5,
        "intermediate_size": 7,
        "vocab_size": 100,
        "draft_vocab_size": 20,
    }
    shapes = {rule.name: expected_shape(rule, shape_numbers(config)) for rule in FORMATS["eagle3"].tensors}
    assert shapes["fc.weight"] == (10, 36)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (20, 20)
    assert shapes["midlayer.self_attn.k_proj.weight"] == (10, 20)
    assert shapes["midlayer.self_attn.v_proj.weight"] == (10, 20)
    assert shapes["midlayer.self_attn.o_proj.weight"] == (10, 20)
    assert shapes["midlayer.mlp.gate_proj.weight"] == (7, 10)
    assert shapes["midlayer.mlp.down_proj.weight"] == (10, 7)
    assert shapes["lm_head.weight"] == (20, 10)
    assert shapes["d2t"] == (20,)
    assert shapes["t2d"] == (100,)


def test_default_layers_write_no_ids():
    assert aux_layer_fields((2, 4, 5), num_target_layers=8) == {}
    assert aux_layer_fields((2, 15, 27), num_target_layers=30) == {}


def test_custom_layers_are_written_one_lower_for_sglang():
    """HF[1,3,5] of 8 layers: vLLM's list is the HF indices, SGLang's is one less."""
    assert aux_layer_fields((1, 3, 5), num_target_layers=8) == {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    }


def test_another_number_of_states_is_written():
    fields = aux_layer_fields((2, 4), num_target_layers=8)
    assert fields["num_aux_hidden_states"] == 2
    assert shape_numbers({"hidden_size": 4, **fields})["num_aux_hidden_states"] == 2


@pytest.mark.parametrize("layers", [(2, 4, 5), (1, 3, 5), (2, 4), (8,)])
def test_written_layers_read_back_as_the_same_hf_indices(layers):
    assert aux_layers_of_config(aux_layer_fields(layers, 8), 8) == layers


@pytest.mark.parametrize("layers", [(), (0, 3, 5), (5, 3, 1), (2, 2, 4), (2, 4, 9)])
def test_layers_that_the_engines_would_change_are_refused(layers):
    with pytest.raises(ValueError, match="ascending"):
        aux_layer_fields(layers, num_target_layers=8)


def test_the_last_layers_output_is_named_as_unservable_by_sglang():
    config = {"architectures": ["LlamaForCausalLMEagle3"]}
    assert engine_limits({**config, **aux_layer_fields((2, 4, 8), 8)}, 8).keys() == {"sglang"}
    assert engine_limits({**config, **aux_layer_fields((2, 4, 7), 8)}, 8) == {}
    assert engine_limits(config, 8) == {}


def test_every_missing_field_is_told_at_once():
    problems = "\n".join(config_problems({"architectures": ["LlamaForCausalLMEagle3"]}))
    for field in ("model_type", "draft_vocab_size", "rope_parameters", "tie_word_embeddings", "head_dim", "dtype"):
        assert f"lacks '{field}'" in problems


def test_unknown_algorithms_and_architectures_are_named_with_what_exists():
    with pytest.raises(ValueError, match=r"eagle9.*eagle3"):
        serving_format("eagle9")
    with pytest.raises(ValueError, match="LlamaForCausalLMEagle3"):
        format_of_config({"architectures": ["LlamaForCausalLM"]})


def test_serve_command_survives_a_shell():
    words = shlex.split(vllm_serve_command("eagle3", "my target", "runs/it's/export", 4))
    assert words[:3] == ["vllm", "serve", "my target"]
    assert words[4] == '{"method": "eagle3", "model": "runs/it\'s/export", "num_speculative_tokens": 4}'


def test_norms_beyond_the_papers_bring_their_weights_and_are_named_as_unservable_by_sglang():
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 8, "hidden_size": 4}

    def extra(**norms: bool) -> set[str]:
        return {rule.name for rule in tensor_rules(FORMATS["eagle3"], {**config, **norms})} - EAGLE3_KEYS - {"embed_tokens.weight"}

    assert extra() == extra(norm_before_residual=True, norm_output=True, fc_norm=False) == set()
    assert extra(norm_before_fc=True) == {"input_norm.weight"}
    assert extra(fc_norm=True) == {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}
    assert "knows no norm_before_residual" in engine_limits({**config, "norm_before_residual": True, "norm_output": True}, 8)["sglang"]
    assert "has not been tried with norm_output" in engine_limits({**config, "norm_output": True}, 8)["sglang"]
