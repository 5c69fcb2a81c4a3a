"""What can be known of the target without loading it: its config, tokenizer, fingerprint, and the tensors that drafters share with it.

Place in the flow: a recipe's `TargetConfig` -> checks and stage fingerprints before any work; `load_target_heads` -> drafters. data/target.py loads
the model itself.

Everything here ends in one clear line when the files are not what a target needs, and does so before hours have been spent on it.

Shapes: H hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from data.adapter import ADAPTER_CONFIG, AdapterFiles, has_adapter, read_adapter

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_SAVE_AS_SAFETENSORS = "save it as safetensors (AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)) and name that folder"
_FINAL_NORM = re.compile(r"^(?:.*\.)?(?:model|language_model|transformer)\.norm\.weight$")
_IN_A_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
# Families (of text configs) whose norm multiplies by 1 + weight.
_OFFSET_NORM_FAMILIES = ("gemma", "gemma2", "gemma3_text", "vaultgemma", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# What transformers turns back into float weights on any device.
_READABLE_QUANTISATIONS = ("mxfp4",)
_SAMPLE_BYTES = 1024


@dataclass(frozen=True)
class TargetConfig:
    """Which model is the target.

    Attributes:
        model: a local directory or a Hub id.
        revision: branch, tag or commit of a Hub id.
        dtype: of its weights; "auto" is what its config says.
        adapter: a LoRA adapter on it, a local directory or a Hub id; the target is then the model that data/merge_adapter.py makes of both.
    """

    model: str
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    adapter: str | None = None


@dataclass(frozen=True)
class TargetHeads:
    """The parts of the target that drafters use frozen.

    Attributes:
        embed_VH: token embedding.
        lm_head_VH: head; the embedding itself where the target ties them.
        norm_H: multiplier of the final norm.
        norm_eps: its epsilon.
        softcap: where the target's logits are softcap * tanh(logits / softcap), else None.
    """

    embed_VH: Tensor
    lm_head_VH: Tensor
    norm_H: Tensor
    norm_eps: float
    softcap: float | None = None

    def with_embedding(self, embed_VH: Tensor | None) -> TargetHeads:
        """The same parts with a drafter's own embedding, which vLLM takes where a checkpoint has one; None changes nothing."""
        return self if embed_VH is None else replace(self, embed_VH=embed_VH.to(self.embed_VH))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetHeads:
        """The same parts elsewhere; tied parts stay one tensor."""
        embed_VH = self.embed_VH.to(device=device, dtype=dtype)
        is_tied = self.lm_head_VH is self.embed_VH
        lm_head_VH = embed_VH if is_tied else self.lm_head_VH.to(device=device, dtype=dtype)
        return replace(self, embed_VH=embed_VH, lm_head_VH=lm_head_VH, norm_H=self.norm_H.to(device=device, dtype=dtype))


def base_and_adapter(config: TargetConfig) -> tuple[TargetConfig, AdapterFiles | None]:
    """The base model and the adapter on it, where the target is made of two; an adapter that is named as the model itself names its base.

    Raises:
        ValueError: if there is no such adapter, or it names no base.
    """
    if config.adapter is not None:
        return replace(config, adapter=None), read_adapter(config.adapter)
    if not _is_adapter(config):
        return config, None
    if config.revision is not None:
        raise ValueError(
            f"target.model {config.model!r} is an adapter, and target.revision is its base's: name them apart with "
            f"--target.model BASE --target.adapter {config.model}"
        )
    adapter = read_adapter(config.model)
    if not adapter.base_model:
        raise ValueError(f"the adapter {config.model} names no base model: name it with --target.model BASE --target.adapter {config.model}")
    base = replace(config, model=adapter.base_model, revision=adapter.config.get("revision"))
    if not Path(base.model).is_dir() and not _is_hub_id(base.model):
        raise ValueError(
            f"the adapter {config.model} names {base.model} as its base, which is not here: name it with "
            f"--target.model BASE --target.adapter {config.model}"
        )
    return base, adapter


def _is_adapter(config: TargetConfig) -> bool:
    """Whether the model as it is named is an adapter."""
    folder = Path(config.model)
    if folder.is_dir():
        if not (folder / ADAPTER_CONFIG).is_file():
            return False
        if any((folder / name).exists() for name in (_SINGLE_FILE, _INDEX_FILE)):
            # transformers would load the adapter on its base and leave the model's own weights alone.
            raise ValueError(
                f"target.model {config.model!r} holds both a whole model and an adapter ({ADAPTER_CONFIG}): move one of them to another folder"
            )
        return True
    if not _is_hub_id(config.model):
        return False
    try:
        return _file_of(config, "config.json") is None and has_adapter(config.model, config.revision)
    except OSError:  # no network, or no such repository: said by whoever reads the config
        return False


