"""A small draft model for the quickstart's target, to compare standard speculative decoding with.

    .venv/bin/python bench/draft_model.py

Six of SmolLM2-135M's thirty layers, with its embedding, norm and head, trained for a few minutes on the target's own answers (the run that
bench/recipes.py made first): about the size of a draft head and its target's head together. Written to runs/targets/SmolLM2-6-layers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import tyro
from datasets import load_from_disk
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.progress import Progress
from data.smollm2 import make_smollm2

TARGET_DIR = ROOT / "runs" / "targets" / "SmolLM2-135M-Instruct"
DRAFT_DIR = ROOT / "runs" / "targets" / "SmolLM2-6-layers"
# The first layers make features of the tokens and the last ones turn them into a prediction; those between matter least one by one.
LAYERS = (0, 1, 2, 3, 28, 29)


def main(answers: Path = ROOT / "runs" / "recipes" / "eagle3" / "regenerated", learning_rate: float = 1e-3, max_seconds: float = 1200.0) -> None:
    """
    Args:
        answers: tokenised training data of a run, as `datasets` on disk.
        learning_rate: the largest; cosine.
        max_seconds: training ends then, or after one pass.
    """
    make_smollm2(TARGET_DIR)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    model.model.layers = nn.ModuleList([model.model.layers[index] for index in LAYERS])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(LAYERS)
    model.model.embed_tokens.weight.requires_grad_(False)
    samples = load_from_disk(str(answers)).shuffle(seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    progress, started = Progress("training the draft model", "samples", len(samples)), time.monotonic()
    for index, sample in enumerate(samples):
        done = max(index / len(samples), (time.monotonic() - started) / max_seconds)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (index + 1) / 20) * (1 + torch.cos(torch.tensor(done * torch.pi)).item()) / 2
        ids_1T, mask_T = torch.tensor([sample["input_ids"]]), torch.tensor(sample["loss_mask"]).bool()
        if not mask_T[1:].any():
            continue
        last_TH = model.model(input_ids=ids_1T, use_cache=False).last_hidden_state[0, :-1]
        loss = nn.functional.cross_entropy(model.lm_head(last_TH[mask_T[1:]]), ids_1T[0, 1:][mask_T[1:]])
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.advance(1)
    progress.close()
    model.to(torch.bfloat16).save_pretrained(DRAFT_DIR)
    AutoTokenizer.from_pretrained(TARGET_DIR).save_pretrained(DRAFT_DIR)
    print(f"{DRAFT_DIR}: last loss {loss.item():.2f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
