"""`eval.compare` measures every method on one target, finds the two answers that are known beforehand, and says what it could not do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import eval.compare as compare_module
from checkpoints.draft_config import draft_dimensions
from checkpoints.export import export_drafter
from checkpoints.provenance import Provenance
from data.target import TargetConfig, load_target_heads, target_fingerprint, target_hf_config
from data.vocab import DraftVocabulary
from eval.compare import main
from eval.decode.loop import Answer, Decoded
from eval.decode.verify import Greedy, Verdict
from eval.measurement import Comparison
from eval.methods import find_drafters
from eval.timing import Timed
from eval.tune import coordinate_search
from train.drafters.base import DrafterConfig, load_drafter_class
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
SMALL = ["--max-new-tokens", "12", "--num-prompts", "3", "--num-calibration-prompts", "1", "--batch-sizes", "2"]
SMALL += ["--methods.draft-length", "3", "--num-length-prompts", "2", "--num-lossless-prompts", "2"]


@pytest.fixture(scope="module")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("prompts")
    for domain, texts in QUESTIONS.items():
        (folder / f"{domain}.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    return [f"{domain}={folder / domain}.jsonl" for domain in QUESTIONS]


def untrained_run(run: Path, target: Path, config: DrafterConfig) -> Path:
    """The export of a drafter that was never trained: random, or wrong in every weight."""
    target_config = TargetConfig(str(target), dtype="float32")
    hf_config = target_hf_config(target_config)
    size = config.vocabulary_size(hf_config.vocab_size)
    vocabulary = None if size is None else DraftVocabulary(tuple(range(size)), hf_config.vocab_size, 1.0)
    drafter = load_drafter_class(config.algorithm)(config, hf_config, load_target_heads(target_config, "cpu", torch.float32), vocabulary)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor.clone()
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


@pytest.fixture(scope="module")
def runs(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: untrained_run(folder / name, tiny_target, config) for name, config in DRAFTERS.items()}


@pytest.fixture(scope="module")
def measured(tiny_target: Path, runs: dict[str, Path], prompt_files: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run with everything in it; the target is also its own draft model."""
    out = tmp_path_factory.mktemp("compare")
    torch.set_num_threads(1)
    drafters = [str(run) for run in runs.values()]
    arguments = ["--target", str(tiny_target), "--draft-model", str(tiny_target), "--out", str(out)]
    assert main([*arguments, "--drafters", *drafters, "--prompts", *prompt_files, *SMALL]) == 0
    return {"document": json.loads((out / "compare.json").read_text()), "html": (out / "compare.html").read_text()}


def test_one_run_measures_every_method(measured: dict[str, Any]) -> None:
    comparison = Comparison.from_json(measured["document"])
    names = {method.name for method in comparison.methods}
    eagle = {f"{name} {kind}" for name in ("EAGLE-1", "EAGLE-3") for kind in ("chain", "static tree", "dynamic tree")}
    medusa = {f"{name} {kind}" for name in ("Medusa-1", "Medusa-2") for kind in ("chain", "tree", "tree, typical acceptance")}
    assert names == eagle | medusa | {"n-gram", "Lookahead", "Lookahead, prompt pool", "draft model"}
    assert comparison.domains == {"chat": 3, "code": 3}
    assert set(comparison.plain_tokens_per_s) == set(comparison.forward_s) == {1, 2}
    for method in comparison.methods:
        assert method.acceptance.num_prompts == 6, method.name
        assert set(method.speed_by_batch) == {1, 2} and set(method.speed_by_domain) == {"chat", "code"}
        assert method.is_lossless == ("typical" not in method.name)
        assert all(speed.ratio > 0 and speed.ratio_range[0] <= speed.ratio_range[1] for speed in method.speed_by_batch.values())
        if method.is_lossless:
            assert method.lossless is not None and method.lossless.num_identical + method.lossless.num_near_ties == method.lossless.num_outputs == 2
    assert all(name in measured["html"] for name in names)
    assert "MTP" in comparison.not_available


def test_a_target_as_its_own_draft_model_has_tau_of_exactly_k_plus_one(measured: dict[str, Any]) -> None:
    [draft_model] = [method for method in Comparison.from_json(measured["document"]).methods if method.name == "draft model"]
    assert draft_model.acceptance.tau == 1 + draft_model.settings["draft_length"] == 4


def test_a_random_drafter_has_tau_one_and_is_not_recommended(measured: dict[str, Any]) -> None:
    document = measured["document"]
    for method in Comparison.from_json(document).methods:
        if method.algorithm is not None and method.is_lossless:
            assert method.acceptance.tau < 1.15, method.name
    trained = [advice["method"] for advice in document["advice"] if any(name in advice["method"] for name in ("EAGLE", "Medusa"))]
    assert not trained


def test_training_and_decoder_agree_on_tau(measured: dict[str, Any]) -> None:
    for method in Comparison.from_json(measured["document"]).methods:
        assert (method.tau_predicted is None) == (method.kind != "chain" or method.algorithm is None)
        if method.tau_predicted is not None:
            assert method.tau_predicted == pytest.approx(method.acceptance.tau, rel=0.03), method.name


def test_chains_are_timed_at_every_draft_length(measured: dict[str, Any]) -> None:
    for method in Comparison.from_json(measured["document"]).methods:
        expected = {1, 2, 3} if method.kind in ("chain", "n-gram", "draft model") else set()
        assert set(method.speed_by_draft_length) == expected, method.name


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
    assert "expected more than the 9" in error_of(capsys, *common, "--num-calibration-prompts", "9")
    assert "num_prompts is 0" in error_of(capsys, *common, "--num-prompts", "0")
    assert "lookahead_n is 1" in error_of(capsys, *common, "--methods.lookahead-n", "1")
    assert "ngram_max is 1" in error_of(capsys, *common, "--methods.ngram-max", "1")


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
