"""config.json of a drafter, by wire format: what the engines read of its sizes, its rotation and the target states that it joins.

Place in the flow: a drafter's own sizes -> `draft_dimensions` -> checkpoints/export.py, which writes the config beside the tensors and checks both
against the rows of checkpoints/serving.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from checkpoints.serving import BlockNorm, aux_layer_fields, serving_format


@dataclass(frozen=True)
class DraftDimensions:
    """The sizes of a draft head's Llama block, in config.json's terms; `norms` are EAGLE-3's beyond the paper's (checkpoints/serving.py)."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    norms: tuple[BlockNorm, ...] = ()

    @classmethod
    def of_target(cls, target_config: PretrainedConfig) -> DraftDimensions:
        """The target's own sizes: the usual choice."""
        text = target_config.get_text_config().to_dict()
        heads = text["num_attention_heads"]
        return cls(
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            hidden_act=text["hidden_act"],
            rms_norm_eps=text["rms_norm_eps"],
        )


# Rotations that are the same at a position whatever the longest one is, and the same in transformers and the engines.
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def draft_rope_parameters(target_config: PretrainedConfig) -> dict[str, Any]:
    """The rotary embedding of a draft layer for this target, which is the draft's own: trained, exported and served alike.

    It is the target's, of the layers that see everything where they differ. A target that stretches its rotation with the context ("longrope",
    "dynamic") gives only its theta, because engines and transformers stretch differently; and a draft layer always rotates whole heads.

    Raises:
        ValueError: for a target without rotary embedding, or with multimodal sections: engines give such positions to the draft too.
    """
    text = target_config.get_text_config()
    parameters = dict(text.to_dict().get("rope_parameters") or {})
    parameters = dict(parameters.get("full_attention") or parameters)
    if parameters.get("rope_theta") is None or "mrope_section" in parameters:
        raise ValueError(
            f"the target ({text.model_type}) has rope_parameters {parameters}, expected a rope_theta and no sections: EAGLE heads for such a target "
            "are not supported; Medusa heads (recipes/medusa1.py) need no rotation"
        )
    if parameters.get("rope_type", "default") not in FIXED_ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    return {"rope_type": "default"} | {name: value for name, value in parameters.items() if name != "partial_rotary_factor"}


def sliding_window_of(target_config: PretrainedConfig) -> int | None:
    """Tokens that every layer of the target sees; None where some layer sees everything."""
    fields = target_config.get_text_config().to_dict()
    kinds = fields.get("layer_types") or ["sliding_attention"]
    return fields.get("sliding_window") if all(kind == "sliding_attention" for kind in kinds) else None


def rope_fields(target_config: PretrainedConfig) -> dict[str, Any]:
    """The draft's rotary embedding in every spelling that an engine reads.

    transformers 5, and so vLLM 0.32 and SGLang 0.5.23, read `rope_parameters`; older versions read `rope_theta` and
    `rope_scaling`. A `rope_scaling` that is not null wins over `rope_parameters` in transformers 5, so it must say the same.

    Raises:
        ValueError: as `draft_rope_parameters`.
    """
    parameters = draft_rope_parameters(target_config)
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    is_default = scaling.get("rope_type", "default") == "default" and set(scaling) <= {"rope_type"}
    return {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if is_default else scaling,
    }


@dataclass(frozen=True)
class MedusaDimensions:
    """The sizes of Medusa heads, in config.json's terms.

    Attributes:
        hidden_size: the target's.
        num_heads: K.
        num_hidden_layers: residual blocks of a head.
        original_lm_head: whether one head, the target's, serves all K.
    """

    hidden_size: int
    num_heads: int
    num_hidden_layers: int
    original_lm_head: bool


Dimensions = DraftDimensions | MedusaDimensions


