"""What a run would do, before it does anything: `--dry-run`.

Parameters, steps, tokens, bytes on disk and memory, from the configuration, the target's config and, where the data is prepared, its
real lengths; else from a sample of the source.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

from data.chat import ChatTokenizer, SampleError
from data.conversations import read_conversations
from data.extract import document_lengths
from data.loader import PackPlan, shuffled_once
from data.report import DataReport
from data.storage import Storage, bytes_per_state
from data.target import Target, TargetHeads, load_tokenizer, stored_dtype, target_hf_config
from data.vocab import DraftVocabulary
from train.config import RunConfig
from train.drafters.base import DrafterConfig, FeatureRequest, load_drafter_class
from train.engine import check_launch

_SAMPLE_CONVERSATIONS = 200


@dataclass(frozen=True)
class Plan:
    """The numbers of a run.

    Attributes:
        num_parameters: trainable parameters of the drafter.
        num_documents, num_tokens: of the train split, one epoch.
        is_exact: whether those were counted; else they are extrapolated from a sample.
        num_steps: optimizer steps.
        num_train_tokens: tokens trained on, repeats counted.
        store_bytes: hidden states on disk; 0 online.
        checkpoint_bytes: the checkpoints that are kept.
        memory_bytes: of one rank while training: parameters, gradients, optimizer state, frozen target parts and activations.
    """

    num_parameters: int
    num_documents: int
    num_tokens: int
    is_exact: bool
    num_steps: int
    num_train_tokens: int
    store_bytes: int
    checkpoint_bytes: int
    memory_bytes: int


def make_plan(config: RunConfig) -> Plan:
    """Computes the plan; reads configs and, if need be, the head of the source."""
    check_launch(config.train.packs_per_step, config.train.deepspeed_config)
    target = target_hf_config(config.target)
    request = load_drafter_class(config.drafter.algorithm).feature_request_of(config.drafter, target)
    num_trained, num_frozen = num_parameters(config.drafter, target)
    lengths, is_exact = _document_lengths(config)
    num_tokens = int(lengths.sum())
    packs = PackPlan(lengths, config.train.pack_tokens, config.train.packs_per_step, config.train.seed)
    steps = packs.num_steps(config.train.num_epochs)
    num_steps = steps if config.train.max_steps is None else min(steps, config.train.max_steps)
    is_bf16 = config.train.precision == "bf16" or (config.train.precision == "auto" and torch.cuda.is_available())
    state_bytes = 4 * target.hidden_size * (len(request.aux_layers) + request.last)
    return Plan(
        num_parameters=num_trained,
        num_documents=len(lengths),
        num_tokens=num_tokens,
        is_exact=is_exact,
        num_steps=num_steps,
        num_train_tokens=int(num_tokens * config.train.num_epochs * num_steps / steps),
        store_bytes=num_tokens * _stored_bytes_per_token(target, request, config.features.storage) if config.features.mode == "offline" else 0,
        checkpoint_bytes=(config.train.num_kept_checkpoints * 12 + 4) * num_trained,
        memory_bytes=_optimizer_bytes(config, num_trained)
        + 2 * num_frozen * (2 if is_bf16 else 4)  # rank 0 measures with a copy
        + 2 * target.vocab_size * target.hidden_size * (2 if is_bf16 else 4)
        + config.train.pack_tokens * state_bytes,
    )


def print_plan(config: RunConfig) -> None:
    """Prints the plan as a table."""
    plan = make_plan(config)
    table = Table(title=f"{config.run_dir}: {config.drafter.algorithm} for {config.target.model}", show_header=False)
    about = "" if plan.is_exact else "about "
    rows = [
        ("drafter parameters", f"{plan.num_parameters:,}"),
        ("train split", f"{about}{plan.num_documents:,} conversations, {about}{plan.num_tokens:,} tokens"),
        ("steps", f"{about}{plan.num_steps:,} of {config.train.batch_tokens:,} tokens ({config.train.packs_per_step} packs)"),
        ("tokens trained on", f"{about}{plan.num_train_tokens:,}"),
        ("hidden states on disk", f"{about}{plan.store_bytes / 1e9:,.2f} GB" if plan.store_bytes else "none (online)"),
        ("checkpoints on disk", f"{plan.checkpoint_bytes / 1e9:,.2f} GB"),
        ("memory of a rank", f"{plan.memory_bytes / 1e9:,.2f} GB without activations and an online target"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def num_parameters(config: DrafterConfig, target: PretrainedConfig) -> tuple[int, int]:
    """(trained, frozen) parameters of a drafter that is built without memory; frozen ones are those of a target that is trained by adapters."""
    size = config.vocabulary_size(target.vocab_size)
    vocabulary = None if size is None else DraftVocabulary(tuple(range(size)), target.vocab_size, 1.0)
    with torch.device("meta"):
        matrix_VH = torch.empty(target.vocab_size, target.hidden_size)
        heads = TargetHeads(matrix_VH, matrix_VH, torch.empty(target.hidden_size), 1e-6)
        drafter = load_drafter_class(config.algorithm)(config, target, heads, vocabulary)
        if config.trains_target:
            drafter.attach_target(Target(AutoModelForCausalLM.from_config(target), tokenizer=None))
    num_trained = sum(parameter.numel() for _, parameter in drafter.trained())
    return num_trained, sum(parameter.numel() for parameter in drafter.parameters()) - num_trained


def _document_lengths(config: RunConfig) -> tuple[np.ndarray, bool]:
    """(tokens of each document of the train split, whether they were counted); else those of a sample, repeated."""
    is_regenerated = config.answers.source == "target"
    folder = config.run_dir / ("regenerated" if is_regenerated else "data")
    if folder.exists():
        loaded = load_from_disk(str(folder))
        return document_lengths(shuffled_once(loaded if isinstance(loaded, Dataset) else loaded["train"])), True
    conversations = (item for source in config.data.sources for item in read_conversations(source, DataReport()))
    chat = ChatTokenizer(load_tokenizer(config.target))
    results = chat.tokenize(list(itertools.islice(conversations, _SAMPLE_CONVERSATIONS)), config.data.max_length)
    samples = [result for result in results if not isinstance(result, SampleError)]
    limit = config.data.max_conversations
    num_documents = len(samples) + sum(1 for _ in itertools.islice(conversations, None if limit is None else max(0, limit - len(samples))))
    num_documents = max(0, num_documents - config.data.num_heldout)
    lengths = [len(sample.input_ids) for sample in samples]
    if is_regenerated:
        prompts = [len(sample.prompt_ids) for sample in samples if len(sample.prompt_ids) <= config.answers.max_prompt_tokens]
        lengths = [length + config.answers.max_new_tokens for length in prompts]
        num_documents = min(num_documents, config.answers.max_conversations or num_documents)
    return np.resize(np.array(lengths, dtype=np.int64), num_documents if lengths else 0), False


def _stored_bytes_per_token(target: PretrainedConfig, request: FeatureRequest, storage: Storage) -> int:
    return (len(request.aux_layers) + request.last) * bytes_per_state(storage, target.hidden_size, stored_dtype(target)) + 5


def _optimizer_bytes(config: RunConfig, num_parameters: int) -> int:
    """Weights, gradients and two moments in fp32, divided as ZeRO divides them among the ranks of this launch."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if config.train.deepspeed_config is None:
        return 16 * num_parameters
    return 8 * num_parameters + 8 * num_parameters // world_size
