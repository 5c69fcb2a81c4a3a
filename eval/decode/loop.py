"""The decoding loop that every method shares: a method drafts a tree, one forward of the target judges it, a rule accepts a path.

    prefill -> first token
    repeat:    method.draft(seen) -> a tree for each sequence
               session.forward    -> logits of the newest token and of every node
               verifier.verify    -> the accepted path and the token after it
               session.accept     -> the cache holds exactly the accepted tokens

Plain decoding is the method that drafts nothing (`Plain`), so the speed of a method against it is that of the method, not of another loop.
With `verify.Greedy` every method writes what plain decoding writes; with `verify.Sampled` the same distribution.

Sequences that have ended leave the batch. Tokens, verifications and acceptance are counted as engines count them: the last verification of an answer
counts whole, also where it emits tokens past the end (algorithms.md section 7).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from data.target import Target
from eval.acceptance import Acceptance
from eval.decode.session import NOTHING, TargetRows, TargetSession, padded_ids, states_of
from eval.decode.tree import DraftTree
from eval.decode.verify import Verdict, Verifier
from train.drafters.base import FeatureRequest, VerifiedStates


@dataclass(frozen=True)
class Seen:
    """What is new to a method since it last drafted.

    Attributes:
        contexts: all known tokens of each sequence, prompt included. The last one is the newest: the target has not read it yet.
        states: of the positions that were verified since; their next tokens end with the newest one.
    """

    contexts: Sequence[Sequence[int]]
    states: VerifiedStates


class Method(ABC):
    """A way of drafting. One object decodes one batch at a time: `start`, then `draft` before every verification.

    Attributes:
        longest_path: deepest node of its trees; what acceptance is counted up to.
        most_nodes: of a tree.
        request: states of the target that it reads.
    """

    longest_path: int
    most_nodes: int
    request: FeatureRequest = NOTHING

    @abstractmethod
    def start(self, num_sequences: int, capacity: int) -> None:
        """Forgets everything and prepares for sequences of at most `capacity` tokens."""

    @abstractmethod
    def draft(self, seen: Seen) -> list[DraftTree]:
        """A tree for each sequence."""

    def observe(self, logits_BRV: Tensor) -> None:  # noqa: B027
        """Told what the target said of every row of the last trees, those that are no drafts included."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Only these sequences go on."""

    @property
    def weights_bytes(self) -> int:
        """Of what it loads beside the target."""
        return 0

    @property
    def cache_bytes(self) -> int:
        """Keys and values that it holds for one sequence of the longest length since `start`."""
        return 0

    @property
    def pool_bytes(self) -> int:
        """Of n-gram pools and the like for one sequence, at their largest since `start`."""
        return 0


class Plain(Method):
    """Drafts nothing: one token a forward."""

    longest_path = most_nodes = 0

    def start(self, num_sequences: int, capacity: int) -> None:
        pass

    def draft(self, seen: Seen) -> list[DraftTree]:
        return [DraftTree()] * len(seen.contexts)

    def keep(self, rows: Sequence[int]) -> None:
        pass


@dataclass(frozen=True)
class Answer:
    """One decoded answer.

    Attributes:
        token_ids: its end token included where it was reached.
        accepted: drafts that each verification accepted; a verification is a forward of the target after the prefill.
        num_nodes: nodes of each verification's tree.
    """

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    num_nodes: tuple[int, ...]

    @property
    def num_verifications(self) -> int:
        return len(self.accepted)


@dataclass(frozen=True)
class Decoded:
    """A batch of answers and what they took.

    Attributes:
        answers: in the order of the prompts.
        longest_path: of the method.
        total_s: wall time of the whole call.
        prefill_s, drafting_s, verification_s: its parts; verification includes the bookkeeping.
    """

    answers: tuple[Answer, ...]
    longest_path: int
    total_s: float
    prefill_s: float
    drafting_s: float
    verification_s: float

    @property
    def acceptance(self) -> Acceptance:
        """The counters of every prompt; results add up."""
        return Acceptance.from_walks([answer.accepted for answer in self.answers], self.longest_path)

    @property
    def num_tokens(self) -> int:
        """Of the answers."""
        return sum(len(answer.token_ids) for answer in self.answers)


class PhaseTimer:
    """Seconds since the previous reading. Read it only when the phase's result is on the host, so that a GPU has finished it."""

    def __init__(self) -> None:
        self._started = self._previous = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._previous = now - self._previous, now
        return elapsed

    def total(self) -> float:
        return time.perf_counter() - self._started


