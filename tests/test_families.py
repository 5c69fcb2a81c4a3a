"""Each model family, as a tiny random model: its states are those of transformers, a drafter trains on them, exports, reloads, and says the same.

`FAMILIES` is the table that docs/targets.md shows: `markdown_table` writes it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from checkpoints.draft_config import draft_dimensions, sliding_window_of
from checkpoints.export import export_drafter, read_export
from checkpoints.provenance import Provenance
from checkpoints.serving import serving_format, target_limits
from data.batch import drafter_batch
from data.generate import generate_greedy
from data.target import Target, TargetConfig, check_plain_logits, load_target_heads, target_fingerprint, target_hf_config
from data.vllm_engine import engine_python, worker_environment
from data.vocab import DraftVocabulary
from eval.acceptance import Trajectory, chain_acceptance, trajectory_features
from eval.evaluation import exported_drafter
from train.drafters.base import Drafter, DrafterConfig, VerifiedStates, load_drafter_class
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.medusa1 import Medusa1Config

ROOT = Path(__file__).resolve().parent.parent
V, H, L, END = 96, 64, 7, 5
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 96,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,  # Large, so that the random model's continuations vary.
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
# Tokens that the families' tokenizer classes add of themselves.
SPECIAL = ["<|endoftext|>", "<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>"]
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 3000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 3000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 3000.0, "factor": 2.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 256, "rope_type": "longrope", "rope_theta": 3000.0}
GEMMA = {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 32}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
}


@dataclass(frozen=True)
class Family:
    """A family, or what makes one of its models a case of its own.

    Attributes:
        title: as the documentation names it.
        class_name: of transformers, without "Config" and "ForCausalLM".
        changes: to `SIZES`.
        draft_rope: the rotation that a draft head has, by hand.
    """

    title: str
    class_name: str
    changes: dict[str, Any] = field(default_factory=dict)
    draft_rope: dict[str, Any] = field(default_factory=lambda: DEFAULT_ROPE)

    def config(self) -> Any:
        base = SIZES | ({} if "rope_parameters" in self.changes else {"rope_parameters": dict(DEFAULT_ROPE)})
        name = f"{self.class_name}TextConfig" if self.class_name == "Gemma3" else f"{self.class_name}Config"
        return getattr(transformers, name)(**(base | self.changes))


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", "Llama"),
    "llama_tied": Family("Llama, tied embeddings", "Llama", {"tie_word_embeddings": True}),
    "llama_llama3": Family("Llama, rope scaling llama3", "Llama", {"rope_parameters": LLAMA3}, LLAMA3),
    "llama_yarn": Family("Llama, rope scaling yarn", "Llama", {"rope_parameters": YARN}, YARN),
    "llama_linear": Family("Llama, rope scaling linear", "Llama", {"rope_parameters": LINEAR}, LINEAR),
    "llama_dynamic": Family(
        "Llama, rope scaling dynamic", "Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 3000.0, "factor": 2.0}}
    ),
    "llama_narrow_heads": Family("Llama, head_dim other than hidden/heads", "Llama", {"head_dim": 64}),
    "llama_bias": Family("Llama, attention bias", "Llama", {"attention_bias": True}),
    "mistral": Family("Mistral, sliding window", "Mistral", {"sliding_window": 8}),
    "qwen2": Family("Qwen2 / Qwen2.5", "Qwen2", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3": Family("Qwen3", "Qwen3"),
    "qwen3_moe": Family("Qwen3-MoE", "Qwen3Moe", MOE),
    "mixtral": Family("Mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": Family(
        "Gemma 2 (softcapped logits)",
        "Gemma2",
        GEMMA | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3": Family(
        "Gemma 3 (text)",
        "Gemma3",
        GEMMA | {"rope_parameters": GEMMA3_ROPE},
        {"rope_type": "default", "rope_theta": 9000.0},
    ),
    "phi3": Family("Phi-3", "Phi3", {"num_attention_heads": 2, "hidden_size": 64, "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 1.0}}),
    "phi4_mini": Family(
        "Phi-4-mini (part of each head rotated, longrope)",
        "Phi3",
        {"num_attention_heads": 2, "rope_parameters": LONG | {"partial_rotary_factor": 0.5}},
    ),
    "gpt_oss": Family(
        "GPT-OSS",
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": YARN | {"truncate": False}},
        YARN | {"truncate": False},
    ),
}
DRAFTERS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=80, ttt_steps=3),
    "eagle1": Eagle1Config(),
    "medusa1": Medusa1Config(num_heads=3, labels="soft"),
}
# What the real vLLM was seen to serve, with the acceptance that we measure.
IN_VLLM = [
    ("llama_yarn", "eagle3"),
    ("mistral", "eagle3"),
    ("qwen3_moe", "eagle3"),
    ("phi4_mini", "eagle3"),
    ("gpt_oss", "eagle3"),
    ("gemma3", "eagle1"),
    ("gemma2", "medusa1"),
]


def markdown_table() -> str:
    """The table of docs/targets.md: families by row, all of it trained, exported and reloaded here; what vLLM was seen to serve, or will not."""
    lines = ["| target | EAGLE-3 | EAGLE-1 | Medusa-1 |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        cells = []
        for algorithm in DRAFTERS:
            config = family.config()
            is_refused = "vllm" in target_limits(algorithm, config.model_type)
            is_narrow = "vllm" in target_limits(algorithm, config.model_type, sliding_window_of(config))
            is_served = (name, algorithm) in IN_VLLM
            cells.append("not in vLLM" if is_refused else "in vLLM within the window" if is_narrow else "counted in vLLM" if is_served else "yes")
        lines.append(f"| {family.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves a family's model once; every parameter of it is random (norms, biases and sinks too)."""
    folders: dict[str, Path] = {}

    def save(name: str) -> TargetConfig:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name) / "target"
            torch.manual_seed(0)
            model = getattr(transformers, f"{FAMILIES[name].class_name}ForCausalLM")(FAMILIES[name].config())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            model.save_pretrained(folders[name])
            words = [f"w{token}" for token in range(V - len(SPECIAL))] + SPECIAL
            backend = Tokenizer(WordLevel({word: token for token, word in enumerate(words)}, unk_token="w0"))
            PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"w{END}").save_pretrained(folders[name])
        return TargetConfig(str(folders[name]), dtype="float32")

    return save


