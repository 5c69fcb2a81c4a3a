"""`eval.compare` measures every method on one target, finds the two answers that are known beforehand, and says what it could not do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

import eval.compare as compare_module
import eval.timing as timing_module
from checkpoints.draft_config import draft_dimensions
from checkpoints.export import export_drafter
from checkpoints.provenance import Provenance
from data.batch import drafter_batch
from data.target import Target, TargetConfig, load_target_heads, target_fingerprint, target_hf_config
from data.vocab import DraftVocabulary
from eval.acceptance import trajectory_features
from eval.compare import divide, main
from eval.decode.loop import Answer, Decoded, Plain
from eval.decode.verify import Greedy, Verdict
from eval.measurement import Comparison, MethodResult
from eval.methods import find_drafters, greedy_trajectory
from eval.prompts import DomainPrompts
from eval.timing import Timed, num_calls, time_methods
from eval.tune import coordinate_search
from train.drafters.base import Drafter, DrafterConfig, load_drafter_class
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.medusa1 import Medusa1Config
from train.drafters.medusa2 import Medusa2Config

QUESTIONS = {
    "chat": ["who runs?", "what is red?", "say something", "the sun", "old or new?"],
    "code": ["def f(a): f(a) f(a)", "x = 1; x = 1; x = 1;", "for i in range:", "a b a b a b a b", "if a: if a: if a:"],
}
DRAFTERS: dict[str, DrafterConfig] = {
    "eagle1": Eagle1Config(),
    "eagle3": Eagle3Config(draft_vocab_size=128, ttt_steps=2),
    "medusa1": Medusa1Config(num_heads=3),
    "medusa2": Medusa2Config(num_heads=3),
}
SMALL = ["--max-new-tokens", "12", "--num-prompts", "4", "--num-calibration-prompts", "1", "--batch-sizes", "2", "--num-batches", "1"]
SMALL += ["--methods.draft-length", "3", "--num-length-prompts", "2", "--num-lossless-prompts", "2"]


@pytest.fixture(scope="module")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("prompts")
    for domain, texts in QUESTIONS.items():
        (folder / f"{domain}.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    return [f"{domain}={folder / domain}.jsonl" for domain in QUESTIONS]


def make_run(run: Path, target: Path, config: DrafterConfig, num_steps: int = 0) -> Path:
    """The export of a drafter: random in every weight, or trained for a moment on some of the target's answers."""
    target_config = TargetConfig(str(target), dtype="float32")
    hf_config = target_hf_config(target_config)
    size = config.vocabulary_size(hf_config.vocab_size)
    vocabulary = None if size is None else DraftVocabulary(tuple(range(size)), hf_config.vocab_size, 1.0)
    drafter = load_drafter_class(config.algorithm)(config, hf_config, load_target_heads(target_config, "cpu", torch.float32), vocabulary)
    if num_steps:
        learn(drafter, Target.load(target_config, "cpu"), num_steps)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() and not num_steps else tensor.detach().clone()
        for name, tensor in drafter.export_tensors().items()
    }
    if "fc.bias" in tensors:
        tensors["fc.bias"].zero_()
    if config.trains_target:
        shutil.copytree(target, run / "backbone")
        target_config = TargetConfig(str(run / "backbone"))
    export_drafter(
        tensors,
        algorithm=config.algorithm,
        target_config=hf_config,
        dimensions=draft_dimensions(config.algorithm, drafter.export_dimensions()),
        aux_layers=drafter.request.aux_layers,
        dtype=torch.float32,
        out_dir=run / "export",
        provenance=Provenance("c0ffee", {}, "random", target_fingerprint(target_config), "5eed"),
        card="# a drafter",
    )
    return run


