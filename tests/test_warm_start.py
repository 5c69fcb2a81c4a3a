"""A run that starts from another drafter's weights starts as good as it was, in its vocabulary; what does not fit is told before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import SPECFORGE, V, W, draft_ids, eagle3_tensors, write, write_layout
from safetensors.torch import load_file
from same_run import losses

from data.target import TargetConfig, load_target_heads, target_hf_config
from train.drafters.base import DrafterConfig, load_drafter_class
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.medusa1 import Medusa1Config
from train.drafters.medusa2 import Medusa2Config
from train.engine import TorchEngine
from train.warm_start import WarmStart, load_warm_start

CONFIGS: dict[str, DrafterConfig] = {
    "safeailab eagle3": Eagle3Config(draft_vocab_size=W),
    "specforge": Eagle3Config(draft_vocab_size=W),
    "speculators": Eagle3Config(draft_vocab_size=W, aux_layers=(1, 3, 6)),
    "safeailab eagle1": Eagle1Config(),
    "medusa": Medusa1Config(num_heads=3, num_layers=2),
}


def started(source: Path, config: DrafterConfig, target: Path, run_dir: Path | None = None) -> WarmStart:
    hf_config = target_hf_config(TargetConfig(str(target)))
    request = load_drafter_class(config.algorithm).feature_request_of(config, hf_config)
    found = load_warm_start(str(source), config, hf_config, request, run_dir or source.parent / "run", is_shown=True)
    assert found is not None
    return found


def report(run: Path) -> dict[str, Any]:
    return json.loads((run / "report.json").read_text())


# --- whole runs -----------------------------------------------------------------------------------------------------------


def test_a_run_from_an_export_starts_where_that_one_ended(launcher: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its acceptance before the first step is the other's after its last: same prompts, same target."""
    launcher.here("first")
    first = launcher.runs_dir / "first"
    assert "init_from" not in json.loads((first / "stages" / "train.json").read_text())["inputs"]  # runs without it keep their fingerprint
    launcher.here("second", "--train.max-steps", "1", "--train.init-from", str(first / "export"))
    second = launcher.runs_dir / "second"
    assert report(second)["tau_untrained"] == report(first)["tau"] != report(first)["tau_untrained"]
    assert json.loads((second / "draft_vocab.json").read_text())["ids"] == json.loads((first / "draft_vocab.json").read_text())["ids"]
    # Wherever the same weights lie, nothing is trained again.
    moved = shutil.copytree(first / "export", launcher.runs_dir / "elsewhere")
    capsys.readouterr()
    launcher.here("second", "--train.max-steps", "1", "--train.init-from", str(moved))
    assert "[train] done before" in capsys.readouterr().out


def test_a_run_from_another_tools_checkpoint_takes_its_vocabulary(launcher: Any) -> None:
    """As that tool wrote it: no conversion by hand. The run's own data would choose other tokens."""
    source = write_layout(launcher.runs_dir / "source", "specforge")
    options = ("--drafter.draft-vocab-size", str(W), "--optim.learning-rate", "1e-30", "--train.max-steps", "1")
    launcher.here("warm", "--train.init-from", str(source), *options)
    run = launcher.runs_dir / "warm"
    assert json.loads((run / "draft_vocab.json").read_text())["ids"] == draft_ids().tolist()
    exported, given = load_file(run / "export" / "model.safetensors"), load_file(source / "model.safetensors")
    for name, tensor in given.items():
        torch.testing.assert_close(exported[name], tensor.to(exported[name].dtype), rtol=1e-6, atol=1e-6)


def damage(source: Path, how: str) -> None:
    """What becomes of a source while a run that started from it is away."""
    shutil.rmtree(source)
    if how == "changed":
        write(source, SPECFORGE, eagle3_tensors("midlayer", torch.float32, seed=7), "model.safetensors")


FROM_SPECFORGE = ("--drafter.draft-vocab-size", str(W))


