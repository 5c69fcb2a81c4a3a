"""Checkpoints of other tools become ours and ours theirs, bit for bit; they draft as they did; what cannot be is said in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import (
    MEDUSA,
    NUM_LAYERS,
    NUM_MEDUSA_HEADS,
    SAFEAILAB_EAGLE1,
    SAFEAILAB_EAGLE3,
    SPECFORGE,
    SPECULATORS,
    H,
    V,
    draft_ids,
    eagle1_logits,
    eagle1_tensors,
    eagle3_logits,
    eagle3_tensors,
    medusa_logits,
    medusa_tensors,
    write,
    write_layout,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.convert import main
from checkpoints.export import read_export
from checkpoints.serving import aux_layers_of_config
from data.target import Target, TargetConfig
from eval.evaluation import exported_drafter
from eval.methods import check_drafter, find_drafters
from train.drafters.base import VerifiedStates

LAYOUTS = ("safeailab eagle3", "safeailab eagle1", "specforge", "specforge with norms", "speculators", "speculators with norms", "medusa")
FILES = {"safeailab": "pytorch_model.bin", "specforge": "model.safetensors", "speculators": "model.safetensors", "medusa": "medusa_lm_head.pt"}


def convert(source: Path, out: Path, to: str, *options: str) -> dict[str, Any]:
    """The written config.json."""
    assert main([str(source), str(out), "--to", to, *options]) == 0
    return json.loads((out / "config.json").read_text())


def refusal(capsys: pytest.CaptureFixture[str], source: Path | str, out: Path, to: str, *options: str) -> str:
    """The one line of a conversion that cannot be; nothing is left of it."""
    before = sorted(out.parent.iterdir()) if out.parent.exists() else []
    capsys.readouterr()
    assert main([str(source), str(out), "--to", to, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert (sorted(out.parent.iterdir()) if out.parent.exists() else []) == before
    return line


def stored(folder: Path, layout: str) -> dict[str, Tensor]:
    path = folder / FILES[layout.split()[0]]
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Names, dtypes and every bit."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in found
    )


# --- round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_foreign_checkpoint_comes_back_bit_for_bit(tmp_path: Path, layout: str) -> None:
    source = write_layout(tmp_path / "source", layout)
    convert(source, tmp_path / "ours", "headstart")
    # Medusa's target is known from the source; that of a speculators checkpoint too.
    convert(tmp_path / "ours", tmp_path / "back", layout.split()[0])
    assert same(stored(tmp_path / "back", layout), stored(source, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ours_comes_back_from_every_layout_with_the_same_config(tmp_path: Path, layout: str, tiny_target: Path) -> None:
    target = ("--target", str(tiny_target))
    config = convert(write_layout(tmp_path / "source", layout), tmp_path / "ours", "headstart", *target)
    convert(tmp_path / "ours", tmp_path / "theirs", layout.split()[0], *target)
    again = convert(tmp_path / "theirs", tmp_path / "again", "headstart", *target)
    assert again == config
    assert same(load_file(tmp_path / "again" / "model.safetensors"), load_file(tmp_path / "ours" / "model.safetensors"))


@pytest.mark.parametrize("other", ["safeailab", "specforge", "speculators"])
def test_eagle3_goes_from_one_tool_to_another_without_ours_in_between(tmp_path: Path, tiny_target: Path, other: str) -> None:
    source = write(tmp_path / "source", SAFEAILAB_EAGLE3, eagle3_tensors("midlayer", torch.float16), "model.safetensors")
    convert(source, tmp_path / "specforge", "specforge")
    if other == "safeailab":
        convert(tmp_path / "specforge", tmp_path / other, other)
    elif other == "speculators":
        convert(tmp_path / "specforge", tmp_path / other, other, "--target", str(tiny_target))
    names = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored(tmp_path / other, other).items()}
    assert same(names, load_file(source / "model.safetensors"))


# --- what is written is what its reader expects ---------------------------------------------------------------------------


def test_the_names_that_each_tool_loads_are_written(tmp_path: Path, tiny_target: Path) -> None:
    """Against the documented shapes, spelled out in foreign_checkpoints.py; the configs' fields that its code reads."""
    ours = tmp_path / "ours"
    convert(write_layout(tmp_path / "source", "safeailab eagle3"), ours, "headstart")
    safeailab = convert(ours, tmp_path / "safeailab", "safeailab")
    assert {name: safeailab[name] for name in SAFEAILAB_EAGLE3.keys() & safeailab.keys()} == {
        name: value for name, value in SAFEAILAB_EAGLE3.items() if name in safeailab
    }
    assert {"draft_vocab_size", "pretraining_tp", "rms_norm_eps", "vocab_size", "rope_scaling", "rope_theta"} <= safeailab.keys()
    specforge = convert(ours, tmp_path / "specforge", "specforge")
    assert specforge["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "eagle_aux_hidden_state_layer_ids" not in specforge  # vLLM's, at the top level
    speculators = convert(ours, tmp_path / "speculators", "speculators", "--target", str(tiny_target), "--num-drafts", "4")
    assert speculators["speculators_config"]["verifier"]["name_or_path"] == str(tiny_target)
    assert speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert speculators["norm_before_residual"] is False
    assert "model_type" not in speculators
    assert speculators["transformer_layer_config"]["model_type"] == "llama"


def test_safeailabs_eagle1_code_is_told_that_there_is_no_bias(tmp_path: Path) -> None:
    """It makes one, at random, unless its config says no."""
    convert(write_layout(tmp_path / "source", "safeailab eagle1"), tmp_path / "ours", "headstart")
    written = convert(tmp_path / "ours", tmp_path / "back", "safeailab")
    assert {name: written[name] for name in SAFEAILAB_EAGLE1.keys() & written.keys()} == {
        name: value for name, value in SAFEAILAB_EAGLE1.items() if name in written
    }
    assert written["bias"] is False


def test_medusa_is_written_with_what_its_own_loader_reads(tmp_path: Path) -> None:
    convert(write_layout(tmp_path / "source", "medusa"), tmp_path / "ours", "headstart")
    written = convert(tmp_path / "ours", tmp_path / "back", "medusa")  # the target's name was in the source
    assert {name: written[name] for name in MEDUSA} == MEDUSA


def test_auxiliary_layers_are_counted_as_each_tool_counts_them(tmp_path: Path, tiny_target: Path) -> None:
    """HF hidden_states 2, 4, 6 are ids 2, 4, 6 for vLLM and speculators, and 1, 3, 5 for SGLang and SpecForge."""
    source = write(
        tmp_path / "source",
        {**SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}},
        eagle3_tensors("midlayer", torch.float32),
        "model.safetensors",
    )
    target = ("--target", str(tiny_target))
    ours = convert(source, tmp_path / "ours", "headstart", *target)
    assert ours["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert ours["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert convert(tmp_path / "ours", tmp_path / "speculators", "speculators", *target)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert convert(tmp_path / "speculators", tmp_path / "back", "specforge")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]


