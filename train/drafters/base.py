"""What every drafter is to the rest of the pipeline: a loss, teacher-forced drafts, and a proposal step for the decoder.

Place in the flow: `DrafterBatch` -> `Drafter.forward` (the loss) -> engine; and `Drafter.teacher_forced_drafts` -> eval/acceptance.py;
`Drafter.read` and `Drafter.extend` -> eval/decode/. A new algorithm is one file beside this one: its name is its registration (`load_drafter_class`).

Shapes: T packed tokens, K drafts, B sequences that are decoded together, n positions (of each), m drafted nodes so far, X = A * H concatenated
auxiliary states, H target hidden size, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from data.batch import DrafterBatch
from data.target import Target, TargetHeads
from data.vocab import DraftVocabulary
from train.losses import DistillationSums, Labels, LossKind, Teacher, distillation_loss


@dataclass(frozen=True)
class DrafterConfig:
    """Base of the per-algorithm configs; each drafter file defines its own.

    A drafter that trains the target too (`trains_target`) is a `TargetTrainer`, reads no stored states, and fits only the target that it writes.
    """

    algorithm: ClassVar[str]
    trains_target: ClassVar[bool] = False

    def vocabulary_size(self, target_vocab_size: int) -> int | None:
        """Size of the draft vocabulary, or None where the drafter covers the target's whole vocabulary."""
        return None

    def perplexity_bound(self) -> float | None:
        """Largest share by which the target's held-out perplexity may rise, or None where the drafter leaves the target as it is."""
        return None

    def longest_chain(self) -> int | None:
        """Most drafts of a chain, or None where the drafter can go on for ever."""
        return None


@dataclass(frozen=True)
class FeatureRequest:
    """What a drafter needs of the target at each token.

    Attributes:
        aux_layers: HF `hidden_states` indices, ascending; empty when none is needed.
        last: whether the post-norm last hidden state is needed.
    """

    aux_layers: tuple[int, ...]
    last: bool


class LossOutput(NamedTuple):
    """One micro-batch's loss as sums, so that micro-batches and ranks add up exactly.

    Attributes:
        loss_sum: fp32 scalar; the engine divides it by the supervised positions of the whole global batch.
        metrics: fp32 sums by name (never means); `metrics.py` turns them into ratios after adding over ranks.
    """

    loss_sum: Tensor
    metrics: dict[str, Tensor]


class VerifiedStates(NamedTuple):
    """What the target said of the positions that a verification (or the prefill) added to each sequence.

    Attributes:
        aux_BnX: auxiliary states, or None where `feature_request` asks for none.
        last_BnH: post-norm last states, or None likewise.
        next_ids_Bn: int64, the token that follows each position; the last one is the newest known token.
        num_new_B: int64, how many of the n positions are there for each sequence; those after them are padding.
    """

    aux_BnX: Tensor | None
    last_BnH: Tensor | None
    next_ids_Bn: Tensor
    num_new_B: Tensor

    def newest(self, values_BnH: Tensor) -> Tensor:
        """[B, 1, H]: what stands at the last position of each sequence."""
        index_B11 = (self.num_new_B - 1)[:, None, None]
        return values_BnH.gather(1, index_B11.expand(-1, 1, values_BnH.shape[-1]))


class Guess(NamedTuple):
    """A drafter's opinion of the token that follows.

    Attributes:
        logits_BnW: over the draft vocabulary (`Drafter.draft_ids_W`). From `read`: of the next n tokens, n of them at once; from `extend`: of the
            token after each of n nodes.
        hidden_BnH: what `extend` continues from: [B, 1, H] from `read`.
    """

    logits_BnW: Tensor
    hidden_BnH: Tensor


