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

from checkpoints.draft_config import draft_rope_parameters


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
        fields = target.to_dict() | {"rope_parameters": draft_rope_parameters(target)}
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


class RMSNorm(LlamaRMSNorm):
    """The same values, and a third of the memory: the backward pass forms the normalised states again from what came in."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        hidden_fp32 = hidden_TH.float()
        scale_T1 = torch.rsqrt(hidden_fp32.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden_TH, weight_H, scale_T1)
        return weight_H * (hidden_fp32 * scale_T1).to(hidden_TH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden_TH, weight_H, scale_T1 = ctx.saved_tensors
        normed_TH = hidden_TH.float() * scale_T1
        grad_fp32 = grad_TH.float()
        grad_weight_H = (grad_fp32 * normed_TH).flatten(0, -2).sum(0).to(weight_H.dtype)
        grad_fp32 = grad_fp32 * weight_H.float()
        along_T1 = (grad_fp32 * normed_TH).mean(-1, keepdim=True)
        return grad_fp32.sub_(normed_TH.mul_(along_T1)).mul_(scale_T1).to(hidden_TH.dtype), grad_weight_H, None


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
        """Applies the rotary embedding at the given positions (any leading dimensions); keeps the dtype."""
        self._rotary.to(heads_TND.device)
        cos_1TD, sin_1TD = self._rotary(torch.empty((), dtype=torch.float32, device=heads_TND.device), position_T.reshape(1, -1))
        cos_T1D, sin_T1D = (table_1TD.view(*position_T.shape, 1, table_1TD.shape[-1]) for table_1TD in (cos_1TD, sin_1TD))
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
        hidden_TH = cast_once(hidden_TH)
        return self.down_proj(_SwiGLU.apply(self.gate_proj(hidden_TH), self.up_proj(hidden_TH)))


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up; the backward pass forms silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        return nn.functional.silu(gate_TI).mul_(up_TI)

    @staticmethod
    def backward(ctx: Any, grad_TI: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate_TI, up_TI = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad_TI * up_TI, gate_TI), nn.functional.silu(gate_TI).mul_(grad_TI)


def cast_once(input_TH: Tensor) -> Tensor:
    """The input in the type that autocast gives it anyway, so that the linear layers that share it share one copy."""
    kind = input_TH.device.type
    return input_TH.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else input_TH


class LlamaLayer(nn.Module):
    """A decoder layer around an attention that the caller performs.

    At initialisation `o_proj` and `down_proj` are zero, so that the layer starts as the identity on its residual.
    """

    def __init__(self, shape: LayerShape, attention_width: int) -> None:
        super().__init__()
        self.shape = shape
        self.self_attn = SelfAttention(shape, attention_width)
        self.mlp = MLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = RotaryTable(shape)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def project(self, input_TC: Tensor, position_T: Tensor, rows_R: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, D], or [R, N, D] at the given rows only, keys and values [T, M, D]; RoPE applied to queries and keys."""
        head_dim = self.shape.head_dim
        input_TC = cast_once(input_TC)
        input_RC, position_R = (input_TC, position_T) if rows_R is None else (input_TC[rows_R], position_T[rows_R])
        query_RND = self.self_attn.q_proj(input_RC).unflatten(-1, (-1, head_dim))
        key_TMD = self.self_attn.k_proj(input_TC).unflatten(-1, (-1, head_dim))
        value_TMD = self.self_attn.v_proj(input_TC).unflatten(-1, (-1, head_dim))
        return self.rotary.rotate(query_RND, position_R), self.rotary.rotate(key_TMD, position_T), value_TMD

    def finish(self, attended_TND: Tensor, residual_TH: Tensor) -> Tensor:
        """residual + o_proj(attended), then + MLP of its norm; the residual stays in its own dtype."""
        hidden_TH = residual_TH + self.self_attn.o_proj(attended_TND.flatten(-2))
        return hidden_TH + self.mlp(self.post_attention_layernorm(hidden_TH))


