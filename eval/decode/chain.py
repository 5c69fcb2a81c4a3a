"""Chain speculation, greedy and lossless (algorithms.md section 6): the drafter proposes K tokens, one target forward verifies
them all.

Each verification feeds the newest known token and the K drafts. The drafts are accepted up to the first that is not the target's
argmax after its predecessor; that argmax is emitted too, so a + 1 tokens come out of a verification that accepts a. The target's
cache is rolled back to the accepted tokens, and the drafter takes in the *target's* states of exactly these positions, never its
own from drafting.

    cache           ... newest | d0 d1 d2 d3         K = 4, d0 d1 accepted, d2 is not what the target says (t)
    target argmax          d0    d1 t  .  .
    emitted                d0 d1 t                   cache rolled back to ... newest d0 d1; t is the newest token
    next pairs      (h_newest, d0) (h_d0, d1) (h_d1, t)

Shapes: K drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from data.target import Target
from eval.decode.cache import StepOutput, TargetSession
from eval.decode.plain import DecodeResult, PhaseTimer
from train.drafters.base import Drafter


@torch.no_grad()
def decode_chain(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], draft_length: int, max_new_tokens: int, end_ids: Collection[int]
) -> DecodeResult:
    """Greedy decoding with a chain of drafts, batch 1; the tokens are those of `decode_plain`.

    Args:
        target: the frozen target.
        drafter: on the target's device.
        prompt_ids: at least one token.
        draft_length: K drafts a verification, at least 1.
        max_new_tokens: longest answer, at least 1.
        end_ids: tokens that end an answer.
    """
    timer = PhaseTimer()
    drafting_s = verification_s = 0.0
    session, state = TargetSession(target, drafter.feature_request()), drafter.new_state()
    step = session.forward(prompt_ids, 1)
    tokens = [int(step.logits_kV.argmax())]
    following, accepted_counts = [*prompt_ids[1:], tokens[0]], []
    prefill_s = timer.lap()
    while not _is_finished(tokens, max_new_tokens, end_ids):
        next_ids = torch.tensor(following, device=target.device)
        drafts = drafter.propose(state, step.aux_nX, step.last_nH, next_ids, draft_length).tolist()
        drafting_s += timer.lap()
        num_known = session.num_tokens + 1
        step = session.forward([following[-1], *drafts], 1 + draft_length)
        greedy = step.logits_kV.argmax(-1).tolist()
        accepted = num_leading_equal(drafts, greedy)
        session.rollback(num_known + accepted)
        step = _first_positions(step, accepted + 1)
        following = greedy[: accepted + 1]
        tokens += following
        accepted_counts.append(accepted)
        verification_s += timer.lap()
    return DecodeResult(
        token_ids=_answer(tokens, max_new_tokens, end_ids),
        num_verifications=len(accepted_counts),
        accepted_at=tuple(sum(accepted > position for accepted in accepted_counts) for position in range(draft_length)),
        num_verified_tokens=len(tokens) - 1,
        total_s=timer.total(),
        prefill_s=prefill_s,
        drafting_s=drafting_s,
        verification_s=verification_s,
    )


def num_leading_equal(drafts: Sequence[int], greedy: Sequence[int]) -> int:
    """How many drafts equal the target's choice before the first that does not."""
    for index, draft in enumerate(drafts):
        if draft != greedy[index]:
            return index
    return len(drafts)


def _first_positions(step: StepOutput, count: int) -> StepOutput:
    """The states of the verified positions: the newest token's and the accepted drafts'."""
    return StepOutput(
        logits_kV=step.logits_kV[:count],
        aux_nX=None if step.aux_nX is None else step.aux_nX[:count],
        last_nH=None if step.last_nH is None else step.last_nH[:count],
    )


def _answer(tokens: Sequence[int], max_new_tokens: int, end_ids: Collection[int]) -> tuple[int, ...]:
    """The tokens up to the limit or the first end token, that included; verifications may emit more."""
    kept = tokens[:max_new_tokens]
    end = next((index for index, token in enumerate(kept) if token in end_ids), len(kept) - 1)
    return tuple(kept[: end + 1])


def _is_finished(tokens: Sequence[int], max_new_tokens: int, end_ids: Collection[int]) -> bool:
    return len(tokens) >= max_new_tokens or any(token in end_ids for token in tokens)