def _is_hub_id(model: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) is not None and not model.startswith(".")


def target_hf_config(config: TargetConfig) -> PretrainedConfig:
    """The target's transformers config; of a multimodal model, its text part.

    Raises:
        ValueError: if there is no such model, or it is not a decoder.
    """
    base, adapter = base_and_adapter(config)
    outer = _outer_config(base)
    text = outer.get_text_config()
    if text.dtype is None:
        text.dtype = outer.dtype
    if adapter is not None and adapter.vocab_size is not None:
        text.vocab_size = adapter.vocab_size
    return text


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer; of an adapter that brings its own, that one.

    Raises:
        ValueError: if it has none, or one with tokens that the target lacks.
    """
    base, adapter = base_and_adapter(config)
    name, revision = base.model, base.revision
    if adapter is not None and any((adapter.folder / file).is_file() for file in ("tokenizer_config.json", "tokenizer.json")):
        name, revision = str(adapter.folder), None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the tokenizer of target.model {name!r} cannot be read: expected tokenizer.json and tokenizer_config.json beside the weights "
            f"({_first_line(error)})"
        ) from error
    vocab_size = target_hf_config(config).vocab_size
    strangers = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items() if token_id >= vocab_size)
    if strangers:
        raise ValueError(
            f"the tokenizer of {name} has {len(strangers)} tokens from id {strangers[0][0]} on ({strangers[0][1]!r}), but the target has only "
            f"{vocab_size}: they were added without resizing its embedding; name the model that was trained with them, or take them out"
        )
    return tokenizer


def target_fingerprint(config: TargetConfig) -> str:
    """What tells this target from any other: Hub id and commit, or a hash over a local directory's config, tokenizer, template and weights.

    Weights are hashed by their headers and by samples of every tensor, so a model saved again under the same path is noticed without reading it all.

    Raises:
        ValueError: if there is no such model, or a local one lacks weights in safetensors.
    """
    base, adapter = base_and_adapter(config)
    if adapter is not None:
        commit = extract_commit_hash(str(adapter.folder / ADAPTER_CONFIG), None)
        is_local = Path(adapter.name).is_dir()
        return f"{target_fingerprint(base)}+{_folder_fingerprint(adapter.folder) if is_local else f'{adapter.name}@{commit}'}"
    folder = Path(config.model)
    if not folder.is_dir():
        _outer_config(config)
        commit = extract_commit_hash(str(_file_of(config, "config.json")), None)
        return f"{config.model}@{commit or config.revision or 'main'}"
    check_target_files(config)
    return _folder_fingerprint(folder)


def _folder_fingerprint(folder: Path) -> str:
    """The folder's name and a hash over its config, tokenizer, template and weights."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.suffix in {".json", ".jinja", ".model", ".txt"}:
            digest.update(f"{path.name}:{path.stat().st_size}:".encode() + path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name}:{path.stat().st_size}:".encode() + _weight_samples(path))
    return f"{folder.resolve().name}@{digest.hexdigest()[:16]}"


def check_target_files(config: TargetConfig) -> None:
    """Looks whether the target can be loaded, without loading it.

    Raises:
        ValueError: if there is no such model, or its weights are not whole safetensors files.
    """
    base, _ = base_and_adapter(config)
    _outer_config(base)
    _weight_files(base)


def stored_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that the target's weights are saved in."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16


# Fields by which a model scales its logits after the head; drafters are judged by `lm_head(state)`, and a softcap of it.
_LOGIT_CHANGES = {"logits_scaling": 1.0, "logit_scale": 1.0, "lm_head_multiplier": 1.0}


def logit_softcap(config: PretrainedConfig) -> float | None:
    """The c of a target whose logits are c * tanh(logits / c), as Gemma 2's are."""
    softcap = config.get_text_config().to_dict().get("final_logit_softcapping")
    return float(softcap) if softcap else None


