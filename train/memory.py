"""Peak memory of a training process, as a sum of named parts: what `--dry-run` predicts and chooses settings by.

Place in the flow: a run's config and the target's sizes -> `step_parts` -> train/plan.py. Nothing is allocated here. Every formula counts what the
code holds, so it changes when the code does: tests/test_memory.py compares the activations with the tensors that autograd saves in a real step, and
bench/planner.py the whole with measured peaks.

A step has three moments that can be the peak: in the loss, when all activations are there and logits are formed; at the start of the backward pass;
and in the optimizer step, when all gradients are there and no activations. `step_parts` returns the parts of the largest.

Precision comes in three kinds: fp32; bf16 under the torch engine, which keeps fp32 weights and computes through autocast; bf16 under DeepSpeed, whose
weights are bf16 beside fp32 master weights.

Shapes: T tokens of a micro-batch, P positions that are supervised, K TTT steps or heads, H hidden size, A = N * D query width, M * D key width,
I MLP width, X = number of auxiliary states * H, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig

from train import losses
from train.drafters.base import DrafterConfig
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.llama_layer import LayerShape
from train.drafters.medusa1 import Medusa1Config
from train.engine import read_deepspeed_config

_DEEPSPEED_BUCKET, _DEEPSPEED_MAX_LIVE = 500_000_000, 1_000_000_000  # what DeepSpeed takes where a ZeRO file says nothing


class Part(NamedTuple):
    """One thing that takes memory.

    Attributes:
        name: for the table.
        device_bytes: on the GPU, or in the process where there is none.
        host_bytes: beside it in the host's memory, of a process with a GPU.
    """

    name: str
    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Precision:
    """Bytes of the numbers.

    Attributes:
        weight_bytes: of a weight that the forward pass reads, and of its gradient.
        compute_bytes: of an activation.
    """

    weight_bytes: int
    compute_bytes: int

    @property
    def autocasts(self) -> bool:
        return self.weight_bytes != self.compute_bytes


FP32 = Precision(4, 4)
AUTOCAST = Precision(4, 2)
BF16 = Precision(2, 2)


@dataclass(frozen=True)
class Sharding:
    """How the ranks hold the training state.

    Attributes:
        stage: ZeRO stage; None is the torch engine (DDP), where every rank holds everything.
        offloads: whether the optimizer's state is in the host's memory.
        bucket_elements: gradients of a ZeRO communication buffer.
        num_buckets: such buffers of a rank.
        max_live_elements: most gathered weights of ZeRO-3.
    """

    stage: int | None = None
    offloads: bool = False
    bucket_elements: int = 0
    num_buckets: int = 0
    max_live_elements: int = 0


def sharding_of(deepspeed_config: Path | None) -> Sharding:
    """How a ZeRO file shards; None is the torch engine.

    Raises:
        ValueError: if the file is not a ZeRO configuration.
    """
    if deepspeed_config is None:
        return Sharding()
    zero = read_deepspeed_config(deepspeed_config)["zero_optimization"]
    stage, offload = zero["stage"], zero.get("offload_optimizer", {})
    overlaps = zero.get("overlap_comm", stage == 3)
    return Sharding(
        stage=stage,
        offloads=offload.get("device", "none") != "none",
        bucket_elements=int(zero.get("reduce_bucket_size", _DEEPSPEED_BUCKET)),
        num_buckets=0 if stage == 0 else 2 if overlaps and stage < 3 else 1,
        max_live_elements=int(zero.get("stage3_max_live_parameters", _DEEPSPEED_MAX_LIVE)),
    )


def precision_of(is_bf16: bool, sharding: Sharding) -> Precision:
    """The kind of precision that an engine gives."""
    if not is_bf16:
        return FP32
    return AUTOCAST if sharding.stage is None else BF16


@dataclass(frozen=True)
class DrafterSizes:
    """What a drafter consists of, in parameters.

    Attributes:
        num_trained: parameters that are trained.
        num_frozen: parameters of a target inside the drafter that are not.
        num_cast: parameters of the trained matrices that autocast copies to bf16 (all but the heads, which the loss casts).
        largest: of the largest trained parameter.
    """

    num_trained: int
    num_frozen: int
    num_cast: int
    largest: int


@dataclass(frozen=True)
class Work:
    """What a step of one rank is about.

    Attributes:
        num_tokens: T, tokens of a micro-batch.
        num_supervised: P, positions of it that are supervised.
        packs_per_rank: micro-batches of a step.
        world_size: ranks.
        is_bf16: the run's precision.
        recomputes: `train.recompute`.
        has_gpu: whether the step runs on a GPU.
        is_prefetched: whether the next step's features are read ahead (from a store).
        feature_bytes: of one state's number, as features come from the store or the target.
        target_layers: layers of a target that the drafter trains through, 0 for none.
        online_target_bytes: weights of a target that computes features in this process, 0 for none.
    """

    num_tokens: int
    num_supervised: int
    packs_per_rank: int
    world_size: int
    is_bf16: bool
    recomputes: bool
    has_gpu: bool
    is_prefetched: bool
    feature_bytes: int
    target_layers: int = 0
    online_target_bytes: int = 0


# --- training state ---------------------------------------------------------------------------------------------------------


def state_parts(num_trained: int, largest: int, sharding: Sharding, is_bf16: bool, world_size: int, has_gpu: bool = True) -> list[Part]:
    """Weights, gradients and optimizer state of one rank, as the engine holds them (DeepSpeed 0.19.8).

    torch       fp32 weights, gradients and two moments: 16 bytes a parameter.
    ZeRO-1, 2   weights in the training precision, whole; fp32 master weights and moments, divided. In bf16, stage 1 accumulates in whole fp32
                gradients and stage 2 in divided ones; in fp32, stage 1 keeps whole gradients and a divided copy.
    ZeRO-3      weights divided, and gathered while they are used; the rest divided. In fp32 the divided weights are the master weights.
    offload     master weights, moments and accumulated gradients are the host's.
    """
    weight, share = (2 if is_bf16 else 4), -(-num_trained // world_size)
    if sharding.stage is None or sharding.stage == 0:
        return [Part("drafter weights", 4 * num_trained), Part("gradients", 4 * num_trained), Part("AdamW moments", 8 * num_trained)]
    if sharding.stage == 3:
        gathered = min(num_trained, sharding.max_live_elements) if world_size > 1 or is_bf16 else 0
        weights = [Part("drafter weights, divided", weight * share), Part("drafter weights, gathered", weight * gathered)]
        master = 4 * share if is_bf16 or sharding.offloads else 0
    else:
        weights = [Part("drafter weights", weight * num_trained)]
        master = 4 * share
    gradients = 4 * share
    if sharding.stage == 1 and not sharding.offloads:
        gradients = 4 * num_trained + (0 if is_bf16 else 4 * share)
    is_bucketed = not (sharding.stage == 1 and is_bf16 and not sharding.offloads)  # those go through DeepSpeed's bf16 optimizer
    # A GPU's buffers are there as they were asked for; of a CPU's, only what has been written to.
    elements = sharding.bucket_elements if has_gpu else min(sharding.bucket_elements, num_trained)
    buffers = Part("ZeRO's buffers", weight * (elements * sharding.num_buckets * is_bucketed + 2 * largest * sharding.offloads))
    if sharding.offloads:
        return [*weights, Part("optimizer state, offloaded", 0, master + 8 * share + 2 * gradients), buffers]
    return [*weights, Part("fp32 master weights", master), Part("gradients", gradients), Part("AdamW moments", 8 * share), buffers]


# --- activations ------------------------------------------------------------------------------------------------------------


def activation_bytes(config: DrafterConfig, target: PretrainedConfig, work: Work, precision: Precision) -> int:
    """Bytes that autograd keeps of one micro-batch for its backward pass, weights in a lower precision included.

    Raises:
        ValueError: for an algorithm whose activations have no formula here.
    """
    if isinstance(config, Eagle3Config):
        return _eagle3_activations(config, target, work, precision)
    if isinstance(config, Eagle1Config):
        return _eagle1_activations(config, target, work, precision)
    if isinstance(config, Medusa1Config):
        return _medusa_activations(config, target, work, precision) + _target_activations(target, work, precision)
    raise ValueError(f"train/memory.py has no formula for the activations of {config.algorithm}: add one")


def _attention_bytes(shape: LayerShape, num_queries: int, num_keys: int, precision: Precision) -> int:
    """Queries, output and log-sum-exp where queries stand; keys and values."""
    query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return precision.compute_bytes * (2 * num_queries * query_width + 2 * num_keys * key_width) + 4 * num_queries * shape.num_heads


def _rotary_bytes(shape: LayerShape, num_queries: int, num_keys: int) -> int:
    """fp32 cosines and sines, once for queries and once for keys."""
    return 2 * 4 * shape.head_dim * (num_queries + num_keys)


def _finish_bytes(shape: LayerShape, num_rows: int, precision: Precision) -> int:
    """After attention: the norm's input and fp32 scale, the MLP's input, gate, up and their product."""
    hidden, inner, item = shape.hidden_size, shape.intermediate_size, precision.compute_bytes
    return num_rows * (2 * hidden * item + 4 + 3 * inner * item)


def _layer_weight_copies(shape: LayerShape, attention_width: int, precision: Precision) -> int:
    """bf16 copies of the layer's matrices, which autocast makes and autograd keeps."""
    if not precision.autocasts:
        return 0
    query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projections = attention_width * (query_width + 2 * key_width) + query_width * shape.hidden_size
    return 2 * (projections + 3 * shape.hidden_size * shape.intermediate_size)