def test_layers_that_are_named_and_are_the_default_ones_are_not_told_from_them(tmp_path: Path, tiny_target: Path) -> None:
    """2, 7 // 2, 7 - 3: with the target at hand both are known to be the same, so SafeAILab's code, which has only these, can run it."""
    config = {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    source = write(tmp_path / "source", config, eagle3_tensors("layers.0", torch.float32), "model.safetensors")
    target = ("--target", str(tiny_target))
    ours = convert(source, tmp_path / "ours", "headstart", *target)
    assert "eagle_aux_hidden_state_layer_ids" not in ours
    assert aux_layers_of_config(ours, NUM_LAYERS) == (2, 3, 4)
    convert(source, tmp_path / "safeailab", "safeailab", *target)


# --- what is drafted ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def states(tiny_target: Path) -> dict[str, Any]:
    """Sixteen random tokens, the target's states of them and its frozen parts, through transformers alone."""
    target = Target.load(TargetConfig(str(tiny_target), dtype="float32"), "cpu")
    ids = torch.randint(V, (16,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = target.model(input_ids=ids[None], output_hidden_states=True).hidden_states
        embed, head = target.model.get_input_embeddings().weight.clone(), target.model.lm_head.weight.clone()
    return {"ids": ids, "hidden": [layer[0] for layer in found], "embed": embed, "head": head}


def ours_logits(folder: Path, target: Path, states: dict[str, Any], aux_layers: tuple[int, ...] | None = None, num_drafts: int = 1) -> Tensor:
    """[drafts, n, W]: of the drafter that the evaluation loads, at every position, one prefix after the other."""
    drafter = exported_drafter(folder, TargetConfig(str(target), dtype="float32"), torch.device("cpu"))
    ids, last = states["ids"], states["hidden"][-1]
    rows = []
    for length in range(1, len(ids)):
        aux = torch.cat([states["hidden"][layer] for layer in drafter.request.aux_layers], dim=-1)[None, :length] if aux_layers else None
        assert aux_layers is None or drafter.request.aux_layers == aux_layers
        verified = VerifiedStates(aux, last[None, :length], ids[None, 1 : length + 1], torch.tensor([length]))
        rows.append(drafter.read(drafter.new_cache(1, 40), verified, num_drafts).logits_BnW[0])
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize(
    ("layout", "aux_layers", "theta", "factor", "eps"),
    [
        ("safeailab eagle3", (2, 3, 4), 10000.0, 1.0, 1e-5),  # no rope_theta in its config: 10000
        ("specforge", (2, 3, 4), 20000.0, 2.0, 1e-5),
        ("speculators", (1, 3, 6), 3000.0, 1.0, 1e-6),  # no rms_norm_eps in its config: transformers' default
        ("speculators with norms", (1, 3, 6), 3000.0, 1.0, 1e-6),
        ("specforge with norms", (2, 3, 4), 20000.0, 2.0, 1e-5),
    ],
)
def test_an_imported_eagle3_head_drafts_as_its_own_tool_would(
    tmp_path: Path, tiny_target: Path, states: dict[str, Any], layout: str, aux_layers: tuple[int, ...], theta: float, factor: float, eps: float
) -> None:
    source = write_layout(tmp_path / "source", layout)
    convert(source, tmp_path / "ours", "headstart", "--target", str(tiny_target))
    aux = torch.cat([states["hidden"][layer] for layer in aux_layers], dim=-1)
    layer = "layers.0" if layout.startswith("speculators") else "midlayer"
    is_normed = layout == "speculators with norms"
    expected = eagle3_logits(stored(source, layout), layer, aux[:-1], states["embed"][states["ids"][1:]], theta, factor, eps, is_normed)
    torch.testing.assert_close(ours_logits(tmp_path / "ours", tiny_target, states, aux_layers)[0], expected, rtol=1e-4, atol=1e-4)
    drafter = exported_drafter(tmp_path / "ours", TargetConfig(str(tiny_target), dtype="float32"), torch.device("cpu"))
    assert torch.equal(drafter.draft_ids_W, draft_ids())


def test_an_imported_eagle1_head_drafts_as_its_own_tool_would(tmp_path: Path, tiny_target: Path, states: dict[str, Any]) -> None:
    """With its own embedding, which differs from the target's, as vLLM takes it."""
    source = write_layout(tmp_path / "source", "safeailab eagle1")
    convert(source, tmp_path / "ours", "headstart")
    tensors = stored(source, "safeailab")
    embed = tensors["embed_tokens.weight"].float()[states["ids"][1:]]
    expected = eagle1_logits(tensors, states["hidden"][-1][:-1], embed, states["head"], 500000.0, 1e-5)
    torch.testing.assert_close(ours_logits(tmp_path / "ours", tiny_target, states)[0], expected, rtol=1e-4, atol=1e-4)


def test_imported_medusa_heads_draft_as_their_own_tool_would(tmp_path: Path, tiny_target: Path, states: dict[str, Any]) -> None:
    source = write_layout(tmp_path / "source", "medusa")
    convert(source, tmp_path / "ours", "headstart")
    expected = medusa_logits(stored(source, "medusa"), states["hidden"][-1][:-1])
    found = ours_logits(tmp_path / "ours", tiny_target, states, num_drafts=NUM_MEDUSA_HEADS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_converted_folder_is_compared_like_a_run(tmp_path: Path, tiny_target: Path) -> None:
    convert(write_layout(tmp_path / "source", "specforge"), tmp_path / "imported", "headstart")
    [found] = find_drafters([str(tmp_path / "imported")])
    assert (found.algorithm, found.label, found.backbone) == ("eagle3", "EAGLE-3", None)
    check_drafter(found, TargetConfig(str(tiny_target)))
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": V + 2}))
    with pytest.raises(ValueError, match=f"vocab_size {V}, but .* has {V + 2}: it belongs to another target"):
        check_drafter(found, TargetConfig(str(other)))


def test_a_foreign_folder_in_a_comparison_is_answered_with_the_command_that_converts_it(tmp_path: Path) -> None:
    source = write_layout(tmp_path / "source", "specforge")
    with pytest.raises(ValueError, match=rf"python -m checkpoints.convert {source} OUT --to headstart"):
        find_drafters([str(source)])


# --- traps ----------------------------------------------------------------------------------------------------------------


def test_a_bias_that_vllm_drops_is_refused_until_it_is_dropped_knowingly(
    tmp_path: Path, tiny_target: Path, states: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = eagle1_tensors(torch.float32) | {"fc.bias": torch.full((H,), 0.5)}
    config = {name: value for name, value in SAFEAILAB_EAGLE1.items() if name != "bias"}
    source = write(tmp_path / "source", config, tensors, "pytorch_model.bin")
    assert "vLLM drops it without a word. --drop-fc-bias" in refusal(capsys, source, tmp_path / "out" / "ours", "headstart")
    convert(source, tmp_path / "ours", "headstart", "--drop-fc-bias")
    assert "fc.bias dropped, as vLLM drops it (largest 0.5)" in capsys.readouterr().out
    embed = tensors["embed_tokens.weight"][states["ids"][1:]]
    expected = eagle1_logits(tensors, states["hidden"][-1][:-1], embed, states["head"], 500000.0, 1e-5)  # knows no bias
    torch.testing.assert_close(ours_logits(tmp_path / "ours", tiny_target, states)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("missing", ["t2d", "d2t"])
def test_a_vocabulary_map_that_is_missing_is_made_from_the_other(tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = eagle3_tensors("midlayer", torch.float32)
    expected = tensors.pop(missing)
    convert(write(tmp_path / "source", SPECFORGE, tensors, "model.safetensors"), tmp_path / "ours", "headstart")
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")[missing], expected)
    assert f"{missing} is missing and was made from" in capsys.readouterr().out


def test_ids_in_the_place_of_offsets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = eagle3_tensors("midlayer", torch.float32)
    tensors["d2t"] = draft_ids()
    source = write(tmp_path / "source", SPECFORGE, tensors, "model.safetensors")
    assert "d2t holds offsets (target id - j), not ids" in refusal(capsys, source, tmp_path / "out" / "ours", "headstart")


def test_the_whole_vocabulary_has_no_maps_in_ours_and_both_in_specforge(tmp_path: Path) -> None:
    """SpecForge's models save zeros and ones; vLLM has no place for them."""
    tensors = eagle3_tensors("midlayer", torch.float32, size=V)
    tensors |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    source = write(tmp_path / "source", {**SPECFORGE, "draft_vocab_size": V}, tensors, "model.safetensors")
    assert convert(source, tmp_path / "ours", "headstart")["draft_vocab_size"] == V
    assert not {"d2t", "t2d"} & load_file(tmp_path / "ours" / "model.safetensors").keys()
    convert(tmp_path / "ours", tmp_path / "back", "specforge")
    assert same(load_file(tmp_path / "back" / "model.safetensors"), tensors)


def test_an_embedding_of_its_own_stays_and_is_what_is_drafted_with(tmp_path: Path, tiny_target: Path, states: dict[str, Any]) -> None:
    own = torch.randn(V, H, generator=torch.Generator().manual_seed(8))
    tensors = eagle3_tensors("layers.0", torch.float32) | {"embed_tokens.weight": own}
    source = write(tmp_path / "source", SPECULATORS, tensors, "model.safetensors")
    convert(source, tmp_path / "ours", "headstart")
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")["embed_tokens.weight"], own)
    aux = torch.cat([states["hidden"][layer] for layer in (1, 3, 6)], dim=-1)[:-1]
    expected = eagle3_logits(tensors, "layers.0", aux, own[states["ids"][1:]], 3000.0, 1.0, 1e-6)
    torch.testing.assert_close(ours_logits(tmp_path / "ours", tiny_target, states, (1, 3, 6))[0], expected, rtol=1e-4, atol=1e-4)


def test_the_targets_embedding_is_added_where_it_is_asked_for(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_layout(tmp_path / "source", "specforge"), ("--target", str(tiny_target))
    convert(source, tmp_path / "without", "speculators", *target)
    assert "speculators 0.9.0 itself starts from whatever is in memory: --with-embedding" in capsys.readouterr().out
    convert(source, tmp_path / "with", "speculators", "--with-embedding", *target)
    assert "the target's embedding added, rounded from torch.float32 to torch.bfloat16" in capsys.readouterr().out
    written, expected = load_file(tmp_path / "with" / "model.safetensors"), load_file(tiny_target / "model.safetensors")
    assert torch.equal(written.pop("embed_tokens.weight"), expected["model.embed_tokens.weight"].bfloat16())
    assert same(written, load_file(tmp_path / "without" / "model.safetensors"))
    again = refusal(capsys, tmp_path / "with", tmp_path / "out" / "more", "headstart", "--with-embedding", *target)
    assert "has an embedding of its own" in again
    assert "say which target with --target" in refusal(capsys, source, tmp_path / "out" / "more", "headstart", "--with-embedding")


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    source = write_layout(tmp_path / "source", "safeailab eagle3")
    tensors = stored(source, "safeailab")
    (source / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[:7], "pytorch_model-00002-of-00002.bin": names[7:]}
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, source / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    convert(source, tmp_path / "ours", "headstart")
    assert same(load_file(tmp_path / "ours" / "model.safetensors"), tensors)


def test_tensors_of_several_dtypes_are_brought_to_the_one_that_holds_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = eagle3_tensors("midlayer", torch.float16)
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.bfloat16)
    config = convert(write(tmp_path / "source", SPECFORGE, tensors, "model.safetensors"), tmp_path / "ours", "headstart")
    assert config["dtype"] == "float32"
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")["norm.weight"], tensors["norm.weight"].float())
    assert "all stored as torch.float32, which holds them exactly" in capsys.readouterr().out


def test_a_context_shorter_than_the_targets_is_raised_to_it(tmp_path: Path, tiny_target: Path) -> None:
    """SGLang refuses a draft whose context is shorter."""
    source = write_layout(tmp_path / "source", "safeailab eagle3")
    assert convert(source, tmp_path / "alone", "headstart")["max_position_embeddings"] == 128
    assert convert(source, tmp_path / "ours", "headstart", "--target", str(tiny_target))["max_position_embeddings"] == 512


def test_heads_inside_a_models_files_are_taken_out(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As FasterDecoding's 1.0 checkpoints keep them; the model is not read."""
    heads = medusa_tensors(torch.float32)
    tensors = {f"medusa_head.{name}": tensor for name, tensor in heads.items()} | {"model.embed_tokens.weight": torch.zeros(V, H)}
    source = write(tmp_path / "source", {**MEDUSA, "model_type": "llama"}, tensors, "model.safetensors")
    convert(source, tmp_path / "ours", "headstart")
    assert "1 tensors of the model itself left out" in capsys.readouterr().out
    convert(tmp_path / "ours", tmp_path / "back", "medusa", "--target", str(tiny_target))
    assert same(stored(tmp_path / "back", "medusa"), heads)


def test_a_file_with_more_heads_than_its_config_says_gives_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FasterDecoding's own loader passes over the rest."""
    source = write(tmp_path / "source", {**MEDUSA, "medusa_num_heads": 2}, medusa_tensors(torch.float32), "medusa_lm_head.pt")
    assert convert(source, tmp_path / "ours", "headstart")["num_heads"] == NUM_MEDUSA_HEADS
    assert "config.json speaks of 2 heads, but the file has 3" in capsys.readouterr().out


def test_one_head_for_all_is_written_once_for_each_medusa_head(tmp_path: Path, tiny_target: Path) -> None:
    tensors = {f"blocks.{head}.layers.0.weight": torch.randn(H, H) for head in (0, 1)}
    tensors |= {f"blocks.{head}.layers.0.bias": torch.randn(H) for head in (0, 1)} | {"lm_head.weight": torch.randn(V, H)}
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "original_lm_head": True}
    source = write(tmp_path / "source", config, tensors, "model.safetensors")
    convert(source, tmp_path / "theirs", "medusa", "--target", str(tiny_target))
    written = stored(tmp_path / "theirs", "medusa")
    assert torch.equal(written["0.1.weight"], tensors["lm_head.weight"])
    assert torch.equal(written["1.1.weight"], tensors["lm_head.weight"])


# --- what cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "to", "message"),
    [
        ("safeailab eagle1", "speculators", "eagle1 cannot be written in the speculators layout: vLLM reads EAGLE-3 of this layout"),
        ("safeailab eagle1", "specforge", "it is for EAGLE-3 heads"),
        ("medusa", "safeailab", "it is for EAGLE heads"),
        ("specforge", "medusa", "it is for Medusa heads"),
        ("specforge", "speculators", "names the target that it serves with: say it with --target"),
        ("speculators", "safeailab", "always takes the default three"),
        ("speculators with norms", "safeailab", "norm_before_residual, fc_norm, norm_output, for which the safeailab layout has no place"),
        ("speculators with norms", "specforge", "norm_before_residual, for which the specforge layout has no place"),
        ("specforge", "safeailab", "SafeAILab's code has rope_type default, and linear with theta 10000"),
        ("specforge", "specforge", "is in the specforge layout already"),
    ],
)
def test_a_layout_without_a_place_for_something_says_for_what(
    tmp_path: Path, layout: str, to: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_layout(tmp_path / "source", layout)
    assert message in refusal(capsys, source, tmp_path / "out" / "theirs", to)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (SPECFORGE, {"attention_bias": True}, "its projections have biases"),
        (SPECFORGE, {"layer_types": ["sliding_attention"], "sliding_window": 64}, "a sliding_window of 64 tokens: its attention sees no more"),
        (SPECFORGE, {"hidden_act": "gelu"}, 'hidden_act "gelu", but our draft block is one Llama layer: expected "silu"'),
        (SPECFORGE, {"num_hidden_layers": 2}, "num_hidden_layers 2"),
        (SPECFORGE, {"target_hidden_size": 64}, "our drafters are as wide as their target"),
        (SPECFORGE, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "our draft block rotates whole heads, with rope_type default, linear"),
        (SPECFORGE, {"hidden_size": None}, "config.json lacks hidden_size"),
        (SPECFORGE, {"intermediate_size": 40}, f"midlayer.mlp.gate_proj.weight is [48, {H}] float32, expected [40, {H}] float32"),
        (SPECFORGE, {"draft_vocab_size": 50}, "config.json has draft_vocab_size 50, but lm_head.weight has 96 rows"),
        (SPECFORGE, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, "it joins 3 states of width 32, but config.json names 2 layers"),
        (
            SPECFORGE,
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
            "which vLLM reads as HF hidden_states [1, 3, 5], and in eagle_config [1, 3, 5], which SGLang reads as [2, 4, 6]: say which",
        ),
    ],
)
def test_a_config_that_means_another_drafter_is_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "source", {**base, **changes}, eagle3_tensors("midlayer", torch.float32), "model.safetensors")
    assert message in refusal(capsys, source, tmp_path / "out" / "ours", "headstart")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": "REMOVE"}, "does not say norm_before_residual: vLLM takes true and speculators false"),
        ({"fc_norm": True}, "fc_norm.0.weight is missing, expected [32]"),
        ({"attention_bias": True}, "attention_bias true: its projections have biases"),
        ({"speculators_model_type": "dflash"}, 'speculators_model_type is "dflash": headstart has no such drafter'),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, 'model_type "qwen3"'),
        ({"transformer_layer_config": "REMOVE"}, "config.json has no transformer_layer_config"),
    ],
)
def test_a_speculators_checkpoint_of_another_block_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {name: value for name, value in {**SPECULATORS, **changes}.items() if value != "REMOVE"}
    source = write(tmp_path / "source", config, eagle3_tensors("layers.0", torch.float32), "model.safetensors")
    assert message in refusal(capsys, source, tmp_path / "out" / "ours", "headstart")


def test_a_window_that_holds_everything_stays_and_a_sliding_targets_draft_gets_one(tmp_path: Path, tiny_target: Path) -> None:
    """Without one of its own, vLLM gives a draft layer the window of a target whose layers all slide."""
    target = tmp_path / "target"
    target.mkdir()
    fields = json.loads((tiny_target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}))
    source = write_layout(tmp_path / "source", "specforge")
    assert "sliding_window" not in convert(source, tmp_path / "plain", "headstart", "--target", str(tiny_target))
    ours = convert(source, tmp_path / "ours", "headstart", "--target", str(target))
    assert (ours["layer_types"], ours["sliding_window"]) == (["sliding_attention"], 512)
    convert(tmp_path / "ours", tmp_path / "theirs", "speculators", "--target", str(target))
    assert convert(tmp_path / "theirs", tmp_path / "again", "headstart", "--target", str(tiny_target)) == ours


