"""The tools themselves: speculators 0.9.0 writes what we read and reads what we write; vLLM serves our speculators export by its folder alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import HEAD_DIM, HEADS, KV_HEADS, SPECFORGE, H, I, V, W, draft_ids, eagle3_tensors, write
from safetensors.torch import load_file, save_file
from test_engine_parity import NUM_DRAFTS, measured_run, target_dir  # noqa: F401 (a fixture)
from torch import Tensor

from checkpoints.convert import main
from checkpoints.serving import BLOCK_NORMS, BlockNorm
from data.batch import Features, drafter_batch
from data.target import Target, TargetConfig
from eval.evaluation import exported_drafter
from eval.serve import engine_python, worker_environment
from train.drafters.eagle3 import Eagle3, Eagle3Config

AUX_LAYERS, NUM_STEPS, NUM_TOKENS = [1, 3, 6], 3, 24
PEER = Path.home() / ".cache" / "headstart" / "speculators-0.9.0" / "bin" / "python"

# Runs in the environment that `make peers` installs: a folder with `inputs.safetensors`, and the logits of every training-time-test step.
SPECULATORS = """
import json, sys
import torch
from safetensors.torch import load_file, save_file
from speculators.model import SpeculatorModel
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import LlamaConfig

job = json.loads(sys.argv[1])
if job["do"] == "write":
    layer = LlamaConfig(**job["layer"], architectures=["LlamaForCausalLM"])
    maps = load_file(job["maps"])
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=maps["t2d"], d2t=maps["d2t"], draft_vocab_size=len(maps["d2t"]), **job["norms"],
        ttt_steps=3, verifier_name_or_path=job["target"], target_layer_ids=job["aux_layers"], draft_attn_impl="eager",
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(("verifier_", "embed_tokens")):
                parameter += torch.randn_like(parameter) * (0.5 if parameter.ndim == 1 else 0.3)
    model.save_pretrained(job["folder"])
else:
    model = SpeculatorModel.from_pretrained(job["folder"])  # attends by flex_attention, which is slow here: the same model anew
    model.config.transformer_layer_config._attn_implementation = "eager"
    state = model.state_dict()
    model = Eagle3DraftModel(model.config)
    model.load_state_dict(state)
assert type(model) is Eagle3DraftModel
inputs, logits = load_file(job["inputs"]), []
model.float().eval()
model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output.detach()[0]))
with torch.no_grad():
    model(inputs["aux"][None], inputs["known"][None], torch.zeros_like(inputs["known"])[None], ttt_steps=job["num_steps"])
save_file({str(step): step_logits.contiguous() for step, step_logits in enumerate(logits)}, job["logits"])
"""


def run_peer(job: dict[str, Any]) -> None:
    if not PEER.is_file():
        pytest.skip(f"no speculators at {PEER}: `make peers` installs it")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([str(PEER), "-c", SPECULATORS, json.dumps(job)], text=True, capture_output=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def inputs(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The target's states of some tokens, and for each position the token after it."""
    target = Target.load(TargetConfig(str(tiny_target), dtype="float32"), "cpu")
    ids = torch.randint(V, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    features = target.features(ids, torch.ones_like(ids).bool(), (NUM_TOKENS,), tuple(AUX_LAYERS), last=True)
    assert features.aux_TX is not None
    path = tmp_path_factory.mktemp("inputs") / "inputs.safetensors"
    save_file({"aux": features.aux_TX.float().contiguous(), "known": torch.cat([ids[1:], torch.zeros(1, dtype=torch.int64)])}, path)
    return {"path": path, "features": features}


def our_logits(folder: Path, target: Path, features: Features) -> list[Tensor]:
    """[T, W] of each training-time-test step."""
    drafter = exported_drafter(folder, TargetConfig(str(target), dtype="float32"), torch.device("cpu"))
    assert isinstance(drafter, Eagle3)
    with torch.no_grad():
        hidden = drafter._rollout(drafter_batch(features), NUM_STEPS, torch.arange(NUM_TOKENS))
        return [drafter._guess(step).logits_BnW for step in hidden]


def assert_same_logits(found: list[Tensor], path: Path) -> None:
    """Where a step knows its token: at the end of the text there is none."""
    expected = load_file(path)
    assert len(expected) == NUM_STEPS
    for step, logits in enumerate(found):
        num = NUM_TOKENS - 1 - step
        torch.testing.assert_close(logits[:num], expected[str(step)][:num], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("norms", [(), ("norm_before_residual", "norm_before_fc", "norm_output"), ("fc_norm",)])
def test_what_speculators_saves_drafts_here_as_it_does_there(
    tmp_path: Path, tiny_target: Path, inputs: dict[str, Any], norms: tuple[str, ...]
) -> None:
    """The paper's block, that of `speculators train` by default, and the other one of EAGLE-3.1."""
    ids_W = draft_ids()
    is_drafted_V = torch.zeros(V, dtype=torch.bool)
    is_drafted_V[ids_W] = True
    save_file({"d2t": ids_W - torch.arange(W), "t2d": is_drafted_V}, tmp_path / "maps.safetensors")
    layer = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": I,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 2.0},
    }
    job = {"do": "write", "layer": layer, "maps": str(tmp_path / "maps.safetensors"), "target": str(tiny_target), "aux_layers": AUX_LAYERS}
    job |= {"norms": {name: name in norms for name in BLOCK_NORMS}, "folder": str(tmp_path / "theirs"), "inputs": str(inputs["path"])}
    run_peer({**job, "num_steps": NUM_STEPS, "logits": str(tmp_path / "logits.safetensors")})
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "headstart", "--target", str(tiny_target)]) == 0
    assert_same_logits(our_logits(tmp_path / "ours", tiny_target, inputs["features"]), tmp_path / "logits.safetensors")
    # And back, bit for bit; what is only the verifier's was not saved.
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "speculators", "--target", str(tiny_target)]) == 0
    theirs, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert theirs.keys() == back.keys()
    assert all(torch.equal(theirs[name], back[name]) for name in theirs)