def check_plain_logits(config: PretrainedConfig) -> None:
    """Raises ValueError for a target whose logits are not its head applied to the last state, softcapped or not: it would be learned wrongly."""
    fields = config.to_dict()
    changed = {name: fields[name] for name, plain in _LOGIT_CHANGES.items() if fields.get(name) not in (None, plain)}
    if changed:
        raise ValueError(
            f"the target ({config.model_type}) changes its logits after the head ({changed}), expected plain logits: "
            "drafters for such targets are not supported yet"
        )


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The engines' default auxiliary states: HF hidden_states 2, L//2 and L-3; below seven layers, where these do not ascend, 1, L//2 and L-1.

    Raises:
        ValueError: if the target has too few layers for three ascending ones.
    """
    for layers in ((2, num_layers // 2, num_layers - 3), (1, num_layers // 2, num_layers - 1)):
        if layers[0] < layers[1] < layers[2]:
            return layers
    raise ValueError(
        f"a target of {num_layers} layers has no three auxiliary layers (1, L//2, L-1 must ascend): name what there is, for example "
        "--drafter.aux-layers 1"
    )


def load_target_heads(config: TargetConfig, device: torch.device | str, dtype: torch.dtype) -> TargetHeads:
    """Reads embedding, head and final norm straight from the weight files, tied or untied, one file or sharded.

    Raises:
        ValueError: if they are not there under a known name, in a float dtype and in the config's shapes, or the config ties two that differ.
    """
    if base_and_adapter(config)[1] is not None:
        raise ValueError(
            f"{config.adapter or config.model} is an adapter, and embedding and head are those of the merged model: merge it with "
            "`python -m data.merge_adapter` and name the folder that this writes"
        )
    outer, text = _outer_config(config), target_hf_config(config)
    if "rms_norm_eps" not in text.to_dict():
        raise ValueError(
            f"{config.model} ({text.model_type}) has no rms_norm_eps in its config: drafters and engines need a target whose final norm is an RMSNorm"
        )
    files = {name: path for name, path in _weight_files(config).items() if not _IN_A_LAYER.search(name)}
    embed = _only(files, lambda name: name.endswith("embed_tokens.weight"), "embed_tokens.weight", config)
    norm = _only(files, lambda name: _FINAL_NORM.match(name) is not None, "model.norm.weight", config)
    heads = [name for name in files if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
    is_tied = outer.tie_word_embeddings or (text.tie_word_embeddings and not heads)
    if not is_tied and not heads:
        raise ValueError(f"{config.model} has no lm_head.weight, and its config does not tie it to the embedding: its weight files are incomplete")
    shape_VH = (text.vocab_size, text.hidden_size)
    stored_VH = _read(files[embed], embed, shape_VH)
    if is_tied and heads and not torch.equal(_read(files[heads[0]], heads[0], shape_VH), stored_VH):
        # transformers then uses the file's head and vLLM the embedding: whichever we took, acceptance here or there would be wrong, silently.
        raise ValueError(
            f"{config.model}: its config ties the head to the embedding (tie_word_embeddings true), but {files[heads[0]].name} has a {heads[0]} that "
            "differs from the embedding: set tie_word_embeddings to false in config.json if the head is its own, else remove it from the file"
        )
    embed_VH = stored_VH.to(device=device, dtype=dtype)
    lm_head_VH = embed_VH if is_tied else _read(files[heads[0]], heads[0], shape_VH).to(device=device, dtype=dtype)
    norm_H = _read(files[norm], norm, (text.hidden_size,))
    if text.model_type in _OFFSET_NORM_FAMILIES:
        norm_H = norm_H.float() + 1
    return TargetHeads(embed_VH, lm_head_VH, norm_H.to(device=device, dtype=dtype), text.rms_norm_eps, logit_softcap(text))


def final_norm_weight(config: TargetConfig) -> Tensor:
    """[H] the weight of the final norm as it is stored: some families multiply by 1 + weight.

    Raises:
        ValueError: as `load_target_heads`.
    """
    files = {name: path for name, path in _weight_files(config).items() if not _IN_A_LAYER.search(name)}
    norm = _only(files, lambda name: _FINAL_NORM.match(name) is not None, "model.norm.weight", config)
    return _read(files[norm], norm, (target_hf_config(config).hidden_size,))


def saved_config(config: TargetConfig) -> PretrainedConfig:
    """The config as it is saved; of a multimodal model, the whole of it.

    Raises:
        ValueError: if there is no such model, or it is not a decoder.
    """
    return _outer_config(config)


def _outer_config(config: TargetConfig) -> PretrainedConfig:
    """The config as it is saved; of a multimodal model, the whole of it."""
    folder = Path(config.model)
    if folder.is_dir():
        if config.revision is not None:
            raise ValueError(f"target.revision {config.revision!r} has no effect on the local directory {config.model}: leave it out")
        if not (folder / "config.json").exists():
            raise ValueError(f"target.model {config.model!r} is a directory without a config.json: expected a model saved by save_pretrained")
    elif not _is_hub_id(config.model):
        raise ValueError(f"target.model {config.model!r} does not exist: expected a local directory or a Hub id (owner/name)")
    try:
        outer = AutoConfig.from_pretrained(config.model, revision=config.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"target.model {config.model!r} cannot be read: expected a local directory with a config.json or a Hub id ({_first_line(error)})"
        ) from error
    if outer.is_encoder_decoder:
        raise ValueError(f"target.model {config.model!r} ({outer.model_type}) is an encoder-decoder: expected a decoder-only language model")
    quantised = outer.to_dict().get("quantization_config") or outer.get_text_config().to_dict().get("quantization_config")
    if quantised and quantised.get("quant_method") not in _READABLE_QUANTISATIONS:
        raise ValueError(
            f"target.model {config.model!r} ({outer.model_type}) is quantised ({quantised.get('quant_method')}), expected float weights: name the "
            "checkpoint that it was made from, and serve the drafter with either; the quantised one accepts somewhat fewer drafts"
        )
    return outer


def _weight_samples(path: Path) -> bytes:
    """The header of a weight file, and the begin, middle and end of each tensor."""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(header_size)
        parts = [header]
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            for offset in (begin, max(begin, (begin + end - _SAMPLE_BYTES) // 2), max(begin, end - _SAMPLE_BYTES)):
                file.seek(8 + header_size + offset)
                parts.append(file.read(min(_SAMPLE_BYTES, end - offset)))
    return b"".join(parts)


def _weight_files(config: TargetConfig) -> dict[str, Path]:
    """Tensor name -> file, of a whole checkpoint: all tensors of a local one, those outside the layers of one on the Hub.

    Raises:
        ValueError: if there are no safetensors files, one is missing or damaged, or one lacks a tensor that the index promises.
    """
    index = _file_of(config, _INDEX_FILE)
    if index is None:
        single = _file_of(config, _SINGLE_FILE)
        if single is None:
            raise ValueError(f"{config.model} has neither {_SINGLE_FILE} nor {_INDEX_FILE}: {_SAVE_AS_SAFETENSORS}{_other_weights(config)}")
        return dict.fromkeys(_names(single), single)
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{index} is damaged ({error}): expected a weight_map of tensor names to files; copy or download it again") from error
    if not Path(config.model).is_dir():
        weight_map = {name: file_name for name, file_name in weight_map.items() if not _IN_A_LAYER.search(name)}
    resolved: dict[str, Path] = {}
    for file_name in sorted(set(weight_map.values())):
        path = _file_of(config, file_name)
        if path is None:
            raise ValueError(f"{config.model}: {_INDEX_FILE} names {file_name}, which is missing: copy or download it")
        absent = {name for name, place in weight_map.items() if place == file_name} - _names(path)
        if absent:
            raise ValueError(f"{path} lacks {len(absent)} tensors that {_INDEX_FILE} promises ({min(absent)}): copy or download both again")
        resolved[file_name] = path
    return {name: resolved[file_name] for name, file_name in weight_map.items()}


def _other_weights(config: TargetConfig) -> str:
    """What a local directory has instead of safetensors, for the message."""
    folder = Path(config.model)
    suffixes = {".bin", ".pt", ".pth", ".gguf", ".safetensors"}
    found = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes) if folder.is_dir() else []
    return f" (found {', '.join(found[:3])})" if found else ""


def _file_of(config: TargetConfig, name: str) -> Path | None:
    """A file of the target, downloaded if it is on the Hub; None if it has none of that name."""
    found = cached_file(config.model, name, revision=config.revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _names(path: Path) -> set[str]:
    """Names of a weight file's tensors; opening it also checks that it is as long as its header says."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({_first_line(error)}): copy or download it again") from error


def _only(files: dict[str, Path], is_wanted: Callable[[str], bool], expected: str, config: TargetConfig) -> str:
    found = [name for name in files if is_wanted(name)]
    if len(found) != 1:
        raise ValueError(
            f"{config.model}: found {len(found)} tensors that could be {expected} ({', '.join(found) or 'none'}) among {len(files)} outside the "
            "layers, expected one: its weight files are incomplete, or it is of a family that headstart does not know"
        )
    return found[0]


def _read(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} in {path} is {tensor.dtype}, expected a float tensor: name the target's unquantised checkpoint")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} in {path} has shape {list(tensor.shape)}, but the config says {list(shape)}: copy or download the target again")
    return tensor


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
