"""The memory model: activations against what autograd saves in a real forward pass, training state against sums by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.batch import DrafterBatch, Features, drafter_batch
from data.target import Target, TargetHeads
from data.vocab import DraftVocabulary
from train.drafters.base import Drafter, DrafterConfig, load_drafter_class
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.medusa1 import Medusa1Config
from train.drafters.medusa2 import Medusa2Config
from train.memory import (
    AUTOCAST,
    BF16,
    FP32,
    DrafterSizes,
    Part,
    Precision,
    Sharding,
    Work,
    activation_bytes,
    device_total,
    heads_bytes,
    sharding_of,
    state_parts,
    step_parts,
)

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
TARGET = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
)
TOKENS = 1000
PRECISIONS = {"fp32": FP32, "autocast": AUTOCAST, "bf16": BF16}


def build(config: DrafterConfig, precision: Precision) -> Drafter:
    dtype = torch.float32 if precision == FP32 else torch.bfloat16
    embed_VH, head_VH = torch.randn(2, TARGET.vocab_size, TARGET.hidden_size).to(dtype)
    heads = TargetHeads(embed_VH.clone(), head_VH.clone(), torch.ones(TARGET.hidden_size, dtype=dtype), 1e-5)
    size = config.vocabulary_size(TARGET.vocab_size)
    vocabulary = None if size is None else DraftVocabulary(tuple(range(size)), TARGET.vocab_size, 1.0)
    drafter = load_drafter_class(config.algorithm)(config, TARGET, heads, vocabulary)
    return drafter.bfloat16() if precision == BF16 else drafter


def batch() -> DrafterBatch:
    """Two documents of which three fifths are supervised, with bf16 states."""
    hidden = TARGET.hidden_size
    ids_T, is_answer_T = torch.randint(0, TARGET.vocab_size, (TOKENS,)), torch.arange(TOKENS) % 500 >= 200
    aux_TX, last_TH = torch.randn(TOKENS, 3 * hidden).bfloat16(), torch.randn(TOKENS, hidden).bfloat16()
    return drafter_batch(Features(ids_T, is_answer_T, (TOKENS // 2, TOKENS // 2), aux_TX, last_TH))


def saved_bytes(drafter: Drafter, packed: DrafterBatch, autocasts: bool) -> int:
    """Bytes that autograd keeps, each storage once, without weights and features."""
    features, heads = packed.features, drafter.heads
    known = [*drafter.parameters(), heads.embed_VH, heads.lm_head_VH, features.aux_TX, features.last_TH]
    ours = {tensor.untyped_storage().data_ptr() for tensor in known if tensor is not None}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in ours:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts),
    ):
        output = drafter(packed)
    return sum(tensor.untyped_storage().nbytes() for tensor in [*kept.values(), *gradients_of_losses(output.loss_sum)])


def gradients_of_losses(loss: torch.Tensor) -> list[torch.Tensor]:
    """What the loss has formed in the forward pass already, and keeps beside autograd's tensors."""
    found, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Distillation" in type(node).__name__:
            found += node.grads  # type: ignore[attr-defined]
        nodes += [parent for parent, _ in node.next_functions]
    assert found
    return found


