"""The frozen target: its hidden states over packed documents.

Place in the flow: token ids -> `Target.features` -> shards or the trainer. What is known without loading the model is in data/target_files.py, whose
names are also importable from here.

Documents are packed end to end in one sequence of batch 1. Attention runs document by document through an attention function registered with
transformers, so nothing is padded, no T x T mask is built and documents cannot see each other. Only the wanted layers are hooked, and the base model
is called, so neither L+1 hidden states nor logits are ever held. A target that mixes tokens in any other way (logit softcapping, sinks, linear
attention, rotations that depend on the longest position) goes through its own code, one document at a time; a probe at loading finds out.

Shapes: T packed tokens, H hidden size, V vocabulary, L layers, X = A * H concatenated auxiliary states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, Cache, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import AttentionMaskInterface

from data.adapter import merge_adapter
from data.batch import Features
from data.target_files import (
    TargetConfig,
    TargetHeads,
    base_and_adapter,
    check_plain_logits,
    check_target_files,
    default_aux_layers,
    load_target_heads,
    load_tokenizer,
    logit_softcap,
    stored_dtype,
    target_fingerprint,
    target_hf_config,
)

__all__ = [
    "Target",
    "TargetConfig",
    "TargetHeads",
    "attend_packed",
    "base_and_adapter",
    "check_plain_logits",
    "default_aux_layers",
    "holding",
    "load_target_heads",
    "load_tokenizer",
    "register_attention",
    "stored_dtype",
    "target_fingerprint",
    "target_hf_config",
]

_PACKED, _PROBE = "headstart_packed", "headstart_probe"
# Rotations of these kinds depend on the longest position of the whole forward.
_WHOLE_FORWARD_ROPE = {"dynamic", "longrope"}

_document_lengths: ContextVar[tuple[int, ...]] = ContextVar("document_lengths")
# What the attention function was called with, one entry a call.
_probed: ContextVar[list[dict[str, Any]]] = ContextVar("probed")


class Target:
    """A loaded frozen target."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self.config: PretrainedConfig = model.config.get_text_config()
        self._base: Any = model.get_decoder()
        self._softcap = logit_softcap(self.config)
        if not hasattr(self._base, "layers"):
            raise ValueError(
                f"{self.config.model_type} targets are not supported: {type(self._base).__name__} has no list of layers to read states from"
            )
        self.layers: nn.ModuleList = self._base.layers
        self.is_packable = self._is_packable()

    @classmethod
    def load(cls, config: TargetConfig, device: torch.device | str) -> Target:
        """Loads model and tokenizer; an adapter is merged into its base in the dtype that the base is stored in, whatever it is loaded in.

        Raises:
            ValueError: if there is no such model, or its files are not whole, or its adapter does not fit.
        """
        check_target_files(config)
        tokenizer = load_tokenizer(config)
        base, adapter = base_and_adapter(config)
        wanted = None if config.dtype == "auto" else getattr(torch, config.dtype)
        dtype = "auto" if wanted is None or adapter is not None else wanted
        load: Any = AutoModelForCausalLM.from_pretrained
        try:
            model, loading = load(
                base.model, revision=base.revision, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            raise ValueError(f"target.model {base.model!r} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
        if loading["missing_keys"]:
            # transformers would go on with random weights in their place.
            missing = sorted(loading["missing_keys"])
            raise ValueError(
                f"the weight files of target.model {base.model!r} lack {len(missing)} tensors ({', '.join(missing[:3])}): copy or download it again"
            )
        if adapter is not None:
            model = merge_adapter(model, adapter)
            for parameter in model.parameters() if wanted is not None else ():  # not the buffers: rotations stay in fp32
                parameter.data = parameter.data.to(wanted)
        return cls(model.to(device), tokenizer)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self._tokenizer is not None, "a model that was built to be counted has no tokenizer"
        return self._tokenizer

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
    def final_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return self._base.norm

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer, as an engine takes them: the generation config's, and the tokenizer's own."""
        configured = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(int(token) for token in [*ids, self.tokenizer.eos_token_id] if token is not None)

    def logits(self, last_TH: Tensor) -> Tensor:
        """[T, V] logits of post-norm states, softcapped where the target's are."""
        logits_TV = self.model.get_output_embeddings()(last_TH)
        return logits_TV if self._softcap is None else torch.tanh(logits_TV / self._softcap) * self._softcap

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

        Raises:
            ValueError: if the target has no such layer or token.
        """
        self._check_layers(aux_layers)
        lengths = tuple(int(length) for length in document_lengths)
        input_ids_T = input_ids_T.to(self.device)
        with self.capturing(aux_layers) as captured:
            last_TH = self.last_states(input_ids_T, lengths)
        aux_TX = torch.cat([torch.cat(captured[layer], dim=1)[0] for layer in aux_layers], dim=-1) if aux_layers else None
        return Features(input_ids_T, loss_mask_T.to(self.device), lengths, aux_TX, last_TH if last else None)

    def last_states(self, input_ids_T: Tensor, document_lengths: Sequence[int]) -> Tensor:
        """[T, H] post-norm last states of packed documents; differentiable unless the caller turns gradients off.

        Raises:
            ValueError: if the target has no such token.
        """
        self.check_tokens(input_ids_T)
        if not self.is_packable:
            documents = input_ids_T.split(tuple(document_lengths))
            return torch.cat([self._forward(ids, torch.arange(len(ids), device=self.device)) for ids in documents])
        position_T = torch.cat([torch.arange(length) for length in document_lengths]).to(self.device)
        with self.attention(_PACKED), holding(_document_lengths, tuple(document_lengths)):
            return self._forward(input_ids_T, position_T)

    def _forward(self, input_ids_T: Tensor, position_T: Tensor) -> Tensor:
        return self.forward_base(input_ids_T[None], position_T[None])[0]

    def forward_base(self, input_ids_BT: Tensor, position_BT: Tensor) -> Tensor:
        """[B, T, H] post-norm states of the base model, without a cache."""
        return self._base(input_ids=input_ids_BT, position_ids=position_BT, use_cache=False).last_hidden_state

    def forward_cached(self, input_ids_BT: Tensor, cache: Cache, position_BT: Tensor | None = None, attention_mask: Any = None) -> Tensor:
        """[B, T, H] post-norm states of tokens that follow those in the cache, which takes them in.

        Args:
            input_ids_BT: int64 token ids.
            cache: any of transformers' caches.
            position_BT: RoPE positions; None goes on from those in the cache.
            attention_mask: what transformers takes: one that is added to the scores [B, 1, T, C], or one for each kind of layer; None is causal.
        """
        return self._base(
            input_ids=input_ids_BT, cache=cache, use_cache=True, position_ids=position_BT, attention_mask=attention_mask
        ).last_hidden_state

    def _check_layers(self, aux_layers: Sequence[int]) -> None:
        if list(aux_layers) != sorted(set(aux_layers)) or any(not 1 <= layer <= self.num_layers for layer in aux_layers):
            raise ValueError(f"auxiliary layers are {tuple(aux_layers)}, expected ascending indices from 1 to the target's {self.num_layers}")

    def check_tokens(self, input_ids_T: Tensor) -> None:
        """Raises ValueError where a token id is outside the target's vocabulary."""
        lowest, highest = (int(value) for value in input_ids_T.aminmax())
        if lowest < 0 or highest >= self.vocab_size:
            found = lowest if lowest < 0 else highest
            raise ValueError(f"token id {found} is outside the target's vocabulary of {self.vocab_size}: the tokenizer is not the target's own")

    @torch.no_grad()
    def _is_packable(self) -> bool:
        """Whether tokens see each other in nothing but softmax attention over scores, through the function that transformers lets us register.

        Three tokens in two documents show it: every layer calls the function once and hands it no tensor or number that would change the scores
        (sinks, softcaps, position biases).
        """
        if self.device.type == "meta":  # built to be counted, not to be run
            return False
        if not self.model._supports_attention_backend or _rope_types(self.config.to_dict()) & _WHOLE_FORWARD_ROPE:
            return False
        calls: list[dict[str, Any]] = []
        ids_T, position_T = torch.zeros(3, dtype=torch.int64, device=self.device), torch.tensor([0, 1, 0], device=self.device)
        with self.attention(_PROBE), holding(_document_lengths, (2, 1)), holding(_probed, calls):
            self._forward(ids_T, position_T)
        fields = self.config.to_dict()
        is_chunked = fields.get("attention_chunk_size") is not None
        return len(calls) == self.num_layers and not is_chunked and not any(_changes_scores(call) for call in calls)

    @contextmanager
    def capturing(self, aux_layers: Sequence[int]) -> Iterator[dict[int, list[Tensor]]]:
        """Collects the outputs of the wanted layers inside this context, one [B, T, H] a forward."""
        captured: dict[int, list[Tensor]] = {layer: [] for layer in aux_layers}

        def keep(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                captured[layer].append(output[0] if isinstance(output, tuple) else output)

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
def holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """The variable has this value inside this context: how an attention function that transformers calls is told about the batch."""
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


def _probe_attention(
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
    """The packed attention, noting what else it was given."""
    _probed.get().append(_)
    return attend_packed(query_1NTD, key_1MTD, value_1MTD, _document_lengths.get(), scaling, sliding_window), None


register_attention(_PROBE, _probe_attention)


def _changes_scores(arguments: dict[str, Any]) -> bool:
    """Whether an attention call was given more than positions and switches."""
    others = [value for name, value in arguments.items() if name not in ("position_ids", "cache_position")]
    return any(isinstance(value, (Tensor, int, float)) and not isinstance(value, bool) for value in others)


def _rope_types(value: Any) -> set[str]:
    """All rope types that a config names, at any depth (some name one for each kind of layer)."""
    if not isinstance(value, dict):
        return set()
    own = {value[name] for name in ("rope_type", "type") if isinstance(value.get(name), str)}
    return own.union(*(_rope_types(child) for child in value.values()))
