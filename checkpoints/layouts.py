"""The layouts in which other tools keep a drafter, as data: names of tensors and files, fields of config.json, and what each cannot hold.

Place in the flow: checkpoints/foreign.py reads by these names, checkpoints/convert.py writes by them. Sources, all read: SafeAILab/EAGLE
(eagle/model/cnets.py, cnets1.py, ea_model.py), sgl-project/SpecForge (specforge/modeling/draft/llama3_eagle.py, configs/), FasterDecoding/Medusa
(medusa/model/medusa_model.py, train/train_legacy.py), speculators 0.9.0 as installed, which tests/test_convert_peers.py runs.

    layout        tensors                          EAGLE block      auxiliary layers                     embedding
    headstart     model.safetensors                midlayer.        both of the next two                 the target's
    speculators   model.safetensors                layers.0.        top level, id k is HF[k]             the target's, or its own
    specforge     model.safetensors                midlayer.        eagle_config, id k is HF[k + 1]      the target's
    safeailab     pytorch_model.bin                midlayer.        none: always the default three       its own (EAGLE-1), the target's (EAGLE-3)
                                                   (EAGLE-1: layers.0.)
    medusa        medusa_lm_head.pt                -
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from checkpoints.serving import BLOCK_NORMS, serving_format

Layout = Literal["headstart", "speculators", "safeailab", "specforge", "medusa"]

# The wire formats (checkpoints/serving.py) that a layout has a place for.
HOLDS: dict[Layout, tuple[str, ...]] = {
    "headstart": ("eagle1", "eagle3", "medusa"),
    "speculators": ("eagle3",),
    "safeailab": ("eagle1", "eagle3"),
    "specforge": ("eagle3",),
    "medusa": ("medusa",),
}
# Of BLOCK_NORMS; speculators holds all.
_NORMS: dict[Layout, tuple[str, ...]] = {"specforge": ("fc_norm", "norm_output")}
WHY_NOT = {
    "speculators": "vLLM reads EAGLE-3 of this layout, but no EAGLE-1 and no Medusa",
    "safeailab": "it is for EAGLE heads",
    "specforge": "it is for EAGLE-3 heads",
    "medusa": "it is for Medusa heads",
}

# Fields of our config.json that mean the same there. Old transformers, on which SafeAILab and SpecForge run, know no rope_parameters and no dtype.
_LLAMA_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
)
_OLD_LLAMA_FIELDS = (*_LLAMA_FIELDS, "rope_theta", "rope_scaling", "torch_dtype")


# Only where the target's layers see a window: without them vLLM would give the draft that window.
_WINDOW_FIELDS = ("layer_types", "sliding_window")


def _taken(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: config[name] for name in names} | {name: config[name] for name in _WINDOW_FIELDS if name in config}


@dataclass(frozen=True)
class Serves:
    """What a checkpoint is served with, where a layout wants to know it.

    Attributes:
        target: path or Hub id of the target, or None.
        architectures: of the target's config.json; empty where it is not known.
        num_target_layers: likewise, or None.
        num_drafts: drafts of a chain.
    """

    target: str | None
    architectures: tuple[str, ...]
    num_target_layers: int | None
    num_drafts: int


@dataclass(frozen=True)
class ForeignFiles:
    """What a layout's folder holds.

    Attributes:
        config: config.json.
        tensors: by the layout's names.
        file: the file of the tensors.
        notes: what is not as it was, one line each.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str
    notes: tuple[str, ...] = ()


def foreign_files(layout: Layout, algorithm: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], serves: Serves) -> ForeignFiles:
    """A checkpoint of ours in another layout.

    Args:
        layout: any but "headstart".
        algorithm: as in train/drafters/.
        config: our config.json.
        tensors: by contract name.
        serves: what it is served with.

    Raises:
        ValueError: if the layout has no place for something, saying for what and why.
    """
    kind = serving_format(algorithm).name
    if kind not in HOLDS[layout]:
        raise ValueError(f"{algorithm} cannot be written in the {layout} layout: {WHY_NOT[layout]}")
    if layout == "speculators":
        return _speculators(config, tensors, serves)
    norms = [name for name in BLOCK_NORMS if config.get(name) and name not in _NORMS.get(layout, ())]
    if norms:
        raise ValueError(f"the drafter's block has {', '.join(norms)}, for which the {layout} layout has no place: the speculators layout has")
    if layout == "specforge":
        return _specforge(config, tensors)
    if layout == "medusa":
        return _medusa(config, tensors, serves)
    return _safeailab(kind, config, tensors)


# --- speculators ----------------------------------------------------------------------------------------------------------


