"""Training-time-test attention: causal over the step-0 keys plus one diagonal key for each later step, merged exactly.

Place in the flow: called by the EAGLE-3 block once a TTT step. At step s the query of position i attends to the step-0 keys 0..i of its own
document and to the keys of steps 1..s at the same i (algorithms.md section 3, EAGLE-3 paper section 3.2). Nothing of size T x T is ever held:

    forward   a flash kernel gives the base part and its log-sum-exp; the s diagonal scores join by softmax over [lse, d_1 .. d_s].
    backward  the same kernel's backward, given the *merged* output and log-sum-exp, is exact for the base part, because flash attention's
              gradient needs only P = exp(S - lse) and rowsum(dO * O), and both hold for the merged softmax. The diagonals are explicit.

Grouped-query attention never repeats keys: the members of a group of query heads are a batch over one view of the keys. Queries may stand at some
positions only (`rows_R`): where nothing is supervised, only keys and values are needed.

Shapes: T packed tokens, R positions with a query, N query heads, M key/value heads, G = N / M, D head dimension, S diagonal steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def ttt_attention(
    query_RND: Tensor,
    base_key_TMD: Tensor,
    base_value_TMD: Tensor,
    diagonals: Sequence[tuple[Tensor, Tensor]],
    lengths: Sequence[int],
    rows_R: Tensor | None = None,
) -> Tensor:
    """Attention of one TTT step over packed documents.

    Args:
        query_RND: queries of this step, RoPE applied.
        base_key_TMD: step-0 keys, RoPE applied; base_value_TMD likewise without RoPE.
        diagonals: (key_RMD, value_RMD) of steps 1..s, empty at step 0.
        lengths: tokens of each document, summing to T.
        rows_R: int64, ascending: the positions that the queries (and diagonals) stand at; None where they are all T.

    Returns:
        [R, N, D], in the queries' dtype.
    """
    flat = [tensor for pair in diagonals for tensor in pair]
    return _TTTAttention.apply(query_RND, base_key_TMD, base_value_TMD, tuple(lengths), rows_R, *flat)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_RND: Tensor, base_key_TMD: Tensor, base_value_TMD: Tensor, lengths: tuple[int, ...], rows_R: Tensor | None, *flat: Tensor
    ) -> Tensor:
        num_tokens, num_kv_heads, _ = base_key_TMD.shape
        query_RMGD = query_RND.unflatten(1, (num_kv_heads, -1))
        out_TMGD, lse_TMG = _base_forward(_spread(query_RMGD, rows_R, num_tokens), base_key_TMD, base_value_TMD, lengths)
        out_RMGD, lse_RMG = (out_TMGD, lse_TMG) if rows_R is None else (out_TMGD[rows_R], lse_TMG[rows_R])
        if flat:
            scores_SRMG = _diagonal_scores(query_RMGD, flat[0::2])
            base_lse_RMG = lse_RMG
            lse_RMG = torch.logsumexp(torch.cat([base_lse_RMG[None], scores_SRMG]), dim=0)
            merged_RMGD = out_RMGD.float() * (base_lse_RMG - lse_RMG).exp()[..., None]
            for score_RMG, value_RMD in zip(scores_SRMG, flat[1::2], strict=True):
                merged_RMGD += (score_RMG - lse_RMG).exp()[..., None] * value_RMD[:, :, None].float()
            out_RMGD = merged_RMGD.to(query_RND.dtype)
        ctx.save_for_backward(query_RMGD, base_key_TMD, base_value_TMD, out_RMGD, lse_RMG, *flat)
        ctx.lengths, ctx.rows_R = lengths, rows_R
        return out_RMGD.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_RND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_RMGD, base_key_TMD, base_value_TMD, out_RMGD, lse_RMG, *flat = ctx.saved_tensors
        num_tokens, num_kv_heads, _ = base_key_TMD.shape
        grad_RMGD = grad_RND.unflatten(1, (num_kv_heads, -1)).to(out_RMGD.dtype).contiguous()
        grad_query_TMGD, grad_key_TMD, grad_value_TMD = _base_backward(
            _spread(grad_RMGD, ctx.rows_R, num_tokens),
            _spread(query_RMGD, ctx.rows_R, num_tokens),
            base_key_TMD,
            base_value_TMD,
            _spread(out_RMGD, ctx.rows_R, num_tokens),
            _spread(lse_RMG, ctx.rows_R, num_tokens, fill=float("inf")),  # a probability of zero: nothing flows from there
            ctx.lengths,
        )
        grad_query_RMGD = grad_query_TMGD if ctx.rows_R is None else grad_query_TMGD[ctx.rows_R]
        flat_grads: list[Tensor] = []
        if flat:
            scale = query_RMGD.shape[-1] ** -0.5
            query_fp32, grad_fp32 = query_RMGD.float(), grad_RMGD.float()
            grad_query_fp32 = grad_query_RMGD.float()
            delta_RMG = (grad_fp32 * out_RMGD.float()).sum(-1)
            weights_SRMG = (_diagonal_scores(query_RMGD, flat[0::2]) - lse_RMG).exp()
            for weight_RMG, key_RMD, value_RMD in zip(weights_SRMG, flat[0::2], flat[1::2], strict=True):
                grad_weight_RMG = (grad_fp32 * value_RMD[:, :, None].float()).sum(-1)
                grad_score_RMG1 = (weight_RMG * (grad_weight_RMG - delta_RMG) * scale)[..., None]
                grad_query_fp32 += grad_score_RMG1 * key_RMD[:, :, None].float()
                flat_grads.append((grad_score_RMG1 * query_fp32).sum(2).to(key_RMD.dtype))
                flat_grads.append((weight_RMG[..., None] * grad_fp32).sum(2).to(value_RMD.dtype))
            grad_query_RMGD = grad_query_fp32.to(query_RMGD.dtype)
        return grad_query_RMGD.flatten(1, 2), grad_key_TMD, grad_value_TMD, None, None, *flat_grads


def _spread(values_R: Tensor, rows_R: Tensor | None, num_tokens: int, fill: float = 0.0) -> Tensor:
    """[T, ...]: the values at their positions, `fill` elsewhere."""
    if rows_R is None:
        return values_R
    return values_R.new_full((num_tokens, *values_R.shape[1:]), fill).index_copy_(0, rows_R, values_R)


def _diagonal_scores(query_RMGD: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scaled scores [S, R, M, G] of each query with the later steps' keys at its own position, fp32."""
    scale = query_RMGD.shape[-1] ** -0.5
    query_fp32 = query_RMGD.float()
    return torch.stack([(query_fp32 * key_RMD[:, :, None].float()).sum(-1) * scale for key_RMD in keys])


