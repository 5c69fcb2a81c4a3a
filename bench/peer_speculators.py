"""One EAGLE-3 training step of `speculators`, run by bench/training_step.py in the environment that `make peers` installs.

The model is built as `speculators train` builds it: `from_training_args` with its defaults for EAGLE-3 (a Llama layer, norms before fc and on
the output), the verifier's embedding, norm and head read from a folder; the loss is its default, KL divergence. The step is that of its Trainer:
autocast, zero_grad, backward, clipping to 1, AdamW with torch's defaults and its own weight decay. It drops one token a document and pads the pack
to T, as its collate function does. Its sliding window is left out, so that it attends to what the others attend to.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

# Behind the environment's own packages: our folders have common names.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import save_file
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from transformers import LlamaConfig

from bench.step_worker import (
    LEARNING_RATE,
    NUM_TARGET_LAYERS,
    RMS_NORM_EPS,
    ROPE_THETA,
    STEP_DECAY,
    Inputs,
    Job,
    Shape,
    device,
    dtype_of,
    run_job,
    target_parts,
)

AUX_LAYERS = [2, NUM_TARGET_LAYERS // 2, NUM_TARGET_LAYERS - 3]
WEIGHT_DECAY, CLIP = 0.01, 1.0


def llama_config(shape: Shape, num_layers: int) -> LlamaConfig:
    """The verifier's config, or with one layer the drafter's."""
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=RMS_NORM_EPS,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def write_verifier(folder: Path, shape: Shape) -> None:
    """What it reads of a verifier: the config, and three tensors."""
    parts = target_parts(shape)
    llama_config(shape, NUM_TARGET_LAYERS).save_pretrained(folder)
    names = {"model.embed_tokens.weight": parts.embed_VH, "lm_head.weight": parts.lm_head_VH, "model.norm.weight": parts.norm_H}
    save_file({name: tensor.cpu().clone() for name, tensor in names.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def build(job: Job) -> Callable[[Shape, Inputs], float]:
    """Its model, and a step of its trainer."""
    shape = job.shape
    ids_W = target_parts(shape).draft_ids_W
    t2d_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
    t2d_V[ids_W] = True
    torch.manual_seed(0)
    model = Eagle3DraftModel.from_training_args(
        llama_config(shape, 1),
        t2d=t2d_V,
        d2t=ids_W - torch.arange(len(ids_W)),
        draft_vocab_size=shape.draft_vocab_size,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        ttt_steps=shape.ttt_steps,
        target_layer_ids=AUX_LAYERS,
        verifier_name_or_path=job.verifier,
        draft_attn_impl=job.attention,
    ).to(device())
    # Its fused losses are Triton kernels, which a CPU has not.
    loss = {"loss_fn": "kl_div", "loss_implementation": "fused" if torch.cuda.is_available() else "eager"}
    arguments, _ = Eagle3DraftModel.get_trainer_kwargs(ttt_steps=shape.ttt_steps, ttt_step_loss_decay=STEP_DECAY, **loss)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    model.train()

    def step(shape: Shape, inputs: Inputs) -> float:
        with torch.autocast(device().type, dtype=dtype_of(shape), enabled=shape.precision == "bf16"):
            _, loss, _ = model(**batch_of(shape, inputs), **arguments)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(loss.detach())

    return step


def batch_of(shape: Shape, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The pack as its data loader gives it: one token less a document, padded to T."""
    samples, start = [], 0
    for length in shape.document_lengths:
        rows = slice(start, start + length)
        start += length
        sample = {
            "input_ids": inputs.input_ids_T[rows],
            "hidden_states": inputs.aux_TX[rows],
            "verifier_last_hidden_states": inputs.last_TH[rows],
            "loss_mask": inputs.loss_mask_T[rows],
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length, device=device()),
        }
        samples.append(sample)
    collate = CollateFn(shape.num_tokens, shape.hidden_size, len(AUX_LAYERS), dtype_of(shape), shift_batch)
    batch = collate(samples)
    return {name: value.to(device()) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def main() -> None:
    """`verifier FOLDER JOB` writes the folder; `JOB` takes its steps and prints what was measured."""
    job = Job.from_json(sys.argv[-1])
    warnings.filterwarnings("ignore")
    if sys.argv[1] == "verifier":
        write_verifier(Path(sys.argv[2]), job.shape)
    else:
        print(json.dumps(run_job(job, build)))


if __name__ == "__main__":
    main()