def work(packed: DrafterBatch, precision: Precision, recomputes: bool, target_layers: int = 0) -> Work:
    return Work(
        num_tokens=packed.num_tokens,
        num_supervised=int(packed.supervised(0).sum()),
        packs_per_rank=1,
        world_size=1,
        is_bf16=precision != FP32,
        recomputes=recomputes,
        has_gpu=False,
        is_prefetched=True,
        feature_bytes=2,
        target_layers=target_layers,
    )


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize(
    "config",
    [
        Eagle3Config(draft_vocab_size=256, ttt_steps=1),
        Eagle3Config(draft_vocab_size=256, ttt_steps=4),
        Eagle3Config(draft_vocab_size=None, ttt_steps=2, intermediate_size=96),
        Eagle1Config(),
        Medusa1Config(num_heads=3, num_layers=2),
        Medusa1Config(num_heads=2, shared_lm_head=True),
        Medusa1Config(num_heads=3, num_layers=2, labels="soft"),
        Medusa1Config(num_heads=2, shared_lm_head=True, labels="soft"),
    ],
    ids=["eagle3, 1 step", "eagle3, 4 steps", "eagle3, whole vocabulary", "eagle1", "medusa1", "medusa1, shared head", "medusa1, soft", "both"],
)
def test_the_activations_formula_is_what_autograd_saves(config: DrafterConfig, name: str, recomputes: bool) -> None:
    precision, packed = PRECISIONS[name], batch()
    drafter = build(config, precision)
    drafter.recomputes = recomputes
    saved = saved_bytes(drafter, packed, precision.autocasts)
    assert activation_bytes(config, TARGET, work(packed, precision, recomputes), precision) == pytest.approx(saved, rel=0.03)


def test_an_algorithm_without_a_formula_is_an_error() -> None:
    class Unknown(DrafterConfig):
        algorithm = "unknown"

    with pytest.raises(ValueError, match="no formula for the activations of unknown"):
        activation_bytes(Unknown(), TARGET, work(batch(), FP32, False), FP32)


# --- training state -------------------------------------------------------------------------------------------------------


def by_name(parts: list[Part]) -> dict[str, int]:
    return {part.name: part.device_bytes for part in parts}


def test_the_torch_engine_holds_16_bytes_a_parameter_on_every_rank() -> None:
    for world_size in (1, 8):
        assert device_total(state_parts(1000, 10, Sharding(), is_bf16=True, world_size=world_size)) == 16_000


@pytest.mark.parametrize(
    ("stage", "is_bf16", "expected"),
    [
        # 1000 parameters on 4 ranks: 250 of master weights (4 bytes) and moments (8 bytes) each.
        (1, True, {"drafter weights": 2000, "fp32 master weights": 1000, "gradients": 4000, "AdamW moments": 2000}),
        (2, True, {"drafter weights": 2000, "fp32 master weights": 1000, "gradients": 1000, "AdamW moments": 2000}),
        (1, False, {"drafter weights": 4000, "fp32 master weights": 1000, "gradients": 5000, "AdamW moments": 2000}),
        (2, False, {"drafter weights": 4000, "fp32 master weights": 1000, "gradients": 1000, "AdamW moments": 2000}),
        (
            3,
            True,
            {
                "drafter weights, divided": 500,
                "drafter weights, gathered": 1200,
                "fp32 master weights": 1000,
                "gradients": 1000,
                "AdamW moments": 2000,
            },
        ),
    ],
)
def test_each_zero_stage_divides_what_deepspeed_divides(stage: int, is_bf16: bool, expected: dict[str, int]) -> None:
    found = by_name(state_parts(1000, 10, Sharding(stage, max_live_elements=600), is_bf16, world_size=4))
    assert {name: size for name, size in found.items() if name != "ZeRO's buffers"} == expected


def test_offloading_leaves_weights_and_buffers_on_the_device() -> None:
    parts = state_parts(1000, 10, Sharding(2, offloads=True, bucket_elements=50, num_buckets=2), is_bf16=True, world_size=4)
    assert by_name(parts) == {"drafter weights": 2000, "optimizer state, offloaded": 0, "ZeRO's buffers": 2 * 50 * 2 + 2 * 2 * 10}
    # Master weights and moments, 12 bytes for a quarter; gradients once accumulated and once for the step.
    assert sum(part.host_bytes for part in parts) == 12 * 250 + 2 * 4 * 250


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ds_zero1.json", Sharding(1, False, 100_000_000, 2, 1_000_000_000)),
        ("ds_zero2.json", Sharding(2, False, 100_000_000, 2, 1_000_000_000)),
        ("ds_zero3.json", Sharding(3, False, 100_000_000, 1, 1_000_000_000)),
        ("ds_zero2_offload.json", Sharding(2, True, 100_000_000, 2, 1_000_000_000)),
        ("ds_zero3_offload.json", Sharding(3, True, 100_000_000, 1, 100_000_000)),
    ],
)
def test_zero_files_say_how_they_shard(name: str, expected: Sharding) -> None:
    assert sharding_of(LAUNCH / name) == expected