@torch.no_grad()
def plain_states(model: Any, ids_T: Tensor) -> list[Tensor]:
    """transformers' own states of one document: after each layer, the last one after the final norm."""
    return [state[0] for state in model(ids_T[None], output_hidden_states=True, use_cache=False).hidden_states[1:]]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_states_and_logits_are_those_of_transformers(saved: Any, name: str) -> None:
    """Of the model as it is loaded anew by transformers alone."""
    config = saved(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    target = Target.load(config, "cpu")
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(V, (length,), generator=generator) for length in (13, 1, 20)]
    ids_T = torch.cat(documents)
    features = target.features(ids_T, torch.ones_like(ids_T, dtype=torch.bool), [13, 1, 20], (2, 3, 4), last=True)
    alone = [plain_states(model, document) for document in documents]
    expected_TX = torch.cat([torch.cat([states[1], states[2], states[3]], dim=-1) for states in alone])
    torch.testing.assert_close(features.aux_TX, expected_TX, atol=1e-4, rtol=1e-4)
    last_TH = torch.cat([states[-1] for states in alone])
    torch.testing.assert_close(features.last_TH, last_TH, atol=1e-4, rtol=1e-4)
    logits_TV = model(documents[2][None]).logits[0]
    torch.testing.assert_close(target.logits(features.last_TH[14:]), logits_TV, atol=1e-4, rtol=1e-4)


def answered(target: Target, count: int, seed: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(V, (int(length),), generator=generator).tolist() for length in torch.randint(2, 9, (count,), generator=generator)]
    answers = generate_greedy(target, prompts, 24, 3)
    pairs = zip(prompts, answers, strict=True)
    return [Trajectory(tuple(prompt), tuple(answer.answer_ids), tuple(answer.extra_ids)) for prompt, answer in pairs]


