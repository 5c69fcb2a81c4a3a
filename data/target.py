"""The frozen target: its hidden states over packed documents, and the parts of it that drafters share.

Place in the flow: token ids -> `Target.features` -> shards or the trainer; `load_target_heads` -> drafters, without loading the model.

Documents are packed end to end in one sequence of batch 1. Attention runs document by document through an attention function registered with
transformers, so nothing is padded, no T x T mask is built and documents cannot see each other. Only the wanted layers are hooked, and the base model
is called, so neither L+1 hidden states nor logits are ever held. A target whose attention needs more than a softmax over scores (logit softcapping,
sinks) goes through its own code, one document at a time.

Shapes: T packed tokens, H hidden size, V vocabulary, L layers, X = A * H concatenated auxiliary states.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import cached_file

from data.batch import Features

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PACKED = "headstart_packed"
_FINAL_NORM = re.compile(r"^(?:.*\.)?(?:model|language_model|transformer)\.norm\.weight$")
# Families whose norm multiplies by 1 + weight.
_OFFSET_NORM_FAMILIES = ("gemma", "gemma2", "gemma3", "gemma3_text")

_document_lengths: ContextVar[tuple[int, ...]] = ContextVar("document_lengths")


@dataclass(frozen=True)
class TargetConfig:
    """Which model is the target.

    Attributes:
        model: a local directory or a Hub id.
        revision: branch, tag or commit of a Hub id.
        dtype: of its weights; "auto" is what its config says.
    """

    model: str
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"


@dataclass(frozen=True)
class TargetHeads:
    """The parts of the target that drafters use frozen.

    Attributes:
        embed_VH: token embedding.
        lm_head_VH: head; the embedding itself where the target ties them.
        norm_H: multiplier of the final norm.
        norm_eps: its epsilon.
    """

    embed_VH: Tensor
    lm_head_VH: Tensor
    norm_H: Tensor
    norm_eps: float

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetHeads:
        """The same parts elsewhere; tied parts stay one tensor."""
        embed_VH = self.embed_VH.to(device=device, dtype=dtype)
        is_tied = self.lm_head_VH is self.embed_VH
        lm_head_VH = embed_VH if is_tied else self.lm_head_VH.to(device=device, dtype=dtype)
        return replace(self, embed_VH=embed_VH, lm_head_VH=lm_head_VH, norm_H=self.norm_H.to(device=device, dtype=dtype))


def target_hf_config(config: TargetConfig) -> PretrainedConfig:
    """The target's transformers config; of a multimodal model, its text part.

    Raises:
        ValueError: if there is no such model.
    """
    try:
        loaded = AutoConfig.from_pretrained(config.model, revision=config.revision)
    except OSError as error:
        raise ValueError(
            f"target.model {config.model!r} cannot be read: expected a local directory with a config.json or a Hub id ({_first_line(error)})"
        ) from error
    return loaded.get_text_config()


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer."""
    return AutoTokenizer.from_pretrained(config.model, revision=config.revision)


def target_fingerprint(config: TargetConfig) -> str:
    """What tells this target from any other: Hub id and revision, or a hash over a local directory's config, tokenizer and weights.

    Weights are hashed by name, size and samples of their bytes, so a model saved again under the same path is noticed without reading it all.
    """
    folder = Path(config.model)
    if not folder.is_dir():
        return f"{config.model}@{config.revision or 'main'}"
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".json", ".jinja", ".model", ".txt"} and path.name != "generation_config.json":
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name}:{path.stat().st_size}".encode())
            with path.open("rb") as file:
                for part in range(16):
                    file.seek(path.stat().st_size * part // 16)
                    digest.update(file.read(4096))
    return f"{folder.name}@{digest.hexdigest()[:16]}"


def stored_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that the target's weights are saved in."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The engines' default auxiliary states: HF hidden_states 2, L//2 and L-3.

    Raises:
        ValueError: if the target has too few layers for three ascending ones.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"a target of {num_layers} layers has no default auxiliary layers (2, L//2, L-3 = {layers} must ascend): set drafter.aux_layers"
        )
    return layers


