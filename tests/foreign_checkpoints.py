"""Checkpoints as other tools write them, built from their documented names and fields, and what their drafters compute, written anew.

The names are spelled out here and not taken from checkpoints/layouts.py: a wrong name there must not agree with itself.

Shapes: n positions, H hidden size, I MLP width, W draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

# As tests/conftest.py's tiny target.
V, H, HEADS, KV_HEADS, HEAD_DIM, I, W, NUM_LAYERS = 258, 32, 4, 2, 8, 48, 96, 7  # noqa: E741
NUM_MEDUSA_HEADS, NUM_MEDUSA_LAYERS = 3, 2

SAFEAILAB_EAGLE3 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": I,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": V,
    "draft_vocab_size": W,
}
SAFEAILAB_EAGLE1 = {
    **{name: value for name, value in SAFEAILAB_EAGLE3.items() if name != "draft_vocab_size"},
    "rope_theta": 500000.0,
    "bias": False,
}
SPECFORGE = {
    **{name: value for name, value in SAFEAILAB_EAGLE3.items() if name not in ("architectures", "torch_dtype")},
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "head_dim": HEAD_DIM,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 20000.0,
    "torch_dtype": "bfloat16",
}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": W,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "transformer_layer_config": {
        "bos_token_id": None,
        "head_dim": HEAD_DIM,
        "hidden_size": H,
        "intermediate_size": I,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rope_parameters": {"rope_theta": 3000.0, "rope_type": "default"},
        "vocab_size": V,
    },
}
MEDUSA = {"base_model_name_or_path": "some/target", "medusa_num_heads": NUM_MEDUSA_HEADS, "medusa_num_layers": NUM_MEDUSA_LAYERS}


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Norm weights far from 1 and from each other; large enough that a wrong wiring shows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else 0.3) + (1.0 if "norm" in name else 0.0)).to(dtype)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, attention_width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, attention_width),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, attention_width),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, attention_width),
        f"{prefix}.self_attn.o_proj.weight": (H, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": (I, H),
        f"{prefix}.mlp.up_proj.weight": (I, H),
        f"{prefix}.mlp.down_proj.weight": (H, I),
        f"{prefix}.post_attention_layernorm.weight": (H,),
    }


def vocabulary_maps(ids_W: Tensor) -> dict[str, Tensor]:
    is_drafted_V = torch.zeros(V, dtype=torch.bool)
    is_drafted_V[ids_W] = True
    return {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": is_drafted_V}


def draft_ids() -> Tensor:
    return torch.randperm(V, generator=torch.Generator().manual_seed(5))[:W].sort().values


def eagle3_tensors(layer: str, dtype: torch.dtype, size: int = W, seed: int = 0) -> dict[str, Tensor]:
    """`layer` is "midlayer" (SafeAILab, SpecForge) or "layers.0" (speculators)."""
    shapes = {
        "fc.weight": (H, 3 * H),
        **layer_shapes(layer, 2 * H),
        f"{layer}.input_layernorm.weight": (H,),
        f"{layer}.hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (size, H),
    }
    return random_tensors(shapes, dtype, seed) | (vocabulary_maps(draft_ids()) if size == W else {})


def eagle1_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    return random_tensors({"embed_tokens.weight": (V, H), "fc.weight": (H, 2 * H), **layer_shapes("layers.0", H)}, dtype)


def medusa_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_MEDUSA_HEADS):
        for layer in range(NUM_MEDUSA_LAYERS):
            shapes |= {f"{head}.{layer}.linear.weight": (H, H), f"{head}.{layer}.linear.bias": (H,)}
        shapes[f"{head}.{NUM_MEDUSA_LAYERS}.weight"] = (V, H)
    return random_tensors(shapes, dtype)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / file)
    return folder


def write_layout(folder: Path, name: str) -> Path:
    """One checkpoint of each tool: "safeailab eagle3", "safeailab eagle1", "specforge", "speculators", either "with norms", or "medusa"."""
    if name.endswith("with norms"):
        tool, layer = (SPECULATORS, "layers.0") if name.startswith("speculators") else (SPECFORGE, "midlayer")
        norms = {"fc_norm": True, "norm_output": True} | ({"norm_before_residual": True} if tool is SPECULATORS else {})
        tensors = eagle3_tensors(layer, torch.bfloat16) | random_tensors({f"fc_norm.{index}.weight": (H,) for index in range(3)}, torch.bfloat16)
        return write(folder, {**tool, **norms}, tensors, "model.safetensors")
    if name == "safeailab eagle3":
        return write(folder, SAFEAILAB_EAGLE3, eagle3_tensors("midlayer", torch.float16), "pytorch_model.bin")
    if name == "safeailab eagle1":
        return write(folder, SAFEAILAB_EAGLE1, eagle1_tensors(torch.float16), "pytorch_model.bin")
    if name == "specforge":
        return write(folder, SPECFORGE, eagle3_tensors("midlayer", torch.bfloat16), "model.safetensors")
    if name == "speculators":
        return write(folder, SPECULATORS, eagle3_tensors("layers.0", torch.bfloat16), "model.safetensors")
    return write(folder, MEDUSA, medusa_tensors(torch.float32), "medusa_lm_head.pt")


# --- what these drafters compute ------------------------------------------------------------------------------------------


def rms_norm(hidden_nH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return hidden_nH * (hidden_nH.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_H


def rotate(heads_nND: Tensor, position_n: Tensor, theta: float, factor: float = 1.0) -> Tensor:
    """RoPE as a turn of complex numbers; `factor` stretches positions ("linear")."""
    frequency = theta ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angle = position_n[:, None, None].double() / factor * frequency
    turned = torch.complex(*heads_nND.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1).float()


def llama_layer(tensors: dict[str, Tensor], prefix: str, input_nC: Tensor, residual_nH: Tensor, theta: float, factor: float, eps: float) -> Tensor:
    """A causal decoder layer whose attention reads `input_nC`."""
    num = len(input_nC)
    position_n = torch.arange(num)

    def project(name: str, heads: int) -> Tensor:
        return (input_nC @ tensors[f"{prefix}.self_attn.{name}_proj.weight"].T).view(num, heads, HEAD_DIM)

    query = rotate(project("q", HEADS), position_n, theta, factor)
    key = rotate(project("k", KV_HEADS), position_n, theta, factor).repeat_interleave(HEADS // KV_HEADS, dim=1)
    value = project("v", KV_HEADS).repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("qnd,knd->nqk", query, key) / math.sqrt(HEAD_DIM)
    scores = scores.masked_fill(torch.ones(num, num).triu(1).bool(), -math.inf)
    attended = torch.einsum("nqk,knd->qnd", scores.softmax(-1), value).reshape(num, -1)
    hidden = residual_nH + attended @ tensors[f"{prefix}.self_attn.o_proj.weight"].T
    normed = rms_norm(hidden, tensors[f"{prefix}.post_attention_layernorm.weight"], eps)
    gate, up = (normed @ tensors[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return hidden + (nn.functional.silu(gate) * up) @ tensors[f"{prefix}.mlp.down_proj.weight"].T


def eagle3_logits(
    tensors: dict[str, Tensor],
    layer: str,
    aux_nX: Tensor,
    embed_nH: Tensor,
    theta: float,
    factor: float,
    eps: float,
    has_normed_residual: bool = False,
) -> Tensor:
    """[n, W]: of the first draft at each position, from the target's states and the embedding of the token after each."""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    if "fc_norm.0.weight" in tensors:
        aux_nX = torch.cat([rms_norm(aux_nX[:, i * H : (i + 1) * H], tensors[f"fc_norm.{i}.weight"], eps) for i in range(3)], dim=-1)
    hidden_nH = aux_nX @ tensors["fc.weight"].T
    embed_nH = rms_norm(embed_nH, tensors[f"{layer}.input_layernorm.weight"], eps)
    normed_nH = rms_norm(hidden_nH, tensors[f"{layer}.hidden_norm.weight"], eps)
    residual_nH = normed_nH if has_normed_residual else hidden_nH
    output_nH = llama_layer(tensors, layer, torch.cat([embed_nH, normed_nH], dim=-1), residual_nH, theta, factor, eps)
    return rms_norm(output_nH, tensors["norm.weight"], eps) @ tensors["lm_head.weight"].T


def eagle1_logits(tensors: dict[str, Tensor], last_nH: Tensor, embed_nH: Tensor, head_VH: Tensor, theta: float, eps: float) -> Tensor:
    """[n, V]"""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    hidden_nH = torch.cat([embed_nH, last_nH], dim=-1) @ tensors["fc.weight"].T
    return llama_layer(tensors, "layers.0", hidden_nH, hidden_nH, theta, 1.0, eps) @ head_VH.T


def medusa_logits(tensors: dict[str, Tensor], last_nH: Tensor) -> Tensor:
    """[K, n, V]: of each head."""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    logits = []
    for head in range(NUM_MEDUSA_HEADS):
        hidden = last_nH
        for layer in range(NUM_MEDUSA_LAYERS):
            hidden = hidden + nn.functional.silu(
                nn.functional.linear(hidden, tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"])
            )
        logits.append(hidden @ tensors[f"{head}.{NUM_MEDUSA_LAYERS}.weight"].T)
    return torch.stack(logits)