def vocabulary_of(config: DrafterConfig) -> DraftVocabulary | None:
    size = config.vocabulary_size(V)
    return None if size is None else DraftVocabulary(tuple(range(V - size, V)), V, 1.0)


def trained(target_config: TargetConfig, drafter_config: DrafterConfig, num_steps: int) -> tuple[Drafter, list[float], Target, Any]:
    """A drafter after some steps on the target's own answers; its losses; the target and the pack."""
    hf_config, drafter_class = target_hf_config(target_config), load_drafter_class(drafter_config.algorithm)
    check_plain_logits(hf_config)
    drafter_class.check_target(hf_config)
    target = Target.load(target_config, "cpu")
    torch.manual_seed(0)
    drafter = drafter_class(drafter_config, hf_config, load_target_heads(target_config, "cpu", torch.float32), vocabulary_of(drafter_config))
    [pack] = trajectory_features(target, answered(target, 12, seed=1), drafter.request, pack_tokens=10**6)
    batch = drafter_batch(pack.features)
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=3e-3), []
    for step in range(num_steps):
        drafter.schedule(step, num_steps)
        loss = drafter(batch).loss_sum / drafter.num_supervised(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return drafter, losses, target, batch


def exported(drafter: Drafter, target_config: TargetConfig, folder: Path) -> Path:
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.export_tensors().items()}
    algorithm = drafter.config.algorithm
    return export_drafter(
        tensors,
        algorithm=algorithm,
        target_config=target_hf_config(target_config),
        dimensions=draft_dimensions(algorithm, drafter.export_dimensions()),
        aux_layers=drafter.request.aux_layers,
        dtype=torch.float32,
        out_dir=folder,
        provenance=Provenance("c0ffee", {}, "random", target_fingerprint(target_config), "5eed"),
        card="# a drafter",
    )


@torch.no_grad()
def next_logits(drafter: Drafter, batch: Any) -> Tensor:
    """The drafter's logits after the first eleven pairs of the first document."""
    features = batch.features
    aux_BnX = None if features.aux_TX is None else features.aux_TX[None, :11]
    last_BnH = None if features.last_TH is None else features.last_TH[None, :11]
    verified = VerifiedStates(aux_BnX, last_BnH, features.input_ids_T[None, 1:12], torch.tensor([11]))
    return drafter.read(drafter.new_cache(1, 16), verified, 1).logits_BnW


@pytest.mark.parametrize("algorithm", DRAFTERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_drafter_learns_exports_and_says_the_same_after_a_reload(saved: Any, name: str, algorithm: str, tmp_path: Path) -> None:
    target_config = saved(name)
    drafter, losses, _, batch = trained(target_config, DRAFTERS[algorithm], num_steps=8)
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0]
    export = exported(drafter, target_config, tmp_path / "export")
    reloaded = exported_drafter(export, target_config, torch.device("cpu"))
    torch.testing.assert_close(next_logits(reloaded, batch), next_logits(drafter, batch), atol=1e-5, rtol=1e-5)
    config, _ = read_export(export)
    if algorithm != "medusa1":
        expected = FAMILIES[name].draft_rope
        scaling = {key: value for key, value in expected.items() if key != "rope_theta"}
        assert config["rope_parameters"] == expected
        assert config["rope_theta"] == expected["rope_theta"]
        assert config["rope_scaling"] == (None if expected["rope_type"] == "default" else scaling)
    # A target whose layers all slide would make vLLM's draft layer slide too: a window of its own, as long as the context, keeps it from that.
    window = ["sliding_attention"], 256
    assert (config.get("layer_types"), config.get("sliding_window")) == (window if (name, algorithm) == ("mistral", "eagle3") else (None, None))