def _speculators(config: Mapping[str, Any], tensors: Mapping[str, Tensor], serves: Serves) -> ForeignFiles:
    """`vllm serve DIR` finds the target by the verifier's name in it."""
    if serves.target is None:
        raise ValueError("the speculators layout names the target that it serves with: say it with --target")
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers is None and serves.num_target_layers is not None:
        layers = [2, serves.num_target_layers // 2, serves.num_target_layers - 3]
    written: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config["draft_vocab_size"],
        **{name: config.get(name, False) for name in BLOCK_NORMS},
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": layers,
        "transformer_layer_config": _taken(config, (*_LLAMA_FIELDS, "rope_parameters", "rope_theta", "rope_scaling", "dtype")),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": serves.num_drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": serves.target, "architectures": list(serves.architectures)},
        },
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
    }
    renamed = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items()}
    return ForeignFiles(written, renamed, "model.safetensors")


# --- SpecForge and SafeAILab ----------------------------------------------------------------------------------------------


def _specforge(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ForeignFiles:
    written: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"]} | _taken(config, _OLD_LLAMA_FIELDS)
    written["draft_vocab_size"] = config["draft_vocab_size"]
    written |= {name: True for name in BLOCK_NORMS if config.get(name)}
    if "eagle_config" in config:
        written["eagle_config"] = config["eagle_config"]
    if len(config.get("eagle_aux_hidden_state_layer_ids", (0, 0, 0))) != 3:
        raise ValueError(f"the drafter reads {len(config['eagle_aux_hidden_state_layer_ids'])} of the target's states: SpecForge's models read three")
    tensors = dict(tensors)
    if "d2t" not in tensors:  # its models have both maps, also for the whole vocabulary
        tensors["d2t"] = torch.zeros(config["draft_vocab_size"], dtype=torch.int64)
        tensors["t2d"] = torch.ones(config["vocab_size"], dtype=torch.bool)
    return ForeignFiles(written, tensors, "model.safetensors")


def _safeailab(kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ForeignFiles:
    if "eagle_aux_hidden_state_layer_ids" in config:
        raise ValueError(
            f"the drafter reads the target's states {config['eagle_aux_hidden_state_layer_ids']}: SafeAILab's code always takes the default three "
            "(2, L/2, L-3); with --target it is known whether these are they"
        )
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default" and not (rope["rope_type"] == "linear" and rope["rope_theta"] == 10000):
        raise ValueError(f"the drafter's rotation is {rope}: SafeAILab's code has rope_type default, and linear with theta 10000")
    if kind == "eagle1" and config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise ValueError(
            f"the drafter has {config['num_attention_heads']} heads of {config['head_dim']} in a width of {config['hidden_size']}: SafeAILab's "
            "EAGLE-1 code takes hidden_size / num_attention_heads for the head's width"
        )
    written: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]} | _taken(config, _OLD_LLAMA_FIELDS) | {"pretraining_tp": 1}
    if rope["rope_type"] == "linear":
        written["rope_scaling"] = {"type": "linear", "factor": rope["factor"]}
    if kind == "eagle3":
        written["draft_vocab_size"] = config["draft_vocab_size"]
        return ForeignFiles(written, dict(tensors), "pytorch_model.bin")
    # Its code adds a bias unless this says no.
    written["bias"] = False
    return ForeignFiles(written, {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}, "pytorch_model.bin")


# --- Medusa ---------------------------------------------------------------------------------------------------------------


def _medusa(config: Mapping[str, Any], tensors: Mapping[str, Tensor], serves: Serves) -> ForeignFiles:
    if serves.target is None:
        raise ValueError("the medusa layout names the model that its heads belong to: say it with --target")
    num_heads, num_layers = config["num_heads"], config["num_hidden_layers"]
    notes: tuple[str, ...] = ()
    tensors = dict(tensors)
    if config["original_lm_head"]:
        head_VH = tensors.pop("lm_head.weight")
        tensors |= {f"lm_heads.{head}.weight": head_VH.clone() for head in range(num_heads)}
        notes = (f"the one head that all share is written {num_heads} times: the layout has a head for each",)
    written = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": serves.target,
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "torch_dtype": config["dtype"],
    }
    renamed = {name_to_medusa(name, num_layers): tensor for name, tensor in tensors.items()}
    return ForeignFiles(written, renamed, "medusa_lm_head.pt", notes)


def name_to_medusa(name: str, num_layers: int) -> str:
    """A contract name in FasterDecoding's: a head is a sequence of `num_layers` residual blocks and a linear map."""
    if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := re.fullmatch(r"lm_heads\.(\d+)\.weight", name):
        return f"{match[1]}.{num_layers}.weight"
    raise ValueError(f"{name} has no name in the medusa layout")


def name_from_medusa(name: str, num_layers: int) -> str:
    """The inverse of `name_to_medusa`; a name that is none of the layout's stays, for the contract to tell."""
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if (match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name)) and int(match[2]) == num_layers:
        return f"lm_heads.{match[1]}.weight"
    return name


def medusa_sizes(names: Iterable[str]) -> tuple[int, int]:
    """(heads, residual blocks of a head) by FasterDecoding's names; zeros where there are none."""
    found = [(int(match[1]), int(match[2])) for name in names if (match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", name))]
    return (0, 0) if not found else (1 + max(head for head, _ in found), 1 + max(layer for _, layer in found))