def _base_forward(query_TMGD: Tensor, key_TMD: Tensor, value_TMD: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Causal attention of each document with its log-sum-exp (fp32 [T, M, G])."""
    out_TMGD = torch.empty_like(query_TMGD, memory_format=torch.contiguous_format)
    lse_TMG = torch.empty(query_TMGD.shape[:3], dtype=torch.float32, device=query_TMGD.device)
    for rows in _document_slices(lengths):
        query_GMTD, key_GMTD, value_GMTD = _by_member(query_TMGD[rows], key_TMD[rows], value_TMD[rows])
        out_GMTD, lse_GMT = _flash_forward(query_GMTD, key_GMTD, value_GMTD)
        out_TMGD[rows] = out_GMTD.permute(2, 1, 0, 3)
        lse_TMG[rows] = lse_GMT.permute(2, 1, 0)
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
    grad_query_TMGD = torch.empty_like(query_TMGD, memory_format=torch.contiguous_format)
    grad_key_TMD, grad_value_TMD = torch.empty_like(key_TMD), torch.empty_like(value_TMD)
    for rows in _document_slices(lengths):
        query_GMTD, key_GMTD, value_GMTD = _by_member(query_TMGD[rows], key_TMD[rows], value_TMD[rows])
        grad_GMTD, out_GMTD = (tensor[rows].permute(2, 1, 0, 3).to(query_GMTD.dtype) for tensor in (grad_TMGD, out_TMGD))
        lse_GMT = lse_TMG[rows].permute(2, 1, 0).contiguous()
        grad_query, grad_key, grad_value = _flash_backward(grad_GMTD, query_GMTD, key_GMTD, value_GMTD, out_GMTD, lse_GMT)
        grad_query_TMGD[rows] = grad_query.permute(2, 1, 0, 3).to(query_TMGD.dtype)
        grad_key_TMD[rows] = grad_key.float().sum(0).transpose(0, 1).to(key_TMD.dtype)
        grad_value_TMD[rows] = grad_value.float().sum(0).transpose(0, 1).to(value_TMD.dtype)
    return grad_query_TMGD, grad_key_TMD, grad_value_TMD


def _by_member(query_TMGD: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[G, M, T, D] each, for the kernels: the members of a group are a batch, whose keys and values are one view without a copy.

    On a CPU in fp32, whatever the dtype: its flash kernel takes twice as long in bf16.
    """
    dtype = torch.float32 if query_TMGD.device.type == "cpu" else query_TMGD.dtype
    key_GMTD, value_GMTD = (tensor.to(dtype).transpose(0, 1).expand(query_TMGD.shape[2], -1, -1, -1) for tensor in (key_TMD, value_TMD))
    return query_TMGD.to(dtype).permute(2, 1, 0, 3), key_GMTD, value_GMTD


def _flash_forward(query_GMTD: Tensor, key_GMTD: Tensor, value_GMTD: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one causal document by the kernel that fits the device and dtype."""
    aten = torch.ops.aten
    if query_GMTD.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query_GMTD, key_GMTD, value_GMTD, 0.0, True)
    # The memory-efficient kernel takes fp32 and bf16 alike; it wants contiguous heads-first tensors and pads lse to a multiple of 32.
    out_GMTD, lse_GMT, _, _ = aten._scaled_dot_product_efficient_attention(query_GMTD, key_GMTD, value_GMTD, None, True, 0.0, True)
    return out_GMTD, lse_GMT[..., : query_GMTD.shape[2]]


def _flash_backward(
    grad_GMTD: Tensor, query_GMTD: Tensor, key_GMTD: Tensor, value_GMTD: Tensor, out_GMTD: Tensor, lse_GMT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (query, key, value) of one causal document."""
    aten = torch.ops.aten
    if query_GMTD.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_GMTD, query_GMTD, key_GMTD, value_GMTD, out_GMTD, lse_GMT, 0.0, True)
    padded = torch.nn.functional.pad(lse_GMT, (0, -lse_GMT.shape[-1] % 32), value=float("inf"))
    no_dropout = torch.zeros((), dtype=torch.int64, device="cpu")
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_GMTD, query_GMTD, key_GMTD, value_GMTD, None, out_GMTD, padded, no_dropout, no_dropout, 0.0, [True, True, True, False], True
    )
    return grad_q, grad_k, grad_v


def _document_slices(lengths: Sequence[int]) -> list[slice]:
    """The rows of each document in the pack."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
