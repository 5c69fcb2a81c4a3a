"""An EAGLE-3 training step as a textbook writes it: what train/drafters/eagle3.py computes, without any of its care for time and memory.

Every TTT step attends under an explicit mask of T x (s+1) T, with keys and values repeated for every query head, and keeps the logits of all
positions; the loss is a softmax cross entropy, and autograd finds all gradients. tests/test_bench.py holds it to the same loss and gradients.

Shapes: T packed tokens, N query heads, D head dimension, H hidden size, W draft vocabulary, S = (s+1) T keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from bench.step_worker import RMS_NORM_EPS, ROPE_THETA, STEP_DECAY, Inputs, Shape, TargetParts


def naive_loss(weights: Mapping[str, Tensor], parts: TargetParts, inputs: Inputs, shape: Shape) -> Tensor:
    """The sum over steps and supervised positions of decay^s * cross entropy; `weights` by their names in the checkpoint."""
    place = inputs.input_ids_T.device
    document_T = torch.cat([torch.full((length,), index) for index, length in enumerate(shape.document_lengths)]).to(place)
    position_T = torch.cat([torch.arange(length) for length in shape.document_lengths]).to(place)
    is_same_TT = document_T[:, None] == document_T
    mask_TS = is_same_TT.tril()
    is_drafted_T, p_TW = _teacher(parts, inputs, shape)
    hidden_TH = linear(inputs.aux_TX.to(weights["fc.weight"].dtype), weights["fc.weight"])
    keys, values, total = [], [], torch.zeros((), device=place)
    for step in range(shape.ttt_steps):
        known_T = _later(inputs.input_ids_T, 1 + step) * (_later(document_T, 1 + step, fill=-1) == document_T)
        embed_TH = parts.embed_VH[known_T].to(hidden_TH.dtype)
        if step:
            mask_TS = torch.cat([mask_TS, torch.eye(shape.num_tokens, dtype=torch.bool, device=place)], dim=1)
        hidden_TH = _layer(weights, shape, embed_TH, hidden_TH, position_T + step, keys, values, mask_TS)
        logits_TW = linear(_norm(hidden_TH, weights["norm.weight"]), weights["lm_head.weight"])
        loss_T = -(_later(p_TW, 1 + step) * logits_TW.float().log_softmax(-1)).sum(-1)
        # The token that is predicted is of the same document, it and the last known one are supervised, and the drafter can say the target's choice.
        is_judged_T = (_later(document_T, 2 + step, fill=-1) == document_T) & _later(is_drafted_T, 1 + step)
        is_judged_T &= _later(inputs.loss_mask_T, 1 + step) & _later(inputs.loss_mask_T, 2 + step)
        total = total + STEP_DECAY**step * (loss_T * is_judged_T).sum()
    return total


def _teacher(parts: TargetParts, inputs: Inputs, shape: Shape) -> tuple[Tensor, Tensor]:
    """(bool [T], whether a row's draft is judged; fp32 [T, W], the target's distribution over the draft vocabulary)."""
    ids_W = parts.draft_ids_W.to(inputs.last_TH.device)
    with torch.no_grad():
        if shape.outside == "renormalise":
            return torch.ones_like(inputs.loss_mask_T), linear(inputs.last_TH, parts.lm_head_VH[ids_W]).float().softmax(-1)
        logits_TV = linear(inputs.last_TH, parts.lm_head_VH)
        return torch.isin(logits_TV.argmax(-1), ids_W), logits_TV[:, ids_W].float().softmax(-1)


def _layer(
    weights: Mapping[str, Tensor],
    shape: Shape,
    embed_TH: Tensor,
    hidden_TH: Tensor,
    position_T: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask_TS: Tensor,
) -> Tensor:
    """[T, H]: one TTT step of the decoder layer; adds its keys and values to those of the earlier steps."""
    layer = {name.removeprefix("midlayer."): tensor for name, tensor in weights.items()}
    x_T2H = torch.cat([_norm(embed_TH, layer["input_layernorm.weight"]), _norm(hidden_TH, layer["hidden_norm.weight"])], -1)
    heads = [linear(x_T2H, layer[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, shape.head_dim)) for name in ("q", "k", "v")]
    query_TND, key_TMD, value_TMD = _rotate(heads[0], position_T), _rotate(heads[1], position_T), heads[2]
    keys.append(key_TMD.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1))
    values.append(value_TMD.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1))
    scores_NTS = torch.einsum("tnd,snd->nts", query_TND, torch.cat(keys)) * shape.head_dim**-0.5
    weights_NTS = scores_NTS.masked_fill(~mask_TS, float("-inf")).softmax(-1)
    attended_TND = torch.einsum("nts,snd->tnd", weights_NTS.to(query_TND.dtype), torch.cat(values))
    hidden_TH = hidden_TH + linear(attended_TND.flatten(1), layer["self_attn.o_proj.weight"])
    y_TH = _norm(hidden_TH, layer["post_attention_layernorm.weight"])
    gated = silu(linear(y_TH, layer["mlp.gate_proj.weight"])) * linear(y_TH, layer["mlp.up_proj.weight"])
    return hidden_TH + linear(gated, layer["mlp.down_proj.weight"])


def _norm(x: Tensor, weight_H: Tensor) -> Tensor:
    return rms_norm(x, weight_H.shape, weight_H, RMS_NORM_EPS)


def _rotate(heads_TND: Tensor, position_T: Tensor) -> Tensor:
    """RoPE over the halves (d, d + D/2), in fp32."""
    half = heads_TND.shape[-1] // 2
    frequency = ROPE_THETA ** (-torch.arange(half, device=heads_TND.device, dtype=torch.float32) / half)
    angle_T1D = (position_T[:, None].float() * frequency).repeat(1, 2)[:, None]
    swapped_TND = torch.cat([-heads_TND[..., half:], heads_TND[..., :half]], -1)
    return heads_TND * angle_T1D.cos().to(heads_TND.dtype) + swapped_TND * angle_T1D.sin().to(heads_TND.dtype)


def _later(values: Tensor, distance: int, fill: int = 0) -> Tensor:
    """values[i + distance] at i, `fill` behind the end."""
    tail = torch.full_like(values[:distance], fill)
    return torch.cat([values[distance:], tail])
