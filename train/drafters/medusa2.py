"""Medusa-2 (arXiv 2401.10774): Medusa heads and their backbone, the target itself, trained together.

    stage 1    loss = sum_k 0.8^k CE_k                                    heads alone, as Medusa-1                   section 2.2.2
    stage 2    loss = L_LM + lambda_0 s(t) sum_k 0.8^k CE_k               heads and backbone

    L_LM       = KL(original || adapted)       self-distillation: the original is the same model with its adapters off      section 2.3.2
               = CE(adapted, next token)       where the data is what the backbone should say
    s(t)       = sin(pi/2 t), t = 0 .. 1 over stage 2                     the heads' gradient reaches the backbone little by little

The backbone learns states from which tokens further ahead can be told; L_LM holds it to what it was. Its layers are trained by LoRA, or in full; its
embedding and head stay as they are: tied targets would change both at once, and the Medusa heads begin as copies of that head.

The heads' learning rate is `heads_rate` times that of the backbone, which begins stage 2 with a warm-up of its own. AdamW takes no notice of a
constant factor on a gradient, only of its change: so the heads always get the gradient of their plain sum, and lambda_0 s(t) scales what flows from
them into the backbone.

The heads fit the trained backbone and no other model: `save_target` writes it, and it has to be served as the target.

Shapes: T packed tokens, R supervised rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PretrainedConfig

from data.batch import DrafterBatch
from data.target import Target, TargetHeads
from data.vocab import DraftVocabulary
from train.drafters.base import FeatureRequest, LossOutput, TargetTrainer
from train.drafters.medusa1 import Medusa1, Medusa1Config
from train.losses import Labels, Teacher, distillation_loss


@dataclass(frozen=True)
class Medusa2Config(Medusa1Config):
    """Settings of Medusa-2: those of the heads, and how the backbone is trained.

    Attributes:
        backbone: "lora" trains adapters in every linear map of the layers, "full" the layers and the final norm themselves.
        backbone_loss: "distil" keeps the backbone to its own distributions (LoRA only), "data" trains it on the tokens of the data.
        lora_rank, lora_alpha, lora_dropout: of the adapters.
        heads_only_share: share of the steps that train the heads alone.
        heads_weight: lambda_0, the weight of the heads' loss for the backbone. The paper has 0.01 with "distil" and 0.2 with "data".
        heads_rate: learning rate of the heads, as a multiple of the backbone's.
        backbone_warmup_steps: steps over which the backbone's rate rises from 0.
        max_perplexity_increase: the run fails when the backbone's held-out perplexity has risen by a larger share.
    """

    algorithm: ClassVar[str] = "medusa2"
    trains_target: ClassVar[bool] = True

    backbone: Literal["lora", "full"] = "lora"
    backbone_loss: Literal["distil", "data"] = "distil"
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    heads_only_share: float = 0.5
    heads_weight: float = 0.01
    heads_rate: float = 4.0
    backbone_warmup_steps: int = 40
    max_perplexity_increase: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone == "full" and self.backbone_loss == "distil":
            raise ValueError(
                "drafter.backbone_loss distil needs the original beside the trained backbone, which only drafter.backbone lora keeps: set "
                "drafter.backbone_loss data, or lora"
            )
        if not 0 <= self.heads_only_share < 1:
            raise ValueError(f"drafter.heads_only_share is {self.heads_only_share}, expected a share in [0, 1); for 1 take Medusa-1")
        for name, value in (("lora_rank", self.lora_rank), ("lora_alpha", self.lora_alpha), ("heads_rate", self.heads_rate)):
            if value <= 0:
                raise ValueError(f"drafter.{name} is {value}, expected a positive number")
        for name, value in (("heads_weight", self.heads_weight), ("backbone_warmup_steps", self.backbone_warmup_steps)):
            if value < 0:
                raise ValueError(f"drafter.{name} is {value}, expected at least 0")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"drafter.lora_dropout is {self.lora_dropout}, expected a share in [0, 1)")

    def perplexity_bound(self) -> float:
        return self.max_perplexity_increase


class Medusa2(Medusa1, TargetTrainer):
    """Medusa heads with a backbone of their own. Without it (read back from an export) they are Medusa-1's on the target's states."""

    config_class = Medusa2Config
    config: Medusa2Config

    def __init__(self, config: Medusa2Config, target: PretrainedConfig, heads: TargetHeads, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(config, target, heads, vocabulary)
        self._target: list[Target] = []  # a list hides it from nn.Module, which has the model itself
        self._is_joint = False
        self._heads_share = 0.0

    @classmethod
    def feature_request_of(cls, config: Medusa1Config, target: PretrainedConfig) -> FeatureRequest:
        return FeatureRequest(aux_layers=(), last=False)

    # --- the backbone ---------------------------------------------------------------------------------------------------

    def attach_target(self, target: Target) -> None:
        config = self.config
        self.backbone: Any = target.model
        if config.backbone == "lora":
            in_layers = set(target.layers.modules())  # nothing of a vision tower, nor the head
            names = [name for name, module in target.model.named_modules() if isinstance(module, nn.Linear) and module in in_layers]
            adapters = LoraConfig(
                r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, target_modules=names, task_type="CAUSAL_LM"
            )
            self.backbone = get_peft_model(target.model, adapters)
        else:
            target.model.float()  # master weights; autocast computes in bf16 where that is asked for
            for module in (target.layers, target.final_norm):
                module.requires_grad_(True)
        self._target = [target]
        self.train()

    def save_target(self, folder: Path, dtype: torch.dtype) -> None:
        """The adapters merged into the weights, with the tokenizer."""
        [target] = self._target
        model = self.backbone.merge_and_unload() if isinstance(self.backbone, PeftModel) else self.backbone
        target.config.dtype = dtype  # of a multimodal model, transformers writes the outer config's alone
        model.to(dtype).save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)

    @classmethod
    def from_export(cls, export_config: dict[str, Any], tensors: dict[str, Tensor], target: PretrainedConfig, heads: TargetHeads) -> Medusa2:
        """The heads alone, to be given the trained target's states."""
        drafter = super().from_export(export_config, tensors, target, heads)
        assert isinstance(drafter, Medusa2)
        drafter.request = FeatureRequest(aux_layers=(), last=True)
        return drafter

    def export_tensors(self) -> dict[str, Tensor]:
        """The heads alone."""
        return {name: tensor for name, tensor in super().export_tensors().items() if self.part_of(name) == "heads"}

    # --- training -------------------------------------------------------------------------------------------------------

    def part_of(self, parameter: str) -> str:
        return "backbone" if parameter.startswith("backbone.") else "heads"

    def schedule(self, step: int, num_steps: int) -> dict[str, float]:
        """Which stage the step belongs to, s(t), and the two learning rates."""
        first_joint = round(self.config.heads_only_share * num_steps)
        self._is_joint = step >= first_joint
        progress = (step - first_joint) / max(1, num_steps - first_joint)
        self._heads_share = math.sin(math.pi / 2 * progress) if self._is_joint else 0.0
        warmup = min(1.0, (step - first_joint + 1) / max(1, self.config.backbone_warmup_steps))
        return {"heads": self.config.heads_rate, "backbone": warmup if self._is_joint else 0.0}

    def forward(self, batch: DrafterBatch) -> LossOutput:
        if not self._is_joint:
            heads = self.heads_loss(batch, self._original_states(batch))
            # One token goes through the backbone for nothing: every parameter takes part in every step, by its own module (Drafter.forward).
            idle_1H = self._target[0].last_states(batch.features.input_ids_T[:1], (1,))
            return LossOutput(heads.loss_sum + 0.0 * idle_1H.sum(), heads.metrics)
        last_TH = self._states(batch)
        language_loss = self._language_loss(batch, last_TH)
        heads = self.heads_loss(batch, _ScaledGradient.apply(last_TH, self.config.heads_weight * self._heads_share))
        return LossOutput(language_loss + heads.loss_sum, {**heads.metrics, "loss_language": language_loss.detach()})

    def _states(self, batch: DrafterBatch) -> Tensor:
        """[T, H] post-norm last states of the backbone as it is now."""
        [target] = self._target
        return target.last_states(batch.features.input_ids_T, batch.document_lengths)

    @torch.no_grad()
    def _original_states(self, batch: DrafterBatch) -> Tensor:
        """[T, H] those of the original; in full training only before the backbone has changed."""
        if not isinstance(self.backbone, PeftModel):
            return self._states(batch)
        with self.backbone.disable_adapter():
            return self._states(batch)

    def _language_loss(self, batch: DrafterBatch, last_TH: Tensor) -> Tensor:
        """L_LM, summed over the rows that choose the assistant's tokens."""
        is_supervised_T = batch.answered()
        teacher: Teacher | Labels
        if self.config.backbone_loss == "distil":
            original_RH = self._original_states(batch)[is_supervised_T]
            teacher = Teacher(original_RH, self.heads.lm_head_VH, draft_ids_W=None, drops_outside=False, softcap=self.heads.softcap)
        else:
            teacher = Labels(batch.known_tokens(0)[is_supervised_T][None])
        student_1RH = last_TH[is_supervised_T][None]
        weight_1R = torch.ones(student_1RH.shape[:2], device=last_TH.device)
        kind: Literal["kl", "ce"] = "kl" if self.config.backbone_loss == "distil" else "ce"
        return distillation_loss(student_1RH, self.heads.lm_head_VH, teacher, weight_1R, kind, self.heads.softcap).loss_sum

    # --- drafting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        """While it is trained, from the backbone's own states of these tokens."""
        return self._drafts(self._states(batch), num_drafts) if self._target else super().teacher_forced_drafts(batch, num_drafts)


class _ScaledGradient(torch.autograd.Function):
    """The identity, with a factor on the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None