def killed_after(monkeypatch: pytest.MonkeyPatch, launcher: Any, num_steps: int, *options: str) -> None:
    """The run "killed", ended by the step after so many."""
    take_step = TorchEngine.train_step
    taken = []

    def train_step(*arguments: Any) -> Any:
        if len(taken) == num_steps:
            raise KeyboardInterrupt
        taken.append(None)
        return take_step(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TorchEngine, "train_step", train_step)
        launcher.here("killed", *options)


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_a_run_goes_on_from_what_it_began_with_whatever_became_of_the_source(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Killed after its second checkpoint, it ends bit for bit as one that was not; finished, it is found done."""
    source = write_layout(launcher.runs_dir / "source", "specforge")
    options = ("--train.init-from", str(source), *FROM_SPECFORGE)
    launcher.here("whole", *options)
    killed_after(monkeypatch, launcher, 5, *options)
    damage(source, how)
    capsys.readouterr()
    launcher.here("killed", *options)
    said = capsys.readouterr().out
    assert "steps 4 to 6" in said and "stale" not in said
    assert f"note: --train.init-from {source}: training has begun with what it held then, which is in " in said
    whole, killed = (launcher.runs_dir / name for name in ("whole", "killed"))
    assert losses(killed) == losses(whole) and report(killed)["tau"] == report(whole)["tau"]
    assert report(killed)["tau_untrained"] == report(whole)["tau_untrained"]
    begun_with = [json.loads((run / "stages" / "train.json").read_text())["inputs"]["init_from"] for run in (whole, killed)]
    assert begun_with[0] == begun_with[1]
    exported = [(run / "export" / "model.safetensors").read_bytes() for run in (whole, killed)]
    assert exported[0] == exported[1]
    launcher.here("killed", *options)
    assert "[train] done before" in (said := capsys.readouterr().out) and "stale" not in said


def test_a_run_without_a_checkpoint_begins_with_what_the_source_holds_now(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_layout(launcher.runs_dir / "source", "specforge")
    options = ("--train.init-from", str(source), *FROM_SPECFORGE)
    killed_after(monkeypatch, launcher, 1, *options)
    damage(source, "changed")
    launcher.here("killed", *options, "--optim.learning-rate", "1e-30", "--train.max-steps", "1")
    exported = load_file(launcher.runs_dir / "killed" / "export" / "model.safetensors")
    given = load_file(source / "model.safetensors")
    torch.testing.assert_close(exported["fc.weight"], given["fc.weight"], rtol=1e-6, atol=1e-6)


def test_a_run_that_cannot_start_so_says_it_before_any_work(launcher: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.here("wrong", "--train.init-from", str(write_layout(launcher.runs_dir / "source", "medusa")))
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "is a drafter of medusa1, but this run trains eagle3" in captured.err
    assert "[prepare]" not in captured.out
    assert not (launcher.runs_dir / "wrong" / "data").exists()


def test_a_dry_run_says_the_same_of_weights_that_do_not_fit(launcher: Any, capsys: pytest.CaptureFixture[str]) -> None:
    layout, option = write_layout(launcher.runs_dir / "source", "medusa"), ("--drafter.draft-vocab-size", str(W))
    said = []
    for name, *dry in (("run",), ("plan", "--dry-run", "--plan.gpus", "1", "--plan.gpu-memory-gb", "80")):
        with pytest.raises(SystemExit, match="2"):
            launcher.here(name, "--train.init-from", str(layout), *dry)
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "is a drafter of medusa1" in said[1]
    fits = write_layout(launcher.runs_dir / "fits", "specforge")
    launcher.here("plan", "--train.init-from", str(fits), *option, *dry)
    assert "note:" not in (out := capsys.readouterr().out) and "drafter parameters" in out
    assert not (launcher.runs_dir / "plan").exists()


# --- what fits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", CONFIGS)
def test_every_parameter_is_taken(tmp_path: Path, tiny_target: Path, layout: str) -> None:
    config = CONFIGS[layout]
    warm_start = started(write_layout(tmp_path / "source", layout), config, tiny_target)
    target_config = TargetConfig(str(tiny_target))
    heads = load_target_heads(target_config, "cpu", torch.float32)
    drafter = load_drafter_class(config.algorithm)(config, target_hf_config(target_config), heads, warm_start.vocabulary(torch.ones(V).numpy()))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(float("nan"))
    warm_start.load_into(drafter)
    assert all(bool(parameter.isfinite().all()) for parameter in drafter.parameters())
    names = {name for name in drafter.export_tensors() if name not in ("d2t", "t2d", "fc.bias")}
    _, tensors = warm_start._checkpoint.prepared()
    assert all(torch.equal(drafter.export_tensors()[name], tensors[name].float()) for name in names)


@pytest.mark.parametrize("layout", CONFIGS)
def test_what_a_run_keeps_is_what_it_read(tmp_path: Path, tiny_target: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept of one source, it is read for no other; and only where training has begun."""
    source, run, config = write_layout(tmp_path / "source", layout), tmp_path / "run", CONFIGS[layout]
    read = started(source, config, tiny_target)
    read.keep(run)
    other = shutil.copytree(source, tmp_path / "other")
    capsys.readouterr()
    started(source, config, tiny_target, run)
    assert "training has begun" not in capsys.readouterr().out
    (run / "best.json").write_text("{}")
    started(other, config, tiny_target, run)
    assert "training has begun" not in capsys.readouterr().out
    shutil.rmtree(source)
    kept = started(source, config, tiny_target, run)
    assert "training has begun" in capsys.readouterr().out and kept.digest == read.digest
    kept.keep(run)
    assert started(source, config, tiny_target, run).digest == read.digest


def test_medusa1_heads_start_medusa2(tmp_path: Path, tiny_target: Path) -> None:
    started(write_layout(tmp_path / "source", "medusa"), Medusa2Config(num_heads=3, num_layers=2), tiny_target)


def test_coverage_is_that_of_the_runs_own_data(tmp_path: Path, tiny_target: Path) -> None:
    warm_start = started(write_layout(tmp_path / "source", "specforge"), CONFIGS["specforge"], tiny_target)
    counts_V = torch.zeros(V, dtype=torch.int64)
    counts_V[draft_ids()[0]], counts_V[next(token for token in range(V) if token not in draft_ids())] = 3, 1
    vocabulary = warm_start.vocabulary(counts_V.numpy())
    assert vocabulary is not None
    assert vocabulary.coverage == 0.75


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [
        ("safeailab eagle1", Eagle3Config(), "is a drafter of eagle1, but this run trains eagle3"),
        ("specforge", Eagle3Config(draft_vocab_size=50), "drafts from 96 tokens, this run from 50: set --drafter.draft-vocab-size 96"),
        ("specforge", Eagle3Config(draft_vocab_size=None), f"drafts from 96 tokens, this run from {V}: set --drafter.draft-vocab-size 96"),
        ("speculators", Eagle3Config(draft_vocab_size=W), r"states \[1, 3, 6\], this run those of \[2, 3, 4\]: set --drafter.aux-layers 1 3 6"),
        ("specforge", Eagle3Config(draft_vocab_size=W, intermediate_size=40), "another shape .*: intermediate_size 48 instead of 40"),
        ("medusa", Medusa1Config(num_heads=5, num_layers=2), "num_heads 3 instead of 5"),
        ("medusa", Medusa1Config(num_heads=3, num_layers=2, shared_lm_head=True), "original_lm_head False instead of True"),
    ],
)
def test_weights_of_another_drafter_are_refused(tmp_path: Path, tiny_target: Path, layout: str, config: DrafterConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        started(write_layout(tmp_path / "source", layout), config, tiny_target)


def test_a_folder_that_is_no_drafter_is_refused_by_the_options_name(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--train.init-from: .*this is no drafter that headstart knows"):
        started(tiny_target, Eagle3Config(), tiny_target)
    with pytest.raises(ValueError, match=r"--train.init-from: .*expected the folder of a checkpoint or a Hub id"):
        started(tmp_path / "nowhere", Eagle3Config(), tiny_target)


def test_another_rotation_is_told(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(write_layout(tmp_path / "source", "specforge"), CONFIGS["specforge"], tiny_target)
    assert "it was trained with the rotation {'rope_type': 'linear'" in capsys.readouterr().out


def test_an_embedding_that_is_not_the_targets_is_told(tmp_path: Path, tiny_target: Path) -> None:
    heads = load_target_heads(TargetConfig(str(tiny_target)), "cpu", torch.float32)
    told = ["its embed_tokens.weight differs from the target's by 100.0%; the target's is taken"]
    for own, expected in ((heads.embed_VH, []), (2 * heads.embed_VH, told)):
        tensors = eagle3_tensors("midlayer", torch.float32) | {"embed_tokens.weight": own.clone()}
        folder = write(tmp_path / f"source {len(expected)}", SPECFORGE, tensors, "model.safetensors")
        assert started(folder, CONFIGS["specforge"], tiny_target).differences(heads) == expected


def test_the_digest_is_of_the_content(tmp_path: Path, tiny_target: Path) -> None:
    def digest(name: str, seed: int, **changes: object) -> str:
        source = write(tmp_path / name, {**SPECFORGE, **changes}, eagle3_tensors("midlayer", torch.float32, seed=seed), "model.safetensors")
        return started(source, CONFIGS["specforge"], tiny_target).digest

    assert digest("a", 0) == digest("b", 0)
    assert len({digest("c", 0), digest("d", 1), digest("e", 0, rms_norm_eps=1e-6)}) == 3
