"""Exact greedy acceptance of a chain drafter, from one teacher-forced pass over trajectories of the target.

Place in the flow: held-out prompts answered greedily by the target (`Trajectory`, saved as runs/<name>/answers/) ->
`trajectory_features` (once) -> `chain_acceptance` (each time a drafter is measured: during training and at the end) ->
eval/report.py.

Why one pass is exact. A greedy engine emits exactly the target's own continuation, whatever is drafted; so every state of every
verification is already on the trajectory, and draft s made at pair i after s accepted drafts has seen exactly the trajectory's
tokens. The walk then only has to visit the pairs that the engine would visit. For a prompt of n tokens and an answer y_0 ..
y_{m-1} (x is their concatenation):

    y_0 = x_n comes from the prefill, so the first verification drafts from pair n-1 = (h_{n-1}, x_n): draft s predicts x_{n+1+s}.
    A verification at pair i that accepts a drafts emits a + 1 tokens (the target's own next token included), and the next one is
    at i + a + 1. It ends when m tokens have been emitted. An engine counts accepted drafts past the end too, hence
    `Trajectory.extra_ids`.

    n = 3, m = 4, K = 2    x0 x1 x2 | y0 y1 y2 y3 | e0      drafts at pair 2: y1 y2, at pair 3: y2 y3, at pair 4: y3 e0

tau = emitted tokens / verifications, the prefill excluded = 1 + sum of joint acceptances (algorithms.md section 7).

Shapes: T packed tokens, K drafts, H target hidden size, V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Features, drafter_batch
from data.target import Target
from train.drafters.base import Drafter, FeatureRequest

_LOGIT_ROWS = 512


@dataclass(frozen=True)
class Trajectory:
    """A prompt and the target's greedy continuation.

    Attributes:
        prompt_ids: the rendered prompt, generation prompt included.
        answer_ids: the greedy answer; its last token is the end token unless the token limit came first.
        extra_ids: the greedy continuation past the answer's end. A chain of K drafts needs K - 1 of them.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    extra_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.answer_ids:
            raise ValueError(
                f"a trajectory has {len(self.prompt_ids)} prompt tokens and {len(self.answer_ids)} answer tokens, "
                "expected at least one of each"
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt, answer and extra tokens end to end."""
        return self.prompt_ids + self.answer_ids + self.extra_ids


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes one JSON object a line, atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(asdict(trajectory)) + "\n" for trajectory in trajectories))
    temporary.replace(path)


def read_trajectories(path: Path) -> list[Trajectory]:
    """Reads what `write_trajectories` wrote.

    Raises:
        ValueError: on a line that is not a trajectory, naming file and line.
    """
    trajectories = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            fields = {name: tuple(int(token) for token in record[name]) for name in ("prompt_ids", "answer_ids", "extra_ids")}
            trajectories.append(Trajectory(**fields))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is no trajectory ({error!r}): expected prompt_ids, answer_ids and extra_ids; "
                "delete the file to answer again"
            ) from error
    return trajectories


@dataclass(frozen=True)
class TrajectorySpan:
    """Where one trajectory lies in a pack.

    Attributes:
        start: index of its first token in the pack.
        num_prompt_tokens, num_answer_tokens, num_extra_tokens: its three parts, in this order.
    """

    start: int
    num_prompt_tokens: int
    num_answer_tokens: int
    num_extra_tokens: int

    @property
    def first_pair(self) -> int:
        """The pair of the first verification, relative to `start`: the last prompt position, which knows y_0."""
        return self.num_prompt_tokens - 1


@dataclass(frozen=True)
class TrajectoryPack:
    """Packed target states of whole trajectories."""

    features: Features
    spans: tuple[TrajectorySpan, ...]

    def to(self, device: torch.device | str) -> TrajectoryPack:
        """The same pack on another device."""
        return TrajectoryPack(self.features.to(device), self.spans)


def trajectory_features(
    target: Target, trajectories: Sequence[Trajectory], request: FeatureRequest, pack_tokens: int
) -> list[TrajectoryPack]:
    """The target's states over the trajectories, packed in the given order.

    Args:
        target: the frozen target; the states have its dtype and device.
        trajectories: any number; one that is longer than `pack_tokens` gets a pack of its own.
        request: the states to keep. `count_near_ties` needs `last`.
        pack_tokens: most tokens of a pack.
    """
    packs = []
    for members in _pack(trajectories, pack_tokens):
        spans, start = [], 0
        for trajectory in members:
            spans.append(TrajectorySpan(start, len(trajectory.prompt_ids), len(trajectory.answer_ids), len(trajectory.extra_ids)))
            start += len(trajectory.token_ids)
        features = target.features(
            torch.tensor([token for trajectory in members for token in trajectory.token_ids]),
            torch.cat([_answer_mask(trajectory) for trajectory in members]),
            tuple(len(trajectory.token_ids) for trajectory in members),
            request.aux_layers,
            request.last,
        )
        packs.append(TrajectoryPack(features, tuple(spans)))
    return packs


def _pack(trajectories: Sequence[Trajectory], pack_tokens: int) -> list[list[Trajectory]]:
    packs: list[list[Trajectory]] = []
    free = 0
    for trajectory in trajectories:
        length = len(trajectory.token_ids)
        if not packs or length > free:
            packs.append([])
            free = pack_tokens
        packs[-1].append(trajectory)
        free -= length
    return packs


def _answer_mask(trajectory: Trajectory) -> Tensor:
    mask_T = torch.zeros(len(trajectory.token_ids), dtype=torch.bool)
    mask_T[len(trajectory.prompt_ids) : len(trajectory.prompt_ids) + len(trajectory.answer_ids)] = True
    return mask_T


@dataclass(frozen=True)
class PromptCount:
    """What one prompt contributes: tokens emitted by its verifications (those past the end included), and their number."""

    num_tokens: int
    num_verifications: int


@dataclass(frozen=True)
class Acceptance:
    """Counts of chain verifications; `+` joins measurements over different prompts.

    Attributes:
        accepted_at: for each draft position p, verifications that accepted drafts 0..p (all of them).
        prompts: counts of each prompt.
    """

    accepted_at: tuple[int, ...]
    prompts: tuple[PromptCount, ...]

    @classmethod
    def from_walks(cls, walks: Sequence[Sequence[int]], draft_length: int) -> Acceptance:
        """From the number of accepted drafts of every verification of every prompt."""
        accepted_at = tuple(sum(accepted > position for walk in walks for accepted in walk) for position in range(draft_length))
        return cls(accepted_at, tuple(PromptCount(sum(walk) + len(walk), len(walk)) for walk in walks))

    def __add__(self, other: Acceptance) -> Acceptance:
        if self.draft_length != other.draft_length:
            raise ValueError(f"cannot add acceptances of chains of {self.draft_length} and {other.draft_length} drafts")
        summed = tuple(mine + theirs for mine, theirs in zip(self.accepted_at, other.accepted_at, strict=True))
        return Acceptance(summed, self.prompts + other.prompts)

    @property
    def draft_length(self) -> int:
        return len(self.accepted_at)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_verifications(self) -> int:
        return sum(prompt.num_verifications for prompt in self.prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens emitted by verifications: without y_0 of each prompt, with those accepted past the end."""
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def tau(self) -> float:
        """Tokens per verification over all prompts (micro average).

        Raises:
            ValueError: if there was no verification, because every answer is a single token.
        """
        return self.num_tokens / self._verifications_or_raise()

    @property
    def tau_macro(self) -> float:
        """Mean over prompts of each prompt's tokens per verification."""
        self._verifications_or_raise()
        return float(
            np.mean([prompt.num_tokens / prompt.num_verifications for prompt in self.prompts if prompt.num_verifications])
        )

    @property
    def joint_acceptance(self) -> list[float]:
        """Share of verifications that accepted drafts 0..p, by p; what vLLM's per-position counters give."""
        return [accepted / self._verifications_or_raise() for accepted in self.accepted_at]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of verifications that accepted draft p among those that accepted all before it (alpha); 0 where there were
        none."""
        reached = (self._verifications_or_raise(), *self.accepted_at[:-1])
        return [accepted / total if total else 0.0 for accepted, total in zip(self.accepted_at, reached, strict=True)]

    def tau_interval(self, seed: int = 0, num_resamples: int = 2000) -> tuple[float, float]:
        """95% bootstrap interval of `tau`, prompts resampled with replacement."""
        self._verifications_or_raise()
        counts_P2 = np.array([(prompt.num_tokens, prompt.num_verifications) for prompt in self.prompts])
        drawn = np.random.default_rng(seed).integers(len(counts_P2), size=(num_resamples, len(counts_P2)))
        sums_R2 = counts_P2[drawn].sum(axis=1)
        sums_R2 = sums_R2[sums_R2[:, 1] > 0]
        low, high = np.quantile(sums_R2[:, 0] / sums_R2[:, 1], [0.025, 0.975])
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        """The numbers that reports carry."""
        return {
            "tau": self.tau,
            "tau_interval_95": list(self.tau_interval()),
            "tau_macro": self.tau_macro,
            "joint_acceptance": self.joint_acceptance,
            "conditional_acceptance": self.conditional_acceptance,
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "num_verifications": self.num_verifications,
            "draft_length": self.draft_length,
        }

    def _verifications_or_raise(self) -> int:
        if not self.num_verifications:
            raise ValueError(
                f"acceptance is undefined: none of the {self.num_prompts} answers has a second token to draft; "
                "use other prompts or longer answers"
            )
        return self.num_verifications


def walk(agreement_KT: Tensor, first_pair: int, num_answer_tokens: int) -> list[int]:
    """Accepted drafts of every verification of one sequence.

    Args:
        agreement_KT: bool, entry [s, i] true where draft s at pair i equals the sequence's token i+2+s.
        first_pair: pair of the first verification (index of the last prompt token).
        num_answer_tokens: m; the walk ends when so many tokens have been emitted, the first one by the prefill.
    """
    return _walk(_leading_agreement(agreement_KT).tolist(), first_pair, num_answer_tokens)


def _leading_agreement(agreement_KT: Tensor) -> Tensor:
    """int64 [T]: how many drafts agree before the first that does not."""
    return agreement_KT.long().cumprod(0).sum(0)


def _walk(accepted_T: Sequence[int], first_pair: int, num_answer_tokens: int) -> list[int]:
    walked, pair, num_emitted = [], first_pair, 1
    while num_emitted < num_answer_tokens:
        accepted = accepted_T[pair]
        walked.append(accepted)
        num_emitted += accepted + 1
        pair += accepted + 1
    return walked


@torch.no_grad()
def chain_acceptance(drafter: Drafter, packs: Sequence[TrajectoryPack], draft_length: int) -> Acceptance:
    """Exact greedy acceptance of a chain of drafts, against the full target vocabulary.

    Args:
        drafter: on the packs' device, or the packs are moved there one at a time.
        packs: from `trajectory_features` with the drafter's own feature request (or more).
        draft_length: K drafts of a chain.

    Raises:
        ValueError: if a trajectory does not reach far enough past its end.
    """
    device = next((parameter.device for parameter in drafter.parameters()), None)
    walks = []
    for pack in packs:
        _check_extra_tokens(pack, draft_length)
        batch = drafter_batch(pack.features if device is None else pack.features.to(device))
        drafts_KT = drafter.teacher_forced_drafts(batch, draft_length)
        agreement_KT = torch.stack([drafts_KT[step] == batch.predicted_tokens(step) for step in range(draft_length)])
        accepted_T = _leading_agreement(agreement_KT).tolist()
        walks += [_walk(accepted_T, span.start + span.first_pair, span.num_answer_tokens) for span in pack.spans]
    return Acceptance.from_walks(walks, draft_length)


def _check_extra_tokens(pack: TrajectoryPack, draft_length: int) -> None:
    for span in pack.spans:
        if span.num_answer_tokens > 1 and span.num_extra_tokens < draft_length - 1:
            raise ValueError(
                f"a trajectory has {span.num_extra_tokens} tokens past its answer, but a chain of {draft_length} drafts looks "
                f"{draft_length - 1} past it: answer the held-out prompts again with at least as many extra tokens"
            )


@dataclass(frozen=True)
class NearTies:
    """Trajectory tokens that are not the target's argmax under another forward of the same target.

    A trajectory is decoded token by token and measured in one packed forward: rounding differs, and where the two best logits
        nearly tie, so may the
    argmax. A few with a tiny gap are normal; a large gap means that trajectory and forward do not belong together (dtype,
    revision, packing).

    Attributes:
        num_tokens: answer and extra tokens looked at.
        num_ties: those that are not the argmax here.
        largest_gap: largest difference between the best logit and that of the trajectory's token; 0 where there is none.
    """

    num_tokens: int
    num_ties: int
    largest_gap: float


@torch.no_grad()
def count_near_ties(packs: Sequence[TrajectoryPack], lm_head_VH: Tensor) -> NearTies:
    """Compares every answer and extra token with the target's argmax under the packed forward.

    Args:
        packs: with the post-norm last hidden state.
        lm_head_VH: the target's head, in the dtype and on the device to compute logits in.
    """
    num_tokens = num_ties = 0
    largest_gap = 0.0
    for pack in packs:
        if pack.features.last_TH is None:
            raise ValueError("near ties are counted from the target's last hidden state, which these features lack: request it")
        for span in pack.spans:
            first = span.start + span.first_pair
            rows = torch.arange(
                first, first + span.num_answer_tokens + span.num_extra_tokens, device=pack.features.last_TH.device
            )
            for block in rows.split(_LOGIT_ROWS):
                logits_RV = (pack.features.last_TH[block].to(lm_head_VH) @ lm_head_VH.T).float()
                chosen_R = pack.features.input_ids_T[block + 1].to(logits_RV.device)
                gap_R = logits_RV.amax(-1) - logits_RV.gather(1, chosen_R[:, None])[:, 0]
                is_tie_R = logits_RV.argmax(-1) != chosen_R
                num_tokens += len(block)
                num_ties += int(is_tie_R.sum())
                largest_gap = max(largest_gap, float(gap_R[is_tie_R].amax()) if is_tie_R.any() else 0.0)
    return NearTies(num_tokens, num_ties, largest_gap)
