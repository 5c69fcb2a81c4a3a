"""Standard speculative decoding: a smaller model with the same tokenizer drafts (arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2).

The draft model has a cache of its own. It reads what it has not read of the verified tokens, drafts K tokens one after the other, and once the target
has judged them forgets those that were not accepted:

    K = 3, a b verified, c newest          draft model has read    text afterwards
    draft     reads c d0 d1                a b c d0 d1             (the last draft is not read: nobody needs what follows it)
    d0 accepted, then t                    a b c d0                a b c d0 t           unread: t
    all accepted, then t                   a b c d0 d1             a b c d0 d1 d2 t     unread: d2 t, two tokens

So a batch has sequences with one unread token and with two, each read as a chain, in one forward. K drafts cost K forwards of the draft model.

Shapes: B sequences, K drafts, R = K + 1 rows, D vocabulary of the draft model, V of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from data.target import Target
from eval.decode.loop import Method, Seen
from eval.decode.session import TargetSession
from eval.decode.tree import DraftTree
from eval.decode.verify import Chance, Sampling


class DraftModel(Method):
    """K drafts from another model, greedy or sampled."""

    def __init__(self, target: Target, draft: Target, draft_length: int, sampling: Sampling | None = None, chance: Chance | None = None) -> None:
        """
        Args:
            target: the model that verifies.
            draft: the model that drafts, on the target's device; the target itself is the case whose tau is known: K + 1.
            draft_length: K, at least 1.
            sampling: how drafts are sampled; None drafts greedily.
            chance: what samples them; needed with `sampling`.

        Raises:
            ValueError: if the two have different vocabularies, or K is none.
        """
        if draft_length < 1:
            raise ValueError(f"a chain of {draft_length} drafts is wanted, expected at least 1")
        assert (sampling is None) == (chance is None), "sampled drafts need a source of chance, greedy ones have none"
        self._is_target = draft.model is target.model
        if not self._is_target:
            check_same_tokenizer(target, draft)
        self.longest_path = self.most_nodes = draft_length
        self._draft, self._vocab_size, self._sampling, self._chance = draft, target.vocab_size, sampling, chance
        self._capacity = 0
        self._session: TargetSession | None = None

    def start(self, num_sequences: int, capacity: int) -> None:
        self._capacity, self._session = capacity, None

    def keep(self, rows: Sequence[int]) -> None:
        if self._session is not None:
            self._session.keep(rows)

    @torch.no_grad()
    def draft(self, seen: Seen) -> list[DraftTree]:
        if self._session is None:
            self._session = TargetSession(self._draft, len(seen.contexts), self._capacity)
            self._session.prefill([context[:-1] for context in seen.contexts])
        else:
            # Of the drafts that it read the text has a beginning, and after those the newest token, which nobody has read.
            lengths = [min(read, len(context) - 1) for read, context in zip(self._session.lengths, seen.contexts, strict=True)]
            self._session.truncate(lengths)
        unread = [list(context[length:]) for context, length in zip(seen.contexts, self._session.lengths, strict=True)]
        chosen, probs = [], []
        for _ in range(self.longest_path):
            ids_B, probs_BV = self._choose(self._read(self._session, unread))
            unread = [[token] for token in ids_B]
            chosen.append(ids_B)
            probs.append(probs_BV)
        drafts = list(zip(*chosen, strict=True))
        if self._sampling is None:
            return [DraftTree.chain(ids) for ids in drafts]
        # The last draft has no children.
        probs_BRV = torch.stack([*probs, torch.zeros_like(probs[0])], dim=1)
        return [DraftTree.chain(ids, probs_RV) for ids, probs_RV in zip(drafts, probs_BRV, strict=True)]

    def _read(self, session: TargetSession, unread: Sequence[Sequence[int]]) -> Tensor:
        """[B, V] logits after the last unread token of each sequence; the cache takes the tokens in."""
        rows = session.forward([ids[0] for ids in unread], [DraftTree.chain(tuple(ids[1:])) for ids in unread])
        session.accept([range(len(ids) - 1) for ids in unread])
        last_B = torch.tensor([len(ids) - 1 for ids in unread], device=rows.logits_BRV.device)
        logits_BD = rows.logits_BRV[torch.arange(len(unread), device=last_B.device), last_B]
        # Rows of the embedding beyond the shared tokens are padding, of another size in each model.
        num_missing = self._vocab_size - logits_BD.shape[1]
        return nn.functional.pad(logits_BD, (0, num_missing), value=-torch.inf)  # a negative number cuts

    def _choose(self, logits_BV: Tensor) -> tuple[list[int], Tensor]:
        """The next draft of each sequence, and the distribution that it is from."""
        if self._sampling is None or self._chance is None:
            return logits_BV.argmax(-1).tolist(), logits_BV
        probs_BV = self._sampling.probabilities(logits_BV)
        return [self._chance.sample(probs_V) for probs_V in probs_BV], probs_BV

    @property
    def weights_bytes(self) -> int:
        return 0 if self._is_target else sum(parameter.numel() * parameter.element_size() for parameter in self._draft.model.parameters())

    @property
    def cache_bytes(self) -> int:
        return 0 if self._session is None else self._session.cache_bytes_per_token * self._capacity


def check_same_tokenizer(target: Target, draft: Target) -> None:
    """Raises ValueError where a token id means one thing to the target and another to the draft model.

    Only the ids that both tokenizers have need to agree; sizes of embeddings may differ, by padding. But the draft model must have an embedding of
    every token of the target, for it reads the target's text.
    """
    theirs = {token_id: token for token, token_id in draft.tokenizer.get_vocab().items()}
    ours = {token_id: token for token, token_id in target.tokenizer.get_vocab().items()}
    shorter = min(max(theirs), max(ours)) + 1
    different = [token_id for token_id in range(shorter) if ours.get(token_id) != theirs.get(token_id)]
    if different:
        first = different[0]
        raise ValueError(
            f"the draft model has another tokenizer than the target: {len(different)} of {shorter} token ids differ, the first is {first}, "
            f"{theirs.get(first)!r} in the draft model and {ours.get(first)!r} in the target; take a draft model of the target's own family"
        )
    if max(ours) >= draft.vocab_size:
        raise ValueError(
            f"the draft model has {draft.vocab_size} embeddings, but the target's tokenizer has {ours[max(ours)]!r} with id {max(ours)}, "
            "which it could not read; take a draft model of the target's own family"
        )