def _eagle3_activations(config: Eagle3Config, target: PretrainedConfig, work: Work, precision: Precision) -> int:
    shape = LayerShape.from_target(target, config.intermediate_size)
    tokens, rows, steps = work.num_tokens, work.num_supervised, config.ttt_steps
    hidden, item = shape.hidden_size, precision.compute_bytes
    num_aux = len(config.aux_layers) if config.aux_layers is not None else 3
    copies_features = precision.autocasts or precision.weight_bytes != work.feature_bytes
    fc_input = tokens * num_aux * hidden * item if copies_features else 0
    attention = _attention_bytes(shape, rows, tokens, precision) + (steps - 1) * _attention_bytes(shape, rows, rows, precision)
    # Each step's outputs: gathered for the final norm, with its scale; and their gradient, which the loss forms at once.
    outputs = steps * rows * (hidden * (item + precision.weight_bytes) + 4 + 8)
    head = (config.vocabulary_size(target.vocab_size) or target.vocab_size) * hidden * precision.weight_bytes
    if work.recomputes:
        kept = tokens * (hidden * item + 16) + steps * rows * (hidden * item + 16)
        return fc_input + kept + attention + outputs + head
    # The inputs of the norms of embedding and hidden state, with their scales; queries, keys and values share one input of both.
    norms, width = hidden * (precision.weight_bytes + item) + 8, 2 * hidden * item
    first = tokens * (norms + width) + rows * width + _rotary_bytes(shape, rows, tokens)
    later = rows * (norms + width) + _rotary_bytes(shape, rows, rows)
    layer = first + (steps - 1) * later + steps * _finish_bytes(shape, rows, precision)
    return fc_input + layer + attention + outputs + head + _layer_weight_copies(shape, 2 * hidden, precision)