def test_conflicting_layers_can_be_decided(tmp_path: Path) -> None:
    config = {**SPECFORGE, "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}
    source = write(tmp_path / "source", config, eagle3_tensors("midlayer", torch.float32), "model.safetensors")
    assert convert(source, tmp_path / "ours", "headstart", "--aux-layers", "2", "4", "6")["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"vocab_size": V + 1}, f"it was made for a target with vocab_size {V}, but the target's is {V + 1}"),
        ({"hidden_size": 64}, f"hidden_size {H}, but the target's is 64"),
    ],
)
def test_a_target_of_other_sizes_is_refused(
    tmp_path: Path, tiny_target: Path, option: dict[str, int], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(json.loads((tiny_target / "config.json").read_text()) | option))
    source = write_layout(tmp_path / "source", "specforge")
    assert message in refusal(capsys, source, tmp_path / "out" / "ours", "headstart", "--target", str(target))


# --- damaged and hostile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["midlayer.self_attn.k_proj.weight", "fc.weight", "norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = eagle3_tensors("midlayer", torch.float32)
    del tensors[name]
    source = write(tmp_path / "source", SPECFORGE, tensors, "model.safetensors")
    line = refusal(capsys, source, tmp_path / "out" / "ours", "headstart")
    assert name in line if name != "fc.weight" else "no drafter that headstart knows" in line


