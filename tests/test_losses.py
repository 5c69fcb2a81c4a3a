"""The chunked losses equal a naive form that holds all logits, and so do their gradients."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from train import losses
from train.losses import Labels, Teacher, cosine_schedule, distillation_loss

V, W, H, E, K, R = 23, 11, 6, 7, 3, 17


def setup(draft_ids, drops_outside):
    torch.manual_seed(0)
    teacher = Teacher(torch.randn(R, E), torch.randn(V, E), draft_ids, drops_outside)
    student = torch.randn(K, R, H, requires_grad=True)
    head = torch.randn(V if draft_ids is None else len(draft_ids), H, requires_grad=True)
    weight = torch.rand(K, R) * (torch.rand(K, R) > 0.3)
    return teacher, student, head, weight


def naive(teacher, student, head, weight, kind):
    full = teacher.last_RE @ teacher.lm_head_VE.T
    ids = torch.arange(V) if teacher.draft_ids_W is None else teacher.draft_ids_W
    p = full[:, ids].softmax(-1)
    inside = (full.argmax(-1)[:, None] == ids).any(-1) if teacher.drops_outside else torch.ones(R, dtype=torch.bool)
    log_q = (student @ head.T).log_softmax(-1)
    cross = -(p * log_q).sum(-1)
    kl = cross + (p * p.log()).sum(-1)
    acceptance = torch.minimum(p.expand_as(log_q), log_q.exp()).sum(-1)
    mix = (-3 * acceptance).exp().detach()
    loss = {"ce": cross, "kl": kl, "lk": mix * kl + (1 - mix) * (1 - acceptance)}[kind]
    hits = (log_q.argmax(-1) == p.argmax(-1)) & inside & (weight > 0)
    return (loss * weight * inside).sum(), hits.sum(1), ((weight > 0) & ~inside).sum(1)


@pytest.mark.parametrize("kind", ["ce", "kl", "lk"])
@pytest.mark.parametrize("vocabulary", ["full", "drop", "renormalise"])
@pytest.mark.parametrize("chunk_elements", [1, 100, 2**24])
def test_loss_counts_and_gradients_equal_the_naive_form(monkeypatch, kind, vocabulary, chunk_elements):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(losses, "_CPU_BLOCK_ELEMENTS", chunk_elements // 3)
    draft_ids = None if vocabulary == "full" else torch.tensor([0, 2, 3, 5, 8, 9, 12, 15, 16, 20, 22])
    teacher, student, head, weight = setup(draft_ids, vocabulary == "drop")
    sums = distillation_loss(student, head, teacher, weight, kind)
    expected, hits, outside = naive(teacher, student, head, weight, kind)
    torch.testing.assert_close(sums.loss_sum, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(sums.hits_K, hits.float())
    torch.testing.assert_close(sums.num_outside_K, outside.float())
    torch.testing.assert_close(sums.rows_K, (weight > 0).sum(1).float())
    grads = torch.autograd.grad(sums.loss_sum * 0.5, (student, head))
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected * 0.5, (student, head)), strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ce", "kl", "lk"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_softcapped_logits_of_target_and_student_are_those_of_the_naive_form(kind, softcap):
    teacher, student, head, weight = setup(None, False)
    sums = distillation_loss(student, head, dataclasses.replace(teacher, softcap=1.5), weight, kind, softcap)
    p = (1.5 * torch.tanh(teacher.last_RE @ teacher.lm_head_VE.T / 1.5)).softmax(-1)
    logits = student @ head.T
    log_q = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)
    cross = -(p * log_q).sum(-1)
    kl = cross + (p * p.log()).sum(-1)
    acceptance = torch.minimum(p.expand_as(log_q), log_q.exp()).sum(-1)
    mix = (-3 * acceptance).exp().detach()
    expected = ({"ce": cross, "kl": kl, "lk": mix * kl + (1 - mix) * (1 - acceptance)}[kind] * weight).sum()
    torch.testing.assert_close(sums.loss_sum, expected, atol=1e-4, rtol=1e-5)
    for grad, expected_grad in zip(
        torch.autograd.grad(sums.loss_sum, (student, head)), torch.autograd.grad(expected, (student, head)), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ce", "kl", "lk"])
@pytest.mark.parametrize("vocabulary", ["full", "drop"])
@pytest.mark.parametrize("chunk_elements", [1, 100, 2**24])
def test_a_head_for_each_draft_gives_the_sums_of_single_heads_from_one_row_of_the_target(monkeypatch, kind, vocabulary, chunk_elements):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(losses, "_CPU_BLOCK_ELEMENTS", chunk_elements // 3)
    draft_ids = None if vocabulary == "full" else torch.arange(0, 22, 2)
    teacher, student, head, weight = setup(draft_ids, vocabulary == "drop")
    heads = [(head + step).detach().requires_grad_() for step in range(K)]
    computed = []
    teacher_logits = losses._teacher_logits
    monkeypatch.setattr(losses, "_teacher_logits", lambda *given: computed.append(teacher_logits(*given)) or computed[-1])
    sums = distillation_loss(student, heads, teacher, weight, kind)
    assert sum(len(logits) for logits, _ in computed) == R
    singles = [naive(teacher, student[step : step + 1], heads[step], weight[step : step + 1], kind) for step in range(K)]
    expected = sum(loss for loss, _, _ in singles)
    torch.testing.assert_close(sums.loss_sum, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(sums.hits_K, torch.cat([hits for _, hits, _ in singles]).float())
    torch.testing.assert_close(sums.num_outside_K, torch.cat([outside for _, _, outside in singles]).float())
    grads = torch.autograd.grad(sums.loss_sum * 0.5, (student, *heads))
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected * 0.5, (student, *heads)), strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_rows", [4, 1000])
def test_bf16_autocast_stays_near_fp32(monkeypatch, head_rows):
    monkeypatch.setattr(losses, "_HEAD_ROWS", head_rows)
    teacher, student, head, weight = setup(torch.arange(0, 22, 2), False)
    found = []
    for is_bf16 in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            sums = distillation_loss(student, head, teacher, weight, "ce")
        found.append([sums.loss_sum.detach(), *torch.autograd.grad(sums.loss_sum, (student, head))])
    for exact, rounded in zip(*found, strict=True):
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("chunk_elements", [1, 100, 2**24])
def test_hard_labels_give_the_weighted_cross_entropy_and_its_gradients(monkeypatch, chunk_elements):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(losses, "_CPU_BLOCK_ELEMENTS", chunk_elements // 3)
    _, student, head, weight = setup(None, False)
    label = torch.randint(V, (K, R))
    sums = distillation_loss(student, head, Labels(label), weight, "ce")
    logits = student @ head.T
    cross = torch.nn.functional.cross_entropy(logits.reshape(-1, V), label.reshape(-1), reduction="none").reshape(K, R)
    expected = (cross * weight).sum()
    torch.testing.assert_close(sums.loss_sum, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(sums.hits_K, ((logits.argmax(-1) == label) & (weight > 0)).sum(1).float())
    torch.testing.assert_close(sums.rows_K, (weight > 0).sum(1).float())
    assert not sums.num_outside_K.any()
    grads = torch.autograd.grad(sums.loss_sum * 0.5, (student, head))
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected * 0.5, (student, head)), strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


def test_labels_equal_a_teacher_that_is_certain():
    _, student, head, weight = setup(None, False)
    label = torch.randint(V, (1, R))
    certain = Teacher(1000 * torch.nn.functional.one_hot(label[0], V).float(), torch.eye(V), None, False)
    by_label = distillation_loss(student[:1], head, Labels(label), weight[:1], "ce")
    by_teacher = distillation_loss(student[:1], head, certain, weight[:1], "ce")
    torch.testing.assert_close(by_label.loss_sum, by_teacher.loss_sum)


def test_a_frozen_head_gets_no_gradient_and_the_student_still_does():
    teacher, student, head, weight = setup(None, False)
    head = head.detach()
    distillation_loss(student, head, teacher, weight, "ce").loss_sum.backward()
    assert head.grad is None and student.grad.abs().sum() > 0


@pytest.mark.parametrize("width", [128, 1280, 130])
def test_the_largest_value_is_found_with_its_first_index(width):
    torch.manual_seed(0)
    values = torch.randint(0, 40, (3, 50, width)).float()  # ties in nearly every row
    largest, index = losses._largest(values)
    numbers = values.numpy()
    assert torch.equal(largest, torch.from_numpy(numbers.max(-1))) and torch.equal(index, torch.from_numpy(numbers.argmax(-1)))


def test_cosine_schedule_warms_up_and_ends_at_its_floor():
    values = [cosine_schedule(step, 10, 2, 0.1) for step in range(11)]
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[10] == pytest.approx(0.1)
    assert all(earlier >= later for earlier, later in itertools.pairwise(values[2:]))