def _eagle1_activations(config: Eagle1Config, target: PretrainedConfig, work: Work, precision: Precision) -> int:
    shape = LayerShape.from_target(target, config.intermediate_size)
    tokens, rows = work.num_tokens, work.num_supervised
    hidden, item = shape.hidden_size, precision.compute_bytes
    loss = rows * (hidden * (2 * 4 + item) + 8)  # both sides of the regression, and the gradient of the token loss
    kept = tokens * hidden * item + rows * hidden * item + _attention_bytes(shape, rows, tokens, precision)
    if work.recomputes:
        return tokens * (4 * hidden + 16) + kept + loss
    layer = tokens * 2 * hidden * item + _rotary_bytes(shape, rows, tokens) + _finish_bytes(shape, rows, precision)
    return layer + kept + loss + _layer_weight_copies(shape, hidden, precision)


def _medusa_activations(config: Medusa1Config, target: PretrainedConfig, work: Work, precision: Precision) -> int:
    hidden, item = target.hidden_size, precision.compute_bytes
    block = work.num_supervised * hidden * (2 * config.num_layers * item + precision.weight_bytes)
    copies = 2 * (config.num_layers - 1) * hidden * hidden if precision.autocasts else 0
    head = 0 if config.shared_lm_head else target.vocab_size * hidden * precision.weight_bytes
    return config.num_heads * (block + copies + head)