def llama_block_config(target_config: PretrainedConfig, dimensions: Dimensions, architectures: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    """The fields that every one-layer Llama draft head has.

    Args:
        target_config: the target's transformers config; vocabulary, rotation and context length are its own.
        dimensions: the draft block's sizes.
        architectures: of the wire format.
        dtype: dtype of the exported tensors.
    """
    assert isinstance(dimensions, DraftDimensions)
    text = target_config.get_text_config()
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": list(architectures),
        "model_type": "llama",
        "vocab_size": text.vocab_size,
        "hidden_size": dimensions.hidden_size,
        "intermediate_size": dimensions.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": dimensions.num_attention_heads,
        "num_key_value_heads": dimensions.num_key_value_heads,
        "head_dim": dimensions.head_dim,
        "hidden_act": dimensions.hidden_act,
        "rms_norm_eps": dimensions.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # SGLang refuses a draft context that is shorter than the target's.
        "max_position_embeddings": text.max_position_embeddings,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        **rope_fields(target_config),
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def eagle3_config(
    tensors: Mapping[str, Tensor], target_config: PretrainedConfig, dimensions: Dimensions, aux_layers: Sequence[int], dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of an EAGLE-3 head; the rows of its `lm_head` are the draft vocabulary."""
    assert isinstance(dimensions, DraftDimensions)
    if "lm_head.weight" not in tensors:
        raise ValueError(f"the drafter has no lm_head.weight; found {', '.join(sorted(tensors))}")
    text = target_config.get_text_config()
    config = llama_block_config(target_config, dimensions, serving_format("eagle3").architectures, dtype)
    config |= {
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
        "norm_before_residual": False,
        **{str(name): True for name in dimensions.norms},
        **aux_layer_fields(aux_layers, text.num_hidden_layers),
    }
    if text.hidden_size != dimensions.hidden_size:
        config["target_hidden_size"] = text.hidden_size
    if sliding_window_of(target_config) is not None:
        # vLLM 0.32.0 gives a draft layer the window of a target whose layers all slide, unless the layer has one of its own: this one holds it all.
        config |= {"layer_types": ["sliding_attention"], "sliding_window": text.max_position_embeddings}
    return config


def eagle1_config(
    tensors: Mapping[str, Tensor], target_config: PretrainedConfig, dimensions: Dimensions, aux_layers: Sequence[int], dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of an EAGLE-1 head."""
    return llama_block_config(target_config, dimensions, serving_format("eagle1").architectures, dtype)


def medusa_config(
    tensors: Mapping[str, Tensor], target_config: PretrainedConfig, dimensions: Dimensions, aux_layers: Sequence[int], dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of Medusa heads.

    vLLM takes any key with "num" and "heads" (or "layers") in it for the number of heads (or blocks): there is no further such field.
    """
    assert isinstance(dimensions, MedusaDimensions)
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": list(serving_format("medusa1").architectures),
        "model_type": "medusa",
        "vocab_size": target_config.get_text_config().vocab_size,
        **asdict(dimensions),
        "medusa_fc_bias": True,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


class ConfigBuilder(Protocol):
    """Makes config.json from what a drafter exports."""

    def __call__(
        self, tensors: Mapping[str, Tensor], target_config: PretrainedConfig, dimensions: Dimensions, aux_layers: Sequence[int], dtype: torch.dtype
    ) -> dict[str, Any]: ...


# By wire format: how its config.json is made, and from which sizes.
CONFIG_BUILDERS: dict[str, tuple[ConfigBuilder, type[Dimensions]]] = {
    "eagle3": (eagle3_config, DraftDimensions),
    "eagle1": (eagle1_config, DraftDimensions),
    "medusa": (medusa_config, MedusaDimensions),
}


def draft_dimensions(algorithm: str, sizes: Mapping[str, Any]) -> Dimensions:
    """A drafter's own sizes (`Drafter.export_dimensions`) as its wire format takes them."""
    _, dimensions_class = CONFIG_BUILDERS[serving_format(algorithm).name]
    return dimensions_class(**sizes)
