"""SGLang's real model classes load what we export and give our logits; its real collector writes what we read of its /metrics.

On a CPU, in an environment of its own (`make sglang`), with its CUDA kernels and paged attention in torch: tests/sglang_worker.py says exactly what
is stubbed. Its server needs a GPU and is not started here.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from checkpoints.draft_config import draft_dimensions
from checkpoints.export import export_drafter
from checkpoints.provenance import Provenance
from checkpoints.serving import FORMATS
from data.target import TargetConfig, load_target_heads, target_fingerprint
from data.vocab import DraftVocabulary
from eval.engine_counters import draft_counts
from eval.evaluation import exported_drafter
from train.drafters.base import DrafterConfig, VerifiedStates, load_drafter_class
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config

ROOT = Path(__file__).parent.parent
SGLANG_VERSION = FORMATS["eagle3"].engines["sglang"].version
PYTHON = Path.home() / ".cache" / "headstart" / f"sglang-cpu-{SGLANG_VERSION}" / "bin" / "python"
NUM_LAYERS, V, NUM_TOKENS = 7, 96, 14

DRAFTERS = {
    "eagle3": (Eagle3Config(draft_vocab_size=80), (2, 3, 4)),
    "eagle3 of other layers": (Eagle3Config(draft_vocab_size=80, aux_layers=(1, 4, 5)), (1, 4, 5)),
    "eagle3 of two layers with the whole vocabulary": (Eagle3Config(draft_vocab_size=None, aux_layers=(3, 6)), (3, 6)),
    "eagle1": (Eagle1Config(), ()),
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with Llama 3's rope scaling and heads wider than hidden / heads."""
    folder = tmp_path_factory.mktemp("sglang") / "target"
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.12,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 3000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=5,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def export(folder: Path, target_dir: Path, config: DrafterConfig) -> None:
    """A drafter at random, norms included, exported as a recipe does."""
    target = TargetConfig(str(target_dir), dtype="float32")
    hf_config = LlamaConfig.from_pretrained(target_dir)
    size = config.vocabulary_size(V)
    vocabulary = None if size is None else DraftVocabulary(tuple(range(V - size, V)), V, 1.0)
    drafter = load_drafter_class(config.algorithm)(config, hf_config, load_target_heads(target, "cpu", torch.float32), vocabulary)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    export_drafter(
        {name: tensor.detach().clone() for name, tensor in drafter.export_tensors().items()},
        algorithm=config.algorithm,
        target_config=hf_config,
        dimensions=draft_dimensions(config.algorithm, drafter.export_dimensions()),
        aux_layers=drafter.request.aux_layers,
        dtype=torch.float32,
        out_dir=folder,
        provenance=Provenance("c0ffee", {}, "random", target_fingerprint(target), "5eed"),
        card="# a drafter",
    )


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(V, (NUM_TOKENS + 1,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, tokens: list[int]) -> Path:
    """What SGLang makes of every export, in one process: the exports, `<number>.safetensors` for each, and metrics.txt."""
    if not PYTHON.is_file():
        pytest.skip("SGLang's environment is not installed: make sglang")
    folder = tmp_path_factory.mktemp("exports")
    exports = [folder / str(number) for number in range(len(DRAFTERS))]
    for path, (config, _) in zip(exports, DRAFTERS.values(), strict=True):
        export(path, target_dir, config)
    job = {"target": str(target_dir), "exports": [str(path) for path in exports], "input_ids": tokens[:-1], "next_ids": tokens[1:]}
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(PYTHON), "-I", str(ROOT / "tests" / "sglang_worker.py"), str(folder / "job.json"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_sglang_reads_the_states_we_read_and_gives_our_logits(sglang: Path, target_dir: Path, tokens: list[int], name: str) -> None:
    number, (_, aux_layers) = list(DRAFTERS).index(name), DRAFTERS[name]
    with safe_open(sglang / f"{number}.safetensors", "pt") as file:
        theirs, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    assert metadata["draft_class"] == json.loads((sglang / str(number) / "config.json").read_text())["architectures"][0]

    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    last = states[-1]
    aux = torch.cat([states[layer] for layer in aux_layers], dim=-1) if aux_layers else last
    assert torch.allclose(theirs["aux"], aux[0], atol=2e-5)
    assert torch.allclose(theirs["last"], last[0], atol=2e-5)

    drafter = exported_drafter(sglang / str(number), TargetConfig(str(target_dir), dtype="float32"), torch.device("cpu"))
    for count in range(1, NUM_TOKENS + 1):
        known, num_new = torch.tensor([tokens[1 : count + 1]]), torch.tensor([count])
        verified = VerifiedStates(aux[:, :count] if aux_layers else None, last[:, :count], known, num_new)
        guess = drafter.read(drafter.new_cache(1, NUM_TOKENS + 4), verified, 1)
        assert torch.allclose(theirs["logits"][count - 1], guess.logits_BnW[0, 0], atol=1e-4), count
        assert torch.allclose(theirs["hidden"][count - 1], guess.hidden_BnH[0, 0], atol=1e-4), count
    assert theirs["logits"].std() > 0.1  # there was something to compare
    if "target_ids" in theirs:
        assert theirs["target_ids"].tolist() == drafter.draft_ids_W.tolist()


@pytest.mark.engine
def test_what_sglang_counts_is_read_back(sglang: Path) -> None:
    """Of 10 tokens after 4 verifications, one is the prompt's and 5 are accepted drafts; of 7 after 3, 3 are."""
    counts = draft_counts((sglang / "metrics.txt").read_text(), "sglang")
    assert (counts.num_verifications, counts.num_accepted) == (7, 8)


def test_the_makefile_installs_the_version_that_the_contract_was_read_from() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^SGLANG_VERSION := (.*)$", makefile, re.MULTILINE)[1] == SGLANG_VERSION