def learn(drafter: Drafter, target: Target, num_steps: int) -> None:
    """By heart, half of the prompts that will be asked: so that some drafts are accepted and some are not."""
    asked = [target.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True) for text in QUESTIONS["chat"]]
    trajectories = [greedy_trajectory(target, prompt["input_ids"], 12, 3) for prompt in asked]
    [pack] = trajectory_features(target, trajectories, drafter.feature_request(), pack_tokens=10**6)
    batch = drafter_batch(pack.features)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        (drafter(batch).loss_sum / drafter.num_supervised(batch)).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def runs(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    num_steps = {"eagle1": 60}  # the others stay random
    return {name: make_run(folder / name, tiny_target, config, num_steps.get(name, 0)) for name, config in DRAFTERS.items()}


@pytest.fixture(scope="module")
def measured(tiny_target: Path, runs: dict[str, Path], prompt_files: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run with everything in it; the target is also its own draft model."""
    out = tmp_path_factory.mktemp("compare")
    torch.set_num_threads(1)
    drafters = [str(run) for run in runs.values()]
    arguments = ["--target", str(tiny_target), "--draft-model", str(tiny_target), "--out", str(out)]
    assert main([*arguments, "--drafters", *drafters, "--prompts", *prompt_files, *SMALL]) == 0
    return {"document": json.loads((out / "compare.json").read_text()), "html": (out / "compare.html").read_text()}


def methods_of(measured: dict[str, Any]) -> dict[str, MethodResult]:
    return {method.name: method for method in Comparison.from_json(measured["document"]).methods}


def test_one_run_measures_every_method(measured: dict[str, Any]) -> None:
    comparison, methods = Comparison.from_json(measured["document"]), methods_of(measured)
    eagle = {f"{name} {kind}" for name in ("EAGLE-1", "EAGLE-3") for kind in ("chain", "static tree", "dynamic tree")}
    medusa = {f"{name} {kind}" for name in ("Medusa-1", "Medusa-2") for kind in ("chain", "tree", "tree, typical acceptance")}
    assert methods.keys() == eagle | medusa | {"n-gram", "Lookahead", "Lookahead, prompt pool", "draft model"}
    assert comparison.domains == {"chat": 4, "code": 4}
    assert set(comparison.plain_tokens_per_s) == set(comparison.forward_s) == {1, 2}
    for method in comparison.methods:
        assert set(method.speed_by_batch) == {1, 2} and set(method.speed_by_domain) == {"chat", "code"}
        assert method.is_lossless == ("typical" not in method.name)
        assert all(speed.ratio > 0 and speed.ratio_range[0] <= speed.ratio_range[1] for speed in method.speed_by_batch.values())
        if method.is_lossless:
            assert method.lossless is not None and method.lossless.num_identical + method.lossless.num_near_ties == method.lossless.num_outputs == 2
    assert all(name in measured["html"] for name in methods)
    assert "MTP" in comparison.not_available


def test_domains_add_up_to_the_whole(measured: dict[str, Any]) -> None:
    for method in methods_of(measured).values():
        chat, code = method.acceptance_by_domain["chat"], method.acceptance_by_domain["code"]
        assert (chat.num_prompts, code.num_prompts, method.acceptance.num_prompts) == (4, 4, 8)
        assert (chat + code).accepted_at == method.acceptance.accepted_at
        assert sorted((chat + code).prompts, key=str) == sorted(method.acceptance.prompts, key=str)
        rates = sorted(speed.tokens_per_s for speed in method.speed_by_domain.values())
        assert rates[0] < method.speed.tokens_per_s < rates[1]


def test_a_chain_verifies_all_its_drafts_and_a_tree_its_nodes(measured: dict[str, Any]) -> None:
    for name, method in methods_of(measured).items():
        if method.kind in ("chain", "draft model"):
            assert method.nodes_per_verification == method.settings["draft_length"] == 3, name
        if method.kind.endswith("tree"):
            assert method.nodes_per_verification == method.settings["total_tokens"] - 1 > 3, name


def test_a_target_as_its_own_draft_model_has_tau_of_exactly_k_plus_one(measured: dict[str, Any]) -> None:
    draft_model = methods_of(measured)["draft model"]
    assert draft_model.acceptance.tau == 1 + draft_model.settings["draft_length"] == 4


def test_a_random_drafter_has_tau_one_and_is_not_recommended(measured: dict[str, Any]) -> None:
    [alone] = [advice for advice in measured["document"]["advice"] if advice["scenario"] == "single request, low latency"]
    is_random = [method for method in methods_of(measured).values() if method.algorithm not in (None, "eagle1") and method.is_lossless]
    assert len(is_random) == 7
    for method in is_random:
        assert method.acceptance.tau < 1.15, method.name
        assert alone["method"] != method.name
        if method.acceptance.tau_interval()[0] <= 1.0:
            assert f"Do not use {method.name}" in alone["reason"]


def test_training_and_decoder_agree_on_tau(measured: dict[str, Any]) -> None:
    methods = methods_of(measured)
    for method in methods.values():
        assert (method.tau_predicted is None) == (method.kind != "chain" or method.algorithm is None)
        if method.tau_predicted is not None:
            assert method.tau_predicted == method.acceptance.tau, method.name  # the target is measured in float32
    assert 1.3 < methods["EAGLE-1 chain"].acceptance.tau < 3.9


def test_chains_are_timed_at_every_draft_length(measured: dict[str, Any]) -> None:
    for method in Comparison.from_json(measured["document"]).methods:
        expected = {1, 2, 3} if method.kind in ("chain", "n-gram", "draft model") else set()
        assert set(method.speed_by_draft_length) == expected, method.name
    by_length = methods_of(measured)["draft model"].speed_by_draft_length
    assert by_length[3].drafting_s > 1.5 * by_length[1].drafting_s  # three forwards against one


def test_what_is_held_beside_the_target_is_counted(measured: dict[str, Any], runs: dict[str, Path]) -> None:
    methods = {method.name: method for method in Comparison.from_json(measured["document"]).methods}
    assert methods["n-gram"].memory.weights_bytes == methods["Lookahead"].memory.weights_bytes == 0
    exported = sum(path.stat().st_size for path in (runs["eagle1"] / "export").glob("*.safetensors"))
    assert methods["EAGLE-1 chain"].memory.weights_bytes == pytest.approx(exported, rel=0.1)
    assert methods["EAGLE-1 chain"].memory.cache_bytes > 0 == methods["Medusa-1 chain"].memory.cache_bytes
    # Keys and values of 2 heads of 8 in 7 layers, float32.
    assert methods["EAGLE-1 chain"].memory.tree_bytes == 3 * (2 * 2 * 8 * 7 * 4)
    assert methods["Lookahead"].memory.pool_bytes > 0


def test_the_search_of_parameters_is_reported_and_its_optimum_used(
    tiny_target: Path, prompt_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_module, "LOOKAHEAD_AXES", {"N": (3,), "W": (2,), "G": (1, 2)})
    arguments = ["--target", str(tiny_target), "--prompts", *prompt_files, "--out", str(tmp_path), *SMALL, "--tune"]
    assert main(arguments) == 0
    comparison = Comparison.from_json(json.loads((tmp_path / "compare.json").read_text()))
    for name in ("Lookahead", "Lookahead, prompt pool"):
        points = [point for point in comparison.tuning if point.method == name]
        [best] = [point for point in points if point.is_best]
        assert best.speedup == max(point.speedup for point in points) and len(points) >= 3
        [method] = [method for method in comparison.methods if method.name == name]
        assert method.settings == best.settings
    assert "Settings that were tried" in (tmp_path / "compare.html").read_text()


def test_coordinate_search_finds_the_top_of_a_hill_and_measures_no_setting_twice() -> None:
    measured = []

    def height(settings: Any) -> float:
        measured.append(tuple(settings.items()))
        return -((settings["a"] - 4) ** 2) - (settings["b"] - 5) ** 2

    best = coordinate_search({"a": 1, "b": 1}, {"a": range(8), "b": range(8)}, lambda settings: settings["b"] != 2, height, num_rounds=10)
    assert best == {"a": 4, "b": 5}
    assert len(measured) == len(set(measured)) and not any(dict(settings)["b"] == 2 for settings in measured)


def test_speed_is_tokens_over_seconds_against_the_plain_calls_around_it() -> None:
    def call(num_tokens: int, num_verifications: int, total_s: float) -> Decoded:
        return Decoded((Answer((7,) * num_tokens, (1,) * num_verifications, (2,) * num_verifications),), 1, total_s, 0.1, 0.2, total_s - 0.3)

    timed = Timed([call(10, 4, 1.0), call(20, 6, 4.0)], plain_rates=[5.0, 4.0])
    speed = timed.speed()
    assert (speed.tokens_per_s, speed.tokens_per_s_plain) == (30 / 5, 30 / 7)  # plain: 10 / 5 + 20 / 4 seconds
    assert speed.ratio == pytest.approx(7 / 5) and speed.ratio_range == (1.25, 2.0)
    assert speed.drafting_s == pytest.approx(0.4 / 10)
    assert timed.speed([1]).ratio == pytest.approx(1.25)
    assert timed.acceptance([0]).num_verifications == 4


def test_sequences_of_a_batch_are_verified_together() -> None:
    """The longest of them tells how many forwards there were."""
    answers = (Answer((7,) * 3, (1,), (2,)), Answer((7,) * 7, (1, 1, 1), (2,) * 3))
    speed = Timed([Decoded(answers, 1, total_s=1.0, prefill_s=0.1, drafting_s=0.3, verification_s=0.6)], [5.0]).speed()
    assert speed.drafting_s == pytest.approx(0.1) and speed.verification_s == pytest.approx(0.2)


def test_methods_take_turns_between_two_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def decode(target: Any, method: Any, prompts: Any, *arguments: Any) -> Decoded:
        calls.append((method.label if isinstance(method, Labelled) else "Plain", len(prompts)))
        return Decoded((Answer((7,) * 6, (1,), (2,)),), 1, total_s=float(len(calls)), prefill_s=0.0, drafting_s=0.0, verification_s=1.0)

    class Labelled(Plain):
        def __init__(self, label: str) -> None:
            self.label = label

    monkeypatch.setattr(timing_module, "decode", decode)
    ways: Any = {label: (Labelled(label), Greedy()) for label in "ab"}
    batches = [[[1], [2]], [[3], [4]]]
    timed, plain = time_methods(None, ways, Greedy(), batches, 6, ())  # type: ignore[arg-type]
    assert [name for name, _ in calls] == ["Plain", "a", "b", "Plain", "a", "b", "Plain", "Plain", "b", "a", "Plain"]
    assert [count for _, count in calls[3:]] == [2] * 8
    assert timed["a"].plain_rates == [12 / (4 + 7), 12 / (8 + 11)]
    assert [call.total_s for call in timed["a"].decoded] == [5.0, 10.0] and [call.total_s for call in plain] == [4.0, 8.0]
    assert num_calls(2, 2) == 8


def test_no_prompt_is_both_measured_and_calibrated_with() -> None:
    """Both lie evenly over the set: question sets are sorted by category."""
    asked = [DomainPrompts(name, tuple((index,) for index in range(first, first + 10)), {}, {}) for name, first in (("chat", 0), ("code", 100))]
    questions, calibration = divide(asked, 2)
    assert calibration == [(2,), (7,), (102,), (107,)]
    assert [question.prompt[0] for question in questions[:6]] == [0, 100, 1, 101, 3, 103] and len(questions) == 16
    assert divide(asked, 0)[1] == []


# --- what cannot be done is said ------------------------------------------------------------------------------------------


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(list(arguments))
    except SystemExit as stop:  # a mistake that tyro prints
        code = stop.code
    assert code == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_drafter_of_another_target_is_refused(
    runs: dict[str, Path], tiny_target: Path, prompt_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "other" / "export"
    shutil.copytree(runs["eagle1"] / "export", export)
    provenance = json.loads((export / "headstart.json").read_text())
    (export / "headstart.json").write_text(json.dumps(provenance | {"target_fingerprint": "0123"}))
    common = ["--target", str(tiny_target), "--prompts", *prompt_files, *SMALL, "--drafters"]
    assert "was trained for the target 0123" in error_of(capsys, *common, str(tmp_path / "other"))
    assert "holds no export" in error_of(capsys, *common, str(tmp_path))
    smaller = AutoConfig.from_pretrained(tiny_target)
    smaller.num_hidden_layers = 6
    heads = make_run(tmp_path / "smaller", tiny_target, DRAFTERS["medusa2"])
    LlamaForCausalLM(smaller).save_pretrained(heads / "backbone")
    assert "has num_hidden_layers 6 and the target 7" in error_of(capsys, *common, str(heads))
    heads = shutil.copytree(runs["medusa2"] / "export", tmp_path / "heads")
    assert "fit only the target trained with them" in error_of(capsys, *common, str(heads))


def test_two_drafters_of_one_algorithm_are_told_apart_and_the_same_one_twice_is_refused(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(runs["eagle1"], tmp_path / "other"))
    labels = [drafter.label for drafter in find_drafters([f"{runs['eagle1']}/", str(other / "export"), str(runs["medusa1"])])]
    assert labels == [f"EAGLE-1 ({runs['eagle1']})", f"EAGLE-1 ({other}/export)", "Medusa-1"]
    with pytest.raises(ValueError, match="twice"):
        find_drafters([str(other), str(other / "export")])


def test_too_few_prompts_and_senseless_settings_are_one_clear_line(
    tiny_target: Path, prompt_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--target", str(tiny_target), "--prompts", *prompt_files]
    assert "expected more than the 9" in error_of(capsys, *common, "--tune", "--num-calibration-prompts", "9")
    assert "num_prompts is 0" in error_of(capsys, *common, "--num-prompts", "0")
    assert "lookahead_n is 1" in error_of(capsys, *common, "--methods.lookahead-n", "1")
    assert "ngram_max is 1" in error_of(capsys, *common, "--methods.ngram-max", "1")
    assert "medusa_tree_tokens is 1" in error_of(capsys, *common, "--methods.medusa-tree-tokens", "1")
    assert "tree_total_tokens is -3" in error_of(capsys, *common, "--methods.tree-total-tokens", "-3")


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tiny_target: Path, prompt_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        message = error_of(capsys, "--target", str(tiny_target), "--prompts", *prompt_files, "--out", str(out))
        assert "is no folder that can be written to" in message


def test_heads_that_cannot_be_calibrated_leave_the_other_methods(
    runs: dict[str, Path], tiny_target: Path, prompt_files: list[str], tmp_path: Path
) -> None:
    arguments = ["--target", str(tiny_target), "--prompts", *prompt_files, "--out", str(tmp_path), *SMALL, "--max-new-tokens", "1"]
    assert main([*arguments, "--drafters", str(runs["medusa1"])]) == 0
    comparison = Comparison.from_json(json.loads((tmp_path / "compare.json").read_text()))
    assert "look 4 tokens ahead" in comparison.not_available["Medusa-1 tree"]
    assert "Medusa-1 chain" in {method.name for method in comparison.methods}


def test_a_method_that_is_not_lossless_ends_the_run_before_the_long_work(
    tiny_target: Path, prompt_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Greedy.verify

    def trusting(self: Greedy, trees: Any, logits_BRV: Any) -> list[Verdict]:
        """Accepts the first draft whatever the target says."""
        verdicts = honest(self, trees, logits_BRV)
        first_drafts = [(0,) if tree.num_nodes and tree.num_drafts != 0 else () for tree in trees]
        return [Verdict(path, verdict.next_token) for path, verdict in zip(first_drafts, verdicts, strict=True)]

    monkeypatch.setattr(Greedy, "verify", trusting)
    message = error_of(capsys, "--target", str(tiny_target), "--prompts", *prompt_files, "--out", str(tmp_path / "out"), *SMALL)
    assert "the decoder is not lossless" in message and not (tmp_path / "out").exists()
