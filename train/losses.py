"""Losses as pure functions that never hold logits of all positions: distributions are computed in chunks of teacher rows.

Place in the flow: called by the drafters' `forward`. Every function returns sums, so that chunks, micro-batches and ranks add up exactly; the
engine divides by the supervised positions of the whole global batch.

The gradient is formed in the forward pass: while a chunk's logits exist, d loss / d logits is known in closed form, so the chunk contributes its
part of d student and d head and is dropped. Peak memory is one chunk of logits whatever T, K and the vocabulary are. The target's distribution of
a row is computed once and serves all K drafts that are judged against it, whether they come from one head or from a head each: the heads take turns
within a chunk. Drafts are judged against the target's distributions (`Teacher`) or against the tokens that came next (`Labels`).

Shapes: K drafts (TTT steps or heads; those of one head in a chunk), R teacher rows (C in a chunk, B in a block), H draft hidden size, E target hidden
size, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

LossKind = Literal["ce", "kl", "lk"]
LK_ETA = 3.0
# Logits of a chunk, and of a block of it that is in fp32 at a time: on a GPU the whole chunk.
_CHUNK_ELEMENTS = 2**24
_CPU_BLOCK_ELEMENTS = 2**19
_HEAD_ROWS = 2**13
_GROUP = 128


@dataclass(frozen=True)
class Teacher:
    """The target's distributions at R rows, as what they are computed from.

    Attributes:
        last_RE: post-norm last hidden states of the target.
        lm_head_VE: the target's head.
        draft_ids_W: int64 target ids of the draft vocabulary, ascending; None where it is the whole vocabulary.
        drops_outside: whether rows whose argmax is outside the draft vocabulary carry no loss (what all peers do); finding that
            argmax takes the full-vocabulary logits. False renormalises every row over the draft vocabulary.
        softcap: where the target's logits are softcap * tanh(logits / softcap).
    """

    last_RE: Tensor
    lm_head_VE: Tensor
    draft_ids_W: Tensor | None
    drops_outside: bool
    softcap: float | None = None


@dataclass(frozen=True)
class Labels:
    """The tokens that came next, in the place of the target's distributions.

    Attributes:
        label_KR: int64 indices into the student's vocabulary; anything valid where the weight is zero.
    """

    label_KR: Tensor


class DistillationSums(NamedTuple):
    """Sums over the weighted rows of one micro-batch.

    Attributes:
        loss_sum: fp32 scalar, differentiable with respect to student and head.
        hits_K: fp32, rows where the student's argmax is the label, or the target's argmax (over the full vocabulary where `drops_outside`).
        rows_K: fp32, rows with a non-zero weight, those outside the draft vocabulary included.
        num_outside_K: fp32, rows of `rows_K` whose target argmax is outside the draft vocabulary (0 where unknown).
    """

    loss_sum: Tensor
    hits_K: Tensor
    rows_K: Tensor
    num_outside_K: Tensor


def step_weights(num_steps: int, decay: float) -> list[float]:
    """decay^s for s = 0 .. num_steps-1."""
    return [decay**step for step in range(num_steps)]


def distillation_loss(
    student_KRH: Tensor,
    head_WH: Tensor | Sequence[Tensor],
    teacher: Teacher | Labels,
    weight_KR: Tensor,
    kind: LossKind,
    softcap: float | None = None,
) -> DistillationSums:
    """Weighted sum of the loss between K student distributions and the target's distribution, or the label, at each row.

    Args:
        student_KRH: drafter outputs after its norm, aligned with the teacher's rows.
        head_WH: the drafter's head over the draft vocabulary, or K of them, one for each draft.
        teacher: the target at the same rows, or the labels.
        weight_KR: fp32, zero where a draft is not supervised.
        kind: "ce" sum -p log q; "kl" the same minus the entropy of p (equal gradients); "lk" the hybrid of arXiv 2602.23881,
            w KL + (1 - w) TV with w = exp(-3 acceptance) held constant. Labels take "ce" only.
        softcap: of the student's logits too, where its head is the target's own.
    """
    assert kind == "ce" or isinstance(teacher, Teacher), "labels are judged by cross entropy"
    heads = (head_WH,) if isinstance(head_WH, Tensor) else tuple(head_WH)
    assert len(heads) in (1, len(student_KRH)), "one head for all drafts, or one for each"
    loss_sum, hits_K, rows_K, num_outside_K = _Distillation.apply(student_KRH, teacher, weight_KR, kind, softcap, *heads)
    return DistillationSums(loss_sum, hits_K, rows_K, num_outside_K)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_KRH: Tensor,
        teacher: Teacher | Labels,
        weight_KR: Tensor,
        kind: LossKind,
        softcap: float | None,
        *heads_WH: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_steps, num_rows, _ = student_KRH.shape
        device = student_KRH.device
        compute_dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else student_KRH.dtype
        heads = [head_WH.to(compute_dtype) for head_WH in heads_WH]
        grad_student_KRH = torch.zeros_like(student_KRH)
        grad_heads = [
            torch.zeros(head_WH.shape, dtype=torch.float32, device=device) if is_trained else None
            for head_WH, is_trained in zip(heads_WH, ctx.needs_input_grad[5:], strict=True)
        ]
        loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        counts_3K = torch.zeros(3, num_steps, dtype=torch.float32, device=device)
        of_head = [slice(None)] if len(heads) == 1 else [slice(step, step + 1) for step in range(num_steps)]
        chunk_rows = max(1, _CHUNK_ELEMENTS // max(_teacher_width(teacher), num_steps // len(heads) * len(heads[0])))
        with torch.autocast(device.type, enabled=False):
            for start in range(0, num_rows, chunk_rows):
                rows = slice(start, start + chunk_rows)
                target = teacher.label_KR[:, rows] if isinstance(teacher, Labels) else _ChunkTarget(teacher, rows, compute_dtype, kind, len(heads))
                for drafts, head, grad_WH in zip(of_head, heads, grad_heads, strict=True):
                    student_KCH = student_KRH[drafts, rows].to(compute_dtype)
                    logits_KCW = _product(student_KCH, head.T)
                    judge = target if isinstance(target, _ChunkTarget) else target[drafts]
                    chunk_loss, counts = _judge(logits_KCW, judge, weight_KR[drafts, rows], kind, softcap)
                    loss_sum += chunk_loss
                    counts_3K[:, drafts] += counts
                    grad_logits_KCW = logits_KCW  # what `_judge` made of them
                    grad_student_KRH[drafts, rows] = _product(grad_logits_KCW, head).to(grad_student_KRH.dtype)
                    if grad_WH is not None:
                        _add_product(grad_WH, grad_logits_KCW.flatten(0, 1), student_KCH.flatten(0, 1))
        ctx.grads = [grad_student_KRH, *(grad.to(head.dtype) for grad, head in zip(grad_heads, heads_WH, strict=True) if grad is not None)]
        ctx.mark_non_differentiable(counts_3K)
        hits_K, rows_K, outside_K = counts_3K.unbind(0)
        return loss_sum, hits_K, rows_K, outside_K

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place: nobody else sees them, and a head's gradient is as large as the head. So there is one backward pass.
        grads, ctx.grads = iter([grad.mul_(grad_loss.to(grad.dtype)) for grad in ctx.grads]), None
        return next(grads), None, None, None, None, *(next(grads) if is_trained else None for is_trained in ctx.needs_input_grad[5:])


def _add_product(total_WH: Tensor, rows_NW: Tensor, rows_NH: Tensor) -> None:
    """total += rows_NW.T @ rows_NH, never with a second matrix of that size."""
    if total_WH.dtype == rows_NW.dtype:
        total_WH.addmm_(rows_NW.T, rows_NH)
        return
    for start in range(0, len(total_WH), _HEAD_ROWS):
        rows = slice(start, start + _HEAD_ROWS)
        total_WH[rows] += rows_NW[:, rows].T @ rows_NH


def _product(rows_KCM: Tensor, matrix_MN: Tensor) -> Tensor:
    """[K, C, N] as one matrix product: torch would copy the matrix for a batched one."""
    return (rows_KCM.flatten(0, 1) @ matrix_MN).unflatten(0, rows_KCM.shape[:2])


def _teacher_width(teacher: Teacher | Labels) -> int:
    """Logits of the target that a row takes beside the student's."""
    return teacher.lm_head_VE.shape[0] if isinstance(teacher, Teacher) and teacher.drops_outside else 0


