"""A drafter's checkpoint, whatever tool wrote it, read as one of ours.

Place in the flow: a folder -> `read_checkpoint` -> checkpoints/convert.py writes it in a layout; train/warm_start.py starts from it. What our
drafters would compute differently is refused with the reason; what an engine would do without a word is said in `notes`.

Layouts, told by config.json and the tensors' names (how they differ is said in checkpoints/layouts.py):

    headstart    our exports, which is what vLLM and SGLang load
    speculators  vllm-project/speculators: config.json of two levels
    safeailab    SafeAILab/EAGLE: EAGLE-1, EAGLE-2 (the same checkpoint) and EAGLE-3
    specforge    sgl-project/SpecForge; AngelSlim writes the same
    medusa       FasterDecoding/Medusa
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from checkpoints.draft_config import FIXED_ROPE_TYPES, Dimensions, DraftDimensions, MedusaDimensions, sliding_window_of
from checkpoints.export import CONFIG_FILE, PROVENANCE_FILE, prepare_export, read_config
from checkpoints.layouts import Layout, medusa_sizes, name_from_medusa
from checkpoints.provenance import UNKNOWN
from checkpoints.serving import BLOCK_NORMS, default_engine_layers
from checkpoints.tensor_files import TensorFiles, open_tensors

# Stands in for the number of the target's layers where it is not known: then no list of layers is taken for the engines' default.
_UNKNOWN_NUM_LAYERS = 10_000

_OTHER_BLOCKS = {
    "attention_bias": "its projections have biases, which our block and SGLang's have not",
    "qkv_bias": "its projections have biases, which our block and SGLang's have not",
    "mlp_bias": "its MLP has biases, which our block has not",
}
# Tables that a model computes, and copies of the target's tensors: no engine reads them.
_LEFT_OUT = re.compile(r"(?:^|\.)(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|verifier_norm\.weight|verifier_lm_head\.weight)$")
_MEDUSA_PREFIX = re.compile(r"^medusa_heads?\.")


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's checkpoint in our terms.

    Attributes:
        layout: what it was found in.
        algorithm: as in train/drafters/.
        tensors: by the names of the serving contract, all floating ones in `dtype`.
        target_config: the target's, or what the checkpoint tells of it.
        dimensions: of the draft block or heads.
        aux_layers: HF `hidden_states` indices; empty where none are read.
        dtype: of the floating tensors.
        target: the target's name where the checkpoint says it.
        file: the file that the tensors were found in.
        notes: what its reader should know, one line each.
    """

    layout: Layout
    algorithm: str
    tensors: Mapping[str, Tensor]
    target_config: PretrainedConfig
    dimensions: Dimensions
    aux_layers: tuple[int, ...]
    dtype: torch.dtype
    target: str | None
    file: str
    notes: tuple[str, ...]

    @property
    def knows_layers(self) -> bool:
        """Whether `aux_layers` are those that are read: without the target, the default ones have no numbers."""
        return bool(self.aux_layers) and self.aux_layers[-1] < _UNKNOWN_NUM_LAYERS - 3

    def prepared(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors as our export would hold them, checked against the contract.

        Raises:
            ValueError: naming every tensor and field that is missing, unexpected or wrong.
        """
        return prepare_export(
            self.tensors,
            algorithm=self.algorithm,
            target_config=self.target_config,
            dimensions=self.dimensions,
            aux_layers=self.aux_layers,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class ReadOptions:
    """What the user says of a checkpoint beside what it says itself.

    Attributes:
        target_config: the target's config, where it is at hand.
        aux_layers: HF `hidden_states` indices, instead of what the checkpoint says.
        drop_fc_bias: take an EAGLE-1 checkpoint without its fc.bias, as vLLM does.
    """

    target_config: PretrainedConfig | None = None
    aux_layers: tuple[int, ...] | None = None
    drop_fc_bias: bool = False


def read_checkpoint(folder: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Reads a checkpoint of any layout.

    Raises:
        ValueError: if it is of none, is damaged, or our drafters compute something else.
    """
    options = options or ReadOptions()
    config, files = read_config(folder / CONFIG_FILE), open_tensors(folder)
    provenance = json.loads((folder / PROVENANCE_FILE).read_text()) if (folder / PROVENANCE_FILE).is_file() else None
    layout = detect_layout(config, files.places, is_ours=provenance is not None)
    try:
        if layout == "medusa" or any(name.startswith("blocks.") for name in files.places):
            checkpoint = _read_medusa(config, files, layout)
        else:
            checkpoint = _read_eagle(config, files, layout, options)
        if provenance is not None:
            checkpoint = _with_provenance(checkpoint, provenance)
        _check_target(checkpoint, options.target_config)
        checkpoint.prepared()
    except ValueError as error:
        one_line = str(error).replace(":\n  ", ": ").replace("\n  ", "; ")
        raise ValueError(f"{folder} ({layout} layout): {one_line}") from error
    return checkpoint


def detect_layout(config: Mapping[str, Any], names: Iterable[str], is_ours: bool) -> Layout:
    """The layout of a checkpoint.

    Args:
        config: its config.json.
        names: of its tensors.
        is_ours: whether headstart.json lies beside it.

    Raises:
        ValueError: if it is of none, saying what was found.
    """
    found = sorted(names)
    if "speculators_model_type" in config or "speculators_config" in config:
        return "speculators"
    if any(name.startswith("blocks.") for name in found):
        return "headstart"
    if "medusa_num_heads" in config or any(re.match(r"(?:medusa_heads?\.)?\d+\.\d+\.", name) for name in found):
        return "medusa"
    if "fc.weight" in found and any(name.startswith(("midlayer.", "layers.0.")) for name in found):
        if is_ours:
            return "headstart"
        return "specforge" if config.get("architectures") == ["LlamaForCausalLMEagle3"] else "safeailab"
    shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    raise ValueError(
        f"this is no drafter that headstart knows: config.json has architectures {json.dumps(config.get('architectures'))} and model_type "
        f"{json.dumps(config.get('model_type'))}, the tensors are {shown}; expected an EAGLE, EAGLE-3 or Medusa checkpoint of SafeAILab, SpecForge, "
        "speculators, FasterDecoding or headstart"
    )


# --- EAGLE ----------------------------------------------------------------------------------------------------------------


def _read_eagle(config: dict[str, Any], files: TensorFiles, layout: Layout, options: ReadOptions) -> Checkpoint:
    notes: list[str] = []
    flat, target = _flattened(config) if layout == "speculators" else (config, None)
    _refuse_other_blocks(flat)
    left_out = [name for name in files.places if _LEFT_OUT.search(name)]
    if left_out:
        notes.append(f"left out, no engine reads them: {', '.join(sorted(left_out))}")
    tensors = files.read(name for name in files.places if name not in left_out)
    dtype = _common_dtype(tensors, notes)
    # EAGLE-3 normalises what fc made; EAGLE-1's layer has no such norm.
    is_eagle3 = any(name.endswith(".hidden_norm.weight") for name in tensors)
    dimensions = _draft_dimensions(flat)
    if is_eagle3:
        algorithm = "eagle3"
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
        _check_draft_vocabulary(flat, tensors)
        _complete_vocabulary_maps(tensors, flat["vocab_size"], notes)
    else:
        algorithm = "eagle1"
        if dimensions.norms:
            raise ValueError(f"config.json has {', '.join(dimensions.norms)} true, but the tensors are EAGLE-1's, which has no such norm")
        _settle_fc_bias(tensors, dimensions, dtype, options, notes)
    target_config = _target_config(flat, dimensions, options.target_config, notes)
    return Checkpoint(
        layout=layout,
        algorithm=algorithm,
        tensors=tensors,
        target_config=target_config,
        dimensions=dimensions,
        aux_layers=_aux_layers(flat, tensors, dimensions, target_config, options) if is_eagle3 else (),
        dtype=dtype,
        target=target,
        file=files.file,
        notes=tuple(notes),
    )


def _flattened(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The fields of a speculators config on one level, and the verifier's name."""
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise ValueError(f"speculators_model_type is {json.dumps(kind)}: headstart has no such drafter, of this layout it reads eagle3")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("config.json has no transformer_layer_config: expected what speculators' save_pretrained writes")
    if "norm_before_residual" not in config:
        raise ValueError(
            "config.json does not say norm_before_residual: vLLM takes true and speculators false. Write what it was trained with into config.json"
        )
    # speculators writes what differs from transformers' defaults.
    defaults = LlamaConfig().to_dict()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "rms_norm_eps")
    outer = {name: value for name, value in config.items() if name not in ("transformer_layer_config", "speculators_config", "architectures")}
    flat = {name: defaults[name] for name in sizes} | {"num_hidden_layers": 1} | layer | outer
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return flat, verifier.get("name_or_path")


def _refuse_other_blocks(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a draft block that computes something else than ours."""
    nested = config.get("eagle_config") or {}
    for name, reason in _OTHER_BLOCKS.items():
        if config.get(name) or nested.get(name):
            raise ValueError(f"config.json has {name} true: {reason}, so it cannot be converted, evaluated or trained further here")
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError("config.json has eagle_config.use_aux_hidden_state false: EAGLE-3 without the target's auxiliary states is not supported")
    for name, expected in (("model_type", "llama"), ("num_hidden_layers", 1), ("hidden_act", "silu")):
        if config.get(name, expected) != expected:
            found = json.dumps(config[name])
            raise ValueError(f"config.json has {name} {found}, but our draft block is one Llama layer: expected {json.dumps(expected)}")
    if _slides(config) and (config.get("sliding_window") or 0) < (config.get("max_position_embeddings") or 0):
        raise ValueError(f"config.json has a sliding_window of {config.get('sliding_window')} tokens: its attention sees no more, ours sees all")
    wide = config.get("target_hidden_size")
    if wide is not None and wide != config.get("hidden_size"):
        raise ValueError(
            f"config.json has target_hidden_size {wide} and hidden_size {config.get('hidden_size')}: our drafters are as wide as their target"
        )


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether the draft's layer has a window; our exports name one that holds everything (`llama_block_config`)."""
    return "sliding_attention" in (config.get("layer_types") or ()) or bool(config.get("use_sliding_window"))


def _draft_dimensions(config: Mapping[str, Any]) -> DraftDimensions:
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    absent = [name for name in required if type(config.get(name)) is not int or config[name] < 1]
    if absent:
        raise ValueError(f"config.json lacks {', '.join(absent)}: expected whole numbers, as the tool that trained the drafter writes")
    heads = config["num_attention_heads"]
    return DraftDimensions(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        hidden_act="silu",
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        norms=tuple(name for name in BLOCK_NORMS if config.get(name) or (config.get("eagle_config") or {}).get(name)),
    )


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation in transformers 5's spelling, from any spelling; without one, transformers' theta of 10000."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise ValueError(f"config.json has a rotation for each kind of layer, {json.dumps(found)}, but a draft has one: expected one rope_theta")
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", config.get("rope_theta") or 10000.0)
    rest = {name: value for name, value in found.items() if name not in ("type", "rope_type", "rope_theta")}
    if kind not in FIXED_ROPE_TYPES or rest.get("partial_rotary_factor", 1) != 1:
        known = ", ".join(FIXED_ROPE_TYPES)
        raise ValueError(f"config.json has the rotation {json.dumps(found)}: our draft block rotates whole heads, with rope_type {known}")
    return {"rope_type": kind, "rope_theta": theta, **rest}


def _target_config(
    config: Mapping[str, Any], dimensions: DraftDimensions, target: PretrainedConfig | None, notes: list[str]
) -> PretrainedConfig:
    """What a draft's config.json has of the target's, read from the draft's own: vocabulary, rotation, context length."""
    rope = _rope_parameters(config)
    context = config.get("max_position_embeddings") or 2048
    needed = 0 if target is None else target.max_position_embeddings
    if rope["rope_type"] == "yarn":  # it follows from the context length, unless that is named apart
        rope.setdefault("original_max_position_embeddings", context)
    if needed > context:
        notes.append(f"max_position_embeddings raised from {context} to the target's {needed}: SGLang refuses a shorter draft")
        context = needed
    found = LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=dimensions.hidden_size,
        num_attention_heads=dimensions.num_attention_heads,
        num_key_value_heads=dimensions.num_key_value_heads,
        head_dim=dimensions.head_dim,
        num_hidden_layers=_UNKNOWN_NUM_LAYERS if target is None else target.num_hidden_layers,
        max_position_embeddings=context,
        rope_parameters=rope,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
    )
    if _slides(config) or (target is not None and sliding_window_of(target) is not None):
        found.update({"sliding_window": context})
    return found


def _aux_layers(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], dimensions: DraftDimensions, target: PretrainedConfig, options: ReadOptions
) -> tuple[int, ...]:
    """HF indices of the states that fc joins.

    At the top level of config.json id k is HF[k] (vLLM, speculators), inside `eagle_config` it is HF[k + 1] (SGLang, SpecForge).
    """
    if "fc.weight" not in tensors or tensors["fc.weight"].dim() != 2:
        raise ValueError("fc.weight is missing or no matrix: it joins the target's states")
    num_joined = tensors["fc.weight"].shape[1] / dimensions.hidden_size
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = [layer + 1 for layer in (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()]
    if options.aux_layers is not None:
        layers = options.aux_layers
    elif top and nested and list(top) != nested:
        raise ValueError(
            f"config.json has eagle_aux_hidden_state_layer_ids {list(top)}, which vLLM reads as HF hidden_states {list(top)}, and in eagle_config "
            f"{[layer - 1 for layer in nested]}, which SGLang reads as {nested}: say which with --aux-layers"
        )
    else:
        layers = tuple(top or nested) or default_engine_layers(target.num_hidden_layers)
    if len(layers) != num_joined:
        raise ValueError(
            f"fc.weight is {list(tensors['fc.weight'].shape)}: it joins {num_joined:g} states of width {dimensions.hidden_size}, but config.json "
            f"names {len(layers)} layers{'' if top or nested else ' (none, which is three)'}: say them with --aux-layers"
        )
    return tuple(layers)


def _check_draft_vocabulary(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError where config.json and the head speak of draft vocabularies of two sizes."""
    if "lm_head.weight" not in tensors:
        raise ValueError("lm_head.weight is missing: an EAGLE-3 head brings its own")
    rows, told = tensors["lm_head.weight"].shape[0], config.get("draft_vocab_size") or config["vocab_size"]
    if rows != told:
        raise ValueError(f"config.json has draft_vocab_size {told}, but lm_head.weight has {rows} rows")


def _complete_vocabulary_maps(tensors: dict[str, Tensor], vocab_size: int, notes: list[str]) -> None:
    """d2t as int64 offsets and t2d as bool; the one that is missing is made from the other."""
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].to(torch.int64)
    if "t2d" in tensors:
        tensors["t2d"] = tensors["t2d"].to(torch.bool)
    if "t2d" in tensors and "d2t" not in tensors:
        ids_W = tensors["t2d"].nonzero().flatten()
        tensors["d2t"] = ids_W - torch.arange(len(ids_W))
        notes.append("d2t is missing and was made from t2d: vLLM would have taken draft ids for target ids")
    elif "d2t" in tensors and "t2d" not in tensors:
        ids_W = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
        tensors["t2d"][ids_W[(ids_W >= 0) & (ids_W < vocab_size)]] = True  # ids out of range are the contract's to tell
        notes.append("t2d is missing and was made from d2t")


def _settle_fc_bias(tensors: dict[str, Tensor], dimensions: DraftDimensions, dtype: torch.dtype, options: ReadOptions, notes: list[str]) -> None:
    """EAGLE-1's fc.bias as zeros: vLLM drops it, SGLang has one at random where it is missing."""
    zeros_H = torch.zeros(dimensions.hidden_size, dtype=dtype)
    bias_H = tensors.get("fc.bias", zeros_H)
    if bool((bias_H != 0).any()):
        if not options.drop_fc_bias:
            raise ValueError(
                f"fc.bias is not zero (largest {bias_H.abs().max():.3g}): SafeAILab and SGLang add it, vLLM drops it without a word. "
                "--drop-fc-bias takes the drafter as vLLM runs it"
            )
        notes.append(f"fc.bias dropped, as vLLM drops it (largest {bias_H.abs().max():.3g}): SafeAILab's own code and SGLang would accept more")
    tensors["fc.bias"] = zeros_H


# --- Medusa ---------------------------------------------------------------------------------------------------------------


def _read_medusa(config: Mapping[str, Any], files: TensorFiles, layout: Layout) -> Checkpoint:
    notes: list[str] = []
    heads = [name for name in files.places if _MEDUSA_PREFIX.match(name)]
    if heads:  # the model lies in the same files
        notes.append(f"{len(files.places) - len(heads)} tensors of the model itself left out: these heads fit that model, so name it as the target")
    tensors = {_MEDUSA_PREFIX.sub("", name): tensor for name, tensor in files.read(heads or files.places).items()}
    if layout == "medusa":
        _, num_layers = medusa_sizes(tensors)
        tensors = {name_from_medusa(name, num_layers): tensor for name, tensor in tensors.items()}
    blocks = [(int(match[1]), int(match[2])) for name in tensors if (match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.weight", name))]
    if not blocks:
        raise ValueError("no residual block of a Medusa head among the tensors: expected blocks.0.layers.0.weight or 0.0.linear.weight")
    num_heads, num_layers = (1 + max(index) for index in zip(*blocks, strict=True))
    told = config.get("medusa_num_heads", config.get("num_heads", num_heads))
    if told > num_heads:
        raise ValueError(f"config.json speaks of {told} heads, but the file has {num_heads}: copy or download it again")
    if told < num_heads:
        notes.append(f"config.json speaks of {told} heads, but the file has {num_heads}: all of them are taken")
    is_shared = "lm_head.weight" in tensors
    head_VH = tensors.get("lm_head.weight" if is_shared else "lm_heads.0.weight")
    if head_VH is None or head_VH.dim() != 2:
        raise ValueError("no head among the tensors: expected lm_heads.0.weight, or in FasterDecoding's names 0.N.weight after N residual blocks")
    vocab_size, hidden_size = head_VH.shape
    return Checkpoint(
        layout=layout,
        algorithm="medusa1",
        tensors=tensors,
        target_config=LlamaConfig(vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=1, num_hidden_layers=_UNKNOWN_NUM_LAYERS),
        dimensions=MedusaDimensions(hidden_size, num_heads, num_layers, is_shared),
        aux_layers=(),
        dtype=_common_dtype(tensors, notes),
        target=config.get("base_model_name_or_path"),
        file=files.file,
        notes=tuple(notes),
    )


# --- both -----------------------------------------------------------------------------------------------------------------


def _with_provenance(checkpoint: Checkpoint, provenance: Mapping[str, Any]) -> Checkpoint:
    """What headstart.json says beside it: medusa2 heads look like medusa1's."""
    target = provenance.get("target")
    fields = {**vars(checkpoint), "algorithm": provenance.get("algorithm", checkpoint.algorithm)}
    return Checkpoint(**fields | {"target": target if target != UNKNOWN else None})


def _common_dtype(tensors: dict[str, Tensor], notes: list[str]) -> torch.dtype:
    """The dtype that holds every floating tensor exactly; the tensors are brought to it."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if not dtypes or not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        raise ValueError(f"the tensors are {', '.join(sorted(map(str, dtypes))) or 'of no floating type'}, expected float32, float16 or bfloat16")
    common = functools.reduce(torch.promote_types, dtypes)
    if len(dtypes) > 1:
        notes.append(f"tensors of {', '.join(sorted(map(str, dtypes)))} are all stored as {common}, which holds them exactly")
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.to(common)
    return common


def _check_target(checkpoint: Checkpoint, target: PretrainedConfig | None) -> None:
    """Raises ValueError where a checkpoint was made for a target of other sizes."""
    if target is None:
        return
    for name in ("vocab_size", "hidden_size"):
        found, expected = (getattr(config, name) for config in (checkpoint.target_config, target))
        if found != expected:
            raise ValueError(f"it was made for a target with {name} {found}, but the target's is {expected}: it belongs to another target")
