"""Training-time-test attention: causal over the step-0 keys plus one diagonal key for each later step, merged exactly.

Place in the flow: called by the EAGLE-3 block once a TTT step. At step s the query of position i attends to the step-0 keys 0..i of its own
document and to the keys of steps 1..s at the same i (algorithms.md section 3, EAGLE-3 paper section 3.2). Nothing of size T x T is ever held:

    forward   a flash kernel gives the base part and its log-sum-exp; the s diagonal scores join by softmax over [lse, d_1 .. d_s].
    backward  the same kernel's backward, given the *merged* output and log-sum-exp, is exact for the base part, because flash attention's
              gradient needs only P = exp(S - lse) and rowsum(dO * O), and both hold for the merged softmax. The diagonals are explicit.

Grouped-query attention never repeats keys: each member of a group of query heads runs against the same keys.

Shapes: T packed tokens, N query heads, M key/value heads, G = N / M, D head dimension, S diagonal steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def ttt_attention(
    query_TND: Tensor, base_key_TMD: Tensor, base_value_TMD: Tensor, diagonals: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int]
) -> Tensor:
    """Attention of one TTT step over packed documents.

    Args:
        query_TND: queries of this step, RoPE applied.
        base_key_TMD: step-0 keys, RoPE applied; base_value_TMD likewise without RoPE.
        diagonals: (key_TMD, value_TMD) of steps 1..s, empty at step 0.
        lengths: tokens of each document, summing to T.

    Returns:
        [T, N, D], in the queries' dtype.
    """
    flat = [tensor for pair in diagonals for tensor in pair]
    return _TTTAttention.apply(query_TND, base_key_TMD, base_value_TMD, tuple(lengths), *flat)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_TND: Tensor, base_key_TMD: Tensor, base_value_TMD: Tensor, lengths: tuple[int, ...], *flat: Tensor) -> Tensor:
        num_kv_heads = base_key_TMD.shape[1]
        query_TMGD = query_TND.unflatten(1, (num_kv_heads, -1))
        out_TMGD, lse_TMG = _base_forward(query_TMGD, base_key_TMD, base_value_TMD, lengths)
        if flat:
            scores_STMG = _diagonal_scores(query_TMGD, flat[0::2])
            base_lse_TMG = lse_TMG
            lse_TMG = torch.logsumexp(torch.cat([base_lse_TMG[None], scores_STMG]), dim=0)
            merged_TMGD = out_TMGD.float() * (base_lse_TMG - lse_TMG).exp()[..., None]
            for score_TMG, value_TMD in zip(scores_STMG, flat[1::2], strict=True):
                merged_TMGD += (score_TMG - lse_TMG).exp()[..., None] * value_TMD[:, :, None].float()
            out_TMGD = merged_TMGD.to(query_TND.dtype)
        ctx.save_for_backward(query_TMGD, base_key_TMD, base_value_TMD, out_TMGD, lse_TMG, *flat)
        ctx.lengths = lengths
        return out_TMGD.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_TMGD, base_key_TMD, base_value_TMD, out_TMGD, lse_TMG, *flat = ctx.saved_tensors
        grad_TMGD = grad_TND.unflatten(1, (base_key_TMD.shape[1], -1)).to(out_TMGD.dtype).contiguous()
        grad_query_TMGD, grad_key_TMD, grad_value_TMD = _base_backward(
            grad_TMGD, query_TMGD, base_key_TMD, base_value_TMD, out_TMGD, lse_TMG, ctx.lengths
        )
        flat_grads: list[Tensor] = []
        if flat:
            scale = query_TMGD.shape[-1] ** -0.5
            query_fp32, grad_fp32 = query_TMGD.float(), grad_TMGD.float()
            grad_query_fp32 = grad_query_TMGD.float()
            delta_TMG = (grad_fp32 * out_TMGD.float()).sum(-1)
            weights_STMG = (_diagonal_scores(query_TMGD, flat[0::2]) - lse_TMG).exp()
            for weight_TMG, key_TMD, value_TMD in zip(weights_STMG, flat[0::2], flat[1::2], strict=True):
                grad_weight_TMG = (grad_fp32 * value_TMD[:, :, None].float()).sum(-1)
                grad_score_TMG1 = (weight_TMG * (grad_weight_TMG - delta_TMG) * scale)[..., None]
                grad_query_fp32 += grad_score_TMG1 * key_TMD[:, :, None].float()
                flat_grads.append((grad_score_TMG1 * query_fp32).sum(2).to(key_TMD.dtype))
                flat_grads.append((weight_TMG[..., None] * grad_fp32).sum(2).to(value_TMD.dtype))
            grad_query_TMGD = grad_query_fp32.to(query_TMGD.dtype)
        return grad_query_TMGD.flatten(1, 2), grad_key_TMD, grad_value_TMD, None, *flat_grads


def _diagonal_scores(query_TMGD: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scaled scores [S, T, M, G] of each query with the later steps' keys at its own position, fp32."""
    scale = query_TMGD.shape[-1] ** -0.5
    query_fp32 = query_TMGD.float()
    return torch.stack([(query_fp32 * key_TMD[:, :, None].float()).sum(-1) * scale for key_TMD in keys])


