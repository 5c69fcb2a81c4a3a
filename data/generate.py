"""Batched greedy decoding with the target, full batches all the time.

Place in the flow: prompts -> the target's own answers: held-out trajectories (eval/) and regenerated training data (data/regenerate_stage.py).

A fixed number of slots decodes in lockstep, one token a step. Keys and values lie in one preallocated buffer a layer, every sequence right-aligned to
the same column, so a step writes one column and attends to a view of the buffer: nothing is concatenated or padded to a maximum. A finished
sequence's slot goes to the next prompt, whose prefill is packed with those of the others that start then.

    column     0 1 2 3 4 5 6 7 | 8 <- the next token of every slot
    slot 0     . . . a b c d e |
    slot 1     . . . . . . f g |        started later: it only has to end at the same column
    slot 2     h i j k l m n o |

Shapes: B slots, C columns, M key/value heads, G query heads of one, D head dimension, V vocabulary.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from data.target import Target, attend_packed, holding, register_attention

_SLOTS, _PREFILL = "headstart_slots", "headstart_prefill"
_PREFILL_TOKENS = 4096
_SPARE_COLUMNS = 128
# The rest is left to the prefill's activations and the allocator.
_GPU_MEMORY_SHARE = 0.7


@dataclass
class GeneratedAnswer:
    """A greedy answer.

    Attributes:
        answer_ids: its last token is an end token unless the token limit came first.
        extra_ids: the greedy continuation past the answer's end; an engine's last verification looks there.
    """

    answer_ids: list[int] = field(default_factory=list)
    extra_ids: list[int] = field(default_factory=list)


OnAnswer = Callable[[int, GeneratedAnswer], None]


@torch.no_grad()
def generate_greedy(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_extra_tokens: int = 0,
    batch_sequences: int = 64,
    on_answer: OnAnswer | None = None,
) -> list[GeneratedAnswer]:
    """Answers every prompt greedily.

    Args:
        target: the target.
        prompts: token ids, each at least one.
        max_new_tokens: longest answer.
        num_extra_tokens: tokens to go on past each answer's end.
        batch_sequences: slots B.
        on_answer: called with a prompt's index when its answer is complete, in the order of completion.

    Returns:
        Answers in the order of the prompts.

    Raises:
        ValueError: if a prompt is empty or has a token that the target does not know, or a size is too small.
    """
    _check(target, prompts, max_new_tokens, num_extra_tokens, batch_sequences)
    end_ids = target.end_ids
    answers = [GeneratedAnswer() for _ in prompts]
    # Prompts of one length run together, so that no slot makes the others attend to columns that only it needs.
    pending = deque(sorted(enumerate(prompts), key=lambda item: -len(item[1])))
    if not target.is_packable:
        for index, prompt in pending:
            _generate_alone(target, prompt, max_new_tokens, num_extra_tokens, answers[index])
            if on_answer is not None:
                on_answer(index, answers[index])
        return answers
    longest = max((len(prompt) for prompt in prompts), default=0)
    most_new_tokens = max_new_tokens + num_extra_tokens
    num_slots = min(batch_sequences, len(prompts), _most_slots(target, longest + most_new_tokens + _SPARE_COLUMNS))
    slots = _Slots(target, num_slots, longest, most_new_tokens)
    owners: list[int | None] = [None] * num_slots
    while pending or any(owner is not None for owner in owners):
        free = [slot for slot, owner in enumerate(owners) if owner is None]
        # Prefills are worth bundling, but a slot must not stay empty for long.
        if pending and (len(free) >= max(1, num_slots // 16) or len(free) == num_slots):
            started = [(slot, *pending.popleft()) for slot in free[: len(pending)]]
            first_ids = slots.start([(slot, prompt) for slot, _, prompt in started])
            for (slot, index, _), token in zip(started, first_ids, strict=True):
                owners[slot] = index
                slots.next_id_B[slot] = token
        elif not pending and len(free) * 4 >= len(owners):
            owners = slots.keep([slot for slot, owner in enumerate(owners) if owner is not None], owners)
        for slot, token in enumerate(slots.next_id_B.tolist()):
            owner = owners[slot]
            if owner is not None and _append(answers[owner], token, end_ids, max_new_tokens, num_extra_tokens):
                owners[slot] = None
                slots.free(slot)
                if on_answer is not None:
                    on_answer(owner, answers[owner])
        if any(owner is not None for owner in owners):
            slots.step()
    return answers


def _check(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_extra_tokens: int, batch_sequences: int) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty, expected at least one token: leave it out")
        target.check_tokens(torch.tensor(prompt))
    if max_new_tokens < 1 or batch_sequences < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens} and batch_sequences {batch_sequences}, expected at least 1")
    if num_extra_tokens < 0:
        raise ValueError(f"num_extra_tokens is {num_extra_tokens}, expected at least 0")


def _most_slots(target: Target, num_columns: int) -> int:
    """How many sequences' keys and values fit in the free memory of a GPU; on a CPU the caller's number stands."""
    if target.device.type != "cuda":
        return sys.maxsize
    fields = target.config.to_dict()
    num_heads = fields.get("num_key_value_heads") or fields["num_attention_heads"]
    head_size = fields.get("head_dim") or target.hidden_size // fields["num_attention_heads"]
    slot_bytes = num_columns * target.num_layers * 2 * num_heads * head_size * target.dtype.itemsize
    free_bytes, _ = torch.cuda.mem_get_info(target.device)
    return max(1, int(_GPU_MEMORY_SHARE * free_bytes) // slot_bytes)


def _append(answer: GeneratedAnswer, token: int, end_ids: frozenset[int], max_new_tokens: int, num_extra_tokens: int) -> bool:
    """Adds a token to an answer; returns whether nothing more is wanted."""
    has_ended = len(answer.answer_ids) == max_new_tokens or (bool(answer.answer_ids) and answer.answer_ids[-1] in end_ids)
    (answer.extra_ids if has_ended else answer.answer_ids).append(token)
    has_ended = len(answer.answer_ids) == max_new_tokens or answer.answer_ids[-1] in end_ids
    return has_ended and len(answer.extra_ids) == num_extra_tokens


class _Slots:
    """The sequences being decoded, and their keys and values."""

    def __init__(self, target: Target, num_slots: int, longest_prompt: int, most_new_tokens: int) -> None:
        self._target = target
        self._longest = longest_prompt + most_new_tokens
        # Columns move left when the end is reached; the spare ones make that rare.
        self._num_columns = self._longest + _SPARE_COLUMNS
        self._column = longest_prompt
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._num_slots = num_slots
        device = target.device
        self._lowest = self._column
        self._visible: dict[int | None, Tensor] = {}
        self._first_column_B = torch.full((num_slots,), self._column, dtype=torch.int64, device=device)
        self.next_id_B = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def start(self, started: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Prefills prompts into slots, packed; returns the first token of each answer."""
        first_ids: list[int] = []
        bundle: list[tuple[int, Sequence[int]]] = []
        for slot, prompt in started:
            if bundle and sum(len(other) for _, other in bundle) + len(prompt) > _PREFILL_TOKENS:
                first_ids += self._prefill(bundle)
                bundle = []
            bundle.append((slot, prompt))
        return first_ids + self._prefill(bundle)

    def _prefill(self, bundle: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        lengths = [len(prompt) for _, prompt in bundle]
        device = self._target.device
        ids_T = torch.tensor([token for _, prompt in bundle for token in prompt], device=device)
        position_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
        for (slot, _), length in zip(bundle, lengths, strict=True):
            self._first_column_B[slot] = self._column - length
        packed = _Prefill(lengths, lambda layer, key, value: self._store(layer, key, value, bundle))
        with self._target.attention(_PREFILL), holding(_current, packed):
            last_TH = self._target.forward_base(ids_T[None], position_T[None])[0]
        ends = torch.tensor(lengths).cumsum(0).to(device) - 1
        return _argmax(self._target.logits(last_TH[ends])).tolist()

    def _store(self, layer: int, key_MTD: Tensor, value_MTD: Tensor, bundle: Sequence[tuple[int, Sequence[int]]]) -> None:
        if layer not in self._keys:
            shape = (self._num_slots, key_MTD.shape[0], self._num_columns, key_MTD.shape[-1])
            self._keys[layer] = torch.zeros(shape, dtype=key_MTD.dtype, device=key_MTD.device)
            self._values[layer] = torch.zeros((*shape[:-1], value_MTD.shape[-1]), dtype=value_MTD.dtype, device=value_MTD.device)
        start = 0
        for slot, prompt in bundle:
            rows, columns = slice(start, start + len(prompt)), slice(self._column - len(prompt), self._column)
            self._keys[layer][slot, :, columns] = key_MTD[:, rows]
            self._values[layer][slot, :, columns] = value_MTD[:, rows]
            start += len(prompt)

    def step(self) -> None:
        """Feeds each slot its newest token and takes its next one."""
        if self._column == self._num_columns:
            self._move_left()
        # A free slot keeps decoding its old sequence; it must not reach back further than a live one may.
        self._first_column_B.clamp_(min=self._column - self._longest)
        self._lowest = int(self._first_column_B.min())
        self._visible = {}
        position_B1 = (self._column - self._first_column_B)[:, None]
        with self._target.attention(_SLOTS), holding(_current, self):
            last_BH = self._target.forward_base(self.next_id_B[:, None], position_B1)[:, 0]
        self.next_id_B = _argmax(self._target.logits(last_BH))
        self._column += 1

    def free(self, slot: int) -> None:
        """Nobody waits for this slot's sequence any more: it starts anew, so that it reaches back to no column that the others do not need."""
        self._first_column_B[slot] = self._column

    def attend(self, layer: int, query_BND: Tensor, key_BMD: Tensor, value_BMD: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Stores the new column's key and value and attends to the columns of each sequence: [B, N, D]."""
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self._column] = key_BMD
        values[:, :, self._column] = value_BMD
        columns = slice(self._lowest, self._column + 1)
        out_BMGD = nn.functional.scaled_dot_product_attention(
            query_BND.unflatten(1, (key_BMD.shape[1], -1)),
            keys[:, :, columns],
            values[:, :, columns],
            attn_mask=self._visible_columns(window)[:, None, None],
            scale=scaling,
        )
        return out_BMGD.flatten(1, 2)

    def _visible_columns(self, window: int | None) -> Tensor:
        """bool [B, C]: the columns that each slot attends to; made once a step for each window."""
        if window not in self._visible:
            column_C = torch.arange(self._lowest, self._column + 1, device=self._first_column_B.device)
            visible_BC = column_C[None] >= self._first_column_B[:, None]
            if window is not None:
                visible_BC &= column_C[None] > self._column - window
            self._visible[window] = visible_BC
        return self._visible[window]

    def _move_left(self) -> None:
        """Makes room: the longest possible sequence ends at column `_longest` again."""
        shift = self._column - self._longest
        for buffers in (self._keys, self._values):
            for layer, buffer in buffers.items():
                buffer[:, :, : self._longest] = buffer[:, :, shift : self._column].clone()
                buffers[layer] = buffer
        self._first_column_B -= shift
        self._column -= shift

    def keep(self, chosen: list[int], owners: list[int | None]) -> list[int | None]:
        """Drops the free slots when no prompt is left to fill them."""
        index = torch.tensor(chosen, dtype=torch.int64, device=self.next_id_B.device)
        for buffers in (self._keys, self._values):
            for layer in buffers:
                buffers[layer] = buffers[layer][index]
        self._first_column_B, self.next_id_B = self._first_column_B[index], self.next_id_B[index]
        self._num_slots = len(chosen)
        return [owners[slot] for slot in chosen]


def _argmax(logits_BV: Tensor) -> Tensor:
    """int64 [B]; on a CPU in bf16, `max` is four times as fast as `argmax`."""
    return logits_BV.max(-1).indices


@dataclass(frozen=True)
class _Prefill:
    """What the prefill's attention needs: the prompts' lengths, and where keys and values go."""

    lengths: Sequence[int]
    store: Callable[[int, Tensor, Tensor], None]


_current: ContextVar[Any] = ContextVar("decoding")


def _slots_attention(
    module: Any,
    query_BN1D: Tensor,
    key_BM1D: Tensor,
    value_BM1D: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One new token a slot; called by transformers in place of its sdpa function."""
    slots: _Slots = _current.get()
    out_BND = slots.attend(module.layer_idx, query_BN1D[:, :, 0], key_BM1D[:, :, 0], value_BM1D[:, :, 0], scaling, sliding_window)
    return out_BND[:, None], None


def _prefill_attention(
    module: Any,
    query_1NTD: Tensor,
    key_1MTD: Tensor,
    value_1MTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Packed causal attention that also keeps keys and values."""
    prefill: _Prefill = _current.get()
    prefill.store(module.layer_idx, key_1MTD[0], value_1MTD[0])
    return attend_packed(query_1NTD, key_1MTD, value_1MTD, prefill.lengths, scaling, sliding_window), None


register_attention(_SLOTS, _slots_attention)
register_attention(_PREFILL, _prefill_attention)


def _generate_alone(target: Target, prompt: Sequence[int], max_new_tokens: int, num_extra_tokens: int, answer: GeneratedAnswer) -> None:
    """One prompt on its own, through the target's own attention and cache: for targets whose attention the slots cannot do."""
    cache = DynamicCache(config=target.config)
    ids = list(prompt)
    while True:
        last_TH = target.forward_cached(torch.tensor([ids], device=target.device), cache)[0]
        ids = _argmax(target.logits(last_TH[-1:])).tolist()
        if _append(answer, ids[0], target.end_ids, max_new_tokens, num_extra_tokens):
            return