class _ChunkTarget:
    """The target's distributions at a chunk's rows, a block at a time; where several heads ask, kept for the next one.

    Attributes:
        is_inside_C: whether the argmax over the target's whole vocabulary is in the draft vocabulary; True where nobody asks.
    """

    def __init__(self, teacher: Teacher, rows: slice, dtype: torch.dtype, kind: LossKind, num_heads: int) -> None:
        self._logits_CW, self.is_inside_C = _teacher_logits(teacher, rows, dtype)
        self._softcap, self._kind, self._is_kept = teacher.softcap, kind, num_heads > 1
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def block(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(probabilities [B, W], what is subtracted from the cross entropy: the probabilities' own, or 0 for "ce"; argmax), fp32."""
        if rows.start in self._kept:
            return self._kept[rows.start]
        logits_BW = _capped(self._logits_CW[rows].float(), self._softcap)
        p_BW, log_sum_B, best_B = _softmax(logits_BW)
        entropy_B = torch.zeros_like(log_sum_B) if self._kind == "ce" else log_sum_B - (logits_BW * p_BW).sum(-1)
        if self._is_kept:
            self._kept[rows.start] = p_BW, entropy_B, best_B
        return p_BW, entropy_B, best_B


def _judge(logits_KCW: Tensor, target: _ChunkTarget | Tensor, weight_KC: Tensor, kind: LossKind, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Turns a chunk's logits into d loss / d logits, in place; returns the weighted loss sum and the counts [3, K]: hits, rows, rows outside.

    `target` is the target, or the labels [K, C]. Softmax and gradient are formed in fp32, a block of rows at a time: on a CPU one that stays in its
    cache, where the same passes over a whole chunk take twice as long.
    """
    num_steps, num_rows, width = logits_KCW.shape
    active_KC = weight_KC > 0
    hits_KC = torch.zeros_like(active_KC)
    is_inside_C = target.is_inside_C if isinstance(target, _ChunkTarget) else torch.ones_like(active_KC[0])
    weight_KC = weight_KC * is_inside_C
    loss_sum = torch.zeros((), dtype=torch.float32, device=logits_KCW.device)
    block_elements = _CPU_BLOCK_ELEMENTS if logits_KCW.device.type == "cpu" else _CHUNK_ELEMENTS
    block_rows = max(1, block_elements // ((num_steps + 1) * width))
    for start in range(0, num_rows, block_rows):
        block = slice(start, start + block_rows)
        logits_KBW, weight_KB = _capped(logits_KCW[:, block].float(), softcap), weight_KC[:, block]
        if isinstance(target, _ChunkTarget):
            p_BW, entropy_B, best_B = target.block(block)
            block_loss, grad_KBW, best_KB = _loss_and_gradient(logits_KBW, p_BW, entropy_B, weight_KB, kind)
            hits_KC[:, block] = best_KB == best_B
        else:
            block_loss, grad_KBW, hits_KC[:, block] = _label_loss_and_gradient(logits_KBW, target[:, block], weight_KB)
        loss_sum += block_loss
        if softcap is not None:
            grad_KBW = grad_KBW * (1 - (logits_KBW / softcap) ** 2)  # d tanh = 1 - tanh^2
        logits_KCW[:, block] = grad_KBW
    return loss_sum, torch.stack([(hits_KC & is_inside_C & active_KC).sum(1), active_KC.sum(1), (active_KC & ~is_inside_C).sum(1)])


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _teacher_logits(teacher: Teacher, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the target's logits [C, W] over the draft vocabulary, whether its argmax is in there)."""
    last_CE = teacher.last_RE[rows].to(dtype)
    is_inside_C = torch.ones(last_CE.shape[0], dtype=torch.bool, device=last_CE.device)
    if teacher.draft_ids_W is None:
        return last_CE @ teacher.lm_head_VE.to(dtype).T, is_inside_C
    if not teacher.drops_outside:
        return last_CE @ teacher.lm_head_VE[teacher.draft_ids_W].to(dtype).T, is_inside_C
    logits_CV = last_CE @ teacher.lm_head_VE.to(dtype).T
    return logits_CV[:, teacher.draft_ids_W], torch.isin(_largest(logits_CV)[1], teacher.draft_ids_W)


def _loss_and_gradient(logits_KBW: Tensor, p_BW: Tensor, entropy_B: Tensor, weight_KB: Tensor, kind: LossKind) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted loss sum, d loss / d logits, argmax)."""
    q_KBW, log_sum_KB, best_KB = _softmax(logits_KBW)
    cross_KB = log_sum_KB - (logits_KBW * p_BW).sum(-1) - entropy_B
    if kind != "lk":
        return (weight_KB * cross_KB).sum(), q_KBW.sub_(p_BW).mul_(weight_KB[..., None]), best_KB
    acceptance_KB = torch.minimum(q_KBW, p_BW).sum(-1)
    mix_KB = torch.exp(-LK_ETA * acceptance_KB)
    # d acceptance / d logits = q * (m - E_q[m]) with m = 1 where q < p; TV = 1 - acceptance.
    below_KBW = (q_KBW < p_BW).float()
    grad_tv_KBW = q_KBW * ((q_KBW * below_KBW).sum(-1, keepdim=True) - below_KBW)
    grad_KBW = mix_KB[..., None] * (q_KBW - p_BW) + (1 - mix_KB)[..., None] * grad_tv_KBW
    loss_KB = mix_KB * cross_KB + (1 - mix_KB) * (1 - acceptance_KB)
    return (weight_KB * loss_KB).sum(), grad_KBW * weight_KB[..., None], best_KB


def _label_loss_and_gradient(logits_KBW: Tensor, label_KB: Tensor, weight_KB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted cross entropy of the labels, d loss / d logits = softmax - one-hot, whether the argmax is the label)."""
    q_KBW, log_sum_KB, best_KB = _softmax(logits_KBW)
    cross_KB = log_sum_KB - logits_KBW.gather(-1, label_KB[..., None])[..., 0]
    grad_KBW = q_KBW.mul_(weight_KB[..., None])
    grad_KBW.scatter_add_(-1, label_KB[..., None], -weight_KB[..., None])
    return (weight_KB * cross_KB).sum(), grad_KBW, best_KB == label_KB


def _softmax(logits_KBW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax, log of the sum of exponentials, argmax); on a CPU `torch.logsumexp` alone takes six times as long as the softmax.

    The largest probability is exp(largest logit - log sum), which gives the log sum.
    """
    largest_KB, best_KB = _largest(logits_KBW)
    q_KBW = logits_KBW.softmax(-1)
    return q_KBW, largest_KB - q_KBW.gather(-1, best_KB[..., None])[..., 0].log(), best_KB


def _largest(values_KBW: Tensor) -> tuple[Tensor, Tensor]:
    """(largest, its first index), as `max(-1)` gives them: on a CPU that takes longer than the softmax, and groups first a quarter of it."""
    if values_KBW.shape[-1] % _GROUP:
        return values_KBW.max(-1)
    groups = values_KBW.unflatten(-1, (-1, _GROUP))
    largest_of_groups = groups.amax(-1)
    group_KB1 = largest_of_groups.argmax(-1, keepdim=True)
    within_KB = groups.gather(-2, group_KB1[..., None].expand(*group_KB1.shape, _GROUP))[..., 0, :].argmax(-1)
    return largest_of_groups.gather(-1, group_KB1)[..., 0], group_KB1[..., 0] * _GROUP + within_KB


def cosine_schedule(step: int, num_steps: int, num_warmup_steps: int, floor: float) -> float:
    """Learning-rate factor at `step`: linear from 0 to 1 over the warm-up, then a cosine down to `floor` at `num_steps`."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
