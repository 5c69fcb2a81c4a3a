"""Medusa-2 against its definition: what each stage trains, with which loss; what becomes of the target."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from data.batch import DrafterBatch, Features, drafter_batch
from data.target import Target, TargetConfig, load_target_heads, target_hf_config
from eval.backbone import Document, fit
from eval.evaluation import Evaluation
from eval.serve import read_run
from recipes.medusa2 import recipe
from train.cli import main
from train.drafters.medusa1 import Medusa1, Medusa1Config
from train.drafters.medusa2 import Medusa2, Medusa2Config

LENGTHS = (9, 2, 14)
NUM_STEPS, JOINT_STEP = 20, 15
NO_DROPOUT = Medusa2Config(num_heads=3, lora_rank=4, lora_dropout=0.0, backbone_warmup_steps=4, heads_weight=0.3)


@pytest.fixture
def parts(tiny_target: Path) -> tuple[Target, PretrainedConfig]:
    config = TargetConfig(str(tiny_target), dtype="float32")
    return Target.load(config, "cpu"), target_hf_config(config)


def drafter_of(config: Medusa2Config, target_dir: Path, is_random: bool = True) -> Medusa2:
    """With adapters and heads away from their zeros, where everything would agree with everything."""
    target_config = TargetConfig(str(target_dir), dtype="float32")
    torch.manual_seed(1)
    heads = load_target_heads(target_config, "cpu", torch.float32)
    drafter = Medusa2(config, target_hf_config(target_config), heads, None)
    drafter.attach_target(Target.load(target_config, "cpu"))
    if is_random:
        for name, parameter in drafter.trained():
            if drafter.part_of(name) == "heads" or "lora" in name:
                nn.init.normal_(parameter, std=0.1)
    return drafter


def batch_of(target: Target, is_supervised: bool = True) -> DrafterBatch:
    mask_T = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    if is_supervised:
        mask_T[[3, 4, 5, 6, 7, 9, 10, 13, 14, 15, 18, 19, 20, 21, 22, 23, 24]] = True
    ids_T = torch.randint(target.vocab_size, mask_T.shape, generator=torch.Generator().manual_seed(3))
    return drafter_batch(Features(ids_T, mask_T, LENGTHS, None, None))


def with_states(batch: DrafterBatch, target: Target) -> DrafterBatch:
    features = batch.features
    return drafter_batch(target.features(features.input_ids_T, features.loss_mask_T, LENGTHS, (), last=True))


def gradients(drafter: Medusa1, loss: Tensor) -> dict[str, Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in drafter.trained()}


def test_the_heads_alone_are_trained_as_medusa_1(parts: tuple[Target, PretrainedConfig], tiny_target: Path) -> None:
    target, hf_config = parts
    drafter, batch = drafter_of(NO_DROPOUT, tiny_target), batch_of(target)
    plain = Medusa1(Medusa1Config(num_heads=3), hf_config, drafter.heads, None)
    plain.load_state_dict({name: value for name, value in drafter.state_dict().items() if not name.startswith("backbone.")})
    assert drafter.schedule(0, NUM_STEPS) == {"heads": 4.0, "backbone": 0.0}
    loss, expected = drafter(batch).loss_sum, plain(with_states(batch, target)).loss_sum
    torch.testing.assert_close(loss, expected)
    found, wanted = gradients(drafter, loss), gradients(plain, expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name] if name in wanted else torch.zeros_like(gradient), rtol=1e-4, atol=1e-6, msg=name)


def logits_of(model: nn.Module, batch: DrafterBatch) -> list[Tensor]:
    """[t, V] of each document by itself, by transformers alone."""
    return [model(ids[None]).logits[0] for ids in batch.features.input_ids_T.split(LENGTHS)]


@pytest.mark.parametrize("loss_kind", ["distil", "data"])
def test_heads_and_backbone_together_follow_the_papers_loss(parts: tuple[Target, PretrainedConfig], tiny_target: Path, loss_kind: str) -> None:
    """L_LM + lambda s(t) sum 0.8^k CE_k for the backbone; the plain sum for the heads, whose factor AdamW does not see."""
    target, _ = parts
    config = Medusa2Config(
        num_heads=3, lora_rank=4, lora_dropout=0.0, backbone_warmup_steps=4, heads_weight=0.3, backbone_loss=loss_kind
    )
    drafter, batch = drafter_of(config, tiny_target), batch_of(target)
    assert drafter.schedule(JOINT_STEP, NUM_STEPS)["backbone"] == 1.0
    output = drafter(batch)
    found = gradients(drafter, output.loss_sum)

    share = 0.3 * math.sin(math.pi / 2 * (JOINT_STEP - 10) / 10)
    language = torch.zeros(())
    ids, masks = batch.features.input_ids_T.split(LENGTHS), batch.features.loss_mask_T.split(LENGTHS)
    with torch.no_grad():
        originals = logits_of(target.model, batch)  # another copy of the model, without adapters
    for x, mask, adapted_tV, original_tV in zip(ids, masks, logits_of(drafter.backbone, batch), originals, strict=True):
        for t in range(len(x) - 1):
            if mask[t + 1]:
                log_q_V, log_p_V = adapted_tV[t].log_softmax(-1), original_tV[t].log_softmax(-1)
                language = language + ((log_p_V.exp() * (log_p_V - log_q_V)).sum() if loss_kind == "distil" else -log_q_V[x[t + 1]])
    states = drafter._states(batch)
    heads = drafter.heads_loss(batch, states).loss_sum
    torch.testing.assert_close(output.loss_sum, language + heads, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.metrics["loss_language"], language.detach(), rtol=1e-4, atol=1e-4)
    for_backbone = gradients(drafter, language + share * heads)
    for_heads = gradients(drafter, drafter.heads_loss(batch, states.detach()).loss_sum)
    for name, gradient in found.items():
        expected = for_backbone if drafter.part_of(name) == "backbone" else for_heads
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    assert any(gradient.abs().max() > 1e-3 for name, gradient in found.items() if "lora_A" in name)


def test_the_distilling_loss_begins_at_zero(parts: tuple[Target, PretrainedConfig], tiny_target: Path) -> None:
    drafter = drafter_of(NO_DROPOUT, tiny_target, is_random=False)
    drafter.schedule(10, NUM_STEPS)
    assert float(drafter(batch_of(parts[0])).metrics["loss_language"]) == pytest.approx(0.0, abs=1e-4)


def test_the_schedule_of_both_stages(tiny_target: Path) -> None:
    drafter = drafter_of(NO_DROPOUT, tiny_target)
    rates = [drafter.schedule(step, NUM_STEPS) for step in range(NUM_STEPS)]
    assert [rate["heads"] for rate in rates] == [4.0] * NUM_STEPS
    assert [rate["backbone"] for rate in rates] == [0.0] * 10 + [0.25, 0.5, 0.75] + [1.0] * 7


@pytest.mark.parametrize("step", [0, JOINT_STEP])
def test_a_batch_that_supervises_nothing_gives_every_parameter_a_zero_gradient(
    parts: tuple[Target, PretrainedConfig], tiny_target: Path, step: int
) -> None:
    drafter = drafter_of(NO_DROPOUT, tiny_target)
    drafter.schedule(step, NUM_STEPS)
    drafter(batch_of(parts[0], is_supervised=False)).loss_sum.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for _, parameter in drafter.trained())


def test_the_merged_target_says_what_the_adapted_one_said(parts: tuple[Target, PretrainedConfig], tiny_target: Path, tmp_path: Path) -> None:
    drafter, batch = drafter_of(NO_DROPOUT, tiny_target).eval(), batch_of(parts[0])
    with torch.no_grad():
        adapted = torch.cat(logits_of(drafter.backbone, batch))
    drafter.save_target(tmp_path / "backbone", torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "backbone")
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(logits_of(merged, batch)), adapted, rtol=1e-4, atol=1e-4)
        assert (torch.cat(logits_of(parts[0].model, batch)) - adapted).abs().max() > 0.1
    tokenizer, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "backbone", tiny_target))
    assert (tokenizer.chat_template, tokenizer.vocab_size) == (original.chat_template, original.vocab_size)


def test_embedding_and_head_of_the_target_stay_as_they_are(tiny_target: Path) -> None:
    for config in (NO_DROPOUT, Medusa2Config(backbone="full", backbone_loss="data")):
        names = [name for name, _ in drafter_of(config, tiny_target).trained() if name.startswith("backbone.")]
        assert names and not [name for name in names if "embed_tokens" in name or "lm_head" in name]
    assert {"backbone.model.norm.weight", "backbone.model.layers.6.mlp.up_proj.weight"} <= set(names)


def test_checkpoints_hold_what_is_trained_and_nothing_else(tiny_target: Path) -> None:
    drafter = drafter_of(NO_DROPOUT, tiny_target)
    names = [name for name, _ in drafter.trained()]
    assert all("lora" in name for name in names if name.startswith("backbone."))
    state = {name: parameter.detach().clone() for name, parameter in drafter.trained()}
    other = drafter_of(NO_DROPOUT, tiny_target, is_random=False)
    other.load_trained(state)
    assert all(torch.equal(parameter, state[name]) for name, parameter in other.trained())
    with pytest.raises(ValueError, match="of another drafter"):
        other.load_trained({name: state[name] for name in names[1:]})


def test_a_fit_is_transformers_own_loss(parts: tuple[Target, PretrainedConfig]) -> None:
    target, batch = parts[0], batch_of(parts[0])
    documents, nll = [], []
    for x, mask in zip(batch.features.input_ids_T.split(LENGTHS), batch.features.loss_mask_T.split(LENGTHS), strict=True):
        documents.append(Document(tuple(x.tolist()), tuple(mask.tolist())))
        labels = x.masked_fill(~mask, -100)
        if mask[1:].any():
            nll.append(target.model(x[None], labels=labels[None]).loss * mask[1:].sum())
    found = fit(target, documents)
    assert found.nll_sum == pytest.approx(float(torch.stack(nll).sum()), rel=1e-5)
    assert found.num_tokens == sum(sum(document.is_judged[1:]) for document in documents)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "full"}, "which only drafter.backbone lora keeps"),
        ({"heads_only_share": 1.0}, "for 1 take Medusa-1"),
        ({"lora_rank": 0}, "expected a positive number"),
        ({"lora_dropout": 1.0}, "expected a share"),
        ({"heads_weight": -1.0}, "expected at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Medusa2Config(**settings)  # type: ignore[arg-type]


# --- whole runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_arguments(tiny_arguments: list[str], tmp_path: Path) -> list[str]:
    pairs = zip(tiny_arguments[::2], tiny_arguments[1::2], strict=True)
    common = [part for pair in pairs if not pair[0].startswith("--drafter.") for part in pair]
    # The last step is the best of all that are measured: in the one before it the target has not changed yet.
    own = ["--train.heldout-every", "6", "--drafter.backbone-warmup-steps", "1", "--drafter.lora-dropout", "0"]
    return [*common, *own, "--runs-dir", str(tmp_path)]


def test_what_is_measured_and_served_is_the_trained_target(run_arguments: list[str], tmp_path: Path, tiny_target: Path) -> None:
    main(recipe(), Evaluation(), [*run_arguments, "--drafter.max-perplexity-increase", "9", "--optim.learning-rate", "0.02"])
    folder = tmp_path / "medusa2"
    report = json.loads((folder / "report.json").read_text())
    assert report["target"] == str(folder / "backbone")
    assert report["backbone"] == json.loads((folder / "backbone.json").read_text())
    assert report["backbone"]["perplexity_after"] != report["backbone"]["perplexity_before"]
    weights = [load_file(where / "model.safetensors") for where in (tiny_target, folder / "backbone")]
    changed = {name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])}
    assert changed and all("_proj" in name for name in changed)
    files = read_run(folder)
    assert files.target == str(folder / "backbone")
    answers = [json.loads(line)["answer_ids"] for line in (folder / "backbone_answers" / "answers.jsonl").read_text().splitlines()]
    assert files.answers == answers
    card, backbone_card = ((folder / part / "README.md").read_text() for part in ("export", "backbone"))
    assert "Serve them with that trained target, not with target" in card
    assert f"Held-out perplexity {report['backbone']['perplexity_before']:.3f} before" in card and "not the original model" in backbone_card
    assert json.loads((folder / "export" / "headstart.json").read_text())["target_fingerprint"].startswith("backbone@")


def test_a_target_that_got_worse_ends_the_run_before_anything_is_exported(
    run_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hurting = ["--drafter.max-perplexity-increase", "-0.999"]  # it would have to fall to a thousandth
    with pytest.raises(SystemExit):
        main(recipe(), Evaluation(), [*run_arguments, *hurting])
    message = capsys.readouterr().err
    assert "training has hurt the target: its held-out perplexity went from" in message
    assert "expected at most -99.9%" in message
    assert json.loads((tmp_path / "medusa2" / "backbone.json").read_text())["perplexity_increase"] > -0.999
    assert not (tmp_path / "medusa2" / "export").exists() and not (tmp_path / "medusa2" / "backbone").exists()


def test_nothing_of_an_earlier_trained_target_is_left_beside_another(run_arguments: list[str], tmp_path: Path) -> None:
    """Heads, answers and reports fit one trained target only; one that is refused takes the earlier run's down with it."""
    allowed = [*run_arguments, "--optim.learning-rate", "0.02", "--drafter.max-perplexity-increase", "9"]
    main(recipe(), Evaluation(), allowed)
    folder = tmp_path / "medusa2"
    hurting = ["--optim.learning-rate", "0.5", "--drafter.max-perplexity-increase", "-0.999"]
    with pytest.raises(SystemExit):
        main(recipe(), Evaluation(), [*run_arguments, *hurting])
    assert not [name for name in ("backbone", "backbone_answers", "export", "report.json") if (folder / name).exists()]
    main(recipe(), Evaluation(), allowed)
    read_run(folder)
    saved = load_file(folder / "backbone" / "model.safetensors")
    saved["model.norm.weight"] += 1
    save_file(saved, folder / "backbone" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="run the recipe to its end again"):
        read_run(folder)


