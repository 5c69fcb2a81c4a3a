"""Shared by the tests of whole runs: a tiny random chat model on disk, a small ShareGPT file, and the command line of a run of seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["the", "a", "cat", "dog", "tree", "sun", "sees", "runs", "to", "from", "big", "red", "old", "new", "over", "under"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of seven layers with a one-token-a-byte ChatML tokenizer, saved as a user's target would be."""
    folder = tmp_path_factory.mktemp("target")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rope_parameters=LLAMA3_ROPE,
        initializer_range=0.2,  # Large, so that the random model's continuations vary.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sharegpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short conversations with questions and answers of different lengths."""
    rng = random.Random(0)

    def words() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 8)))

    records = [
        {"id": f"c{number}", "conversations": [{"from": ("human", "gpt")[turn % 2], "value": words()} for turn in range(2)]} for number in range(40)
    ]
    path = tmp_path_factory.mktemp("data") / "sharegpt.json"
    path.write_text(json.dumps(records))
    return path


@pytest.fixture(scope="session")
def tiny_arguments(tiny_target: Path, sharegpt: Path) -> list[str]:
    """Command-line overrides that make recipes/eagle3.py a run of seconds: 4 packs a step, 6 steps; `--name` and `--runs-dir` are the caller's."""
    options = {
        "target.model": tiny_target,
        "data.sources": sharegpt,
        "data.max-length": 96,
        "data.num-heldout": 8,
        "data.num-workers": 1,
        "drafter.draft-vocab-size": 40,
        "drafter.ttt-steps": 3,
        "optim.learning-rate": 3e-3,
        "train.max-steps": 6,
        "train.batch-tokens": 512,
        "train.pack-tokens": 128,
        "train.heldout-every": 3,
        "train.save-every": 2,
        "train.log-every": 1,
        "eval.num-prompts": 4,
        "eval.num-selection-prompts": 2,
        "eval.max-new-tokens": 8,
        "eval.draft-length": 2,
        "eval.num-speedup-prompts": 1,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]
