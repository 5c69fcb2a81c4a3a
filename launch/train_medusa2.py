"""Medusa-2 under DeepSpeed ZeRO-2: `deepspeed launch/train_medusa2.py`; the settings are those of recipes/medusa2.py."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.medusa2 import recipe, start
from train.config import under_deepspeed

if __name__ == "__main__":
    start(under_deepspeed(recipe(), ROOT / "launch" / "ds_zero2.json"))
