"""However a global batch is split, over processes, micro-batches or engines, the losses and the weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from same_run import assert_same_run, losses

from data.batch import Features, drafter_batch
from data.extract import document_lengths
from data.loader import PackPlan
from data.target import Target, TargetConfig, load_target_heads, target_hf_config
from train.drafters.eagle3 import Eagle3, Eagle3Config
from train.engine import Processes, StepRates, TorchEngine, read_deepspeed_config, resolve_precision
from train.optim import OptimConfig

ROOT = Path(__file__).resolve().parent.parent
# Only the last step is measured and exported: the one where differences have had the time to grow.
LAST_STEP = ("--train.heldout-every", "6")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, launcher_in: Any) -> Path:
    """The run that one process takes."""
    launcher = launcher_in(tmp_path_factory.mktemp("reference"))
    launcher.here("plain", *LAST_STEP)
    return launcher.runs_dir / "plain"


def test_some_step_has_a_rank_whose_packs_supervise_nothing(reference: Path) -> None:
    """The equalities below would otherwise not cover the uneven case."""
    samples = load_from_disk(str(reference / "data"))["train"]
    supervised = [sum(mask) > 1 for mask in samples["loss_mask"]]
    steps = PackPlan(lengths=document_lengths(samples), pack_tokens=128, packs_per_step=4, seed=0).steps(0)
    shares = []
    for _ in range(6):
        packs = next(steps)
        shares += [sum(supervised[document] for pack in packs[rank::2] for document in pack) for rank in range(2)]
    assert 0 in shares and max(shares) > 3


def test_two_ranks_under_torchrun_end_like_one_process(launcher: Any, reference: Path) -> None:
    code, output = launcher("torchrun", "torchrun", *LAST_STEP)
    assert code == 0, output
    assert_same_run(launcher.runs_dir / "torchrun", reference)


def test_two_ranks_under_deepspeed_zero_2_end_like_one_process(launcher: Any, reference: Path) -> None:
    code, output = launcher("deepspeed", "zero2", *LAST_STEP)
    assert code == 0, output
    assert_same_run(launcher.runs_dir / "zero2", reference)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])  # 2 is a fast test; 1 runs with Medusa-2 in tests/test_recipes.py
def test_two_ranks_under_deepspeed_zero_end_like_one_process(launcher: Any, reference: Path, stage: int) -> None:
    code, output = launcher("deepspeed", "zero", *LAST_STEP, "--train.deepspeed-config", str(ROOT / "launch" / f"ds_zero{stage}.json"))
    assert code == 0, output
    assert_same_run(launcher.runs_dir / "zero", reference)


@pytest.mark.slow
def test_one_process_under_deepspeed_without_a_launcher_ends_like_plain_torch(launcher: Any, reference: Path) -> None:
    config = str(ROOT / "launch" / "ds_zero2.json")
    code, output = launcher("python", "alone", *LAST_STEP, "--train.engine", "deepspeed", "--train.deepspeed-config", config)
    assert code == 0, output
    assert_same_run(launcher.runs_dir / "alone", reference)


@pytest.mark.slow
def test_plain_python_and_the_run_inside_this_process_are_the_same(launcher: Any, reference: Path) -> None:
    code, output = launcher("python", "plain", *LAST_STEP)
    assert code == 0, output
    assert losses(launcher.runs_dir / "plain") == losses(reference)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_under_deepspeed_stays_near_fp32(launcher: Any, stage: int) -> None:
    # Not with "drop": a rounded argmax can fall out of the draft vocabulary, and takes a whole position with it.
    flags = (*LAST_STEP, "--drafter.outside-vocabulary", "renormalise")
    launcher.here("fp32", *flags)
    config = str(ROOT / "launch" / f"ds_zero{stage}.json")
    code, output = launcher("deepspeed", "bf16", *flags, "--train.precision", "bf16", "--train.deepspeed-config", config)
    assert code == 0, output
    np.testing.assert_allclose(losses(launcher.runs_dir / "bf16"), losses(launcher.runs_dir / "fp32"), rtol=0.005)


# --- inside one process ---------------------------------------------------------------------------------------------------


def trained(target: Path, split: list[list[Features]]) -> tuple[dict[str, torch.Tensor], list[float], list[dict[str, float]]]:
    """(weights, losses, metrics) after a few steps over the given micro-batches."""
    config = TargetConfig(str(target))
    torch.manual_seed(0)
    drafter = Eagle3(
        Eagle3Config(draft_vocab_size=None, ttt_steps=3), target_hf_config(config), load_target_heads(config, "cpu", torch.float32), None
    )
    engine = TorchEngine(drafter, OptimConfig(max_grad_norm=0.5), "fp32", Processes("torch"))
    outputs = [engine.train_step([drafter_batch(pack) for pack in packs], StepRates(1e-3, {"drafter": 1.0})) for packs in split]
    return engine.state(), [output.loss for output in outputs], [output.metrics for output in outputs]


def test_accumulated_micro_batches_equal_one_large_batch(tiny_target: Path) -> None:
    target = Target.load(TargetConfig(str(tiny_target)), "cpu")
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 258, (length,), generator=generator) for length in (30, 7, 45, 20)]
    masks = [torch.rand(len(ids), generator=generator) < share for ids, share in zip(documents, (0.9, 0.0, 0.5, 1.0), strict=True)]

    def pack(chosen: list[int]) -> Features:
        ids, mask = torch.cat([documents[index] for index in chosen]), torch.cat([masks[index] for index in chosen])
        return target.features(ids, mask, [len(documents[index]) for index in chosen], (2, 3, 4), last=True)

    weights, loss, metrics = trained(tiny_target, [[pack([0]), pack([1]), pack([2, 3])]] * 4)
    expected_weights, expected_loss, expected_metrics = trained(tiny_target, [[pack([0, 1, 2, 3])]] * 4)
    np.testing.assert_allclose(loss, expected_loss, rtol=0, atol=1e-5)
    assert metrics == expected_metrics
    for name in expected_weights:
        torch.testing.assert_close(weights[name], expected_weights[name], rtol=0, atol=1e-5, msg=name)


def test_a_step_without_any_supervised_position_changes_no_weight(tiny_target: Path) -> None:
    target = Target.load(TargetConfig(str(tiny_target)), "cpu")
    features = target.features(torch.arange(9), torch.zeros(9).bool(), (9,), (2, 3, 4), last=True)
    weights, loss, _ = trained(tiny_target, [[features, features]])
    untrained, _, _ = trained(tiny_target, [])
    assert loss == [0.0]
    assert all(torch.equal(weights[name], untrained[name]) for name in untrained)


# --- ZeRO files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zero_files_beside_the_launch_scripts_can_be_used(stage: int) -> None:
    assert read_deepspeed_config(ROOT / "launch" / f"ds_zero{stage}.json")["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("[]", "has the ZeRO stage None"),
        ('{"zero_optimization": {"stage": 4}}', "has the ZeRO stage 4"),
        ('{"zero_optimization": {"stage": 2}, "train_batch_size": 8}', "sets 'train_batch_size', which the recipe decides"),
        ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}', "sets 'bf16', which the recipe decides"),
    ],
)
def test_a_wrong_zero_file_is_a_clear_error(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=expected):
        read_deepspeed_config(path)


@pytest.mark.parametrize(
    ("asked", "device", "capabilities", "expected"),
    [
        ("auto", "cuda", {}, "bf16"),
        ("auto", "cpu", {}, "fp32"),
        ("auto", "cpu", {"avx512_bf16": True}, "bf16"),
        ("auto", "cpu", {"amx_bf16": True}, "bf16"),
        ("fp32", "cuda", {"amx_bf16": True}, "fp32"),
        ("bf16", "cpu", {}, "bf16"),
    ],
)
def test_auto_is_bf16_where_the_device_multiplies_in_it(monkeypatch, asked, device, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_precision(asked, device) == expected
