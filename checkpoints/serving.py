"""The serving contract as data: what each engine needs of a draft checkpoint, per wire format.

Both engines load mostly silently: a missing tensor stays uninitialised and only lowers acceptance. So the exporter checks its own
output against these rows, and an export that passes here is one that the engines really load. Source of every rule: vLLM 0.32.0
and SGLang 0.5.23, read and executed; a rule must be checked again when one of these versions moves.

Place in the flow: checkpoints/export.py writes and checks by these rows; a new wire format is one more entry of `FORMATS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

EngineName = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class TensorRule:
    """One tensor of the checkpoint.

    Attributes:
        name: its name in model.safetensors; a config.json field in braces stands for every index below it ("lm_heads.{num_heads}.weight").
        shape: one product per dimension, of config.json fields and whole numbers ("2*hidden_size").
        dtype: "model" (the config's dtype), or a fixed one.
        presence: "always"; "draft_vocab" (exactly when draft_vocab_size differs from vocab_size); "own_heads" and "shared_head" (exactly when
            original_lm_head is false, or true); "norm_before_fc" and "fc_norm" (exactly when that field is true); or "optional".
    """

    name: str
    shape: tuple[str, ...]
    dtype: Literal["model", "int64", "bool"] = "model"
    presence: Literal["always", "draft_vocab", "own_heads", "shared_head", "norm_before_fc", "fc_norm", "optional"] = "always"


@dataclass(frozen=True)
class FieldRule:
    """One field of config.json.

    Attributes:
        name: the field.
        types: the Python types that its JSON value may have.
        otherwise: what the engine does without it, for the error message.
        value: the only value that works, or None where any value of the type does.
    """

    name: str
    types: tuple[type, ...]
    otherwise: str
    value: object = None


@dataclass(frozen=True)
class EngineRow:
    """What one version of one engine reads of config.json."""

    version: str
    fields: tuple[FieldRule, ...]


@dataclass(frozen=True)
class ServingFormat:
    """One wire format.

    Attributes:
        name: of the format; several algorithms may share one.
        vllm_method: the `method` of vLLM's speculative config; never left to vLLM's guess from the path.
        architectures: written to config.json; a spelling that every engine of the format resolves.
        tensors: the exact key set; anything else in the file is an error (vLLM raises, SGLang ignores it silently).
        engines: the engines that load the format.
    """

    name: str
    vllm_method: str
    architectures: tuple[str, ...]
    tensors: tuple[TensorRule, ...]
    engines: Mapping[EngineName, EngineRow]


def _number_rules(names: Sequence[str], otherwise: str) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(name, (int,), otherwise) for name in names)


LLAMA_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)

DTYPE_FIELDS = (
    FieldRule("dtype", (str,), "takes float16"),
    FieldRule("torch_dtype", (str,), "older versions take float16"),
)

# One Llama decoder layer: what every EAGLE head is.
LLAMA_BLOCK = (
    FieldRule("model_type", (str,), "rejects the checkpoint", "llama"),
    *_number_rules(LLAMA_SIZES, "takes transformers' default, and tensors of other shapes"),
    FieldRule("num_hidden_layers", (int,), "builds 32 layers", 1),
    FieldRule("hidden_act", (str,), "takes transformers' default"),
    FieldRule("rms_norm_eps", (float,), "takes 1e-6"),
    FieldRule("attention_bias", (bool,), "vLLM adds biases and SGLang does not", False),
    FieldRule("rope_parameters", (dict,), "rotates with theta 10000, which only lowers acceptance"),
    FieldRule("rope_theta", (int, float), "older versions rotate with theta 10000"),
    *DTYPE_FIELDS,
)

EAGLE3_COMMON = (FieldRule("architectures", (list,), "rejects the checkpoint", ["LlamaForCausalLMEagle3"]), *LLAMA_BLOCK)

# Norms that EAGLE-3's block has in some trainers and not in the paper, by their fields of config.json: the residual is taken after hidden_norm; one
# norm, or one for each state, before fc; drafting goes on from the output after `norm`.
BlockNorm = Literal["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
BLOCK_NORMS: tuple[BlockNorm, ...] = get_args(BlockNorm)

EAGLE3 = ServingFormat(
    name="eagle3",
    vllm_method="eagle3",
    architectures=("LlamaForCausalLMEagle3",),
    tensors=(
        TensorRule("fc.weight", ("hidden_size", "num_aux_hidden_states*target_hidden_size")),
        TensorRule("midlayer.self_attn.q_proj.weight", ("num_attention_heads*head_dim", "2*hidden_size")),
        TensorRule("midlayer.self_attn.k_proj.weight", ("num_key_value_heads*head_dim", "2*hidden_size")),
        TensorRule("midlayer.self_attn.v_proj.weight", ("num_key_value_heads*head_dim", "2*hidden_size")),
        TensorRule("midlayer.self_attn.o_proj.weight", ("hidden_size", "num_attention_heads*head_dim")),
        TensorRule("midlayer.mlp.gate_proj.weight", ("intermediate_size", "hidden_size")),
        TensorRule("midlayer.mlp.up_proj.weight", ("intermediate_size", "hidden_size")),
        TensorRule("midlayer.mlp.down_proj.weight", ("hidden_size", "intermediate_size")),
        TensorRule("midlayer.input_layernorm.weight", ("hidden_size",)),
        TensorRule("midlayer.hidden_norm.weight", ("hidden_size",)),
        TensorRule("midlayer.post_attention_layernorm.weight", ("hidden_size",)),
        TensorRule("norm.weight", ("hidden_size",)),
        TensorRule("lm_head.weight", ("draft_vocab_size", "hidden_size")),
        # An offset, not an id: target id = j + d2t[j]. Left out with the full vocabulary, where vLLM has no place for it.
        TensorRule("d2t", ("draft_vocab_size",), dtype="int64", presence="draft_vocab"),
        TensorRule("t2d", ("vocab_size",), dtype="bool", presence="draft_vocab"),
        # Of BLOCK_NORMS, those with a weight of their own.
        TensorRule("input_norm.weight", ("num_aux_hidden_states*target_hidden_size",), presence="norm_before_fc"),
        TensorRule("fc_norm.{num_aux_hidden_states}.weight", ("target_hidden_size",), presence="fc_norm"),
        # Both engines take the target's embedding when it is absent and the widths agree.
        TensorRule("embed_tokens.weight", ("vocab_size", "hidden_size"), presence="optional"),
    ),
    engines={
        "vllm": EngineRow(
            version="0.32.0",
            fields=(
                *EAGLE3_COMMON,
                FieldRule("norm_before_residual", (bool,), "takes false, and speculators true"),
                FieldRule("draft_vocab_size", (int,), "takes vocab_size"),
            ),
        ),
        "sglang": EngineRow(
            version="0.5.23",
            fields=(
                *EAGLE3_COMMON,
                FieldRule("draft_vocab_size", (int,), "raises AttributeError"),
                FieldRule("tie_word_embeddings", (bool,), "takes the embedding for the head", False),
            ),
        ),
    },
)

# Each engine looks for the spelling that it knows and passes over the other.
EAGLE1_ARCHITECTURES = ("LlamaForCausalLMEagle", "LlamaForCausalLM")
EAGLE1_COMMON = (FieldRule("architectures", (list,), "rejects the checkpoint", list(EAGLE1_ARCHITECTURES)), *LLAMA_BLOCK)

# EAGLE-2 is the same checkpoint under another tree at inference. No head, no norms but one: vLLM raises on `lm_head` and on
# `layers.0.input_layernorm`, and both engines take the target's head.
EAGLE1 = ServingFormat(
    name="eagle1",
    vllm_method="eagle",
    architectures=EAGLE1_ARCHITECTURES,
    tensors=(
        TensorRule("fc.weight", ("hidden_size", "2*hidden_size")),
        # Zeros: vLLM drops it, and SGLang has one at random when the file lacks it.
        TensorRule("fc.bias", ("hidden_size",)),
        TensorRule("layers.0.self_attn.q_proj.weight", ("num_attention_heads*head_dim", "hidden_size")),
        TensorRule("layers.0.self_attn.k_proj.weight", ("num_key_value_heads*head_dim", "hidden_size")),
        TensorRule("layers.0.self_attn.v_proj.weight", ("num_key_value_heads*head_dim", "hidden_size")),
        TensorRule("layers.0.self_attn.o_proj.weight", ("hidden_size", "num_attention_heads*head_dim")),
        TensorRule("layers.0.mlp.gate_proj.weight", ("intermediate_size", "hidden_size")),
        TensorRule("layers.0.mlp.up_proj.weight", ("intermediate_size", "hidden_size")),
        TensorRule("layers.0.mlp.down_proj.weight", ("hidden_size", "intermediate_size")),
        TensorRule("layers.0.post_attention_layernorm.weight", ("hidden_size",)),
        TensorRule("embed_tokens.weight", ("vocab_size", "hidden_size"), presence="optional"),
    ),
    engines={
        "vllm": EngineRow(version="0.32.0", fields=EAGLE1_COMMON),
        "sglang": EngineRow(
            version="0.5.23",
            fields=(*EAGLE1_COMMON, FieldRule("tie_word_embeddings", (bool,), "takes the embedding for the head", False)),
        ),
    },
)

MEDUSA = ServingFormat(
    name="medusa",
    vllm_method="medusa",
    architectures=("MedusaModel",),
    tensors=(
        TensorRule("blocks.{num_heads}.layers.{num_hidden_layers}.weight", ("hidden_size", "hidden_size")),
        TensorRule("blocks.{num_heads}.layers.{num_hidden_layers}.bias", ("hidden_size",)),
        TensorRule("lm_heads.{num_heads}.weight", ("vocab_size", "hidden_size"), presence="own_heads"),
        # Not taken from the target: the file carries it.
        TensorRule("lm_head.weight", ("vocab_size", "hidden_size"), presence="shared_head"),
    ),
    engines={
        "vllm": EngineRow(
            version="0.32.0",
            fields=(
                FieldRule("model_type", (str,), "rejects the checkpoint", "medusa"),
                FieldRule("architectures", (list,), "takes MedusaModel", ["MedusaModel"]),
                FieldRule("hidden_size", (int,), "takes 4096"),
                FieldRule("vocab_size", (int,), "takes 32001"),
                FieldRule("num_heads", (int,), "takes 5"),
                FieldRule("num_hidden_layers", (int,), "takes 1"),
                FieldRule("medusa_fc_bias", (bool,), "drops the biases silently", True),
                FieldRule("original_lm_head", (bool,), "wants one lm_heads tensor a head"),
                *DTYPE_FIELDS,
            ),
        ),
    },
)

FORMATS: dict[str, ServingFormat] = {"eagle3": EAGLE3, "eagle1": EAGLE1, "medusa1": MEDUSA, "medusa2": MEDUSA}


def serving_format(algorithm: str) -> ServingFormat:
    """The wire format of an algorithm.

    Raises:
        ValueError: if the contract has no row for it.
    """
    if algorithm not in FORMATS:
        raise ValueError(f"no serving format for {algorithm!r}; checkpoints/serving.py has rows for {', '.join(FORMATS)}")
    return FORMATS[algorithm]


def format_of_config(config: Mapping[str, Any]) -> ServingFormat:
    """The wire format that a config.json announces by its `architectures`.

    Raises:
        ValueError: if no row has these architectures.
    """
    found = config.get("architectures")
    for row in FORMATS.values():
        if found == list(row.architectures):
            return row
    known = " or ".join(json.dumps(list(row.architectures)) for row in FORMATS.values())
    raise ValueError(f"config.json has architectures {json.dumps(found)}, expected {known}")


def default_engine_layers(num_target_layers: int) -> tuple[int, int, int]:
    """The HF indices that both engines read when config.json names none."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def aux_layer_fields(aux_layers: Sequence[int], num_target_layers: int) -> dict[str, Any]:
    """The config.json fields that make both engines read these target states.

    An explicit id k is HF hidden_states[k] in vLLM, which reads the top level first, and HF[k+1] in SGLang, which reads only
    `eagle_config`; so the two lists differ by one. The engines' default layers need no field at all.

    Args:
        aux_layers: HF `hidden_states` indices, ascending and distinct, each in 1..num_target_layers.
        num_target_layers: L.

    Raises:
        ValueError: if the layers are not such a list.
    """
    layers = list(aux_layers)
    if not layers or layers != sorted(set(layers)) or layers[0] < 1 or layers[-1] > num_target_layers:
        raise ValueError(
            f"auxiliary layers {layers} of a target with {num_target_layers} layers: expected distinct, ascending ids "
            f"in 1..{num_target_layers} (the engines sort and deduplicate them)"
        )
    if tuple(layers) == default_engine_layers(num_target_layers):
        return {}
    fields: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]},
    }
    if len(layers) != 3:
        fields["num_aux_hidden_states"] = len(layers)
    return fields


