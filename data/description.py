"""What a prepared dataset says of itself to someone who has it without headstart: what the columns mean and where it comes from.

Place in the flow: data/prepare.py puts it into the `description` of the splits, which `datasets.load_from_disk` shows. Local paths are not in it: a
dataset may be passed on.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.report import DataReport

_COLUMNS = """Conversations as tokens, for training a draft head for speculative decoding.

conversation_id: id of the record, or <file>:<index>
input_ids: the whole conversation in the target's chat template
loss_mask: true where the assistant speaks, which is what the draft head learns
prompt_ids: up to the first answer, with the template's generation prompt
"""


def describe(report: DataReport, tokenizer: PreTrainedTokenizerBase, max_length: int, num_heldout: int, seed: int) -> str:
    """Columns, sources, tokenizer and settings, one a line."""
    facts = {
        "written by": f"headstart {_version()}",
        "sources": ", ".join(_public_name(source) for source in report.sources),
        "columns": "; ".join(sorted({names for counts in report.columns.values() for names in counts})),
        "records": f"{report.num_read} read, {report.num_kept} kept",
        "tokenizer": f"{_public_name(tokenizer.name_or_path) or 'unknown'}, {len(tokenizer)} tokens",
        "chat template (sha256)": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        "most tokens of a sample": str(max_length),
        "conversations held out": f"{num_heldout}, chosen with seed {seed}",
    }
    return _COLUMNS + "\n" + "".join(f"{name}: {value}\n" for name, value in facts.items())


def _version() -> str:
    try:
        return version("headstart")
    except PackageNotFoundError:  # a bare checkout
        return "(not installed)"


def _public_name(source: str) -> str:
    """A source without the folders that lead to it; package names and Hub ids as they are."""
    path = os.path.expanduser(source)
    is_local = source.startswith(("/", ".", "~")) or os.path.exists(path) or os.path.exists(path.rpartition(":")[0] or path)
    return Path(source).name if is_local else source
