"""Which held-out prompts acceptance is measured on.

Place in the flow: the held-out split -> prompts -> answered by the target (data/generate.py) -> trajectories (eval/acceptance.py). The prompts that
choose the best step are never those of the report, so the reported acceptance is not selected for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from datasets import Dataset


@dataclass(frozen=True)
class EvalConfig:
    """What acceptance is measured on: held-out prompts, answered greedily by the target.

    Attributes:
        num_prompts: prompts of the final report.
        num_selection_prompts: further prompts that choose the best step; the report never sees them.
        max_prompt_tokens: longer held-out prompts are passed over.
        max_new_tokens: longest answer.
        draft_length: drafts of a chain.
        num_speedup_prompts: prompts of the timed comparison of the reference decoder with plain decoding.
        dtype: of the target while it is measured. "auto" is float32 on a CPU and the target's own on a GPU; float32 makes acceptance
            exactly comparable with an engine in float32.
    """

    num_prompts: int = 80
    num_selection_prompts: int = 40
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 128
    draft_length: int = 4
    num_speedup_prompts: int = 8
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_selection_prompts", "max_new_tokens", "draft_length", "num_speedup_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"eval.{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True)
class HeldoutPrompts:
    """Token ids of the prompts that choose the best step, and of those that are reported."""

    selection: list[list[int]]
    report: list[list[int]]


def choose_prompts(heldout: Dataset, config: EvalConfig) -> HeldoutPrompts:
    """The first prompts of the held-out split that are short enough and differ from each other.

    Raises:
        ValueError: if the split has too few of them.
    """
    distinct: dict[tuple[int, ...], None] = {}
    for prompt_ids in heldout["prompt_ids"]:
        if len(prompt_ids) <= config.max_prompt_tokens:
            distinct.setdefault(tuple(prompt_ids))
    prompts = [list(prompt) for prompt in distinct]
    wanted = config.num_prompts + config.num_selection_prompts
    if len(prompts) < wanted:
        raise ValueError(
            f"the held-out split has {len(prompts)} different prompts of at most {config.max_prompt_tokens} tokens, but {wanted} are asked for "
            "(eval.num_prompts + eval.num_selection_prompts): raise data.num_heldout or eval.max_prompt_tokens, or ask for fewer"
        )
    return HeldoutPrompts(selection=prompts[config.num_prompts : wanted], report=prompts[: config.num_prompts])
