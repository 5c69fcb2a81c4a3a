"""The matrix products of a step by themselves: what no implementation of the same computation can be faster than.

`recorded` runs a step and notes each product's operands by shape, strides and dtype; `Products.replay` multiplies random matrices of those layouts
and does nothing else. Attention, norms, softmax and the optimizer are left out, so the time of a replay bounds the step's from below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operands of the products that a drafter's step is made of; addmm's first tensor is what the product is added to.
_OPERANDS = {torch.ops.aten.mm: (0, 1), torch.ops.aten.addmm: (1, 2), torch.ops.aten.addmm_: (1, 2), torch.ops.aten.bmm: (0, 1)}

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def recorded(step: Callable[[], object]) -> Products:
    """The products of one run of `step`, its backward pass included."""
    recorder = _Recorder()
    with recorder:
        step()
    return Products(recorder.counts)


class Products:
    """Matrix products by the layout of their operands, and how often each is needed."""

    def __init__(self, counts: Counter[tuple[Layout, Layout]]) -> None:
        self._counts = counts
        self._operands: list[tuple[Tensor, Tensor, int]] = []

    @property
    def num_operations(self) -> int:
        """Multiplications and additions."""
        return sum(2 * count * _size(left[0]) * right[0][-1] for (left, right), count in self._counts.items())

    def replay(self) -> None:
        """All products once, on random matrices that are made at the first call."""
        if not self._operands:
            self._operands = [(_matrix(left), _matrix(right), count) for (left, right), count in self._counts.items()]
        for left, right, count in self._operands:
            for _ in range(count):
                torch.matmul(left, right)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[Layout, Layout]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.overloadpacket in _OPERANDS:
            left, right = (args[index] for index in _OPERANDS[func.overloadpacket])
            self.counts[_layout(left), _layout(right)] += 1
        return func(*args, **(kwargs or {}))


def _layout(matrix: Tensor) -> Layout:
    return tuple(matrix.shape), matrix.stride(), matrix.dtype, matrix.device


def _matrix(layout: Layout) -> Tensor:
    shape, strides, dtype, device = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).normal_()


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