@pytest.mark.parametrize(
    ("name", "algorithm", "reason"),
    [
        ("gemma3", "eagle3", "reads no auxiliary states of gemma3_text targets"),
        ("mixtral", "eagle3", "reads no auxiliary states of mixtral targets"),
        ("gemma2", "eagle1", "finds no lm_head in gemma2 targets"),
        ("mistral", "eagle1", "shows an EAGLE-1 layer only the last 8 tokens"),
    ],
)
def test_what_vllm_cannot_serve_is_said_in_the_export(saved: Any, name: str, algorithm: str, reason: str, tmp_path: Path) -> None:
    target_config = saved(name)
    heads = load_target_heads(target_config, "cpu", torch.float32)
    drafter = load_drafter_class(algorithm)(DRAFTERS[algorithm], target_hf_config(target_config), heads, vocabulary_of(DRAFTERS[algorithm]))
    facts = json.loads((exported(drafter, target_config, tmp_path / "export") / "headstart.json").read_text())
    assert reason in facts["engine_limits"]["vllm"]


REFUSED = {
    "granite scales its logits": (
        transformers.GraniteConfig(logits_scaling=8.0),
        "eagle3",
        r"\(granite\) changes its logits after the head \(\{'logits_scaling': 8.0\}\)",
    ),
    "a model with multimodal rotations": (
        transformers.LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}),
        "eagle1",
        r"\(llama\) has rope_parameters .*mrope_section.* Medusa heads .* need no rotation",
    ),
    "a model without rotation": (transformers.GPT2Config(), "eagle3", r"\(gpt2\) has rope_parameters \{\}, expected a rope_theta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_family_and_reason(case: str) -> None:
    config, algorithm, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        check_plain_logits(config)
        load_drafter_class(algorithm).check_target(config)


def test_the_documented_table_is_the_tested_one() -> None:
    page = ROOT / "docs" / "targets.md"
    if not page.is_file():
        pytest.skip("docs/targets.md is not written yet")
    assert markdown_table() in page.read_text()


# --- the real engine ------------------------------------------------------------------------------------------------------------------

_LOOP = """
import gc, sys
sys.path.insert(0, sys.argv[1])
import vllm_worker
for job in sys.argv[2:]:
    vllm_worker.main(job, job + ".result")
    gc.collect()
"""


@pytest.mark.engine
def test_vllm_accepts_of_each_family_what_we_measure(saved: Any, tmp_path: Path) -> None:
    """Seven families in one process of vLLM."""
    expected, jobs = {}, []
    for name, algorithm in IN_VLLM:
        target_config = saved(name)
        drafter, _, target, _ = trained(target_config, DRAFTERS[algorithm], num_steps=60)
        folder = exported(drafter, target_config, tmp_path / name / "export")
        trajectories = answered(target, 8, seed=1) + answered(target, 8, seed=2)
        reloaded = exported_drafter(folder, target_config, torch.device("cpu"))
        expected[name] = chain_acceptance(reloaded, trajectory_features(target, trajectories, reloaded.request, pack_tokens=512), 3).joint_acceptance
        job = {
            "target": target_config.model,
            "revision": None,
            "dtype": "float32",
            "max_num_seqs": 1,
            "max_model_len": 64,
            "max_tokens": 24,
            "stop_token_ids": [END],
            "prompts": [list(trajectory.prompt_ids) for trajectory in trajectories],
            "speculative": {"method": serving_format(algorithm).vllm_method, "model": str(folder), "num_speculative_tokens": 3},
            "reference_outputs": None,
        }
        jobs.append(tmp_path / f"{name}.json")
        jobs[-1].write_text(json.dumps(job))
    log = tmp_path / "log"
    environment = worker_environment() | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as file:
        command = [str(engine_python()), "-I", "-c", _LOOP, str(ROOT / "eval"), *map(str, jobs)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, stdout=file, stderr=file, timeout=900)
    assert done.returncode == 0, log.read_text()[-3000:]
    for (name, _), job_path in zip(IN_VLLM, jobs, strict=True):
        counters = json.loads(Path(f"{job_path}.result").read_text())["counters"]
        found = [accepted / counters["num_drafts"] for accepted in counters["accepted_per_position"]]
        assert expected[name][0] > 0.1, f"{name}: nothing to find"
        assert found == pytest.approx(expected[name], abs=0.005), name