@pytest.mark.slow
def test_speculators_loads_what_we_write_and_drafts_the_same(tmp_path: Path, tiny_target: Path, inputs: dict[str, Any]) -> None:
    config = {**SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in AUX_LAYERS]}}
    source = write(tmp_path / "source", config, eagle3_tensors("midlayer", torch.float32), "model.safetensors")
    target = ("--target", str(tiny_target))
    assert main([str(source), str(tmp_path / "headstart"), "--to", "headstart", *target]) == 0
    # Its loader leaves a missing embedding as the memory was.
    assert main([str(source), str(tmp_path / "speculators"), "--to", "speculators", "--with-embedding", *target]) == 0
    job = {"do": "read", "folder": str(tmp_path / "speculators"), "inputs": str(inputs["path"]), "num_steps": NUM_STEPS}
    run_peer({**job, "logits": str(tmp_path / "logits.safetensors")})
    assert_same_logits(our_logits(tmp_path / "headstart", tiny_target, inputs["features"]), tmp_path / "logits.safetensors")


# LLM(model=DIR), and nothing said of a drafter; what it counts goes to a file.
VLLM = """
import json, sys
import vllm
job = json.loads(sys.argv[1])
engine = vllm.LLM(
    model=job["folder"], dtype="float32", enforce_eager=True, enable_prefix_caching=False, skip_tokenizer_init=True, generation_config="vllm",
    disable_log_stats=False, max_num_seqs=1, max_model_len=128, seed=0,
)
sampling = vllm.SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=job["stop"], detokenize=False, max_tokens=job["max_tokens"])
engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
counted = {metric.name: metric for metric in engine.get_metrics()}
config = engine.llm_engine.vllm_config
json.dump({
    "drafts": counted["vllm:spec_decode_num_drafts"].value,
    "accepted": list(counted["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    "target": config.model_config.model,
    "drafter": config.speculative_config.model,
}, open(job["result"], "w"))
"""


@pytest.mark.engine
@pytest.mark.parametrize("norms", [(), ("norm_before_residual", "norm_before_fc", "norm_output")])
def test_vllm_serves_target_and_drafter_by_the_folder_alone_and_accepts_what_we_measure(
    tmp_path: Path,
    target_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    norms: tuple[BlockNorm, ...],
) -> None:
    """What our own format is accepted with is counted in tests/test_engine_parity.py, and equals what we measure."""
    run, folder = tmp_path / "run", tmp_path / "speculators"
    joint = measured_run(run, target_dir, Eagle3Config(draft_vocab_size=80, ttt_steps=3, norms=norms))
    assert 0.95 > joint[0] > joint[1] > joint[2] > 0.01
    options = ["--to", "speculators", "--target", str(target_dir), "--num-drafts", str(NUM_DRAFTS)]
    assert main([str(run / "export"), str(folder), *options]) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    answers = [json.loads(line) for line in (run / "answers" / "answers.jsonl").read_text().splitlines()]
    job = {
        "folder": str(folder),
        "prompts": [answer["prompt_ids"] for answer in answers],
        "max_tokens": max(len(answer["answer_ids"]) for answer in answers),
        "stop": [5],
        "result": str(tmp_path / "result.json"),
    }
    environment = {**worker_environment(), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(engine_python()), "-I", "-c", VLLM, json.dumps(job)], text=True, capture_output=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["target"] == str(target_dir)
    assert result["drafter"] == str(folder)
    assert [accepted / result["drafts"] for accepted in result["accepted"]] == pytest.approx(joint, abs=0.01)