def _base_forward(query_TMGD: Tensor, key_TMD: Tensor, value_TMD: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Causal attention of each document with its log-sum-exp (fp32 [T, M, G])."""
    out_TMGD = torch.empty(query_TMGD.shape, dtype=query_TMGD.dtype, device=query_TMGD.device)
    lse_TMG = torch.empty(query_TMGD.shape[:3], dtype=torch.float32, device=query_TMGD.device)
    for rows in _document_slices(lengths):
        key_1MTD, value_1MTD = _heads_first(key_TMD[rows]), _heads_first(value_TMD[rows])
        for member in range(query_TMGD.shape[2]):
            query_1MTD = _heads_first(query_TMGD[rows, :, member])
            out_1MTD, lse_1MT = _flash_forward(query_1MTD, key_1MTD, value_1MTD)
            out_TMGD[rows, :, member] = out_1MTD[0].transpose(0, 1)
            lse_TMG[rows, :, member] = lse_1MT[0].transpose(0, 1)
    return out_TMGD, lse_TMG


def _base_backward(
    grad_TMGD: Tensor,
    query_TMGD: Tensor,
    key_TMD: Tensor,
    value_TMD: Tensor,
    out_TMGD: Tensor,
    lse_TMG: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the base part, from the merged output and log-sum-exp."""
    grad_query_TMGD = torch.empty_like(query_TMGD)
    grad_key_TMD, grad_value_TMD = torch.empty_like(key_TMD), torch.empty_like(value_TMD)
    for rows in _document_slices(lengths):
        key_1MTD, value_1MTD = _heads_first(key_TMD[rows]), _heads_first(value_TMD[rows])
        grad_key, grad_value = torch.zeros_like(key_1MTD, dtype=torch.float32), torch.zeros_like(value_1MTD, dtype=torch.float32)
        for member in range(query_TMGD.shape[2]):
            grad_q, grad_k, grad_v = _flash_backward(
                _heads_first(grad_TMGD[rows, :, member]),
                _heads_first(query_TMGD[rows, :, member]),
                key_1MTD,
                value_1MTD,
                _heads_first(out_TMGD[rows, :, member]),
                lse_TMG[rows, :, member].transpose(0, 1)[None].contiguous(),
            )
            grad_query_TMGD[rows, :, member] = grad_q[0].transpose(0, 1)
            grad_key, grad_value = grad_key + grad_k.float(), grad_value + grad_v.float()
        grad_key_TMD[rows] = grad_key[0].transpose(0, 1).to(key_TMD.dtype)
        grad_value_TMD[rows] = grad_value[0].transpose(0, 1).to(value_TMD.dtype)
    return grad_query_TMGD, grad_key_TMD, grad_value_TMD


def _flash_forward(query_1MTD: Tensor, key_1MTD: Tensor, value_1MTD: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one causal document by the kernel that fits the device and dtype."""
    aten = torch.ops.aten
    if query_1MTD.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query_1MTD, key_1MTD, value_1MTD, 0.0, True)
    # The memory-efficient kernel takes fp32 and bf16 alike; it wants contiguous heads-first tensors and pads lse to a multiple of 32.
    out_1MTD, lse_1MT, _, _ = aten._scaled_dot_product_efficient_attention(query_1MTD, key_1MTD, value_1MTD, None, True, 0.0, True)
    return out_1MTD, lse_1MT[..., : query_1MTD.shape[2]]


def _flash_backward(
    grad_1MTD: Tensor, query_1MTD: Tensor, key_1MTD: Tensor, value_1MTD: Tensor, out_1MTD: Tensor, lse_1MT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (query, key, value) of one causal document."""
    aten = torch.ops.aten
    if query_1MTD.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_1MTD, query_1MTD, key_1MTD, value_1MTD, out_1MTD, lse_1MT, 0.0, True)
    padded = torch.nn.functional.pad(lse_1MT, (0, -lse_1MT.shape[-1] % 32), value=float("inf"))
    no_dropout = torch.zeros((), dtype=torch.int64, device="cpu")
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_1MTD, query_1MTD, key_1MTD, value_1MTD, None, out_1MTD, padded, no_dropout, no_dropout, 0.0, [True, True, True, False], True
    )
    return grad_q, grad_k, grad_v


def _heads_first(tensor_TMD: Tensor) -> Tensor:
    """[T, M, D] -> [1, M, T, D]."""
    return tensor_TMD.transpose(0, 1)[None]


def _document_slices(lengths: Sequence[int]) -> list[slice]:
    """The rows of each document in the pack."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
