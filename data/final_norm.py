"""The target's final norm alone, as transformers computes it, without loading the target.

Place in the flow: engines hand out the residual stream before the final norm; drafters are trained on the state after it (`Features.last_TH`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from data.target_files import TargetConfig, final_norm_weight, saved_config


def load_final_norm(config: TargetConfig, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The family's own module with the target's weight: its offset, its order of rounding and its epsilon.

    Returns:
        A module from [..., H] states before the final norm to the states after it, in the same dtype.

    Raises:
        ValueError: if the family is unknown, or its final norm is more than one weight [H].
    """
    outer = saved_config(config)
    build: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            model = build(outer, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(f"target.model {config.model!r}: transformers has no causal language model for {outer.model_type} ({error})") from error
    modules = dict(model.get_decoder().named_children())
    norm = modules.get("norm")
    weight_H = final_norm_weight(config)
    shapes = {name: list(tensor.shape) for name, tensor in norm.state_dict().items()} if norm is not None else {}
    if norm is None or shapes != {"weight": list(weight_H.shape)}:
        raise ValueError(
            f"the final norm of {outer.model_type} targets holds {shapes or 'nothing'}, expected one weight {list(weight_H.shape)}: "
            "extract their states with --target-backend transformers"
        )
    norm = norm.to_empty(device=device).to(dtype)
    norm.load_state_dict({"weight": weight_H})
    return norm.eval().requires_grad_(False)
