"""Shared by the tests of whole runs: a tiny random chat model on disk, a small ShareGPT file, and the command line of a run of seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.evaluation import Evaluation
from recipes.eagle3 import recipe
from train.cli import main

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
    """Forty short conversations, and twenty whose question leaves room for one token of the answer: those supervise nothing."""
    rng = random.Random(0)
    texts = [(_words(rng), _words(rng)) for _ in range(40)] + [(f"{number:02d}" * 38, "yes") for number in range(20)]
    records = [
        {"id": f"c{number}", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for number, (question, answer) in enumerate(texts)
    ]
    path = tmp_path_factory.mktemp("data") / "sharegpt.json"
    path.write_text(json.dumps(records))
    return path


def _words(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 8)))


@pytest.fixture(scope="session")
def tiny_arguments(tiny_target: Path, sharegpt: Path) -> list[str]:
    """Overrides that make recipes/eagle3.py a run of seconds: 6 steps of 4 packs; `--name` and `--runs-dir` are the caller's."""
    options = {
        "target.model": tiny_target,
        "data.sources": sharegpt,
        "data.max-length": 96,
        "data.num-heldout": 12,
        "data.num-workers": 1,
        "drafter.draft-vocab-size": 128,
        "drafter.ttt-steps": 3,
        "optim.learning-rate": 3e-3,
        "train.max-steps": 6,
        "features.storage": "lossless",
        "train.precision": "fp32",
        "train.batch-tokens": 512,
        "train.pack-tokens": 128,
        "train.heldout-every": 3,
        "train.save-every": 2,
        "train.log-every": 1,
        "eval.num-prompts": 4,
        "eval.num-selection-prompts": 4,
        "eval.max-new-tokens": 8,
        "eval.draft-length": 2,
        "eval.num-speedup-prompts": 1,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Launcher:
    """Starts recipes/eagle3.py in the ways a user has, from a bare copy of the checkout and another working directory.

    Attributes:
        checkout: the six packages and nothing else; not installed.
        runs_dir: where the runs go.
        arguments: of every run.
    """

    checkout: Path
    runs_dir: Path
    arguments: list[str]

    def command(self, how: str, name: str, *overrides: str) -> list[str]:
        """The command line: `how` is python, torchrun or deepspeed, the latter two with two ranks."""
        binaries = Path(sys.executable).parent
        recipe, launch = str(self.checkout / "recipes" / "eagle3.py"), str(self.checkout / "launch" / "train_eagle3.py")
        port = str(_free_port())
        start = {
            "python": [sys.executable, recipe],
            "torchrun": [str(binaries / "torchrun"), "--nproc-per-node", "2", "--master-port", port, recipe],
            "deepspeed": [str(binaries / "deepspeed"), "--num_accelerators", "2", "--master_port", port, launch],
        }[how]
        return [*start, "--name", name, "--runs-dir", str(self.runs_dir), *self.arguments, *overrides]

    def start(self, how: str, name: str, *overrides: str, **variables: str) -> subprocess.Popen[str]:
        """Starts the command in a process group of its own."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1", **variables}
        return subprocess.Popen(
            self.command(how, name, *overrides),
            cwd=self.runs_dir,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __call__(self, how: str, name: str, *overrides: str, timeout_s: float = 240, **variables: str) -> tuple[int, str]:
        """(exit code, output) of the whole command; nothing of it is left running."""
        process = self.start(how, name, *overrides, **variables)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            self.kill(process)
            self.clear_shared_memory()
        return process.returncode, output

    def kill(self, process: subprocess.Popen[str]) -> None:
        """kill -9 for a started command with all its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @staticmethod
    def clear_shared_memory() -> None:
        """Removes DeepSpeed's buffers (69 MB a rank) that no process has open: other tests may run at the same time."""
        is_open = "".join(_read(path) for path in Path("/proc").glob("[0-9]*/maps"))
        for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):
            if path.name not in is_open:
                path.unlink(missing_ok=True)

    def here(self, name: str, *overrides: str) -> None:
        """The same as "python" inside this process: without the seconds of starting one."""
        torch.set_num_threads(1)  # as the started ones have, so that results are equal bit for bit
        main(recipe(), Evaluation(), ["--name", name, "--runs-dir", str(self.runs_dir), *self.arguments, *overrides])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended, or is another user's
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def bare_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages alone, as a clone has them."""
    folder = tmp_path_factory.mktemp("checkout")
    for package in ("train", "data", "checkpoints", "eval", "recipes", "launch"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="session")
def launcher_in(bare_checkout: Path, tiny_arguments: list[str]) -> Callable[[Path], Launcher]:
    """Makes launchers with a given runs folder."""
    return lambda runs_dir: Launcher(bare_checkout, runs_dir, tiny_arguments)


@pytest.fixture
def launcher(bare_checkout: Path, tmp_path: Path, tiny_arguments: list[str]) -> Launcher:
    """A launcher with a runs folder of its own."""
    return Launcher(bare_checkout, tmp_path, tiny_arguments)


@pytest.fixture(scope="session")
def loopback_hub_module() -> Any:
    """tests/loopback_hub.py; tests/ is no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("loopback_hub", Path(__file__).with_name("loopback_hub.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["loopback_hub"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def loopback_hub(loopback_hub_module: Any, tmp_path: Path) -> Iterator[Any]:
    """A `LoopbackHub`, empty, that the real client of another process talks to: see its `environment`."""
    with loopback_hub_module.LoopbackHub(tmp_path / "hub") as hub:
        yield hub
