"""The Llama decoder layer that EAGLE drafters share: projections, rotary embedding and MLP, with attention left to the caller.

The attention pattern is what differs between methods (TTT in training, a KV cache in decoding), so the layer is split around it:
`project` gives queries, keys and values, the caller attends, `finish` applies the output projection, the residuals and the MLP. Shapes and RoPE
come from the target, because engines read RoPE from the draft config and a drafter trained with another theta loses acceptance silently.

Shapes: T tokens, H hidden size, C attention input width, N query heads, M key/value heads, D head dimension, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


@dataclass(frozen=True)
class LayerShape:
    """Sizes and rotary settings of a drafter layer; by default those of the target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    @classmethod
    def from_target(cls, target: PretrainedConfig, intermediate_size: int | None = None) -> LayerShape:
        """The target's layer shape, read through the Llama config so that absent fields take Llama's rules.

        Args:
            target: the target's (text) config.
            intermediate_size: MLP width of the drafter; None takes the target's.
        """
        fields = target.to_dict()
        llama = LlamaConfig(**{name: fields[name] for name in _TARGET_FIELDS if fields.get(name) is not None})
        return cls(
            hidden_size=llama.hidden_size,
            intermediate_size=intermediate_size or llama.intermediate_size,
            num_heads=llama.num_attention_heads,
            num_kv_heads=llama.num_key_value_heads or llama.num_attention_heads,
            head_dim=llama.head_dim or llama.hidden_size // llama.num_attention_heads,
            rms_norm_eps=llama.rms_norm_eps,
            max_position_embeddings=llama.max_position_embeddings,
            rope_parameters=dict(llama.rope_parameters or {}),
        )

    def export_dimensions(self) -> dict[str, Any]:
        """The sizes in config.json's terms; the activation is SiLU whatever the target's is."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
        }


_TARGET_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)


class RotaryTable:
    """cos and sin by position in fp32, outside the module tree: an engine that casts buffers to bf16 must not touch the frequencies."""

    def __init__(self, shape: LayerShape) -> None:
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters=shape.rope_parameters,
        )
        self._rotary = LlamaRotaryEmbedding(config)

    def rotate(self, heads_TND: Tensor, position_T: Tensor) -> Tensor:
        """Applies the rotary embedding at the given positions; keeps the dtype."""
        self._rotary.to(heads_TND.device)
        cos_1TD, sin_1TD = self._rotary(torch.empty((), dtype=torch.float32, device=heads_TND.device), position_T[None])
        cos_T1D, sin_T1D = cos_1TD[0, :, None], sin_1TD[0, :, None]
        first, second = heads_TND.float().chunk(2, dim=-1)
        rotated_TND = torch.cat([-second, first], dim=-1)
        return (heads_TND * cos_T1D + rotated_TND * sin_T1D).to(heads_TND.dtype)


class SelfAttention(nn.Module):
    """Bias-free projections with the parameter names of the serving contract."""

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(input_width, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden_TH)) * self.up_proj(hidden_TH))


class LlamaLayer(nn.Module):
    """A decoder layer around an attention that the caller performs.

    At initialisation `o_proj` and `down_proj` are zero, so that the layer starts as the identity on its residual.
    """

    def __init__(self, shape: LayerShape, attention_width: int) -> None:
        super().__init__()
        self.shape = shape
        self.self_attn = SelfAttention(shape, attention_width)
        self.mlp = MLP(shape)
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = RotaryTable(shape)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def project(self, input_TC: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, D], keys and values [T, M, D]; RoPE applied to queries and keys."""
        head_dim = self.shape.head_dim
        query_TND = self.self_attn.q_proj(input_TC).unflatten(-1, (-1, head_dim))
        key_TMD = self.self_attn.k_proj(input_TC).unflatten(-1, (-1, head_dim))
        value_TMD = self.self_attn.v_proj(input_TC).unflatten(-1, (-1, head_dim))
        return self.rotary.rotate(query_TND, position_T), self.rotary.rotate(key_TMD, position_T), value_TMD

    def finish(self, attended_TND: Tensor, residual_TH: Tensor) -> Tensor:
        """residual + o_proj(attended), then + MLP of its norm; the residual stays in its own dtype."""
        hidden_TH = residual_TH + self.self_attn.o_proj(attended_TND.flatten(1))
        return hidden_TH + self.mlp(self.post_attention_layernorm(hidden_TH))


class KVCache:
    """Keys and values of the verified positions of one sequence, and how many there are."""

    def __init__(self) -> None:
        self.key_TMD: Tensor | None = None
        self.value_TMD: Tensor | None = None

    @property
    def num_positions(self) -> int:
        return 0 if self.key_TMD is None else self.key_TMD.shape[0]

    def extended(self, key_nMD: Tensor, value_nMD: Tensor) -> KVCache:
        """A cache with n more positions; this one is unchanged, so drafts never need rolling back."""
        longer = KVCache()
        longer.key_TMD = key_nMD if self.key_TMD is None else torch.cat([self.key_TMD, key_nMD])
        longer.value_TMD = value_nMD if self.value_TMD is None else torch.cat([self.value_TMD, value_nMD])
        return longer

    def attend(self, query_ND: Tensor) -> Tensor:
        """[N, D]: one query over every cached position, by a plain softmax."""
        assert self.key_TMD is not None and self.value_TMD is not None
        query_MGD = query_ND.unflatten(0, (self.key_TMD.shape[1], -1))
        scores_MGT = torch.einsum("mgd,tmd->mgt", query_MGD, self.key_TMD) * query_ND.shape[-1] ** -0.5
        return torch.einsum("mgt,tmd->mgd", scores_MGT.float().softmax(-1).to(query_ND.dtype), self.value_TMD).flatten(0, 1)
