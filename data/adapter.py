"""A LoRA adapter on a target: its files, and merging it into the loaded base with peft.

Place in the flow: data/target_files.py asks the files what can be known without loading; `Target.load` merges; data/merge_adapter.py writes the
merged model, which is the target of a run from then on.

Engines serve a drafter with the model that it was trained for, so base and adapter become one model first: W + scale * B A is formed in fp32, one
layer at a time, and rounded once to the base's dtype.

Shapes: V vocabulary, H hidden size, R rank.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# In the folder of a merged model: what it was made of.
ORIGIN_FILE = "merged_from.json"
_OTHER_WEIGHTS = "adapter_model.bin"
_PROBE_TOKENS = 8
# Merged and unmerged logits may differ by rounding, not by more: relative to the largest of them.
_LARGEST_DIFFERENCE = 0.1


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter's files, read but not loaded.

    Attributes:
        name: as the user names it: a folder or a Hub id.
        config: adapter_config.json.
        folder: where its files are on this machine.
        shapes: of the tensors in its weight file.
    """

    name: str
    config: dict[str, Any]
    folder: Path
    shapes: dict[str, tuple[int, ...]]

    @property
    def base_model(self) -> str:
        """The base that it was trained on, as it says itself; empty where it does not."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def vocab_size(self) -> int | None:
        """V of an embedding or head that it brings or was trained on; None where it touches neither."""
        for name, shape in self.shapes.items():
            if "embed_tokens" in name and ("lora_embedding_A" in name or "lora_A" in name):
                return shape[1]
            is_whole = not any(part in name for part in ("lora_", "token_adapter", "trainable_tokens"))
            is_head = "lm_head" in name and (is_whole or "lora_B" in name)
            if len(shape) == 2 and (is_head or ("embed_tokens" in name and is_whole)):
                return shape[0]
        return None


def has_adapter(model: str, revision: str | None) -> bool:
    """Whether a folder or a Hub id is that of an adapter."""
    return cached_file(model, ADAPTER_CONFIG, revision=revision, _raise_exceptions_for_missing_entries=False) is not None


def read_adapter(name: str) -> AdapterFiles:
    """Reads and checks what can be known of an adapter without its base.

    Raises:
        ValueError: if it is not there, not whole, or of a kind that cannot become part of the weights.
    """
    config_path = _file(name, ADAPTER_CONFIG)
    try:
        config: dict[str, Any] = json.loads(config_path.read_text())
    except ValueError as error:
        raise ValueError(f"{config_path} is not JSON ({error}): copy or download the adapter again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{config_path} is no JSON object: copy or download the adapter again")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"the adapter {name} is of peft_type {kind}, expected LORA: merge it with peft yourself and name the merged folder as target.model"
        )
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(f"the adapter {name} is for {config['task_type']}, expected CAUSAL_LM: a target answers in text")
    for field in ("alora_invocation_tokens", "layer_replication"):
        if config.get(field):
            raise ValueError(f"the adapter {name} uses {field}, which cannot become part of the base's weights: it has no drafter")
    weights = _file(name, ADAPTER_WEIGHTS)
    try:
        with safe_open(weights, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{weights} is damaged ({error}): copy or download the adapter again") from error
    return AdapterFiles(name, config, weights.parent, shapes)


def _file(name: str, file_name: str) -> Path:
    """A file of the adapter, downloaded if it is on the Hub."""
    try:
        found = cached_file(name, file_name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ValueError(f"target.adapter {name!r} cannot be read: expected a local folder or a Hub id ({str(error).splitlines()[0]})") from error
    if found is not None:
        return Path(found)
    if file_name == ADAPTER_WEIGHTS and (Path(name) / _OTHER_WEIGHTS).is_file():
        raise ValueError(f"target.adapter {name!r} has only {_OTHER_WEIGHTS}, expected {file_name}: save it again with a recent peft")
    raise ValueError(f"target.adapter {name!r} has no {file_name}: expected the folder that peft's save_pretrained wrote, or its Hub id")


def merge_adapter(model: PreTrainedModel, adapter: AdapterFiles) -> PreTrainedModel:
    """The base with the adapter as part of its weights, in the base's dtypes.

    Tied embedding and head stay one tensor only where the adapter changes both alike.

    Raises:
        ValueError: if the adapter does not fit the base, or what peft merges is not what it computes.
    """
    from peft import PeftModel  # here, because it takes a second that targets without an adapter need not wait

    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    if adapter.vocab_size is not None and adapter.vocab_size != model.config.get_text_config().vocab_size:
        model.resize_token_embeddings(adapter.vocab_size, mean_resizing=False)
    embed: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    is_tied = head.weight is embed.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights and of missing keys: both are looked at below
        try:
            adapted: Any = PeftModel.from_pretrained(model, str(adapter.folder))
            loaded = adapted.load_adapter(str(adapter.folder), "default")
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the adapter {adapter.name} does not fit its base: {_first_line(error)}") from error
    # Where peft also saves the embedding, as it does after a resize, the file holds what it trained under a second name.
    twice = {name for name in loaded.unexpected_keys if name.replace(".modules_to_save.", ".") in adapter.shapes.keys() - {name}}
    strangers = [*loaded.missing_keys, *(set(loaded.unexpected_keys) - twice)]
    if strangers:
        raise ValueError(
            f"the adapter {adapter.name} does not fit its base: {len(strangers)} tensors have no counterpart ({min(strangers)}); it names "
            f"{adapter.base_model or 'no model'} as its base"
        )
    if is_tied:  # each with its own, until it is clear that both changed alike
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    expected_TV = _probe_logits(adapted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all is merged before it is unloaded, and of tied weights
        _merge_layers(adapted)
        merged: PreTrainedModel = adapted.merge_and_unload()
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, model.dtype))
    if is_tied:
        _tie_again(merged)
    _check_merged(expected_TV, _probe_logits(merged), adapter)
    return merged.eval()


def _merge_layers(adapted: Any) -> None:
    """Merges each adapted layer in fp32, then rounds it to the dtype that it had."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            with _in_fp32(module.get_base_layer()):
                module.merge(safe_merge=True)


