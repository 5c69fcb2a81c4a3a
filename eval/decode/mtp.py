"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): draft layers that some targets were trained with, and why none drafts here.

Such a checkpoint holds K more decoder layers after the model's own (GLM-4.5, MiMo and others do likewise). Transformers leaves them out of the model
that `AutoModelForCausalLM` loads; its `MtpModel` loads them apart and only its own `generate(..., use_mtp=True)`, one sequence at a time, drives
them. The loop of this folder verifies batches and trees, so it does not compare them: an engine does.
"""

from __future__ import annotations

import transformers

from data.target import Target

# DeepSeek-V3's name, that of transformers, and that of Qwen3.5.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def mtp_unavailable_reason(target: Target) -> str:
    """Why this target's own multi-token prediction is not among the methods, and what to do about it."""
    fields = target.config.to_dict()
    count = next((fields[name] for name in _COUNTS if fields.get(name)), None)
    if count is None:
        return f"this target has no multi-token-prediction heads: its config has no {_COUNTS[0]}"
    return (
        f"this target's config names {count} multi-token-prediction layer{'s' if count > 1 else ''}, which transformers {transformers.__version__} "
        "leaves out of the model, so the reference decoders do not run them: serve the target with vLLM's speculative method 'mtp'"
    )