def test_a_tensor_that_no_engine_loads_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = eagle3_tensors("midlayer", torch.float32) | {"midlayer.self_attn.q_norm.weight": torch.ones(8)}
    source = write(tmp_path / "source", SPECFORGE, tensors, "model.safetensors")
    assert "midlayer.self_attn.q_norm.weight is unexpected: vLLM raises on it" in refusal(capsys, source, tmp_path / "out" / "ours", "headstart")


class Hostile:
    """Would make a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_refused_by_name_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_layout(tmp_path / "source", "safeailab eagle3")
    torch.save({"fc.weight": torch.zeros(1), "more": Hostile(tmp_path / "was run")}, source / "pytorch_model.bin")
    line = refusal(capsys, source, tmp_path / "out" / "ours", "headstart")
    assert "mkdir, which is code and no tensor: nothing of it was run" in line
    assert "weights_only" not in line  # torch's own advice is to switch the check off
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("layout", ["safeailab eagle3", "specforge"])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_layout(tmp_path / "source", layout)
    path = source / FILES[layout.split()[0]]
    path.write_bytes(path.read_bytes()[:-1000])
    line = refusal(capsys, source, tmp_path / "out" / "ours", "headstart")
    assert f"{path} is damaged" in line
    assert "copy or download it again" in line


def test_other_contents_are_refused_with_what_was_found(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "ours"
    line = refusal(capsys, tiny_target, out, "headstart")
    assert "this is no drafter that headstart knows" in line
    assert "lm_head.weight, model.embed_tokens.weight" in line
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json is missing" in refusal(capsys, empty, out, "headstart")
    (empty / "config.json").write_text("{")
    assert "is not JSON" in refusal(capsys, empty, out, "headstart")
    (empty / "config.json").write_text("{}")
    assert "has no tensors: found config.json" in refusal(capsys, empty, out, "headstart")
    torch.save({"epoch": 3, "state_dict": {}}, empty / "pytorch_model.bin")
    assert "holds dict, int, expected tensors by name" in refusal(capsys, empty, out, "headstart")
    assert "expected the folder of a checkpoint or a Hub id" in refusal(capsys, tmp_path / "nowhere", out, "headstart")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    source = write_layout(tmp_path / "source", "specforge")
    assert main([str(source), str(tmp_path / "file" / "out"), "--to", "headstart"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(tmp_path / "file") in line


def test_an_index_that_lies_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_layout(tmp_path / "source", "specforge")
    index, out = source / "model.safetensors.index.json", tmp_path / "out" / "ours"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    assert "names the file ../elsewhere.safetensors, which is outside its folder" in refusal(capsys, source, out, "headstart")
    index.write_text(json.dumps({"weight_map": {"fc.weight": "gone.safetensors"}}))
    assert "names gone.safetensors, which is missing" in refusal(capsys, source, out, "headstart")
    index.write_text(json.dumps({"weight_map": {"fc.bias": "model.safetensors"}}))
    assert "promises fc.bias in model.safetensors, which lacks it" in refusal(capsys, source, out, "headstart")


def test_only_an_earlier_conversion_is_replaced(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_layout(tmp_path / "source", "specforge")
    for to, options in (("headstart", ()), ("speculators", ("--target", str(tiny_target)))):
        convert(source, tmp_path / to, to, *options)
        convert(source, tmp_path / to, to, *options)
        (tmp_path / to / "notes.txt").write_text("mine")
        assert "notes.txt, which no export wrote" in refusal(capsys, source, tmp_path / to, to, *options)
        assert (tmp_path / to / "notes.txt").read_text() == "mine"
    downloaded = write_layout(tmp_path / "downloaded", "speculators")
    before = (downloaded / "model.safetensors").read_bytes()
    for to in ("headstart", "safeailab"):
        refusal(capsys, write_layout(tmp_path / f"for {to}", "safeailab eagle3"), downloaded, "headstart")
    assert "is the source itself" in refusal(capsys, downloaded, downloaded, "headstart")
    assert (downloaded / "model.safetensors").read_bytes() == before


def test_a_conversion_tells_what_it_read_wrote_and_how_it_is_served(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_layout(tmp_path / "source", "safeailab eagle3")
    convert(source, tmp_path / "ours", "headstart", "--target", str(tiny_target))
    out = capsys.readouterr().out
    assert "read     safeailab eagle3: 15 tensors of float16" in out
    assert "the target's HF hidden_states [2, 3, 4]" in out
    assert f"vllm serve {tiny_target} --speculative-config" in out
    convert(tmp_path / "ours", tmp_path / "theirs", "speculators", "--target", str(tiny_target))
    assert f"use      vllm serve {tmp_path / 'theirs'}" in capsys.readouterr().out


def test_what_is_written_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    """But for the target's in a speculators config, without which nothing would be served."""
    convert(write_layout(tmp_path / "source", "specforge"), tmp_path / "ours", "headstart")
    text = "".join((tmp_path / "ours" / name).read_text() for name in ("config.json", "headstart.json", "README.md"))
    assert str(tmp_path.parent) not in text
    assert json.loads((tmp_path / "ours" / "headstart.json").read_text())["target_fingerprint"] == "unknown"