class Drafter(nn.Module):
    """A draft head with its frozen target parts.

    The target's embedding, norm and head are held in `self.heads`, a plain object: they are frozen, never saved with the drafter, and never
    sharded or cast by an engine.

    Attributes:
        recomputes: whether the backward pass computes the layer's activations again (`train.recompute`).
    """

    config_class: ClassVar[type[DrafterConfig]]

    @abstractmethod
    def __init__(self, config: Any, target: PretrainedConfig, heads: TargetHeads, vocabulary: DraftVocabulary | None) -> None:
        """
        Args:
            config: an instance of `config_class`.
            target: the target's (text) config.
            heads: the target's frozen embedding, norm and head.
            vocabulary: the draft vocabulary; None is the whole target vocabulary.
        """
        super().__init__()
        self.config = config
        self.request = self.feature_request_of(config, target)
        self.recomputes = False
        # A list hides the object from nn.Module's attribute tracking.
        self._frozen = [heads]

    @property
    def heads(self) -> TargetHeads:
        """The target's frozen embedding, final norm and head."""
        return self._frozen[0]

    @classmethod
    @abstractmethod
    def feature_request_of(cls, config: Any, target: PretrainedConfig) -> FeatureRequest:
        """The target states that a drafter of these settings reads."""

    @classmethod
    @abstractmethod
    def from_export(cls, export_config: dict[str, Any], tensors: dict[str, Tensor], target: PretrainedConfig, heads: TargetHeads) -> Drafter:
        """The drafter that an engine would see in an exported checkpoint: built from its config.json and tensors alone."""

    @classmethod
    def check_target(cls, target: PretrainedConfig) -> None:
        """Raises ValueError for a target that this algorithm has no drafter for; asked before any work is done."""
        return None

    # --- what is trained ------------------------------------------------------------------------------------------------

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are trained, by name: what checkpoints of a run hold."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def load_trained(self, state: dict[str, Tensor]) -> None:
        """Takes in the values of all trained parameters; the frozen ones stay as they are.

        Raises:
            ValueError: if they are not the parameters of this drafter.
        """
        expected = {name for name, _ in self.trained()}
        if expected != state.keys():
            different = ", ".join(sorted(expected ^ state.keys())[:3])
            raise ValueError(f"the saved weights are of another drafter: {different} is in only one of the two")
        self.load_state_dict(state, strict=False)

    def part_of(self, parameter: str) -> str:
        """The part of the drafter that a parameter belongs to; parts can have learning rates of their own (`schedule`)."""
        return "drafter"

    def schedule(self, step: int, num_steps: int) -> dict[str, float]:
        """Told before each step which one comes (0-based); returns a factor on the learning rate for each part."""
        return {"drafter": 1.0}

    # --- checkpoint -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def export_tensors(self) -> dict[str, Tensor]:
        """Everything that the checkpoint holds, by contract name."""

    @abstractmethod
    def export_dimensions(self) -> dict[str, Any]:
        """The sizes of the draft block, in config.json's terms."""

    def feature_request(self) -> FeatureRequest:
        """The target states that this drafter reads."""
        return self.request

    def recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), whose inside is computed again in the backward pass where `recomputes` is set, instead of being kept until then."""
        if not self.recomputes:
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    @abstractmethod
    def num_supervised(self, batch: DrafterBatch) -> int:
        """Number of supervised positions of the batch: the unit of the loss's denominator."""

    @abstractmethod
    def forward(self, batch: DrafterBatch) -> LossOutput:
        """The training loss over the supervised positions of one packed micro-batch.

        Every trainable parameter takes part in every batch, also where nothing is supervised: with zero rows its gradient is zero, while a
        parameter that is left out on one rank makes ZeRO-1/2 mismatch or hang (platform.md). And each is used by its own module's forward
        only: elsewhere ZeRO-3 has sharded it.
        """

    @abstractmethod
    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        """Greedy drafts at every position as if all earlier drafts had been accepted.

        Returns:
            int64 [num_drafts, T] target token ids; entry [s, i] predicts x_{i+2+s}. Exactly what `propose` would draft there.
        """

    # --- drafting: what eval/decode/ builds chains and trees with -----------------------------------------------------------

    @property
    def draft_ids_W(self) -> Tensor | None:
        """int64 [W] target ids of the draft vocabulary, on the drafter's device; None where it is the target's whole vocabulary."""
        return None

    @abstractmethod
    def new_cache(self, num_sequences: int, capacity: int) -> Any:
        """An empty drafting cache for sequences of at most `capacity` positions, drafted ones included; None where nothing is remembered."""

    @abstractmethod
    def read(self, cache: Any, verified: VerifiedStates, num_drafts: int) -> Guess:
        """Takes in newly verified positions, forgets what was drafted, and guesses the tokens after the newest known one.

        Args:
            cache: from `new_cache`, updated in place.
            verified: new positions of each sequence, at least one.
            num_drafts: as many of the next tokens are wanted, where the drafter can say several at once; it says at least one.
        """

    def extend(self, cache: Any, hidden_BnH: Tensor, token_ids_Bn: Tensor, sees_Bnm: Tensor) -> Guess:
        """Goes on from n drafted nodes, all one level deeper than those before.

        Args:
            cache: updated in place; remembers the nodes until the next `read`.
            hidden_BnH: for each node, the output that it was drafted from.
            token_ids_Bn: int64 target ids of the nodes.
            sees_Bnm: bool, which of all m nodes since `read` (in the order they were given, the new ones last) are a node's ancestors, or itself.
        """
        raise ValueError(f"{self.config.algorithm} says all its drafts at once and cannot go on from them: draft fewer tokens")


class TargetTrainer(Drafter):
    """A drafter that trains the target with it, and fits only the target that it writes; its config says `trains_target`."""

    @abstractmethod
    def attach_target(self, target: Target) -> None:
        """Hands over the target to train."""

    @abstractmethod
    def save_target(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the trained target, in this dtype, as a model that transformers and the engines load; the drafter is used up by it."""


class DistillingHead(nn.Linear):
    """A head whose forward gives logits, or with a teacher (or labels) the loss of its logits without holding them.

    The loss is part of the module's forward so that an engine that shards parameters (ZeRO-3) gathers the weight around it.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, teacher: Teacher | Labels | None = None, weight_KR: Tensor | None = None, kind: LossKind = "ce"
    ) -> Tensor | DistillationSums:
        if teacher is None:
            return super().forward(hidden)
        assert weight_KR is not None
        return distillation_loss(hidden, self.weight, teacher, weight_KR, kind)


class DistillingHeads(nn.ModuleList):
    """Heads that are judged together, so that the target's distribution of a row is computed once for all of them.

    ZeRO-3 sees that this module's forward uses its heads' weights and gathers them around it: all of them at once.
    """

    def forward(self, student_KRH: Tensor, teacher: Teacher, weight_KR: Tensor) -> DistillationSums:
        """The cross entropy of the drafts, one from each head, against the target."""
        return distillation_loss(student_KRH, [head.get_parameter("weight") for head in self], teacher, weight_KR, "ce")


def algorithms() -> list[str]:
    """Names of the algorithms: the drafter files of this folder."""
    package = importlib.import_module("train.drafters")
    names = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return sorted(names - {"base", "llama_layer"})


def load_drafter_class(algorithm: str) -> type[Drafter]:
    """The drafter class of `train/drafters/<algorithm>.py`.

    Raises:
        ValueError: if there is no such file.
    """
    if algorithm not in algorithms():
        raise ValueError(f"no drafter named {algorithm!r}; train/drafters/ holds {', '.join(algorithms())}")
    module = importlib.import_module(f"train.drafters.{algorithm}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Drafter) and value.__module__ == module.__name__:
            return value
    raise ValueError(f"train/drafters/{algorithm}.py defines no Drafter subclass")
