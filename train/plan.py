"""What a run would do, before it does anything: `--dry-run`.

Parameters, steps, tokens, disk, memory and time, from the configuration, the target's config and, where the data is prepared, its real lengths; else
from a sample of the source, or from a number of tokens that the user gives. train/memory.py predicts the memory, train/fit.py chooses what fits, and
train/plan_table.py prints.

Formulas of time: training takes 6 floating-point operations a trained parameter for each token that passes it (2 forward, 4 backward): all K steps of
EAGLE-3's layer, its head K times, Medusa's heads once each; and 2 a parameter of the target's head where its distribution is the teacher. A target's
forward pass takes 2 a parameter, and a target trained by adapters 4 more. Attention scores are not counted.
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from transformers import AutoModelForCausalLM, PretrainedConfig

from data.chat import ChatTokenizer, SampleError
from data.conversations import read_conversations
from data.extract import document_lengths
from data.loader import PackPlan, shuffled_once
from data.report import DataReport
from data.shards import StoreHeader
from data.target import Target, TargetHeads, load_tokenizer, stored_dtype, target_hf_config
from data.vocab import DraftVocabulary
from train.config import RunConfig
from train.drafters.base import Drafter, DrafterConfig, TargetTrainer, load_drafter_class
from train.drafters.eagle3 import Eagle3Config
from train.drafters.medusa1 import Medusa1Config
from train.engine import check_launch, resolve_precision
from train.fit import Setting, Subject, as_given, choose
from train.machine import Machine, MachineConfig, machine_of
from train.memory import DrafterSizes, forward_bytes
from train.warm_start import load_warm_start

_SAMPLE_CONVERSATIONS = 200
_EXTRACTION_TOKENS = 4096  # of a pack of data/extract.py


@dataclass(frozen=True)
class Disk:
    """Bytes on disk.

    Attributes:
        store: hidden states; 0 online, or where the user's own store is there already.
        checkpoints: those that are kept, and one that is being written.
        weights: the best step's, twice while they are replaced, and the export.
        free: of this machine's disk; None for another machine.
    """

    store: int
    checkpoints: int
    weights: int
    free: int | None

    @property
    def total(self) -> int:
        return self.store + self.checkpoints + self.weights


@dataclass(frozen=True)
class Plan:
    """The numbers of a run.

    Attributes:
        machine: what it is planned for.
        num_parameters: trainable parameters of the drafter.
        num_target_parameters: of the target.
        num_documents, num_tokens: of the train split, one epoch.
        is_exact: whether those were counted; else they are extrapolated.
        num_steps: optimizer steps.
        num_train_tokens: tokens trained on, repeats counted.
        precision: of training.
        disk: bytes on disk.
        target_memory_bytes: of one GPU that runs the target: to answer, extract and evaluate.
        given: the run's own settings, with their peak.
        chosen: the first setting that fits; None where none does.
        smallest: the least that any setting takes; None where the ranks cannot share any number of packs.
        training_flops, extraction_flops: floating-point operations in all.
    """

    machine: Machine
    num_parameters: int
    num_target_parameters: int
    num_documents: int
    num_tokens: int
    is_exact: bool
    num_steps: int
    num_train_tokens: int
    precision: str
    disk: Disk
    target_memory_bytes: int
    given: Setting
    chosen: Setting | None
    smallest: Setting | None
    training_flops: float
    extraction_flops: float


def make_plan(config: RunConfig, machine_config: MachineConfig | None = None) -> Plan:
    """Computes the plan; reads configs, the weights to start from and, if need be, the head of the source.

    Raises:
        ValueError: where the run would end before any work too.
    """
    machine_config = machine_config or MachineConfig()
    machine = machine_of(machine_config)
    if machine.is_here:
        check_launch(config.train.packs_per_step, config.train.deepspeed_config)
    _check_warm_start(config)
    subject = subject_of(config, machine)
    target, sizes, num_target = subject.target, subject.sizes, num_target_parameters(subject.target)
    lengths, is_exact = _document_lengths(config, machine_config.tokens)
    num_tokens = int(lengths.sum())
    steps = PackPlan(lengths, config.train.pack_tokens, config.train.packs_per_step, config.train.seed).num_steps(config.train.num_epochs)
    num_steps = steps if config.train.max_steps is None else min(steps, config.train.max_steps)
    num_train_tokens = int(num_tokens * config.train.num_epochs * num_steps / steps)
    chosen, smallest = choose(subject, machine)
    return Plan(
        machine=machine,
        num_parameters=sizes.num_trained,
        num_target_parameters=num_target,
        num_documents=len(lengths),
        num_tokens=num_tokens,
        is_exact=is_exact,
        num_steps=num_steps,
        num_train_tokens=num_train_tokens,
        precision="bf16" if subject.is_bf16 else "fp32",
        disk=_disk(config, target, num_tokens, sizes.num_trained, machine),
        target_memory_bytes=machine.base_bytes
        + num_target * subject.feature_bytes
        + forward_bytes(target, _EXTRACTION_TOKENS, subject.num_states, subject.feature_bytes),
        given=as_given(subject, machine),
        chosen=chosen,
        smallest=smallest,
        training_flops=num_train_tokens * training_flops_per_token(config.drafter, target, sizes, num_target, subject.target_bytes > 0),
        extraction_flops=2.0 * num_target * num_tokens if config.features.mode == "offline" else 0.0,
    )


def _check_warm_start(config: RunConfig) -> None:
    """Raises the ValueError with which the run would end before any work; what it would only tell, it tells itself."""
    target = target_hf_config(config.target)
    request = load_drafter_class(config.drafter.algorithm).feature_request_of(config.drafter, target)
    load_warm_start(config.train.init_from, config.drafter, target, request, config.run_dir, is_shown=False)


def subject_of(config: RunConfig, machine: Machine) -> Subject:
    """What is to be trained on a machine, in bytes and parameters."""
    target = target_hf_config(config.target)
    request = load_drafter_class(config.drafter.algorithm).feature_request_of(config.drafter, target)
    num_states = len(request.aux_layers) + request.last
    item_bytes = (stored_dtype(target) if config.target.dtype == "auto" else getattr(torch, config.target.dtype)).itemsize
    is_online = config.features.mode == "online" and not config.drafter.trains_target and num_states > 0
    return Subject(
        config=config,
        target=target,
        sizes=drafter_sizes(config.drafter, target),
        num_states=num_states,
        feature_bytes=item_bytes,
        target_bytes=num_target_parameters(target) * item_bytes if is_online else 0,
        is_bf16=resolve_precision(config.train.precision, "cuda" if machine.has_gpu else "cpu") == "bf16",
    )


def training_flops_per_token(config: DrafterConfig, target: PretrainedConfig, sizes: DrafterSizes, num_target: int, is_online: bool) -> float:
    """Floating-point operations of training on one token, were every token supervised (the module's docstring has the formulas)."""
    head = target.vocab_size * target.hidden_size
    online = 2.0 * num_target if is_online else 0.0
    if isinstance(config, Eagle3Config):
        fc = (3 if config.aux_layers is None else len(config.aux_layers)) * target.hidden_size**2
        return 6.0 * (fc + config.ttt_steps * (sizes.num_trained - fc)) + 2.0 * head + online
    if isinstance(config, Medusa1Config):
        shared = 6.0 * config.num_heads * head if config.shared_lm_head else 0.0
        return 6.0 * sizes.num_trained + shared + (6.0 * num_target if config.trains_target else 0.0) + online
    return 6.0 * sizes.num_trained + 6.0 * head + online  # EAGLE-1, through the target's head


def _disk(config: RunConfig, target: PretrainedConfig, num_tokens: int, num_trained: int, machine: Machine) -> Disk:
    request = load_drafter_class(config.drafter.algorithm).feature_request_of(config.drafter, target)
    header = StoreHeader(
        target="",
        samples="",
        aux_layers=request.aux_layers,
        has_last=request.last,
        dtype=str(stored_dtype(target)).removeprefix("torch."),
        hidden_size=target.hidden_size,
        storage=config.features.storage,
    )
    free = None
    if machine.is_here:
        free = shutil.disk_usage(next(folder for folder in [config.run_dir.absolute(), *config.run_dir.absolute().parents] if folder.exists())).free
    return Disk(
        store=num_tokens * header.bytes_per_token if config.features.mode == "offline" else 0,
        checkpoints=(config.train.num_kept_checkpoints + 1) * 12 * num_trained,
        weights=(2 * 4 + stored_dtype(target).itemsize) * num_trained,
        free=free,
    )


def _without_memory(config: DrafterConfig, target: PretrainedConfig) -> Drafter:
    """The drafter on the meta device."""
    size = config.vocabulary_size(target.vocab_size)
    vocabulary = None if size is None else DraftVocabulary(tuple(range(size)), target.vocab_size, 1.0)
    with torch.device("meta"):
        matrix_VH = torch.empty(target.vocab_size, target.hidden_size)
        heads = TargetHeads(matrix_VH, matrix_VH, torch.empty(target.hidden_size), 1e-6)
        drafter = load_drafter_class(config.algorithm)(config, target, heads, vocabulary)
        if isinstance(drafter, TargetTrainer):
            drafter.attach_target(Target(AutoModelForCausalLM.from_config(target), tokenizer=None))
    return drafter


def drafter_sizes(config: DrafterConfig, target: PretrainedConfig) -> DrafterSizes:
    """Sizes of a drafter that is built without memory."""
    drafter = _without_memory(config, target)
    trained = drafter.trained()
    num_trained = sum(parameter.numel() for _, parameter in trained)
    return DrafterSizes(
        num_trained=num_trained,
        num_frozen=sum(parameter.numel() for parameter in drafter.parameters()) - num_trained,
        num_cast=sum(parameter.numel() for name, parameter in trained if parameter.ndim == 2 and "lm_head" not in name),
        largest=max(parameter.numel() for _, parameter in trained),
    )


def num_parameters(config: DrafterConfig, target: PretrainedConfig) -> tuple[int, int]:
    """(trained, frozen) parameters of a drafter; frozen ones are those of a target that is trained by adapters."""
    sizes = drafter_sizes(config, target)
    return sizes.num_trained, sizes.num_frozen


def num_target_parameters(target: PretrainedConfig) -> int:
    """Parameters of the target, built without memory; tied ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(target).parameters())


def _document_lengths(config: RunConfig, num_tokens: int | None) -> tuple[np.ndarray, bool]:
    """(tokens of each document of the train split, whether they were counted).

    Counted are prepared data. Else the number that the user gives, or that a report of prepared data holds, makes documents of one length; else
    those of a sample are repeated.
    """
    is_regenerated = config.answers.source == "target"
    folder = config.run_dir / ("regenerated" if is_regenerated else "data")
    if folder.exists():
        loaded = load_from_disk(str(folder))
        return document_lengths(shuffled_once(loaded if isinstance(loaded, Dataset) else loaded["train"])), True
    if num_tokens is not None:
        return _even_lengths(num_tokens, max(1, 2 * num_tokens // config.data.max_length)), False
    report = config.run_dir / "data_report.json"
    counted = json.loads(report.read_text())["tokens"] if report.exists() and not is_regenerated else None
    if counted is not None:
        train = counted["splits"]["train"]
        return _even_lengths(train["num_tokens"], train["num_samples"]), False
    try:
        tokenizer = load_tokenizer(config.target)
    except ValueError as error:
        raise ValueError(f"{error}; to plan without it, say how many tokens the data have: --plan.tokens N") from error
    return _sampled_lengths(config, ChatTokenizer(tokenizer)), False


def _even_lengths(num_tokens: int, num_documents: int) -> np.ndarray:
    """So many documents of equal length, to one token."""
    return np.diff(np.linspace(0, num_tokens, num_documents + 1).astype(np.int64))


def _sampled_lengths(config: RunConfig, chat: ChatTokenizer) -> np.ndarray:
    """Lengths of a sample of the source, repeated for all of it."""
    is_regenerated = config.answers.source == "target"
    columns, streaming = config.data.columns, config.data.streaming
    conversations = (
        item for source in config.data.sources for item in read_conversations(source, DataReport(), columns=columns, streaming=streaming)
    )
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
    return np.resize(np.array(lengths, dtype=np.int64), num_documents if lengths else 0)