def test_an_exported_run_reads_like_any_other_source(tmp_path: Path, tiny_target: Path) -> None:
    """medusa2's heads keep their name: they fit a target of their own."""
    convert(write_layout(tmp_path / "source", "medusa"), tmp_path / "ours", "headstart")
    path = tmp_path / "ours" / "headstart.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"algorithm": "medusa2"}))
    convert(tmp_path / "ours", tmp_path / "theirs", "medusa", "--target", str(tiny_target))
    assert json.loads((tmp_path / "theirs" / "converted.json").read_text())["algorithm"] == "medusa2"
    _, tensors = read_export(tmp_path / "ours")
    save_file(tensors, tmp_path / "ours" / "model.safetensors")


# --- from the Hub ---------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_a_source_like_a_folder(tmp_path: Path, loopback_hub: Any) -> None:
    """The real client, in a process of its own: its settings are read when it is imported."""
    source = write_layout(tmp_path / "source", "safeailab eagle3")
    loopback_hub.repositories["someone/EAGLE3-tiny"] = {"private": False, "branches": {}, "commits": {}}
    stored_files = {path.name: loopback_hub.store(path.read_bytes(), is_large=path.suffix == ".bin") for path in source.iterdir()}
    loopback_hub.commit("someone/EAGLE3-tiny", "main", stored_files)

    out = tmp_path / "ours"
    wanted = [["someone/else"], ["someone/EAGLE3-tiny", "--revision", "v9"], ["someone/EAGLE3-tiny"]]
    calls = [[source_id, str(out), "--to", "headstart", *options] for source_id, *options in wanted]
    script = "import json, sys; from checkpoints.convert import main; print([main(call) for call in json.loads(sys.argv[1])])"
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(calls)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **loopback_hub.environment(token=None)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1] == "[2, 2, 0]", done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: {name} is neither a local folder nor on the Hub, or it is private and you are not logged in"
        for name in ("someone/else", "someone/EAGLE3-tiny at v9")
    ]
    assert "from someone/EAGLE3-tiny (pytorch_model.bin)" in done.stdout
    assert same(load_file(out / "model.safetensors"), stored(source, "safeailab"))
