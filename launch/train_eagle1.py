"""EAGLE-1 under DeepSpeed ZeRO-2: `deepspeed launch/train_eagle1.py`; the settings are those of recipes/eagle1.py."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.eagle1 import recipe, start
from train.config import under_deepspeed

if __name__ == "__main__":
    start(under_deepspeed(recipe(), ROOT / "launch" / "ds_zero2.json"))