# --- a step ---------------------------------------------------------------------------------------------------------------

SIZES = DrafterSizes(num_trained=1_000_000, num_frozen=0, num_cast=500_000, largest=100_000)


def step(**changes: int | bool) -> dict[str, int]:
    settings = {**vars(work(batch(), AUTOCAST, False)), "has_gpu": True, **changes}
    is_main = bool(settings.pop("is_main", True))
    return by_name(step_parts(Eagle3Config(draft_vocab_size=256), TARGET, SIZES, 4, Sharding(), Work(**settings), is_main))


def test_what_lasts_through_training_is_counted_once_each() -> None:
    found = step(packs_per_rank=3)
    assert found["the target's embedding, head and norm"] == heads_bytes(TARGET, True) == (2 * 512 + 1) * 64 * 2
    assert found["rank 0's copy to measure with"] == 4_000_000 + heads_bytes(TARGET, True)
    assert found["features of a micro-batch"] == TOKENS * (4 * 64 * 2 + 8 + 1 + 16)
    assert found["gradients"] == 4_000_000
    assert "rank 0's copy to measure with" not in step(is_main=False)


@pytest.mark.parametrize(("labels", "shared", "heads"), [("hard", False, 3), ("soft", False, 5), ("soft", True, 3)])
def test_heads_that_are_judged_together_are_gathered_together(labels: Literal["hard", "soft"], shared: bool, heads: int) -> None:
    """Three heads' worth of weights is what ZeRO-3 may hold here; soft labels use all five."""
    config, sharding = Medusa1Config(labels=labels, shared_lm_head=shared), Sharding(3, max_live_elements=300_000)
    found = by_name(step_parts(config, TARGET, SIZES, 1, sharding, Work(**{**vars(work(batch(), AUTOCAST, False)), "world_size": 2})))
    assert found["drafter weights, gathered"] == 2 * heads * SIZES.largest


def test_without_a_gpu_the_next_steps_features_are_in_the_same_memory() -> None:
    assert step(has_gpu=False)["features of a step and the next"] == 2 * step()["features of a micro-batch"]


def test_an_online_target_makes_the_features_of_a_whole_step_on_the_gpu() -> None:
    online = step(packs_per_rank=3, is_prefetched=False)
    assert online["features of a step"] == 3 * step(packs_per_rank=3)["features of a micro-batch"]


def test_a_tied_target_has_one_matrix() -> None:
    tied = LlamaConfig(vocab_size=512, hidden_size=64, tie_word_embeddings=True)
    assert heads_bytes(tied, is_bf16=False) == (512 + 1) * 64 * 4


def test_an_online_target_is_there_during_training() -> None:
    assert step(online_target_bytes=7_000_000)["the online target"] == 7_000_000


@pytest.mark.parametrize("name", ["fp32", "autocast"])
def test_the_target_that_medusa_2_trains_is_counted_in_its_layers(name: str) -> None:
    """A rougher formula: transformers' own layers and peft's adapters lie between."""
    torch.manual_seed(0)
    precision, config, packed = PRECISIONS[name], Medusa2Config(num_heads=2, heads_only_share=0.0), batch()
    drafter, model = build(config, precision), LlamaForCausalLM(TARGET)
    drafter.attach_target(Target(model if precision == FP32 else model.bfloat16(), tokenizer=None))
    drafter.schedule(1, 2)
    saved = saved_bytes(drafter, packed, precision.autocasts)
    found = activation_bytes(config, TARGET, work(packed, precision, False, TARGET.num_hidden_layers), precision)
    assert found == pytest.approx(saved, rel=0.1)
