"""What training did to a target that was trained together with its drafter (Medusa-2): is it still the model that its owner wants?

Place in the flow: the original target and the trained one -> this -> <run>/backbone.json -> report.json. Perplexity is measured on the assistant's
tokens of held-out conversations, agreement on the original's own greedy answers to the held-out prompts.

Shapes: T packed tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn

from data.target import Target
from eval.acceptance import Trajectory

_PACK_TOKENS = 4096
_LOGIT_ROWS = 512


@dataclass(frozen=True)
class Document:
    """Token ids, and for each whether the target is judged on predicting it."""

    token_ids: tuple[int, ...]
    is_judged: tuple[bool, ...]


@dataclass(frozen=True)
class Fit:
    """How a target does on documents.

    Attributes:
        num_tokens: judged tokens.
        nll_sum: sum of their negative log-likelihoods, nats.
        num_hits: those that are the target's argmax.
        num_documents_hit: documents whose judged tokens all are.
    """

    num_tokens: int
    nll_sum: float
    num_hits: int
    num_documents_hit: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll_sum / self.num_tokens, 700.0))  # more is no float


def heldout_documents(heldout: Dataset, num_documents: int) -> list[Document]:
    """The first conversations of the held-out split, the assistant's tokens judged."""
    rows = heldout.select(range(min(num_documents, len(heldout))))
    return [Document(tuple(row["input_ids"]), tuple(bool(flag) for flag in row["loss_mask"])) for row in rows]


def answered_documents(trajectories: Sequence[Trajectory]) -> list[Document]:
    """Prompts with greedy answers, the answers judged."""
    return [
        Document(item.prompt_ids + item.answer_ids, (False,) * len(item.prompt_ids) + (True,) * len(item.answer_ids)) for item in trajectories
    ]


@torch.no_grad()
def fit(target: Target, documents: Sequence[Document]) -> Fit:
    """How well the target predicts the judged tokens.

    Raises:
        ValueError: if no token is judged.
    """
    num_tokens = num_hits = num_documents_hit = 0
    nll_sum = 0.0
    for pack in _packs(documents):
        ids_T = torch.tensor([token for document in pack for token in document.token_ids])
        last_TH = target.last_states(ids_T.to(target.device), [len(document.token_ids) for document in pack])
        start = 0
        for document in pack:
            judged_R = torch.tensor(document.is_judged[1:]).nonzero()[:, 0] + start
            nll_R, is_hit_R = _judge(target, last_TH, judged_R, ids_T)
            start += len(document.token_ids)
            num_tokens += len(judged_R)
            nll_sum += float(nll_R.sum())
            num_hits += int(is_hit_R.sum())
            num_documents_hit += bool(is_hit_R.all())
    if num_tokens == 0:
        raise ValueError(f"none of the {len(documents)} held-out documents has an assistant's token to judge: use other held-out data")
    return Fit(num_tokens, nll_sum, num_hits, num_documents_hit)


def _judge(target: Target, last_TH: Tensor, row_R: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """(negative log-likelihood of the token after each row, whether it is the argmax)."""
    nll, is_hit = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]
    for block in row_R.split(_LOGIT_ROWS):
        logits_RV = target.logits(last_TH[block.to(last_TH.device)]).float().cpu()
        nll.append(nn.functional.cross_entropy(logits_RV, ids_T[block + 1], reduction="none"))
        is_hit.append(logits_RV.argmax(-1) == ids_T[block + 1])
    return torch.cat(nll), torch.cat(is_hit)


def _packs(documents: Sequence[Document]) -> Iterator[list[Document]]:
    pack: list[Document] = []
    for document in documents:
        if pack and sum(len(other.token_ids) for other in pack) + len(document.token_ids) > _PACK_TOKENS:
            yield pack
            pack = []
        pack.append(document)
    if pack:
        yield pack


def comparison(before: Fit, after: Fit, answers: Fit, num_answers: int, bound: float) -> dict[str, Any]:
    """The contents of backbone.json.

    Args:
        before, after: of the original and the trained target on held-out conversations.
        answers: of the trained target on the original's greedy answers.
        num_answers: how many answers those are.
        bound: largest share by which perplexity may rise.
    """
    return {
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
        "perplexity_increase": after.perplexity / before.perplexity - 1,
        "max_perplexity_increase": bound,
        "num_perplexity_tokens": before.num_tokens,
        "answer_token_agreement": answers.num_hits / answers.num_tokens,
        "num_identical_answers": answers.num_documents_hit,
        "num_answers": num_answers,
    }