@dataclass
class _Sequence:
    """One sequence while it is decoded."""

    context: list[int]
    num_prompt_tokens: int
    accepted: list[int] = field(default_factory=list)
    num_nodes: list[int] = field(default_factory=list)

    def is_finished(self, max_new_tokens: int, end_ids: Collection[int], num_new: int) -> bool:
        num_tokens = len(self.context) - self.num_prompt_tokens
        return num_tokens >= max_new_tokens or any(token in end_ids for token in self.context[-num_new:])

    def answer(self, max_new_tokens: int, end_ids: Collection[int]) -> Answer:
        """The tokens up to the limit or the first end token, that included."""
        kept = self.context[self.num_prompt_tokens :][:max_new_tokens]
        end = next((index for index, token in enumerate(kept) if token in end_ids), len(kept) - 1)
        return Answer(tuple(kept[: end + 1]), tuple(self.accepted), tuple(self.num_nodes))


def decode(
    target: Target, method: Method, prompts: Sequence[Sequence[int]], verifier: Verifier, max_new_tokens: int, end_ids: Collection[int]
) -> Decoded:
    """Decodes a batch of prompts.

    Args:
        target: the frozen target.
        method: how drafts are made; on the target's device.
        prompts: at least one, each of at least one token.
        verifier: how drafts are accepted and tokens chosen.
        max_new_tokens: longest answer, at least 1.
        end_ids: tokens that end an answer.

    Raises:
        ValueError: if there is no prompt, or an empty one.
    """
    if not prompts or not all(prompts):
        raise ValueError(f"{len(prompts)} prompts, {sum(not prompt for prompt in prompts)} of them empty: expected at least one token in each")
    timer = PhaseTimer()
    drafting_s = verification_s = 0.0
    # The last verification may begin one token before the limit and accept a whole path.
    capacity = max(map(len, prompts)) + max_new_tokens + method.longest_path + method.most_nodes + 1
    session = TargetSession(target, len(prompts), capacity, method.request)
    method.start(len(prompts), capacity)
    rows = session.prefill(prompts)
    verdicts = verifier.verify([DraftTree()] * len(prompts), rows.logits_BRV)
    sequences = [_Sequence([*prompt, verdict.next_token], len(prompt)) for prompt, verdict in zip(prompts, verdicts, strict=True)]
    going, seen = _rest(list(sequences), session, method, _prompt_states(rows, sequences), [1] * len(prompts), max_new_tokens, end_ids)
    prefill_s = timer.lap()
    while going:
        trees = method.draft(seen)
        drafting_s += timer.lap()
        rows = session.forward([sequence.context[-1] for sequence in going], trees)
        verdicts = verifier.verify(trees, rows.logits_BRV)
        emitted = [_emit(sequence, tree, verdict) for sequence, tree, verdict in zip(going, trees, verdicts, strict=True)]
        paths = [verdict.path for verdict in verdicts]
        session.accept(paths)
        verification_s += timer.lap()
        method.observe(rows.logits_BRV)
        drafting_s += timer.lap()
        states = states_of(rows, paths, emitted)
        going, seen = _rest(going, session, method, states, [len(tokens) for tokens in emitted], max_new_tokens, end_ids)
        verification_s += timer.lap()
    answers = tuple(sequence.answer(max_new_tokens, end_ids) for sequence in sequences)
    return Decoded(answers, method.longest_path, timer.total(), prefill_s, drafting_s, verification_s)


def _emit(sequence: _Sequence, tree: DraftTree, verdict: Verdict) -> list[int]:
    """Takes in one verification; returns the tokens that it adds."""
    tokens = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    sequence.context += tokens
    sequence.accepted.append(len(verdict.path))
    sequence.num_nodes.append(tree.num_nodes)
    return tokens


def _prompt_states(rows: TargetRows, sequences: Sequence[_Sequence]) -> VerifiedStates:
    """Every position of the prompts is new to the method."""
    device = rows.logits_BRV.device
    next_ids = [sequence.context[1:] for sequence in sequences]
    num_new_B = padded_ids([[len(ids)] for ids in next_ids], device)[:, 0]
    return VerifiedStates(rows.aux_BRX, rows.last_BRH, padded_ids(next_ids, device), num_new_B)


def _rest(
    going: list[_Sequence],
    session: TargetSession,
    method: Method,
    states: VerifiedStates,
    num_emitted: Sequence[int],
    max_new_tokens: int,
    end_ids: Collection[int],
) -> tuple[list[_Sequence], Seen]:
    """The sequences that have not ended; the others leave session, method and states."""
    rows = [
        row
        for row, (sequence, num_new) in enumerate(zip(going, num_emitted, strict=True))
        if not sequence.is_finished(max_new_tokens, end_ids, num_new)
    ]
    if rows and len(rows) < len(going):
        session.keep(rows)
        method.keep(rows)
        states = VerifiedStates(*(None if value is None else value[rows] for value in states))  # type: ignore[arg-type]
    still_going = [going[row] for row in rows]
    return still_going, Seen([sequence.context for sequence in still_going], states)