def _target_activations(target: PretrainedConfig, work: Work, precision: Precision) -> int:
    """Of a target that is trained by adapters in all its matrices: each layer, and the adapters' own inputs behind their dropout."""
    if not work.target_layers:
        return 0
    shape = LayerShape.from_target(target)
    tokens, item = work.num_tokens, precision.compute_bytes
    query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norm = tokens * (shape.hidden_size * (4 + item) + 4)
    attention = _attention_bytes(shape, tokens, tokens, precision) + _rotary_bytes(shape, tokens, tokens) // 2 + 2 * tokens * query_width * item
    inputs = 4 * shape.hidden_size + query_width + shape.hidden_size + shape.intermediate_size  # of the adapters: q, k, v, gate, o, up, down
    adapters = tokens * inputs * (item + 1 + (2 if precision.autocasts else 0))  # dropout's result and mask, and the cast that autocast makes
    layer = 2 * norm + attention + adapters + tokens * (4 * shape.intermediate_size + 2 * shape.hidden_size + key_width) * item
    return work.target_layers * layer


def heads_at_once(config: DrafterConfig) -> int:
    """Heads whose own weights the loss uses together: with Medusa's soft labels all of them."""
    if isinstance(config, Medusa1Config) and config.labels == "soft" and not config.shared_lm_head:
        return config.num_heads
    return 1


