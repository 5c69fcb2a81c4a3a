"""The real vLLM accepts of each algorithm's drafts exactly as many as we measure on the export.

A small random target and a drafter that was trained for a moment on some of its answers: so that drafts are accepted at every depth, and not always.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from checkpoints.draft_config import draft_dimensions
from checkpoints.export import export_drafter
from checkpoints.provenance import Provenance
from data.batch import drafter_batch
from data.generate import generate_greedy
from data.target import Target, TargetConfig, load_target_heads, target_fingerprint
from data.vocab import DraftVocabulary
from eval.acceptance import Trajectory, chain_acceptance, trajectory_features, write_trajectories
from eval.evaluation import exported_drafter
from eval.serve import main
from train.drafters.base import DrafterConfig, load_drafter_class
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.medusa1 import Medusa1Config
from train.drafters.medusa2 import Medusa2Config

V, NUM_DRAFTS, MAX_TOKENS, END = 96, 3, 32, 5
NUM_TRAINED_ON, NUM_MEASURED, NUM_STEPS = 24, 16, 80

DRAFTERS = {
    "eagle1": Eagle1Config(),
    "eagle3": Eagle3Config(draft_vocab_size=80, ttt_steps=3),
    "medusa1": Medusa1Config(num_heads=4, num_layers=2),
    "medusa1 through the target's head": Medusa1Config(num_heads=3, shared_lm_head=True, labels="soft"),
    "medusa2 with its own backbone": Medusa2Config(num_heads=3, lora_rank=8, heads_rate=1.0, heads_weight=0.2, backbone_warmup_steps=5),
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose head dimension vLLM's CPU kernels know."""
    folder = tmp_path_factory.mktemp("parity") / "target"
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.12,  # Large, so that the random model's continuations vary.
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(V)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{END}").save_pretrained(folder)
    return folder


def answered(target: Target, count: int, seed: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(V, (int(length),), generator=generator).tolist() for length in torch.randint(2, 9, (count,), generator=generator)]
    answers = generate_greedy(target, prompts, MAX_TOKENS, NUM_DRAFTS)
    pairs = zip(prompts, answers, strict=True)
    return [Trajectory(tuple(prompt), tuple(answer.answer_ids), tuple(answer.extra_ids)) for prompt, answer in pairs]


def measured_run(run: Path, target_dir: Path, config: DrafterConfig) -> list[float]:
    """Trains for a moment, exports, measures, and leaves the run directory that the serve check reads; the joint acceptance."""
    target_config = TargetConfig(str(target_dir), dtype="float32")
    target = Target.load(target_config, "cpu")
    hf_config = target.model.config
    size = config.vocabulary_size(V)
    vocabulary = None if size is None else DraftVocabulary(tuple(range(V - size, V)), V, 1.0)
    torch.manual_seed(0)
    drafter_class = load_drafter_class(config.algorithm)
    drafter = drafter_class(config, hf_config, load_target_heads(target_config, "cpu", torch.float32), vocabulary)
    if config.trains_target:
        drafter.attach_target(Target.load(target_config, "cpu"))
    [pack] = trajectory_features(target, answered(target, NUM_TRAINED_ON, seed=1), drafter.request, pack_tokens=10**6)
    batch = drafter_batch(pack.features)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for step in range(NUM_STEPS):
        drafter.schedule(step, NUM_STEPS)
        loss = drafter(batch).loss_sum / drafter.num_supervised(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.export_tensors().items()}
    answers, report = "answers", {}
    if config.trains_target:
        drafter.save_target(run / "backbone", torch.float32)
        answers, report = "backbone_answers", {"backbone": {}}
        target_config = TargetConfig(str(run / "backbone"))
        target = Target.load(target_config, "cpu")
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
    # Half of the prompts are those it was trained on, so that long chains are accepted too.
    trajectories = answered(target, NUM_MEASURED // 2, seed=1) + answered(target, NUM_MEASURED // 2, seed=2)
    reloaded = exported_drafter(run / "export", target_config, torch.device("cpu"))
    ours = chain_acceptance(reloaded, trajectory_features(target, trajectories, reloaded.request, pack_tokens=512), NUM_DRAFTS)
    (run / answers).mkdir()
    write_trajectories(run / answers / "answers.jsonl", trajectories)
    (run / "report.json").write_text(json.dumps(ours.to_json() | report))
    (run / "config.json").write_text(json.dumps({"target": {"model": str(target_dir), "revision": None}}))
    return ours.joint_acceptance


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_run_has_something_to_find(tmp_path: Path, target_dir: Path, name: str) -> None:
    """Some drafts are accepted at every depth and some are not: parity would mean little otherwise."""
    joint = measured_run(tmp_path / "run", target_dir, DRAFTERS[name])
    assert 0.95 > joint[0] > joint[1] > joint[2] > 0.01


@pytest.mark.engine
@pytest.mark.parametrize("name", DRAFTERS)
def test_vllm_accepts_what_we_measure(tmp_path: Path, target_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = tmp_path / "run"
    joint = measured_run(run, target_dir, DRAFTERS[name])
    assert main([str(run)]) == 0
    served = json.loads((run / "serve.json").read_text())
    assert served["measured"]["joint_acceptance"] == pytest.approx(joint, abs=0.01)
    assert served["num_identical_outputs"] + served["num_near_ties"] == served["num_outputs"] == NUM_MEASURED
