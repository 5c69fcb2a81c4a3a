"""EAGLE-3 (arXiv 2503.01840): one decoder layer over mixed target states, trained as it will be used.

    g_i^0      = fc(concat of the target's low, middle and high states at i)                             section 3.1
    g_i^{s+1}  = layer(norm(embedding of x_{i+1+s}), norm(g_i^s)) at RoPE position i + s                  training-time test, section 3.2
    q(x_{i+2+s}) = lm_head(norm(g_i^{s+1})) over the draft vocabulary

Step s repeats what the engine does after s accepted drafts: it sees the embedding of a token that was drafted, the drafter's own previous output
instead of a target state, and attends to the step-0 keys of all earlier positions and to its own later steps (train/attention.py). The loss of a
step is the cross entropy against the target's distribution at row i+1+s, weighted 0.8^s. There is no feature loss.

Parameter names are those of the serving contract, section 3.

Shapes: T packed tokens, P supervised positions, K TTT steps, R teacher rows, X = A * H concatenated auxiliary states, H hidden size, W draft
vocabulary, n new positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from checkpoints.serving import BLOCK_NORMS, BlockNorm, aux_layers_of_config
from data.batch import DrafterBatch
from data.target import TargetHeads, default_aux_layers
from data.vocab import DraftVocabulary
from train.attention import ttt_attention
from train.drafters.base import DistillingHead, Drafter, DrafterConfig, FeatureRequest, Guess, LossOutput, VerifiedStates
from train.drafters.llama_layer import DraftCache, LayerShape, LlamaLayer, RMSNorm
from train.losses import LossKind, Teacher, step_weights

_LOGIT_ROWS = 1024
# The target's norm makes its head as confident as it is right. At the start the drafter is wrong, and so confident it would first have to unlearn
# that: 40 steps on SmolLM2 end at tau 1.23 with a quarter of the target's norm and at 1.19 with the whole of it.
_INITIAL_CONFIDENCE = 0.25


@dataclass(frozen=True)
class Eagle3Config(DrafterConfig):
    """Settings of an EAGLE-3 drafter.

    Attributes:
        aux_layers: HF hidden_states indices, ascending; None takes the engines' default (2, L//2, L-3).
        draft_vocab_size: W; the most frequent supervised tokens. None keeps the whole vocabulary.
        ttt_steps: K, drafts trained at every position.
        step_decay: weight of step s is step_decay^s.
        loss: "ce", "kl" or "lk" (train/losses.py).
        outside_vocabulary: what happens to positions whose target argmax cannot be drafted: "drop" them, as all peers do, or
            "renormalise" the target over the draft vocabulary, which spares the full-vocabulary logits.
        head_init: "target" starts lm_head and norm from the target's, "random" as the original does.
        intermediate_size: MLP width; None takes the target's.
        norms: norms beyond the paper's, by their fields of config.json, as checkpoints of speculators have them (BLOCK_NORMS in
            checkpoints/serving.py); vLLM reads them all, SGLang not norm_before_residual.
    """

    algorithm: ClassVar[str] = "eagle3"

    aux_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = 32000
    ttt_steps: int = 7
    step_decay: float = 0.8
    loss: LossKind = "ce"
    outside_vocabulary: Literal["drop", "renormalise"] = "drop"
    head_init: Literal["target", "random"] = "target"
    intermediate_size: int | None = None
    norms: tuple[BlockNorm, ...] = ()

    def __post_init__(self) -> None:
        if self.norms != tuple(name for name in BLOCK_NORMS if name in self.norms):
            raise ValueError(f"drafter.norms is {self.norms}, expected some of {' '.join(BLOCK_NORMS)}, in this order")
        if {"norm_before_fc", "fc_norm"} <= set(self.norms):
            raise ValueError("drafter.norms has norm_before_fc and fc_norm, which are two places for one norm: choose one")
        if self.ttt_steps < 1:
            raise ValueError(f"drafter.ttt_steps is {self.ttt_steps}, expected at least 1")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"drafter.step_decay is {self.step_decay}, expected a number in (0, 1]")
        if self.aux_layers is not None and (not self.aux_layers or list(self.aux_layers) != sorted(set(self.aux_layers))):
            raise ValueError(f"drafter.aux_layers is {self.aux_layers}, expected ascending layer indices without repetition")
        if self.draft_vocab_size is None and self.outside_vocabulary != "drop":
            raise ValueError("drafter.outside_vocabulary has no effect without a draft vocabulary: set drafter.draft_vocab_size")

    def vocabulary_size(self, target_vocab_size: int) -> int | None:
        if self.draft_vocab_size is None or self.draft_vocab_size == target_vocab_size:
            return None
        if not 1 <= self.draft_vocab_size < target_vocab_size:
            raise ValueError(
                f"drafter.draft_vocab_size is {self.draft_vocab_size}, but the target has {target_vocab_size} tokens: "
                "choose fewer, or None for all of them"
            )
        return self.draft_vocab_size


class Eagle3Layer(LlamaLayer):
    """The decoder layer whose attention reads the token embedding beside the hidden state, each through its own norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, attention_width=2 * shape.hidden_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def attention_input(self, embed_TH: Tensor, hidden_TH: Tensor) -> Tensor:
        """[T, 2H]"""
        return torch.cat([self.input_layernorm(embed_TH), self.hidden_norm(hidden_TH)], dim=-1)


