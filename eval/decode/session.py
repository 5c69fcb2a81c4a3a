"""Several sequences on the frozen target: one key/value cache that takes in trees of drafts and keeps only what was accepted.

Place in the flow: loop.py runs the target through this for every method, so that their speeds differ by the method alone.

    column     0 .. length - 1   length   length + 1 .. length + n        of each sequence
               verified          newest   nodes of its tree               one forward, under the trees' own mask
    accepted   0 .. length - 1   length   the accepted nodes, moved together; the rest is written over

Shapes: B sequences, R = n + 1 rows (the newest known token and n nodes), C columns, M key/value heads, D head dimension, H hidden size,
X = A * H concatenated auxiliary states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from data.target import Target
from eval.decode.tree import ROOT, DraftTree, ancestors_of, depths_of
from train.drafters.base import FeatureRequest, VerifiedStates

NOTHING = FeatureRequest(aux_layers=(), last=False)


@dataclass(frozen=True)
class TargetRows:
    """What the target says of each row of each sequence.

    Attributes:
        logits_BRV: of the token that follows the row.
        aux_BRX: concatenated auxiliary states, or None where none were requested.
        last_BRH: post-norm last states, or None likewise.
    """

    logits_BRV: Tensor
    aux_BRX: Tensor | None
    last_BRH: Tensor | None


class TargetSession:
    """The target's cache for B sequences."""

    def __init__(self, target: Target, num_sequences: int, capacity: int, request: FeatureRequest = NOTHING) -> None:
        """
        Args:
            target: the frozen target.
            num_sequences: B.
            capacity: longest sequence, nodes of a tree included.
            request: the states that `forward` hands back.

        Raises:
            ValueError: if the target keeps anything but keys and values of every token, which could not be rolled back.
        """
        self._target = target
        self._windows = _attention_windows(target)
        self._request = request
        self._place = _Place(num_sequences, capacity)
        self._layers = [_SessionLayer(self._place) for _ in range(target.num_layers)]
        self._cache = Cache(layers=list(self._layers))
        self.lengths = [0] * num_sequences

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token of one sequence, all layers; known after the first forward."""
        return sum(2 * layer.keys[0, :, 0].numel() * layer.keys.element_size() for layer in self._layers)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> TargetRows:
        """Reads the prompts, each on its own.

        Returns:
            logits after the last token of each [B, 1, V], and the requested states of all of them, padded on the right.
        """
        outputs = []
        for row, prompt in enumerate(prompts):
            self._place.at_prompt(row)
            position_1n = torch.arange(len(prompt), device=self._target.device)[None]
            outputs.append(self._run(torch.tensor([list(prompt)], device=self._target.device), position_1n, None, num_logits=1))
        self.lengths = [len(prompt) for prompt in prompts]
        return TargetRows(
            torch.cat([output.logits_BRV for output in outputs]),
            _stack_ragged([output.aux_BRX for output in outputs]),
            _stack_ragged([output.last_BRH for output in outputs]),
        )

    @torch.no_grad()
    def forward(self, newest: Sequence[int], trees: Sequence[DraftTree]) -> TargetRows:
        """Reads the newest known token of each sequence and its tree; nothing is kept until `accept`.

        Shorter trees are padded with rows that nobody sees and whose logits mean nothing.
        """
        num_rows = 1 + max(tree.num_nodes for tree in trees)
        parents = [tree.parents + (ROOT,) * (num_rows - 1 - tree.num_nodes) for tree in trees]
        ids_BR = torch.tensor([[token, *tree.token_ids, *[0] * (num_rows - 1 - tree.num_nodes)] for token, tree in zip(newest, trees, strict=True)])
        length_B = torch.tensor(self.lengths)
        position_BR = length_B[:, None] + torch.tensor([depths_of(tree_parents) for tree_parents in parents])
        column_BR = length_B[:, None] + torch.arange(num_rows)
        sees_BRR = torch.stack([ancestors_of(tree_parents) for tree_parents in parents])
        self._place.at_rows(self.lengths, column_BR.to(self._target.device), num_rows)
        masks = self._masks(length_B, position_BR, column_BR, sees_BRR)
        return self._run(ids_BR.to(self._target.device), position_BR.to(self._target.device), masks, num_logits=num_rows)

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the newest token of each sequence and the accepted nodes of its tree, and forgets the others."""
        for row, path in enumerate(paths):
            first = self.lengths[row] + 1
            if list(path) != list(range(len(path))):
                column_a = torch.tensor(path, device=self._target.device) + first
                for layer in self._layers:
                    for buffer_BMCD in (layer.keys, layer.values):
                        buffer_BMCD[row, :, first : first + len(path)] = buffer_BMCD[row, :, column_a]
            self.lengths[row] = first + len(path)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets all but the first so many tokens of each sequence."""
        assert all(length <= held for length, held in zip(lengths, self.lengths, strict=True)), f"{lengths} of {self.lengths} tokens are to be kept"
        self.lengths = list(lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all sequences but these."""
        self.lengths = [self.lengths[row] for row in rows]
        self._place.num_sequences = len(rows)
        index = torch.tensor(list(rows), device=self._target.device)
        for layer in self._layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def _run(self, ids_BR: Tensor, position_BR: Tensor, masks: Any, num_logits: int) -> TargetRows:
        with self._target.capturing(self._request.aux_layers) as captured:
            last_BRH = self._target.forward_cached(ids_BR, self._cache, position_BR, masks)
        return TargetRows(
            logits_BRV=self._target.logits(last_BRH[:, -num_logits:]),
            aux_BRX=torch.cat([captured[layer][0] for layer in self._request.aux_layers], dim=-1) if captured else None,
            last_BRH=last_BRH if self._request.last else None,
        )

    def _masks(self, length_B: Tensor, position_BR: Tensor, column_BR: Tensor, sees_BRR: Tensor) -> Any:
        """What each row sees, as the target's attention takes it: added to the scores, one mask a kind of layer."""
        num_columns = int(column_BR[:, -1].max()) + 1
        if position_BR.numel() == 1 and set(self._windows.values()) == {None}:
            return None  # one row sees everything: the target's faster way
        column_C = torch.arange(num_columns)
        visible_BRC = (column_C < length_B[:, None])[:, None].repeat(1, position_BR.shape[1], 1)
        visible_BRC.scatter_(2, column_BR[:, None].expand_as(sees_BRR), sees_BRR)
        masks = {}
        for kind, window in self._windows.items():
            seen_BRC = visible_BRC
            if window is not None:
                position_BC = column_C.repeat(len(length_B), 1).scatter(1, column_BR, position_BR)
                seen_BRC = visible_BRC & (position_BR[:, :, None] - position_BC[:, None] < window)
            added_BRC = torch.zeros(seen_BRC.shape, dtype=self._target.dtype).masked_fill_(~seen_BRC, torch.finfo(self._target.dtype).min)
            masks[kind] = added_BRC[:, None].to(self._target.device)
        return masks if len(masks) > 1 else next(iter(masks.values()))


