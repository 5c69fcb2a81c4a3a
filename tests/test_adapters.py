"""A target that is a base with a LoRA adapter: one model, which computes what peft computes of the two, and which a whole run and vLLM work on.

The adapters are real ones: peft makes, trains for a few steps and saves them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data.merge_adapter import main as merge
from data.merge_adapter import write_merged
from data.target import Target, TargetConfig, load_target_heads, load_tokenizer, target_fingerprint, target_hf_config
from data.vllm_engine import engine_python, worker_environment
from eval.serve import main as serve
from eval.served_run import read_run, stop_token_ids

LINEARS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": LINEARS},
    "rslora_with_bias": {"target_modules": LINEARS, "use_rslora": True, "bias": "none", "lora_alpha": 4},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "embedding_and_head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "embedding_only": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "whole_embedding_and_head": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "some_tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
    "tied_alike": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.fixture(scope="module")
def bases(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny target untied, tied, and in bfloat16."""
    folder = tmp_path_factory.mktemp("bases")
    # "wide" has heads that vLLM's CPU kernels know.
    variants = {"tied": {"tie_word_embeddings": True}, "bf16": {"dtype": torch.bfloat16}, "wide": {"head_dim": 32}}
    for name, changes in variants.items():
        shutil.copytree(tiny_target, folder / name)
        config = LlamaConfig.from_pretrained(tiny_target)
        for field, value in changes.items():
            setattr(config, field, value)
        torch.manual_seed(1)
        LlamaForCausalLM(config).to(config.dtype).save_pretrained(folder / name)
    return {"untied": tiny_target} | {name: folder / name for name in variants}


def fine_tuned(base: Path, folder: Path, settings: dict[str, Any], num_new_tokens: int = 0) -> Path:
    """An adapter after a few steps of peft on one sentence, saved as peft saves it."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    if num_new_tokens:
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.add_tokens([f"<new{index}>" for index in range(num_new_tokens)])
        model.resize_token_embeddings(len(tokenizer))
        tokenizer.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights: the point of some cases
        adapted = get_peft_model(model, LoraConfig(**({"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"} | settings)))
        optimizer = torch.optim.AdamW([parameter for parameter in adapted.parameters() if parameter.requires_grad], lr=2e-2)
        ids_1T = torch.arange(3, 35)[None]
        for _ in range(6):
            loss = adapted(input_ids=ids_1T, labels=ids_1T).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        adapted.save_pretrained(folder)
    return folder


@torch.no_grad()
def states_of(model: Any, ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(all layers' states side by side, logits) of one document, by transformers."""
    out = model(ids_T[None], output_hidden_states=True, use_cache=False)
    return torch.cat([state[0] for state in out.hidden_states[1:]], dim=-1), out.logits[0]


def peft_model(base: Path, adapter: Path, vocab_size: int) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    if vocab_size != model.config.vocab_size:
        model.resize_token_embeddings(vocab_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, adapter).eval()


CASES = [
    *[("untied", name) for name in ADAPTERS if name not in ("tied_alike", "embedding_only")],
    *[("tied", name) for name in ("plain", "embedding_only", "whole_head", "some_tokens", "tied_alike")],
]