@contextmanager
def _in_fp32(layer: nn.Module) -> Iterator[None]:
    """The layer's own parameters are fp32 inside this context."""
    before = {name: parameter.dtype for name, parameter in layer.named_parameters(recurse=False)}
    for parameter in layer.parameters(recurse=False):
        parameter.data = parameter.data.float()
    yield
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.data = parameter.data.to(before[name])


def _tie_again(merged: PreTrainedModel) -> None:
    """Embedding and head share one tensor again if they are equal; else the config says that they do not."""
    embed: Any = merged.get_input_embeddings()
    head: Any = merged.get_output_embeddings()
    is_equal = torch.equal(embed.weight, head.weight)
    if is_equal:
        head.weight = embed.weight
    merged.config.tie_word_embeddings = is_equal
    merged.config.get_text_config().tie_word_embeddings = is_equal


@torch.no_grad()
def _probe_logits(model: Any) -> Tensor:
    """[T, V] fp32 logits of a few tokens."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids_T = torch.linspace(0, vocab_size - 1, _PROBE_TOKENS, device=model.device).long()
    return model.eval()(input_ids=ids_T[None], use_cache=False).logits[0].float()


def _check_merged(expected_TV: Tensor, found_TV: Tensor, adapter: AdapterFiles) -> None:
    """The merged weights compute what base and adapter compute apart, up to rounding."""
    difference = float((expected_TV - found_TV).abs().max() / expected_TV.abs().max())
    if not difference <= _LARGEST_DIFFERENCE:
        raise ValueError(
            f"the adapter {adapter.name}, merged into its base, gives logits that differ by {difference:.2g} of the largest from those of the two "
            "apart, expected rounding only: peft cannot merge it faithfully; merge it yourself, check it, and name the merged folder as target.model"
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