def load_target_heads(config: TargetConfig, device: torch.device | str, dtype: torch.dtype) -> TargetHeads:
    """Reads embedding, head and final norm straight from the weight files, tied or untied, one file or sharded.

    Raises:
        ValueError: if they are not there under a known name.
    """
    files = _weight_files(config)
    embed = _only(files, lambda name: name.endswith("embed_tokens.weight"), "embed_tokens.weight", config)
    norm = _only(files, lambda name: _FINAL_NORM.match(name) is not None, "model.norm.weight", config)
    heads = [name for name in files if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
    hf_config = target_hf_config(config)
    embed_VH = _read(files[embed], embed).to(device=device, dtype=dtype)
    lm_head_VH = _read(files[heads[0]], heads[0]).to(device=device, dtype=dtype) if heads else embed_VH
    if not heads and not hf_config.tie_word_embeddings:
        raise ValueError(f"{config.model} has no lm_head.weight, and its config does not tie it to the embedding: its weight files are incomplete")
    norm_H = _read(files[norm], norm).to(device=device, dtype=dtype)
    if hf_config.model_type in _OFFSET_NORM_FAMILIES:
        norm_H = norm_H + 1
    return TargetHeads(embed_VH, lm_head_VH, norm_H, hf_config.rms_norm_eps)


class Target:
    """A loaded frozen target."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config: PretrainedConfig = model.config.get_text_config()
        self._base: Any = model.get_decoder()
        self.layers: Sequence[nn.Module] = self._base.layers
        self.is_plain_softmax = _is_plain_softmax(self.config, self._base)

    @classmethod
    def load(cls, config: TargetConfig, device: torch.device | str) -> Target:
        """Loads model and tokenizer.

        Raises:
            ValueError: if there is no such model.
        """
        target_hf_config(config)
        dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(config.model, revision=config.revision, dtype=dtype)
        return cls(model.to(device), load_tokenizer(config))

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer, as an engine takes them: the generation config's, and the tokenizer's own."""
        configured = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(int(token) for token in [*ids, self.tokenizer.eos_token_id] if token is not None)

    def logits(self, last_TH: Tensor) -> Tensor:
        """[T, V] logits of post-norm states."""
        return self.model.get_output_embeddings()(last_TH)

    @torch.no_grad()
    def features(self, input_ids_T: Tensor, loss_mask_T: Tensor, document_lengths: Sequence[int], aux_layers: Sequence[int], last: bool) -> Features:
        """The target's states over packed documents.

        Args:
            input_ids_T: int64 token ids of all documents, end to end.
            loss_mask_T: bool, carried along.
            document_lengths: tokens of each document.
            aux_layers: HF hidden_states indices 1..L, ascending; index L is the last layer before the final norm.
            last: whether to keep the post-norm last hidden state.

        Returns:
            Features on the target's device, in its dtype.
        """
        self._check_layers(aux_layers)
        lengths = tuple(int(length) for length in document_lengths)
        input_ids_T = input_ids_T.to(self.device)
        with self._capturing(aux_layers) as captured:
            if self.is_plain_softmax:
                position_T = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
                with self.attention(_PACKED), _set(_document_lengths, lengths):
                    last_TH = self._forward(input_ids_T, position_T)
            else:
                documents = [self._forward(ids, torch.arange(len(ids), device=self.device)) for ids in input_ids_T.split(lengths)]
                last_TH = torch.cat(documents)
        aux_TX = torch.cat([torch.cat(captured[layer]) for layer in aux_layers], dim=-1) if aux_layers else None
        return Features(input_ids_T, loss_mask_T.to(self.device), lengths, aux_TX, last_TH if last else None)

    def _forward(self, input_ids_T: Tensor, position_T: Tensor) -> Tensor:
        return self.forward_base(input_ids_T[None], position_T[None])[0]

    def forward_base(self, input_ids_BT: Tensor, position_BT: Tensor) -> Tensor:
        """[B, T, H] post-norm states of the base model, without a cache."""
        return self._base(input_ids=input_ids_BT, position_ids=position_BT, use_cache=False).last_hidden_state

    def _check_layers(self, aux_layers: Sequence[int]) -> None:
        if list(aux_layers) != sorted(set(aux_layers)) or any(not 1 <= layer <= self.num_layers for layer in aux_layers):
            raise ValueError(f"auxiliary layers are {tuple(aux_layers)}, expected ascending indices from 1 to the target's {self.num_layers}")

    @contextmanager
    def _capturing(self, aux_layers: Sequence[int]) -> Iterator[dict[int, list[Tensor]]]:
        """Collects the outputs of the wanted layers, one [T, H] a forward."""
        captured: dict[int, list[Tensor]] = {layer: [] for layer in aux_layers}

        def keep(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                captured[layer].append((output[0] if isinstance(output, tuple) else output)[0])

            return hook

        handles = [self.layers[layer - 1].register_forward_hook(keep(layer)) for layer in aux_layers]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def attention(self, implementation: str) -> Iterator[None]:
        """The base model attends through a registered attention function inside this context."""
        config = self._base.config
        usual = config._attn_implementation
        config._attn_implementation = implementation
        try:
            yield
        finally:
            config._attn_implementation = usual


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _packed_attention(
    module: nn.Module,
    query_1NTD: Tensor,
    key_1MTD: Tensor,
    value_1MTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each packed document on its own; called by transformers in place of its sdpa function."""
    return attend_packed(query_1NTD, key_1MTD, value_1MTD, _document_lengths.get(), scaling, sliding_window), None


def attend_packed(
    query_1NTD: Tensor, key_1MTD: Tensor, value_1MTD: Tensor, lengths: Sequence[int], scaling: float | None, sliding_window: int | None
) -> Tensor:
    """[1, T, N, D]: causal attention of each packed document on its own."""
    group = query_1NTD.shape[1] // key_1MTD.shape[1]
    if query_1NTD.device.type == "cpu" and group > 1:
        key_1MTD, value_1MTD = key_1MTD.repeat_interleave(group, 1), value_1MTD.repeat_interleave(group, 1)
    out_1TND = torch.empty(1, query_1NTD.shape[2], query_1NTD.shape[1], value_1MTD.shape[-1], dtype=query_1NTD.dtype, device=query_1NTD.device)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        mask_TT = None
        if sliding_window is not None and length > sliding_window:
            distance_TT = torch.arange(length)[:, None] - torch.arange(length)[None]
            mask_TT = ((distance_TT >= 0) & (distance_TT < sliding_window)).to(query_1NTD.device)
        out_1NTD = nn.functional.scaled_dot_product_attention(
            query_1NTD[:, :, rows],
            key_1MTD[:, :, rows],
            value_1MTD[:, :, rows],
            attn_mask=mask_TT,
            is_causal=mask_TT is None,
            scale=scaling,
            enable_gqa=query_1NTD.shape[1] != key_1MTD.shape[1],
        )
        out_1TND[:, rows] = out_1NTD.transpose(1, 2)
    return out_1TND


def _no_mask(*_: Any, **__: Any) -> None:
    """The packed attention needs no mask from transformers."""


def register_attention(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Makes an attention function that masks for itself known to transformers."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _no_mask)


register_attention(_PACKED, _packed_attention)


def _is_plain_softmax(config: PretrainedConfig, base: nn.Module) -> bool:
    """Whether the target's attention is a softmax over scores and nothing more."""
    fields = config.to_dict()
    has_softcap = fields.get("attn_logit_softcapping") is not None
    has_sinks = any(name.endswith("sinks") for name, _ in base.named_parameters())
    is_chunked = fields.get("attention_chunk_size") is not None
    return not (has_softcap or has_sinks or is_chunked)


def _weight_files(config: TargetConfig) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded checkpoint or the header of a single file."""
    index = _file_of(config, _INDEX_FILE)
    if index is not None:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files: dict[str, Path] = {}
        resolved: dict[str, Path] = {}
        for name, file_name in weight_map.items():
            if re.search(r"layers\.\d+\.", name):
                continue
            if file_name not in resolved:
                path = _file_of(config, file_name)
                if path is None:
                    raise ValueError(f"{config.model}: {_INDEX_FILE} names {file_name}, which is missing")
                resolved[file_name] = path
            files[name] = resolved[file_name]
        return files
    single = _file_of(config, _SINGLE_FILE)
    if single is None:
        raise ValueError(f"{config.model} has neither {_SINGLE_FILE} nor {_INDEX_FILE}: save the target as safetensors")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _file_of(config: TargetConfig, name: str) -> Path | None:
    """A file of the target, downloaded if it is on the Hub; None if it has none of that name."""
    found = cached_file(config.model, name, revision=config.revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _only(files: dict[str, Path], is_wanted: Callable[[str], bool], expected: str, config: TargetConfig) -> str:
    found = [name for name in files if is_wanted(name)]
    if len(found) != 1:
        raise ValueError(
            f"{config.model}: found {len(found)} tensors that could be {expected} ({', '.join(found) or 'none'}) among {len(files)}, expected one"
        )
    return found[0]


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
