"""Hidden states in 8 bits: near to what they were for any size, and never garbage."""

from __future__ import annotations

import pytest
import torch

from bench.store import grouped
from data.storage import bytes_per_state, decode, encode, num_groups

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def states(hidden_size: int, num_states: int, dtype: torch.dtype) -> torch.Tensor:
    """[20, A * H] with channels and rows that are hundreds of times larger than the others, as real states have."""
    generator = torch.Generator().manual_seed(0)
    states_NX = torch.randn(20, num_states * hidden_size, generator=generator)
    states_NX[:, 3::17] *= 300
    states_NX[5] *= 50
    states_NX[6] *= 1e-4
    return states_NX.to(dtype)


def round_trip(states_NX: torch.Tensor, hidden_size: int) -> torch.Tensor:
    encoded = encode(states_NX, "int8", hidden_size)
    return decode(encoded.values_NX, encoded.scales_NG, hidden_size, states_NX.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 31, 32, 33, 96, 100])
def test_every_value_is_within_half_a_scale_of_its_own_group(hidden_size: int, dtype: torch.dtype) -> None:
    """Groups of 32 that start anew with each state; the bound is computed value by value. Rounding to the dtype comes on top."""
    states_NX = states(hidden_size, 2, dtype)
    found_NX = round_trip(states_NX, hidden_size)
    assert found_NX.dtype == dtype and found_NX.shape == states_NX.shape
    for state in range(2):
        for first in range(state * hidden_size, (state + 1) * hidden_size, 32):
            columns = slice(first, min(first + 32, (state + 1) * hidden_size))
            group, found = states_NX[:, columns].double(), found_NX[:, columns].double()
            scale_N1 = group.abs().amax(1, keepdim=True) / 127
            assert ((found - group).abs() <= 0.505 * scale_N1 + group.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("hidden_size", [33, 96])
def test_states_come_back_as_the_benchs_plain_formula_says(hidden_size: int) -> None:
    states_NX = states(hidden_size, 2, torch.float32)
    expected = [grouped(part_NH, 32, torch.int8) for part_NH in states_NX.split(hidden_size, dim=1)]
    torch.testing.assert_close(round_trip(states_NX, hidden_size), torch.cat(expected, dim=1), rtol=0, atol=0)


def test_values_that_are_whole_multiples_of_the_scale_come_back_exactly() -> None:
    """Largest 254, so the scale is 2: rounding is to the nearest, ties to even."""
    states_NX = torch.tensor([[254.0, 2.0, -6.0, 3.1, 2.9, -254.0, 5.0, 0.0]])
    assert round_trip(states_NX, 8).tolist() == [[254.0, 2.0, -6.0, 4.0, 2.0, -254.0, 4.0, 0.0]]


def test_one_large_value_costs_its_own_group_only() -> None:
    states_NX = torch.ones(1, 64)
    states_NX[0, 0] = 25000.0
    assert round_trip(states_NX, 64)[0, 32:].tolist() == pytest.approx([1.0] * 32, rel=1 / 254)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_the_largest_and_smallest_numbers_stay_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    states_NX = torch.tensor([[0.0] * 4, [limits.max, -limits.max, 1, 0], [limits.tiny, -limits.tiny, 0, 0]], dtype=torch.float64).to(dtype)
    found_NX = round_trip(states_NX, 4).double()
    assert found_NX[0].tolist() == [0.0] * 4
    torch.testing.assert_close(found_NX[1, :2], states_NX[1, :2].double(), rtol=0.01, atol=0)
    assert (found_NX[2].abs() <= 2 * limits.tiny).all()


@pytest.mark.parametrize("storage", ["int8", "lossless"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_told(value: float, dtype: torch.dtype, storage: str) -> None:
    states_NX = states(33, 2, dtype)
    states_NX[4, 40] = value
    states_NX[7, 65] = value
    is_finite_N = encode(states_NX, storage, 33).is_finite_N  # type: ignore[arg-type]
    assert (~is_finite_N).nonzero()[:, 0].tolist() == [4, 7]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_states_are_the_same_bits(dtype: torch.dtype) -> None:
    states_NX = states(33, 2, dtype)
    encoded = encode(states_NX, "lossless", 33)
    assert encoded.scales_NG is None
    assert torch.equal(decode(encoded.values_NX, None, 33, dtype), states_NX)


@pytest.mark.parametrize("hidden_size", [1, 32, 33, 576])
def test_bytes_of_a_state_are_those_of_its_tensors(hidden_size: int) -> None:
    encoded = encode(torch.ones(1, hidden_size, dtype=torch.bfloat16), "int8", hidden_size)
    assert encoded.scales_NG is not None and encoded.scales_NG.shape == (1, num_groups(hidden_size))
    assert bytes_per_state("int8", hidden_size, torch.bfloat16) == encoded.values_NX.nbytes + encoded.scales_NG.nbytes
    assert bytes_per_state("lossless", hidden_size, torch.float32) == 4 * hidden_size
