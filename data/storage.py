"""How hidden states are stored: in 8 bits with a scale for each group of neighbouring values, or as the target computed them.

Place in the flow: data/extract.py encodes on the target's device -> data/shards.py keeps what it gave -> `decode` in the loader's thread.

int8 splits each state of H values into groups of 32 (the last one may be shorter) and stores round(value / scale) with one bfloat16 scale a group,
chosen so that the group's largest value becomes 127. Hidden states have a few channels a thousand times larger than the others; with a scale a row,
or with fp8's three bits of mantissa, those cost the others their accuracy: bench/store.py compares the formats.

    one state, H = 80      | 32 values | 32 values | 16 values |
    its scales             | s0        | s1        | s2        |   |decoded - value| <= s / 2, then rounded to dtype

Groups never reach over the end of a state, so each layer's columns can be read alone.

Shapes: N tokens, A states of a token, H hidden size, X = A * H, G = A * ceil(H / 32) groups of a token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Storage = Literal["int8", "lossless"]

_GROUP_SIZE = 32
_LARGEST = 127


class Encoded(NamedTuple):
    """States as they are stored.

    Attributes:
        values_NX: int8, or the states themselves.
        scales_NG: bfloat16; None where the states themselves are stored.
        is_finite_N: false where a state holds NaN or infinity; what is stored of such a row means nothing.
    """

    values_NX: Tensor
    scales_NG: Tensor | None
    is_finite_N: Tensor


def num_groups(hidden_size: int) -> int:
    """Scales that one state of H values has."""
    return -(-hidden_size // _GROUP_SIZE)


def bytes_per_state(storage: Storage, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of one state of H values of this dtype."""
    return hidden_size * dtype.itemsize if storage == "lossless" else hidden_size + 2 * num_groups(hidden_size)


def encode(states_NX: Tensor, storage: Storage, hidden_size: int) -> Encoded:
    """States in their stored form, on their device, without waiting for it.

    Args:
        states_NX: floating point, A states of H values side by side.
    """
    if storage == "lossless":
        return Encoded(states_NX, None, states_NX.isfinite().all(1))
    num_tokens = len(states_NX)
    groups_NGS = _grouped(states_NX, hidden_size)
    largest_NG = groups_NGS.abs().amax(-1).float()
    # The bound keeps what is decoded finite in the states' dtype. Where the scale vanishes, as in a row of zeros, zeros are stored.
    scales_NG = (largest_NG / _LARGEST).clamp(max=torch.finfo(states_NX.dtype).max / (_LARGEST + 1)).to(torch.bfloat16)
    scales_NG = scales_NG.masked_fill(scales_NG == 0, 1)
    quotient_NGS = (groups_NGS / scales_NG.float()[..., None]).round_().clamp_(-_LARGEST, _LARGEST)
    values_NAP = quotient_NGS.to(torch.int8).view(num_tokens, states_NX.shape[1] // hidden_size, -1)
    values_NX = values_NAP[..., :hidden_size].reshape(num_tokens, -1)
    return Encoded(values_NX, scales_NG, largest_NG.isfinite().all(1))


def decode(values_NX: Tensor, scales_NG: Tensor | None, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """[N, X] states in the target's dtype: the same bits at every reading.

    Args:
        values_NX, scales_NG: of `Encoded`, or the columns of some of its states.
        hidden_size: H.
        dtype: of the states that were encoded.
    """
    if scales_NG is None:
        return values_NX
    # In place, and in the one type that needs no second pass: a product of bfloat16 is computed in float32 and rounded once.
    work_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    states_NGS = _grouped(values_NX.to(work_dtype), hidden_size).mul_(scales_NG.to(work_dtype)[..., None])
    states_NAP = states_NGS.view(len(values_NX), values_NX.shape[1] // hidden_size, -1)
    return states_NAP[..., :hidden_size].reshape(len(values_NX), -1).to(dtype)


def _grouped(rows_NX: Tensor, hidden_size: int) -> Tensor:
    """[N, G, 32] groups of each state, the last one of a state filled up with zeros."""
    rows_NAH = rows_NX.view(len(rows_NX), rows_NX.shape[1] // hidden_size, hidden_size)
    missing = num_groups(hidden_size) * _GROUP_SIZE - hidden_size
    padded_NAP = nn.functional.pad(rows_NAH, (0, missing)) if missing else rows_NAH
    return padded_NAP.reshape(len(rows_NX), -1, _GROUP_SIZE)