def aux_layers_of_config(config: Mapping[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """The HF indices that vLLM reads for this config.json: the inverse of `aux_layer_fields`."""
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    return default_engine_layers(num_target_layers) if layers is None else tuple(layers)


# Families that vLLM 0.32.0 serves, but not with these drafters: read from its classes.
_VLLM_WITHOUT_AUX_STATES = ("gemma", "gemma2", "gemma3_text", "gemma3n_text", "mixtral", "qwen2_moe", "glm4", "glm4_moe", "exaone4", "olmoe")
_VLLM_WITHOUT_LM_HEAD = ("gemma2",)


def target_limits(algorithm: str, family: str, sliding_window: int | None = None) -> dict[str, str]:
    """Why an engine cannot serve drafters of this algorithm for such targets with full acceptance, by engine; empty where no reason is known.

    Args:
        family: the target's `model_type`.
        sliding_window: tokens that every layer of the target sees; None where some layer sees everything.
    """
    vllm = f"vLLM {FORMATS['eagle3'].engines['vllm'].version}"
    if serving_format(algorithm).name == "eagle3" and family in _VLLM_WITHOUT_AUX_STATES:
        return {"vllm": f"{vllm} reads no auxiliary states of {family} targets; Medusa heads (recipes/medusa1.py) need none"}
    if serving_format(algorithm).name == "eagle1" and family in _VLLM_WITHOUT_LM_HEAD:
        return {"vllm": f"{vllm} finds no lm_head in {family} targets for an EAGLE-1 head to use; Medusa heads (recipes/medusa1.py) have their own"}
    if serving_format(algorithm).name == "eagle1" and sliding_window is not None:
        return {"vllm": f"{vllm} shows an EAGLE-1 layer only the last {sliding_window} tokens, as the target's layers: longer contexts accept less"}
    return {}


def engine_limits(config: Mapping[str, Any], num_target_layers: int) -> dict[str, str]:
    """Why an engine of the format cannot serve this checkpoint with full acceptance, by engine; empty when all can."""
    norms = [name for name in BLOCK_NORMS if config.get(name)]
    if norms:
        known = "knows no norm_before_residual" if norms[0] == "norm_before_residual" else f"has not been tried with {', '.join(norms)}"
        return {"sglang": f"it {known}; vLLM reads them all"}
    last = aux_layers_of_config(config, num_target_layers)[-1]
    if "sglang" in format_of_config(config).engines and last == num_target_layers:
        return {"sglang": f"it captures nothing for the last layer's output (auxiliary layer {last}), silently"}
    return {}


def shape_numbers(config: Mapping[str, Any]) -> dict[str, int]:
    """The whole numbers of config.json that tensor shapes are made of, with the engines' defaults for absent ones."""
    numbers = {name: value for name, value in config.items() if type(value) is int}
    if "hidden_size" in numbers:
        numbers.setdefault("target_hidden_size", numbers["hidden_size"])
    numbers.setdefault("num_aux_hidden_states", len(config.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)))
    return numbers


def tensor_rules(row: ServingFormat, config: Mapping[str, Any]) -> list[TensorRule]:
    """The tensors of a checkpoint with this config.json: conditions decided, indexed names written out.

    A missing number is a KeyError, so check the config first.
    """
    numbers = shape_numbers(config)
    holds = {
        "always": True,
        "optional": True,
        "draft_vocab": numbers.get("draft_vocab_size", numbers["vocab_size"]) != numbers["vocab_size"],
        "own_heads": config.get("original_lm_head") is False,
        "shared_head": config.get("original_lm_head") is True,
        "norm_before_fc": config.get("norm_before_fc") is True,
        "fc_norm": config.get("fc_norm") is True,
    }
    written_out = []
    for rule in row.tensors:
        if holds[rule.presence]:
            fields = re.findall(r"{(\w+)}", rule.name)
            for indices in itertools.product(*(range(numbers[field]) for field in fields)):
                name = rule.name.format(**dict(zip(fields, indices, strict=True)))
                written_out.append(dataclasses.replace(rule, name=name))
    return written_out


def expected_shape(rule: TensorRule, numbers: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor under these numbers; a missing number is a KeyError, so check the config first."""
    return tuple(prod(int(factor) if factor.isdigit() else numbers[factor] for factor in product.split("*")) for product in rule.shape)


def config_problems(config: Mapping[str, Any]) -> list[str]:
    """Every way in which a config.json breaks the rows of its format's engines, one line each."""
    problems: dict[str, None] = {}  # ordered, and a rule that two engines share is told once
    for engine, row in format_of_config(config).engines.items():
        for rule in row.fields:
            if rule.name not in config:
                problems[f"config.json lacks {rule.name!r}: {engine} {row.version} otherwise {rule.otherwise}"] = None
                continue
            found = config[rule.name]
            # bool is an int in Python, not in JSON.
            if not isinstance(found, rule.types) or (isinstance(found, bool) and bool not in rule.types):
                expected = " or ".join(allowed.__name__ for allowed in rule.types)
                problems[f"config.json has {rule.name} = {json.dumps(found)}, expected a value of type {expected}"] = None
            elif rule.value is not None and found != rule.value:
                expected = json.dumps(rule.value)
                problems[f"config.json has {rule.name} = {json.dumps(found)}, expected {expected} ({rule.otherwise})"] = None
    if "target_hidden_size" in config and type(config["target_hidden_size"]) is not int:
        problems["config.json has target_hidden_size that is not a number: leave it out when it equals hidden_size"] = None
    return list(problems)


def vllm_serve_command(algorithm: str, target: str, export_dir: Path | str, draft_length: int) -> str:
    """The shell command that serves a target with an exported drafter.

    `method` is always written: vLLM would otherwise guess it from the path.
    """
    speculative = {
        "method": serving_format(algorithm).vllm_method,
        "model": str(export_dir),
        "num_speculative_tokens": draft_length,
    }
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"
