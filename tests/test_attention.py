"""The TTT attention equals the naive masked softmax, forward and backward."""

from __future__ import annotations

import pytest
import torch

from train.attention import ttt_attention


def naive(query, key, value, diagonals, lengths):
    """One explicit T x (T + S) mask and softmax, in the inputs' dtype, with repeated key/value heads."""
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("ind,jnd->nij", query, key) * head_dim**-0.5
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (document[:, None] == document[None]) & torch.ones(num_tokens, num_tokens).tril().bool()
    scores = scores.masked_fill(~allowed, float("-inf"))
    values = [value]
    for diagonal_key, diagonal_value in diagonals:
        diagonal_key = diagonal_key.repeat_interleave(group, 1)
        scores = torch.cat([scores, ((query * diagonal_key).sum(-1) * head_dim**-0.5).T[..., None]], -1)
        values.append(diagonal_value.repeat_interleave(group, 1))
    weights = scores.softmax(-1)
    out = torch.einsum("nij,jnd->ind", weights[..., :num_tokens], value)
    for step, diagonal_value in enumerate(values[1:]):
        out = out + weights[..., num_tokens + step].T[..., None] * diagonal_value
    return out


@pytest.mark.parametrize("num_diagonals", [0, 1, 6])
@pytest.mark.parametrize("lengths", [(13,), (1, 7, 2, 40), (33, 1)])
def test_ttt_attention_and_its_gradients_equal_the_naive_masked_softmax(num_diagonals, lengths):
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    shapes = [(num_tokens, 6, 8)] + [(num_tokens, 2, 8)] * (2 + 2 * num_diagonals)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def run(function):
        query, key, value, *flat = inputs
        diagonals = list(zip(flat[0::2], flat[1::2], strict=True))
        out = function(query, key, value, diagonals, lengths)
        upstream = torch.linspace(-1, 1, out.numel()).view_as(out)
        return out, torch.autograd.grad(out, inputs, upstream)

    out, grads = run(ttt_attention)
    expected_out, expected_grads = run(naive)
    torch.testing.assert_close(out, expected_out, atol=1e-5, rtol=1e-5)
    for grad, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_diagonals", [0, 3])
@pytest.mark.parametrize("rows", [[0, 3, 4, 9, 12, 20], [], list(range(21))], ids=["some", "none", "all"])
def test_queries_at_some_positions_equal_the_same_rows_of_all(num_diagonals, rows):
    torch.manual_seed(0)
    lengths, rows_R = (13, 1, 7), torch.tensor(rows, dtype=torch.int64)
    query, key, value = (torch.randn(21, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    diagonals = [(torch.randn(21, 2, 8, requires_grad=True), torch.randn(21, 2, 8, requires_grad=True)) for _ in range(num_diagonals)]
    inputs = [query, key, value, *(tensor for pair in diagonals for tensor in pair)]
    some = ttt_attention(query[rows_R], key, value, [(k[rows_R], v[rows_R]) for k, v in diagonals], lengths, rows_R)
    expected = naive(query, key, value, diagonals, lengths)[rows_R]
    upstream = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    torch.testing.assert_close(some, expected, atol=1e-5, rtol=1e-5)
    for grad, wanted in zip(torch.autograd.grad(some, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=1e-5)


def test_bf16_stays_near_fp32():
    torch.manual_seed(0)
    lengths = (20, 44)
    query, key, value, diagonal_key, diagonal_value = (
        torch.randn(64, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2, 2, 2)
    )
    out = ttt_attention(query, key, value, [(diagonal_key, diagonal_value)], lengths)
    expected = naive(query.float(), key.float(), value.float(), [(diagonal_key.float(), diagonal_value.float())], lengths)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)
