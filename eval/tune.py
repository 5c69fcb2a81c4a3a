"""Search of a method's parameters by measurement: Lookahead's W, N and G, a tree's depth, top-k and total tokens.

Place in the flow: `eval.compare --tune` -> `coordinate_search` over timed calls on calibration prompts -> the settings of the comparison, and the
curve of everything that was tried. The calibration prompts are none of those that are reported, so the optimum is not selected for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Settings = Mapping[str, int]


@dataclass(frozen=True)
class TunedPoint:
    """One setting that was measured.

    Attributes:
        method: as in the comparison.
        settings: in the paper's names.
        speedup: tokens/s over plain decoding on the calibration prompts.
        tau: tokens per forward of the target.
        is_best: the one that is used.
    """

    method: str
    settings: Settings
    speedup: float
    tau: float
    is_best: bool = False


def coordinate_search(
    start: Settings,
    axes: Mapping[str, Sequence[int]],
    is_allowed: Callable[[Settings], bool],
    measure: Callable[[Settings], float],
    num_rounds: int = 2,
) -> dict[str, int]:
    """The best settings found by moving along one axis at a time; each is measured once.

    Args:
        start: the first settings.
        axes: values to try for each name, in the order in which the axes are searched.
        is_allowed: false for combinations that make no sense.
        measure: the speed of settings; more is better.
        num_rounds: passes over all axes; ends earlier when a pass changes nothing.
    """
    scores: dict[tuple[tuple[str, int], ...], float] = {}

    def score(settings: Settings) -> float:
        key = tuple(sorted(settings.items()))
        if key not in scores:
            scores[key] = measure(settings)
        return scores[key]

    best = dict(start)
    for _ in range(num_rounds):
        before = dict(best)
        for name, values in axes.items():
            tried = [{**best, name: value} for value in values]
            best = max([best, *filter(is_allowed, tried)], key=score)
        if best == before:
            break
    return best