class _Place:
    """Where the next forward's keys and values go."""

    def __init__(self, num_sequences: int, capacity: int) -> None:
        self.num_sequences, self.capacity = num_sequences, capacity
        self.prompt_row: int | None = None
        self.start = self.end = 0
        self.column_BR = torch.empty(0)

    def at_prompt(self, row: int) -> None:
        """One sequence's prompt, from column 0 on."""
        self.prompt_row, self.start = row, 0

    def at_rows(self, lengths: Sequence[int], column_BR: Tensor, num_rows: int) -> None:
        """The same number of rows for every sequence, after what it holds."""
        self.prompt_row, self.column_BR = None, column_BR
        self.start, self.end = max(lengths), max(lengths) + num_rows


class _SessionLayer(CacheLayerMixin):
    """One layer's keys and values [B, M, C, D], as transformers' attention asks for them."""

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, place: _Place) -> None:
        super().__init__()
        self._place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        size = (self._place.num_sequences, key_states.shape[1], self._place.capacity)
        self.keys = key_states.new_zeros(*size, key_states.shape[-1])
        self.values = value_states.new_zeros(*size, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, num_rows = self._place, key_states.shape[2]
        if place.prompt_row is not None:
            self.keys[place.prompt_row, :, :num_rows], self.values[place.prompt_row, :, :num_rows] = key_states[0], value_states[0]
            return key_states, value_states
        if len(key_states) == 1:
            self.keys[:, :, place.start : place.end], self.values[:, :, place.start : place.end] = key_states, value_states
        else:
            row_B1 = torch.arange(len(key_states), device=key_states.device)[:, None]
            self.keys[row_B1, :, place.column_BR] = key_states.transpose(1, 2)
            self.values[row_B1, :, place.column_BR] = value_states.transpose(1, 2)
        return self.keys[:, :, : place.end], self.values[:, :, : place.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._place.start + query_length, 0

    def get_seq_length(self) -> int:
        return self._place.start

    def get_max_length(self) -> int:
        return self._place.capacity


def _attention_windows(target: Target) -> dict[str, int | None]:
    """The sliding window of each kind of layer, None where a layer sees everything."""
    fields = target.config.to_dict()
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    kinds = set(fields.get("layer_types") or ())
    unsupported = kinds - {"full_attention", "sliding_attention"}
    if unsupported:
        raise ValueError(
            f"{target.config.model_type} has layers of {', '.join(sorted(unsupported))}: what they remember cannot be rolled back to the accepted "
            "tokens, so the reference decoders do not run on it; serve it with an engine that supports it"
        )
    if kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    return {"full_attention": window}


def _stack_ragged(values: Sequence[Tensor | None]) -> Tensor | None:
    """[B, n, X] from B tensors [1, n_b, X], padded on the right; None from Nones."""
    present = [value[0] for value in values if value is not None]
    return nn.utils.rnn.pad_sequence(present, batch_first=True) if present else None


def states_of(rows: TargetRows, paths: Sequence[Sequence[int]], next_ids: Sequence[Sequence[int]]) -> VerifiedStates:
    """The states of the newest token and the accepted nodes of each sequence, as a drafter reads them.

    Args:
        rows: from `TargetSession.forward`.
        paths: accepted nodes of each sequence.
        next_ids: the token that follows each of these positions, 1 + len(path) of them.
    """
    device = rows.logits_BRV.device
    num_new = [1 + len(path) for path in paths]
    longest = max(num_new)
    row_Bn = torch.tensor([[0, *(node + 1 for node in path), *[0] * (longest - 1 - len(path))] for path in paths], device=device)
    batch_B1 = torch.arange(len(paths), device=device)[:, None]
    return VerifiedStates(
        aux_BnX=None if rows.aux_BRX is None else rows.aux_BRX[batch_B1, row_Bn],
        last_BnH=None if rows.last_BRH is None else rows.last_BRH[batch_B1, row_Bn],
        next_ids_Bn=padded_ids(next_ids, device),
        num_new_B=torch.tensor(num_new, device=device),
    )


def padded_ids(ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [B, n], zeros on the right."""
    longest = max(map(len, ids))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids], device=device)