def loss_buffer_bytes(config: DrafterConfig, target: PretrainedConfig, work: Work, precision: Precision) -> int:
    """What the loss holds for a while: student states, a chunk of logits, fp32 blocks of it, the head in the precision it computes in."""
    hidden, item, rows = target.hidden_size, precision.compute_bytes, work.num_supervised
    is_eagle3 = isinstance(config, Eagle3Config)
    width = config.vocabulary_size(target.vocab_size) or target.vocab_size
    num_heads = heads_at_once(config)
    steps = config.ttt_steps if isinstance(config, Eagle3Config) else 1
    if isinstance(config, Medusa1Config) and config.labels == "soft" and config.shared_lm_head:
        steps = config.num_heads
    drops = isinstance(config, Eagle3Config) and config.outside_vocabulary == "drop" and width != target.vocab_size
    has_teacher = not (isinstance(config, Medusa1Config) and config.labels == "hard")
    teacher_width = (target.vocab_size if drops else 0) + (width if has_teacher else 0)
    chunk_rows = min(rows, max(1, losses._CHUNK_ELEMENTS // max(target.vocab_size if drops else 0, steps * width)))
    logits = chunk_rows * (steps * width + teacher_width)
    block = min(chunk_rows * (steps + 1) * width, losses._CHUNK_ELEMENTS if work.has_gpu else losses._CPU_BLOCK_ELEMENTS)
    is_head_trained = is_eagle3 or (isinstance(config, Medusa1Config) and not config.shared_lm_head)
    copies = (num_heads if item == 2 else 1) + precision.autocasts  # of a head in the training precision; under ZeRO the rest of its fp32 gradient
    head = width * hidden * item * copies if is_head_trained else 0
    gathered = width * hidden * item if is_eagle3 and has_teacher and not drops and width != target.vocab_size else 0
    students = (1 + steps * num_heads) * rows * hidden * precision.weight_bytes
    kept = 4 * chunk_rows * width if num_heads > 1 else 0  # the target's probabilities, for the next head
    return students + logits * item + 4 * 4 * block + kept + head + gathered


def backward_buffer_bytes(config: DrafterConfig, target: PretrainedConfig, work: Work, precision: Precision, largest: int) -> int:
    """What the backward pass holds for a while: gradients of one layer's activations and of one weight; what is recomputed."""
    rows, item, weight = work.num_supervised, precision.compute_bytes, precision.weight_bytes
    weight_gradient = largest * (weight + (item if precision.autocasts else 0))
    if isinstance(config, Medusa1Config):
        return weight_gradient + 2 * rows * target.hidden_size * weight
    shape = LayerShape.from_target(target, config.intermediate_size if isinstance(config, (Eagle1Config, Eagle3Config)) else None)
    # Of the MLP: the product's gradient, it times up and times silu(gate), silu(gate), gate's; of the norm: fp32 states and gradients.
    layer = rows * (5 * shape.intermediate_size * item + 6 * shape.hidden_size * 4)
    # Of attention: output, its gradient, queries and theirs at all tokens; in fp32 the later steps' where something is supervised.
    query_width = shape.num_heads * shape.head_dim
    attention = 4 * work.num_tokens * query_width * item + 5 * rows * query_width * 4
    recomputed = _finish_bytes(shape, rows, precision) if work.recomputes else 0
    return weight_gradient + layer + attention + recomputed


# --- the whole --------------------------------------------------------------------------------------------------------------


def heads_bytes(target: PretrainedConfig, is_bf16: bool) -> int:
    """The target's embedding, head and norm, in the training precision; tied ones once."""
    matrices = 1 if target.tie_word_embeddings else 2
    return (matrices * target.vocab_size + 1) * target.hidden_size * (2 if is_bf16 else 4)


def feature_bytes_per_token(target: PretrainedConfig, num_states: int, item_bytes: int) -> int:
    """A token of features in memory: states, int64 id, mask, position and remaining tokens."""
    return num_states * target.hidden_size * item_bytes + 8 + 1 + 16


def forward_bytes(target: PretrainedConfig, num_tokens: int, num_states: int, item_bytes: int) -> int:
    """What a forward pass of the target holds at its widest layer, states that are kept included."""
    shape = LayerShape.from_target(target)
    width = 4 * shape.hidden_size + 3 * shape.intermediate_size + 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return num_tokens * item_bytes * (width + 2 * num_states * shape.hidden_size)


def step_parts(
    config: DrafterConfig, target: PretrainedConfig, sizes: DrafterSizes, num_states: int, sharding: Sharding, work: Work, is_main: bool = True
) -> list[Part]:
    """The parts at the moment of a step that takes the most memory, without the process's own base.

    Args:
        config: the drafter's.
        target: its (text) config.
        sizes: of the drafter.
        num_states: target states that features hold for a token.
        sharding: the engine.
        work: the step.
        is_main: whether the rank measures held-out acceptance, with a copy of drafter and target parts.
    """
    precision = precision_of(work.is_bf16, sharding)
    # What is used together is gathered together, whatever ZeRO-3's bound.
    sharding = replace(sharding, max_live_elements=max(sharding.max_live_elements, heads_at_once(config) * sizes.largest))
    state = state_parts(sizes.num_trained, sizes.largest, sharding, work.is_bf16, work.world_size, work.has_gpu)
    held = [part for part in state if part.name != "gradients"]
    gradients = [part for part in state if part.name == "gradients"]
    held += _lasting_parts(target, sizes, num_states, work, is_main)
    activations = Part("activations of a micro-batch", activation_bytes(config, target, work, precision))
    casts = 2 * sizes.num_cast if precision.autocasts and work.recomputes else 0
    loss = Part("the loss's buffers", loss_buffer_bytes(config, target, work, precision) + casts)
    backward = Part("the backward pass's buffers", backward_buffer_bytes(config, target, work, precision, sizes.largest))
    # Alone, and with one micro-batch, gradients come while activations go.
    are_gradients_there = sharding.stage is not None or work.world_size > 1 or work.packs_per_rank > 1
    early = gradients if are_gradients_there else []
    moments = [[*held, *early, activations, loss], [*held, *early, activations, backward], [*held, *gradients]]
    if work.online_target_bytes:
        forward = Part("the target's forward pass", forward_bytes(target, work.num_tokens, num_states, work.feature_bytes))
        moments.append([*held, *gradients, forward])
    return max(moments, key=device_total)


def _lasting_parts(target: PretrainedConfig, sizes: DrafterSizes, num_states: int, work: Work, is_main: bool) -> list[Part]:
    """What is there during the whole of training beside the training state."""
    target_parts, frozen = heads_bytes(target, work.is_bf16), sizes.num_frozen * (2 if work.is_bf16 else 4)
    features = work.packs_per_rank * work.num_tokens * feature_bytes_per_token(target, num_states, work.feature_bytes)
    ahead = features if work.is_prefetched else 0
    parts = [Part("the target's embedding, head and norm", target_parts)]
    if frozen:
        parts.append(Part("the target inside the drafter", frozen))
    if work.online_target_bytes:
        parts.append(Part("the online target", work.online_target_bytes))
    if is_main:
        parts.append(Part("rank 0's copy to measure with", 4 * sizes.num_trained + target_parts + frozen))
    if not work.has_gpu:
        parts.append(Part("features of a step and the next", features + ahead))
    elif work.is_prefetched:
        # A micro-batch comes to the GPU when its turn has come; the others wait in the host's memory.
        parts.append(Part("features of a micro-batch", features // work.packs_per_rank, features + ahead))
    else:
        parts.append(Part("features of a step", features))
    return parts


def device_total(parts: Sequence[Part]) -> int:
    """Bytes on the device."""
    return sum(part.device_bytes for part in parts)
