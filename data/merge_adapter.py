"""A base and its LoRA adapter as one model on disk.

    python -m data.merge_adapter --target.model BASE --target.adapter ADAPTER --out FOLDER

Place in the flow: train/run.py does this first where the target has an adapter, and writes <run>/target: states, answers, heads, evaluation and
serving are all of that folder. A folder that was made of the same two is kept.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.adapter import ORIGIN_FILE
from data.target import Target
from data.target_files import TargetConfig, base_and_adapter, check_target_files, stored_dtype, target_fingerprint


@dataclass(frozen=True)
class MergeConfig:
    """Merge a LoRA adapter into its base and write the model that both make.

    Attributes:
        target: the base and the adapter; an adapter alone, named as target.model, says itself what its base is.
        out: the folder to write.
    """

    target: TargetConfig
    out: Path


def write_merged(config: TargetConfig, folder: Path) -> TargetConfig:
    """The merged model as a target of its own, with tokenizer and generation config; written unless it is there already.

    The weights have the dtype of the base's; `config.dtype` is what they are loaded in afterwards.

    Raises:
        ValueError: if base and adapter do not fit, or something else is in the folder.
    """
    merged = TargetConfig(model=str(folder), dtype=config.dtype)
    origin = {"fingerprint": target_fingerprint(config)}
    if (folder / ORIGIN_FILE).is_file() and json.loads((folder / ORIGIN_FILE).read_text()) == origin:
        check_target_files(merged)
        return merged
    if folder.exists() and any(folder.iterdir()) and not (folder / ORIGIN_FILE).is_file():
        raise ValueError(f"{folder} holds something that is not a merged target: choose another folder or empty it")
    _, adapter = base_and_adapter(config)
    if adapter is None:
        raise ValueError(f"{config.model} has no adapter, so there is nothing to merge: name one with --target.adapter")
    print(f"merging {adapter.name} into its base: {folder}", flush=True)
    target = Target.load(dataclasses.replace(config, dtype="auto"), "cpu")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    target.model.config.dtype = stored_dtype(target.config)
    save: Any = target.model.save_pretrained
    save(partial)
    target.tokenizer.save_pretrained(partial)
    (partial / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return merged


def main(args: list[str] | None = None) -> int:
    """0 when the folder is written, 2 when it could not be."""
    import tyro

    try:
        config = tyro.cli(MergeConfig, args=args, prog="python -m data.merge_adapter")
        write_merged(config.target, config.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{config.out} is the model to serve, and to name as --target.model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