@pytest.mark.parametrize(("base", "name"), CASES)
def test_states_heads_and_logits_are_those_of_base_and_adapter_apart(bases: dict[str, Path], base: str, name: str, tmp_path: Path) -> None:
    adapter = fine_tuned(bases[base], tmp_path / "adapter", ADAPTERS[name])
    config = TargetConfig(str(bases[base]), adapter=str(adapter))
    ids_T = torch.arange(40, 60)
    expected_TX, expected_TV = states_of(peft_model(bases[base], adapter, 258), ids_T)
    plain_TX, _ = states_of(AutoModelForCausalLM.from_pretrained(bases[base]), ids_T)
    assert (expected_TX - plain_TX).abs().max() > 1e-2, "the adapter does nothing"
    written = write_merged(config, tmp_path / "merged")
    heads = load_target_heads(written, "cpu", torch.float32)
    for target in (Target.load(config, "cpu"), Target.load(written, "cpu")):
        features = target.features(ids_T, torch.ones(20, dtype=torch.bool), [20], tuple(range(1, 7)), last=True)
        torch.testing.assert_close(torch.cat([features.aux_TX, features.last_TH], dim=-1), expected_TX, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(target.logits(features.last_TH), expected_TV, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(features.last_TH @ heads.lm_head_VH.T, expected_TV, atol=2e-4, rtol=1e-4)
        assert torch.equal(heads.embed_VH, target.model.get_input_embeddings().weight)
    is_tied = base == "tied" and name not in ("embedding_only", "whole_head")
    assert (heads.lm_head_VH is heads.embed_VH) == is_tied == AutoConfig.from_pretrained(written.model).tie_word_embeddings


def test_an_adapter_that_was_trained_on_a_larger_vocabulary_brings_it(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = fine_tuned(bases["untied"], tmp_path / "adapter", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, 3)
    config = TargetConfig(str(bases["untied"]), adapter=str(adapter))
    assert target_hf_config(config).vocab_size == 261
    assert len(load_tokenizer(config)) == 261
    written = write_merged(config, tmp_path / "merged")
    ids_T = torch.tensor([5, 258, 9, 260])
    expected_TX, expected_TV = states_of(peft_model(bases["untied"], adapter, 261), ids_T)
    target = Target.load(written, "cpu")
    features = target.features(ids_T, torch.ones(4, dtype=torch.bool), [4], (2,), last=True)
    torch.testing.assert_close(features.last_TH, expected_TX[:, -32:], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(features.last_TH), expected_TV, atol=2e-4, rtol=1e-4)
    assert load_target_heads(written, "cpu", torch.float32).lm_head_VH.shape == (261, 32)
    assert "<new2>" in target.tokenizer.get_vocab()


def test_bfloat16_weights_are_rounded_once(bases: dict[str, Path], tmp_path: Path) -> None:
    """round(W + scale B A), formed in fp32; and what is loaded in fp32 is the served model, not a finer one."""
    adapter = fine_tuned(bases["bf16"], tmp_path / "adapter", {"target_modules": LINEARS})
    config = TargetConfig(str(bases["bf16"]), adapter=str(adapter))
    written = write_merged(config, tmp_path / "merged")
    tensors, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", bases["bf16"]))
    lora = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.3.mlp.up_proj"
    delta = 4.0 * lora[f"base_model.model.{name}.lora_B.weight"].float() @ lora[f"base_model.model.{name}.lora_A.weight"].float()
    expected = (base[f"{name}.weight"].float() + delta).to(torch.bfloat16)
    assert tensors[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(tensors[f"{name}.weight"], expected)
    in_fp32 = [Target.load(dataclasses.replace(given, dtype="float32"), "cpu").model.state_dict() for given in (config, written)]
    assert in_fp32[0].keys() == in_fp32[1].keys()
    assert all(torch.equal(in_fp32[0][key], in_fp32[1][key]) for key in in_fp32[0])


def test_an_adapter_named_as_the_model_finds_its_base(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = fine_tuned(bases["untied"], tmp_path / "adapter", ADAPTERS["plain"])
    alone, both = TargetConfig(str(adapter)), TargetConfig(str(bases["untied"]), adapter=str(adapter))
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(bases["untied"])
    assert target_fingerprint(alone) == target_fingerprint(both)
    assert target_fingerprint(both).startswith(target_fingerprint(TargetConfig(str(bases["untied"]))) + "+adapter@")
    assert torch.equal(*[Target.load(config, "cpu").model.get_parameter("model.layers.2.mlp.up_proj.weight") for config in (alone, both)])
    lora = load_file(adapter / "adapter_model.safetensors")
    next(iter(lora.values())).view(-1)[0] += 1
    before = target_fingerprint(both)
    save_file(lora, adapter / "adapter_model.safetensors")
    assert target_fingerprint(both) != before


def test_what_does_not_fit_is_one_clear_line(bases: dict[str, Path], tmp_path: Path) -> None:
    good = fine_tuned(bases["untied"], tmp_path / "good", ADAPTERS["plain"])
    base = str(bases["untied"])

    def variant(name: str, *removed: str, **fields: Any) -> str:
        folder = tmp_path / name
        shutil.copytree(good, folder)
        for file_name in removed:
            (folder / file_name).unlink()
        path = folder / "adapter_config.json"
        if fields:
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return str(folder)

    pickled, both = variant("pickled", "adapter_model.safetensors"), variant("both")
    torch.save({}, Path(pickled) / "adapter_model.bin")
    shutil.copy(bases["untied"] / "model.safetensors", both)
    prefix = get_peft_model(LlamaForCausalLM.from_pretrained(base), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    prefix.save_pretrained(tmp_path / "prefix")
    cases = [
        (TargetConfig(base, adapter=str(tmp_path / "prefix")), "is of peft_type PREFIX_TUNING, expected LORA: merge it with peft yourself"),
        (TargetConfig(base, adapter=str(tmp_path / "none")), "target.adapter .* cannot be read|has no adapter_config.json"),
        (TargetConfig(base, adapter=pickled), "has only adapter_model.bin, expected adapter_model.safetensors"),
        (TargetConfig(base, adapter=variant("empty", "adapter_model.safetensors")), "has no adapter_model.safetensors"),
        (TargetConfig(base, adapter=variant("kind", task_type="SEQ_CLS")), "is for SEQ_CLS, expected CAUSAL_LM"),
        (TargetConfig(base, adapter=variant("replicated", layer_replication=[[0, 3], [2, 5]])), "uses layer_replication"),
        (TargetConfig(base, adapter=variant("wide", target_modules=["k_proj"])), r"does not fit its base: \d+ tensors have no counterpart"),
        (TargetConfig(base, adapter=variant("rank", r=7)), "does not fit its base"),
        (TargetConfig(variant("lost", base_model_name_or_path="/nowhere/at/all")), "names /nowhere/at/all as its base, which is not here"),
        (TargetConfig(variant("nobase", base_model_name_or_path=None)), "names no base model: name it with --target.model BASE"),
        (TargetConfig(both), "holds both a whole model and an adapter"),
    ]
    for config, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            Target.load(config, "cpu")
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"is an adapter, and embedding and head are those of the merged model"):
        load_target_heads(TargetConfig(base, adapter=str(good)), "cpu", torch.float32)


def test_the_command_writes_once_and_nothing_over_a_strangers_folder(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = fine_tuned(bases["untied"], tmp_path / "adapter", ADAPTERS["plain"])
    arguments = ["--target.model", str(bases["untied"]), "--target.adapter", str(adapter), "--out", str(tmp_path / "merged")]
    assert merge(arguments) == 0
    weights = tmp_path / "merged" / "model.safetensors"
    written_ns = weights.stat().st_mtime_ns
    assert merge(arguments) == 0
    assert weights.stat().st_mtime_ns == written_ns
    shutil.rmtree(adapter)
    fine_tuned(bases["untied"], adapter, ADAPTERS["whole_head"])
    assert merge(arguments) == 0
    assert weights.stat().st_mtime_ns != written_ns
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("dear")
    capsys.readouterr()
    assert merge([*arguments[:-1], str(tmp_path / "notes")]) == 2
    assert "holds something that is not a merged target" in capsys.readouterr().err
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "dear"
    assert merge(["--target.model", str(bases["untied"]), "--out", str(tmp_path / "x")]) == 2
    assert "has no adapter" in capsys.readouterr().err


@pytest.fixture(scope="module")
def adapted_run(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, launcher_in: Any) -> Path:
    """A whole run of recipes/eagle3.py for a fine-tune, named by its adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    adapter = fine_tuned(bases["wide"], folder / "my-tune", ADAPTERS["embedding_and_head"])
    launcher_in(folder).here("tune", "--target.model", str(bases["wide"]), "--target.adapter", str(adapter))
    return folder / "tune"


def test_a_whole_run_is_of_the_merged_target(adapted_run: Path, bases: dict[str, Path]) -> None:
    target, facts = adapted_run / "target", json.loads((adapted_run / "export" / "headstart.json").read_text())
    assert (facts["target"], facts["adapter"]) == ("wide", "my-tune")
    assert facts["target_fingerprint"] == target_fingerprint(TargetConfig(str(target)))
    card = (adapted_run / "export" / "README.md").read_text()
    assert "vllm serve THE_MERGED_TARGET --speculative-config" in card
    assert "python -m data.merge_adapter --target.model wide --target.adapter my-tune --out THE_MERGED_TARGET" in card
    assert "--enable-lora --lora-modules tuned=my-tune" in card
    files = read_run(adapted_run)
    assert files.target == str(target)
    report = json.loads((adapted_run / "report.json").read_text())
    assert report["target"] == str(target)
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (bases["wide"], target))
    prompt_1T = torch.tensor([files.prompts[0]])
    answer = files.answers[0]
    with torch.no_grad():
        whole = [model.generate(prompt_1T, max_new_tokens=len(answer), do_sample=False)[0].tolist() for model in (base, merged)]
    greedy = [ids[prompt_1T.shape[1] :] for ids in whole]
    assert greedy[1] == answer != greedy[0]


def test_the_same_command_again_does_nothing_and_another_adapter_everything(
    adapted_run: Path, bases: dict[str, Path], launcher_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(adapted_run, tmp_path / "tune")
    launcher_in(tmp_path).here("tune", "--target.model", str(bases["wide"]), "--target.adapter", str(adapted_run.parent / "my-tune"))
    assert "merging" not in capsys.readouterr().out
    other = fine_tuned(bases["wide"], tmp_path / "other", ADAPTERS["plain"])
    launcher_in(tmp_path).here("tune", "--target.model", str(bases["wide"]), "--target.adapter", str(other))
    shown = capsys.readouterr().out
    assert "merging" in shown and "[prepare] stale: target: target@" in shown


def test_a_dry_run_plans_without_merging(bases: dict[str, Path], adapted_run: Path, launcher_in: Any, tmp_path: Path) -> None:
    launcher_in(tmp_path).here("tune", "--target.model", str(bases["wide"]), "--target.adapter", str(adapted_run.parent / "my-tune"), "--dry-run")
    assert not (tmp_path / "tune" / "target").exists()


@pytest.mark.engine
def test_vllm_serves_the_merged_target_with_the_acceptance_that_we_measure(adapted_run: Path) -> None:
    assert serve([str(adapted_run)]) == 0


_UNMERGED = """
import json, sys, vllm
from vllm.lora.request import LoRARequest
job, result = sys.argv[1:]
with open(job) as file:
    job = json.load(file)
engine = vllm.LLM(enable_lora=True, max_lora_rank=8, max_loras=1, max_num_seqs=1, max_model_len=128, enforce_eager=True, dtype="float32",
                  enable_prefix_caching=False, skip_tokenizer_init=True, generation_config="vllm", disable_log_stats=False, **job["engine"])
sampling = vllm.SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **job["sampling"])
prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=LoRARequest("tune", 1, job["adapter"]))
counters = {metric.name: list(metric.values) if hasattr(metric, "values") else metric.value for metric in engine.get_metrics()
            if "spec_decode" in metric.name}
with open(result, "w") as file:
    json.dump({"outputs": [list(output.outputs[0].token_ids) for output in outputs], "counters": counters}, file)
"""


@pytest.mark.engine
def test_vllm_serves_base_and_adapter_apart_with_the_same_acceptance(adapted_run: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    """`vllm serve BASE --enable-lora`: for those who serve several adapters on one base."""
    files = read_run(adapted_run)
    job = {
        "engine": {"model": str(bases["wide"]), "speculative_config": files.speculative},
        "sampling": {"max_tokens": files.max_tokens, "stop_token_ids": stop_token_ids(files.target, None)},
        "adapter": str(adapted_run.parent / "my-tune"),
        "prompts": files.prompts,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [str(engine_python()), "-I", "-c", _UNMERGED, str(tmp_path / "job.json"), str(tmp_path / "result.json")]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(command, env=worker_environment(), cwd=tmp_path, stdout=log, stderr=log, timeout=600)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["outputs"] == files.answers
    num_drafts = result["counters"]["vllm:spec_decode_num_drafts"]
    per_position = result["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert [accepted / num_drafts for accepted in per_position] == pytest.approx(files.ours.joint_acceptance, abs=0.01)