class Eagle3(Drafter):
    """EAGLE-3 draft head."""

    config_class = Eagle3Config

    def __init__(self, config: Eagle3Config, target: PretrainedConfig, heads: TargetHeads, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(config, target, heads, vocabulary)
        self.shape = LayerShape.from_target(target, config.intermediate_size)
        hidden_size, vocab_size = self.shape.hidden_size, heads.lm_head_VH.shape[0]
        ids_W = torch.arange(vocab_size) if vocabulary is None else vocabulary.ids_W
        num_aux = len(self.request.aux_layers)
        self.fc = nn.Linear(num_aux * hidden_size, hidden_size, bias=False)
        eps = self.shape.rms_norm_eps
        self.input_norm = RMSNorm(num_aux * hidden_size, eps) if "norm_before_fc" in config.norms else None
        self.fc_norm = nn.ModuleList([RMSNorm(hidden_size, eps) for _ in range(num_aux)]) if "fc_norm" in config.norms else None
        self.midlayer = Eagle3Layer(self.shape)
        self.norm = RMSNorm(hidden_size, self.shape.rms_norm_eps)
        self.lm_head = DistillingHead(hidden_size, len(ids_W), bias=False)
        self.vocabulary = vocabulary
        self._ids = [ids_W]
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Starts as "the target's head on its highest auxiliary state": far ahead of a random start on small data."""
        hidden_size = self.shape.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden_size:] = torch.eye(hidden_size)
        if self.config.head_init == "target":
            self.norm.weight.copy_(_INITIAL_CONFIDENCE * self.heads.norm_H)
            self.lm_head.weight.copy_(self.heads.lm_head_VH[self._ids[0].to(self.heads.lm_head_VH.device)])

    @property
    def draft_ids_W(self) -> Tensor:
        """int64 [W] target ids, on the drafter's device."""
        self._ids[0] = self._ids[0].to(self.fc.weight.device)
        return self._ids[0]

    @classmethod
    def check_target(cls, target: PretrainedConfig) -> None:
        LayerShape.from_target(target)

    @classmethod
    def feature_request_of(cls, config: Eagle3Config, target: PretrainedConfig) -> FeatureRequest:
        return FeatureRequest(aux_layers=config.aux_layers or default_aux_layers(target.num_hidden_layers), last=True)

    def num_supervised(self, batch: DrafterBatch) -> int:
        return int(batch.supervised(0).sum())

    # --- checkpoint -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_export(cls, export_config: dict[str, Any], tensors: dict[str, Tensor], target: PretrainedConfig, heads: TargetHeads) -> Eagle3:
        d2t_W = tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        heads = heads.with_embedding(tensors.pop("embed_tokens.weight", None))
        vocabulary = None
        if d2t_W is not None:
            ids_W = torch.arange(len(d2t_W)) + d2t_W
            vocabulary = DraftVocabulary(ids=tuple(ids_W.tolist()), target_vocab_size=export_config["vocab_size"], coverage=float("nan"))
        aux_layers = aux_layers_of_config(export_config, target.num_hidden_layers)
        norms = tuple(name for name in BLOCK_NORMS if export_config.get(name))
        config = Eagle3Config(aux_layers=aux_layers, draft_vocab_size=export_config["draft_vocab_size"], norms=norms)
        # The layer's shape and RoPE come from the checkpoint, as an engine takes them.
        fields = {name: value for name, value in export_config.items() if name != "layer_types"}  # of one layer, which sees everything
        layer_config = LlamaConfig.from_dict({**fields, "num_hidden_layers": target.num_hidden_layers})
        drafter = cls(config, layer_config, heads, vocabulary)
        drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return drafter

    def export_tensors(self) -> dict[str, Tensor]:
        tensors = dict(self.state_dict())
        if self.vocabulary is not None:
            tensors |= {"d2t": self.vocabulary.d2t_W, "t2d": self.vocabulary.t2d_V}
        return tensors

    def export_dimensions(self) -> dict[str, Any]:
        return {**self.shape.export_dimensions(), "norms": self.config.norms}

    # --- training -------------------------------------------------------------------------------------------------------

    def forward(self, batch: DrafterBatch) -> LossOutput:
        """Sum over steps and supervised positions of decay^s * loss, from one training-time-test rollout of those positions."""
        num_steps = self.config.ttt_steps
        supervised_KT = torch.stack([batch.supervised(step) for step in range(num_steps)])
        rows_R, weight_KR = self._teacher_rows(batch, supervised_KT)
        rows_P = supervised_KT.any(0).nonzero()[:, 0]
        place_T = torch.zeros_like(batch.position_T).index_copy_(0, rows_P, torch.arange(len(rows_P), device=rows_P.device))
        outputs = self._rollout(batch, num_steps, rows_P)
        student_KRH = torch.stack([self._normed(hidden_PH[place_T[(rows_R - 1 - step).clamp(min=0)]]) for step, hidden_PH in enumerate(outputs)])
        last_TH = batch.features.last_TH
        assert last_TH is not None, "EAGLE-3 asks for the last hidden state"
        teacher = Teacher(
            last_RE=last_TH[rows_R],
            lm_head_VE=self.heads.lm_head_VH,
            draft_ids_W=None if self.vocabulary is None else self.draft_ids_W,
            drops_outside=self.vocabulary is not None and self.config.outside_vocabulary == "drop",
            softcap=self.heads.softcap,
        )
        sums = self.lm_head(student_KRH, teacher, weight_KR, self.config.loss)
        metrics = {f"hits_{step}": sums.hits_K[step] for step in range(num_steps)}
        metrics |= {f"rows_{step}": sums.rows_K[step] for step in range(num_steps)}
        metrics["outside_vocabulary"] = sums.num_outside_K[0]
        return LossOutput(loss_sum=sums.loss_sum, metrics=metrics)

    def _teacher_rows(self, batch: DrafterBatch, supervised_KT: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the target that judge any draft, and decay^s where step s has a supervised draft judged there.

        Draft s of pair i is judged at row j = i+1+s, so row j's draft s comes from pair j-1-s.
        """
        weight_KT = torch.zeros(supervised_KT.shape, device=supervised_KT.device)
        for step, weight in enumerate(step_weights(len(supervised_KT), self.config.step_decay)):
            weight_KT[step, batch.teacher_rows(step)[supervised_KT[step]]] = weight
        rows_R = weight_KT.any(0).nonzero()[:, 0]
        return rows_R, weight_KT[:, rows_R]

    def _rollout(self, batch: DrafterBatch, num_steps: int, rows_P: Tensor) -> list[Tensor]:
        """The drafter's outputs at the given positions, one [P, H] a step: what the next step goes on from.

        Step 0 projects keys and values of all tokens, which later positions attend to; all else is computed at these positions only.
        """
        aux_TX = batch.features.aux_TX
        assert aux_TX is not None, "EAGLE-3 asks for auxiliary states"
        hidden_TH = self._joined(aux_TX)
        query_PND, key_TMD, value_TMD = self.recomputed(self._project, hidden_TH, batch.known_tokens(0), batch.position_T, rows_P)
        attended_PND = ttt_attention(query_PND, key_TMD, value_TMD, [], batch.document_lengths, rows_P)
        outputs = [self.recomputed(self._finish, attended_PND, hidden_TH[rows_P])]
        diagonals: list[tuple[Tensor, Tensor]] = []
        for step in range(1, num_steps):
            ids_P, position_P = batch.known_tokens(step)[rows_P], batch.position_T[rows_P] + step
            query_PND, step_key, step_value = self.recomputed(self._project, outputs[-1], ids_P, position_P)
            diagonals.append((step_key, step_value))
            attended_PND = ttt_attention(query_PND, key_TMD, value_TMD, diagonals, batch.document_lengths, rows_P)
            outputs.append(self.recomputed(self._finish, attended_PND, outputs[-1]))
        return outputs

    def _joined(self, aux_TX: Tensor) -> Tensor:
        """[T, H]: the target's states in one."""
        aux_TX = aux_TX.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            aux_TX = self.input_norm(aux_TX)
        if self.fc_norm is not None:
            chunks = aux_TX.chunk(len(self.fc_norm), dim=-1)
            aux_TX = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux_TX)

    def _finish(self, attended_TND: Tensor, hidden_TH: Tensor) -> Tensor:
        """[T, H]: what is drafted from and gone on from, after the attention that `hidden_TH` asked for."""
        residual_TH = self.midlayer.hidden_norm(hidden_TH) if "norm_before_residual" in self.config.norms else hidden_TH
        output_TH = self.midlayer.finish(attended_TND, residual_TH)
        return self.norm(output_TH) if "norm_output" in self.config.norms else output_TH

    def _normed(self, output_TH: Tensor) -> Tensor:
        """What `lm_head` reads."""
        return output_TH if "norm_output" in self.config.norms else self.norm(output_TH)

    def _project(self, hidden_TH: Tensor, token_ids_T: Tensor, position_T: Tensor, rows_P: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (at the given rows), keys and values of the layer."""
        return self.midlayer.project(self.midlayer.attention_input(self._embed(token_ids_T), hidden_TH), position_T, rows_P)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        return self.heads.embed_VH[token_ids_T].to(self.fc.weight.dtype)

    # --- drafting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        every_T = torch.arange(batch.num_tokens, device=batch.position_T.device)
        return torch.stack([self._greedy(hidden_TH) for hidden_TH in self._rollout(batch, num_drafts, every_T)])

    def new_cache(self, num_sequences: int, capacity: int) -> DraftCache:
        return DraftCache(self.shape, num_sequences, capacity, like=self.fc.weight)

    @torch.no_grad()
    def read(self, cache: DraftCache, verified: VerifiedStates, num_drafts: int) -> Guess:
        assert verified.aux_BnX is not None, "EAGLE-3 asks for auxiliary states"
        hidden_BnH = self._joined(verified.aux_BnX)
        position_Bn = cache.verified_positions(hidden_BnH.shape[1])
        query_BnND, key_BnMD, value_BnMD = self._project(hidden_BnH, verified.next_ids_Bn, position_Bn)
        # One layer: the earlier new positions only add keys, and drafting needs the output of the newest.
        attended_B1ND = cache.read(query_BnND, key_BnMD, value_BnMD, verified.num_new_B)
        return self._guess(self._finish(attended_B1ND, verified.newest(hidden_BnH)))

    @torch.no_grad()
    def extend(self, cache: DraftCache, hidden_BnH: Tensor, token_ids_Bn: Tensor, sees_Bnm: Tensor) -> Guess:
        query_BnND, key_BnMD, value_BnMD = self._project(hidden_BnH, token_ids_Bn, cache.node_positions(hidden_BnH.shape[1]))
        return self._guess(self._finish(cache.extend(query_BnND, key_BnMD, value_BnMD, sees_Bnm), hidden_BnH))

    def _guess(self, hidden_BnH: Tensor) -> Guess:
        return Guess(self.lm_head(self._normed(hidden_BnH)), hidden_BnH)

    def _greedy(self, hidden_TH: Tensor) -> Tensor:
        """int64 [T] most likely target ids, logits computed a block of rows at a time."""
        best = [self._guess(block).logits_BnW.argmax(-1) for block in hidden_TH.split(_LOGIT_ROWS)]
        return self.draft_ids_W[torch.cat(best)]