class DraftCache:
    """Keys and values of one layer for the verified positions of each sequence, and after them for the drafted nodes.

    Nodes are forgotten by writing over them, so drafting is never rolled back.

        column      0 .. length - 1     length .. length + m - 1
                    verified            nodes, in the order they were drafted; a node sees the verified ones and its ancestors
    """

    def __init__(self, shape: LayerShape, num_sequences: int, capacity: int, like: Tensor) -> None:
        """`like` has the dtype and device of the layer."""
        size = (num_sequences, shape.num_kv_heads, capacity, shape.head_dim)
        self._key_BMCD, self._value_BMCD = like.new_zeros(size), like.new_zeros(size)
        self.length_B = torch.zeros(num_sequences, dtype=torch.int64, device=like.device)
        self._num_nodes = 0
        self._depth = 0

    def keep(self, rows: Tensor) -> None:
        """Drops all sequences but these."""
        self._key_BMCD, self._value_BMCD, self.length_B = self._key_BMCD[rows], self._value_BMCD[rows], self.length_B[rows]

    @property
    def num_bytes(self) -> int:
        """Of one position of one sequence, keys and values."""
        return 2 * self._key_BMCD[0, :, 0].numel() * self._key_BMCD.element_size()

    def verified_positions(self, num_new: int) -> Tensor:
        """int64 [B, n]: where new verified positions go, and their RoPE positions."""
        return self.length_B[:, None] + torch.arange(num_new, device=self.length_B.device)

    def node_positions(self, num_nodes: int) -> Tensor:
        """int64 [B, n]: RoPE positions of the next level of nodes. The newest verified pair's is length - 1; each level is one further."""
        return (self.length_B + self._depth)[:, None].expand(-1, num_nodes)

    def read(self, query_BnND: Tensor, key_BnMD: Tensor, value_BnMD: Tensor, num_new_B: Tensor) -> Tensor:
        """[B, 1, N, D]: adds verified positions and attends from the newest of each sequence over all of them."""
        num_heads, head_dim = query_BnND.shape[2:]
        self._write(self.verified_positions(key_BnMD.shape[1]), key_BnMD, value_BnMD)
        self.length_B = self.length_B + num_new_B
        self._num_nodes = self._depth = 0
        newest_B1ND = query_BnND.gather(1, (num_new_B - 1)[:, None, None, None].expand(-1, 1, num_heads, head_dim))
        num_columns = int(self.length_B.max())
        column_C = torch.arange(num_columns, device=self.length_B.device)
        return self._attend(newest_B1ND, (column_C < self.length_B[:, None])[:, None])

    def extend(self, query_BnND: Tensor, key_BnMD: Tensor, value_BnMD: Tensor, sees_Bnm: Tensor) -> Tensor:
        """[B, n, N, D]: adds a level of nodes and attends from each over the verified positions and the nodes that it sees."""
        num_new, num_nodes = sees_Bnm.shape[1:]
        node_Bm = self.verified_positions(num_nodes)
        self._write(node_Bm[:, self._num_nodes :], key_BnMD, value_BnMD)
        self._num_nodes, self._depth = num_nodes, self._depth + 1
        num_columns = int(self.length_B.max()) + num_nodes
        column_C = torch.arange(num_columns, device=self.length_B.device)
        visible_BnC = (column_C < self.length_B[:, None])[:, None].repeat(1, num_new, 1)
        visible_BnC.scatter_(2, node_Bm[:, None].expand(-1, num_new, -1), sees_Bnm)
        return self._attend(query_BnND, visible_BnC)

    def _write(self, column_Bn: Tensor, key_BnMD: Tensor, value_BnMD: Tensor) -> None:
        row_B1 = torch.arange(len(column_Bn), device=column_Bn.device)[:, None]
        self._key_BMCD[row_B1, :, column_Bn] = key_BnMD
        self._value_BMCD[row_B1, :, column_Bn] = value_BnMD

    def _attend(self, query_BnND: Tensor, visible_BnC: Tensor) -> Tensor:
        num_columns = visible_BnC.shape[-1]
        out_BNnD = nn.functional.scaled_dot_product_attention(
            query_BnND.transpose(1, 2),
            self._key_BMCD[:, :, :num_columns],
            self._value_BMCD[:, :, :num_columns],
            attn_mask=visible_BnC[:, None],
            enable_gqa=True,
        )
        return out_BNnD.transpose(1, 2)
