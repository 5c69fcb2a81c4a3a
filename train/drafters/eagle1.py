"""EAGLE-1 (arXiv 2401.15077): autoregression at the feature level, with the next token known.

    g_i       = layer(fc([embedding of x_{i+1}, h_i])) at RoPE position i            section 3.1: features and tokens shifted by one
    loss      = SmoothL1(g_i, h_{i+1}) + 0.1 CE(p_{i+1}, softmax(head g_i))          section 3.2: regression and classification
    q(x_{i+2}) = softmax(head g_i)

h is the target's last hidden state after its final norm; embedding and head are the target's, frozen. The layer has no input norm, and nothing
follows it: what it predicts is a feature. Drafting goes on from g_i in the place of the h_{i+1} that is not known yet:

    draft s of pair i     reads [embedding of x_{i+1+s}, previous output at i] at RoPE position i + s; it attends to the keys of pairs 0 .. i, which
                          come from target states, and to its own keys of drafts 1 .. s.

Training never sees its own outputs: it learns draft 0 only. Uniform noise on h stands in for their error (section 3.2). EAGLE-2 is the same
checkpoint under another tree at inference.

Parameter names are those of the serving contract, section 4.

Shapes: T packed tokens, R supervised rows, H hidden size, V vocabulary, n new positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from data.batch import DrafterBatch
from data.target import TargetHeads
from data.vocab import DraftVocabulary
from train.attention import ttt_attention
from train.drafters.base import Drafter, DrafterConfig, FeatureRequest, Guess, LossOutput, VerifiedStates
from train.drafters.llama_layer import DraftCache, LayerShape, LlamaLayer
from train.losses import Teacher, distillation_loss

_LOGIT_ROWS = 1024


@dataclass(frozen=True)
class Eagle1Config(DrafterConfig):
    """Settings of an EAGLE-1 drafter.

    Attributes:
        token_weight: weight of the cross entropy beside the regression's 1.
        noise: half-width of the uniform noise on the input features; 0 is none.
        intermediate_size: MLP width; None takes the target's.
    """

    algorithm: ClassVar[str] = "eagle1"

    token_weight: float = 0.1
    noise: float = 0.1
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        if self.token_weight < 0:
            raise ValueError(f"drafter.token_weight is {self.token_weight}, expected at least 0")
        if self.noise < 0:
            raise ValueError(f"drafter.noise is {self.noise}, expected at least 0")


class Eagle1(Drafter):
    """EAGLE-1 draft head."""

    config_class = Eagle1Config

    def __init__(self, config: Eagle1Config, target: PretrainedConfig, heads: TargetHeads, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(config, target, heads, vocabulary)
        assert vocabulary is None, "EAGLE-1 drafts through the target's own head"
        self.shape = LayerShape.from_target(target, config.intermediate_size)
        hidden_size = self.shape.hidden_size
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = nn.ModuleList([LlamaLayer(self.shape, attention_width=hidden_size)])
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Starts as "the next feature is this one": `fc` passes h through, and a new layer is the identity.

        The token is mixed in at random, as loud as h: embeddings can be far smaller (a fifteenth in SmolLM2), and with nothing to normalise them
        the layer would not hear which token came. 30 steps there end at tau 1.172 so, and at 1.146 from zeros.
        """
        hidden_size = self.shape.hidden_size
        loudness = self.heads.norm_H.float().square().mean().sqrt() / self.heads.embed_VH.float().square().mean().sqrt()
        self.fc.weight[:, :hidden_size].normal_(std=1 / math.sqrt(hidden_size)).mul_(loudness)
        self.fc.weight[:, hidden_size:] = torch.eye(hidden_size)

    @property
    def layer(self) -> LlamaLayer:
        layer = self.layers[0]
        assert isinstance(layer, LlamaLayer)
        return layer

    @classmethod
    def check_target(cls, target: PretrainedConfig) -> None:
        LayerShape.from_target(target)

    @classmethod
    def feature_request_of(cls, config: Eagle1Config, target: PretrainedConfig) -> FeatureRequest:
        return FeatureRequest(aux_layers=(), last=True)

    def num_supervised(self, batch: DrafterBatch) -> int:
        return int(batch.supervised(0).sum())

    # --- checkpoint -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_export(cls, export_config: dict[str, Any], tensors: dict[str, Tensor], target: PretrainedConfig, heads: TargetHeads) -> Eagle1:
        # vLLM has no bias, SGLang has one: both compute the same only while it is zero.
        if bool((tensors["fc.bias"] != 0).any()):
            raise ValueError("fc.bias is not zero: vLLM drops it silently, so the engines would disagree; export the drafter again")
        heads = heads.with_embedding(tensors.pop("embed_tokens.weight", None))
        # The layer's shape and RoPE come from the checkpoint, as an engine takes them.
        layer_config = LlamaConfig.from_dict({**export_config, "num_hidden_layers": target.num_hidden_layers})
        drafter = cls(Eagle1Config(), layer_config, heads, None)
        drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items() if name != "fc.bias"})
        return drafter

    def export_tensors(self) -> dict[str, Tensor]:
        return {**self.state_dict(), "fc.bias": torch.zeros(self.shape.hidden_size)}

    def export_dimensions(self) -> dict[str, Any]:
        return self.shape.export_dimensions()

    # --- training -------------------------------------------------------------------------------------------------------

    def forward(self, batch: DrafterBatch) -> LossOutput:
        """Sum over supervised positions of SmoothL1 (a mean over H) + token_weight * cross entropy with the target."""
        last_TH = _last(batch)
        is_supervised_T = batch.supervised(0)
        [student_RH] = self._rollout(batch, last_TH + self._noise_TH(batch), 1, is_supervised_T.nonzero()[:, 0])
        target_RH = last_TH[batch.teacher_rows(0)[is_supervised_T]]
        regression = nn.functional.smooth_l1_loss(student_RH.float(), target_RH.float(), reduction="none").mean(-1).sum()
        teacher = Teacher(last_RE=target_RH, lm_head_VE=self.heads.lm_head_VH, draft_ids_W=None, drops_outside=False, softcap=self.heads.softcap)
        weight_1R = torch.ones(1, len(target_RH), device=target_RH.device)
        sums = distillation_loss(student_RH[None], self.heads.lm_head_VH, teacher, weight_1R, "ce", self.heads.softcap)
        return LossOutput(
            loss_sum=regression + self.config.token_weight * sums.loss_sum,
            metrics={
                "hits_0": sums.hits_K[0],
                "rows_0": sums.rows_K[0],
                "loss_regression": regression.detach(),
                "loss_token": sums.loss_sum.detach(),
            },
        )

    def _noise_TH(self, batch: DrafterBatch) -> Tensor:
        """[T, H] fp32 from U(-noise, noise), a function of the pack's tokens.

        So it is the same whichever rank has the pack, and whether or not the run was resumed: ranks never share a random stream.
        """
        last_TH = _last(batch)
        generator = torch.Generator(last_TH.device)
        ids_T = batch.features.input_ids_T
        generator.manual_seed(int((ids_T * torch.arange(1, batch.num_tokens + 1, device=ids_T.device)).sum()))
        uniform_TH = torch.rand(last_TH.shape, generator=generator, device=last_TH.device)
        return (2 * uniform_TH - 1) * self.config.noise

    def _rollout(self, batch: DrafterBatch, last_TH: Tensor, num_steps: int, rows_R: Tensor) -> list[Tensor]:
        """The predicted features at the given positions, one [R, H] a draft; draft 0 reads target states, later ones the output before them."""
        input_TH = self.recomputed(self._input, batch.known_tokens(0), last_TH)
        query_RND, key_TMD, value_TMD = self.recomputed(self.layer.project, input_TH, batch.position_T, rows_R)
        attended_RND = ttt_attention(query_RND, key_TMD, value_TMD, [], batch.document_lengths, rows_R)
        outputs = [self.recomputed(self.layer.finish, attended_RND, input_TH[rows_R])]
        diagonals: list[tuple[Tensor, Tensor]] = []
        for step in range(1, num_steps):
            input_RH = self._input(batch.known_tokens(step)[rows_R], outputs[-1])
            query_RND, step_key, step_value = self.layer.project(input_RH, batch.position_T[rows_R] + step)
            diagonals.append((step_key, step_value))
            attended_RND = ttt_attention(query_RND, key_TMD, value_TMD, diagonals, batch.document_lengths, rows_R)
            outputs.append(self.layer.finish(attended_RND, input_RH))
        return outputs

    def _input(self, token_ids_T: Tensor, hidden_TH: Tensor) -> Tensor:
        """[T, H]: fc([embedding, hidden]), the residual stream of the layer."""
        embed_TH = self.heads.embed_VH[token_ids_T]
        return self.fc(torch.cat([embed_TH.to(self.fc.weight.dtype), hidden_TH.to(self.fc.weight.dtype)], dim=-1))

    # --- drafting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def teacher_forced_drafts(self, batch: DrafterBatch, num_drafts: int) -> Tensor:
        every_T = torch.arange(batch.num_tokens, device=batch.position_T.device)
        return torch.stack([self._greedy(hidden_TH) for hidden_TH in self._rollout(batch, _last(batch), num_drafts, every_T)])

    def new_cache(self, num_sequences: int, capacity: int) -> DraftCache:
        return DraftCache(self.shape, num_sequences, capacity, like=self.fc.weight)

    @torch.no_grad()
    def read(self, cache: DraftCache, verified: VerifiedStates, num_drafts: int) -> Guess:
        assert verified.last_BnH is not None, "EAGLE-1 asks for the last hidden state"
        input_BnH = self._input(verified.next_ids_Bn, verified.last_BnH)
        query_BnND, key_BnMD, value_BnMD = self.layer.project(input_BnH, cache.verified_positions(input_BnH.shape[1]))
        # One layer: the earlier new positions only add keys, and drafting needs the output of the newest.
        attended_B1ND = cache.read(query_BnND, key_BnMD, value_BnMD, verified.num_new_B)
        return self._guess(self.layer.finish(attended_B1ND, verified.newest(input_BnH)))

    @torch.no_grad()
    def extend(self, cache: DraftCache, hidden_BnH: Tensor, token_ids_Bn: Tensor, sees_Bnm: Tensor) -> Guess:
        input_BnH = self._input(token_ids_Bn, hidden_BnH)
        query_BnND, key_BnMD, value_BnMD = self.layer.project(input_BnH, cache.node_positions(input_BnH.shape[1]))
        return self._guess(self.layer.finish(cache.extend(query_BnND, key_BnMD, value_BnMD, sees_Bnm), input_BnH))

    def _guess(self, hidden_BnH: Tensor) -> Guess:
        """The target's own head on the predicted feature."""
        head_VH = self.heads.lm_head_VH
        return Guess(hidden_BnH.to(head_VH.dtype) @ head_VH.T, hidden_BnH)

    def _greedy(self, hidden_TH: Tensor) -> Tensor:
        """int64 [T] most likely ids, logits computed a block of rows at a time."""
        return torch.cat([self._guess(block).logits_BnW.argmax(-1) for block in hidden_TH.split(_LOGIT_ROWS)])


def _last(batch: DrafterBatch) -> Tensor:
    """[T, H] post-norm last hidden states of the target."""
    assert batch.features.last_TH is not None, "EAGLE-1 asks for the last hidden state"
    return batch.features.last_TH