def test_another_bound_does_not_train_again(run_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bound in ("8", "9"):
        capsys.readouterr()
        main(recipe(), Evaluation(), [*run_arguments, "--drafter.max-perplexity-increase", bound])
    output = capsys.readouterr().out
    assert "[train] done before" in output and "[backbone] stale: perplexity_bound: 8.0 -> 9.0" in output


def test_tokens_that_the_target_lacks_are_one_clear_line(parts: tuple[Target, PretrainedConfig], tiny_target: Path) -> None:
    features = batch_of(parts[0]).features
    foreign = dataclasses.replace(features, input_ids_T=features.input_ids_T.masked_fill(features.loss_mask_T, 258))
    with pytest.raises(ValueError, match="token id 258 is outside the target's vocabulary of 258"):
        drafter_of(NO_DROPOUT, tiny_target)(drafter_batch(foreign))


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_a_backbone_in_bf16_can_be_measured(parts: tuple[Target, PretrainedConfig], tiny_target: Path, backbone: str) -> None:
    """Outside of autocast, as held-out acceptance is."""
    config = TargetConfig(str(tiny_target), dtype="bfloat16")
    heads = load_target_heads(config, "cpu", torch.bfloat16)
    drafter = Medusa2(Medusa2Config(backbone=backbone, backbone_loss="data"), target_hf_config(config), heads, None)
    drafter.attach_target(Target.load(config, "cpu"))
    assert drafter.teacher_forced_drafts(batch_of(parts[0]), 2).shape == (2, sum(LENGTHS))


def test_stored_states_are_refused(run_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(recipe(), Evaluation(), [*run_arguments, "--features.mode", "offline"])
    assert "set features.mode online" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_plan_counts_adapters_as_trained_and_the_target_as_frozen(run_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(recipe(), Evaluation(), [*run_arguments, "--dry-run", "--drafter.num-heads", "2", "--drafter.lora-rank", "2"])
    heads = 2 * (32 * 32 + 32 + 258 * 32)
    adapters = 7 * 2 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))  # layers x rank x (in + out) of q; k, v; o; gate, up, down
    assert f"{heads + adapters:,}" in capsys.readouterr().out
