"""A finished run whose figures follow by hand: a target whose greedy continuation is a table, and a drafter whose drafts are another.

Not a test: the tests of real engines and servers import it (`pythonpath` in pyproject.toml).
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from checkpoints.draft_config import DraftDimensions
from checkpoints.export import export_drafter
from checkpoints.provenance import Provenance

V, W, H, HEADS, HEAD_DIM, INNER, LAYERS = 128, 96, 64, 2, 32, 96, 8
FIRST_DRAFTED, NUM_DRAFTS, MAX_TOKENS = 16, 3, 24
STOP, ALSO_STOPS = 5, 7  # the config's end token, and the tokenizer's


class TableModel:
    """A target that continues x with next_token[x], and a drafter that drafts two_later[x] at every step after state x.

    Every attention and MLP adds nothing, so the state at each layer is the token's embedding; the heads look it up.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding_VH = torch.randn(V, H, generator=generator)
        self.next_token = torch.randperm(V, generator=generator)
        for token in (20, 40, 60):  # a text that arrives here repeats it, and then every draft is right
            self.next_token[token] = token
        self.two_later = self.next_token[self.next_token]

    def target(self) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=V,
            hidden_size=H,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=1,
            head_dim=HEAD_DIM,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=STOP,
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        )
        model = LlamaForCausalLM(config).float()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight.copy_(self.embedding_VH)
            model.lm_head.weight.zero_().index_add_(0, self.next_token, self.embedding_VH)
        return model

    def drafter(self) -> dict[str, torch.Tensor]:
        ids_W = torch.arange(FIRST_DRAFTED, FIRST_DRAFTED + W)
        is_drafted_V = torch.zeros(V, dtype=torch.bool)
        is_drafted_V[ids_W] = True
        head_VH = torch.zeros(V, H).index_add_(0, self.two_later, self.embedding_VH)
        names = {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
        return {
            "fc.weight": torch.cat([torch.zeros(H, 2 * H), torch.eye(H)], dim=1),
            **{f"midlayer.{name}.weight": torch.ones(H) for name in names},
            "midlayer.self_attn.q_proj.weight": torch.randn(HEADS * HEAD_DIM, 2 * H),
            "midlayer.self_attn.k_proj.weight": torch.randn(HEAD_DIM, 2 * H),
            "midlayer.self_attn.v_proj.weight": torch.randn(HEAD_DIM, 2 * H),
            "midlayer.self_attn.o_proj.weight": torch.zeros(H, HEADS * HEAD_DIM),
            "midlayer.mlp.gate_proj.weight": torch.randn(INNER, H),
            "midlayer.mlp.up_proj.weight": torch.randn(INNER, H),
            "midlayer.mlp.down_proj.weight": torch.zeros(H, INNER),
            "norm.weight": torch.ones(H),
            "lm_head.weight": head_VH[ids_W],
            "d2t": ids_W - torch.arange(W),
            "t2d": is_drafted_V,
        }

    def answer(self, prompt: list[int]) -> list[int]:
        tokens = [int(self.next_token[prompt[-1]])]
        while tokens[-1] not in (STOP, ALSO_STOPS) and len(tokens) < MAX_TOKENS:
            tokens.append(int(self.next_token[tokens[-1]]))
        return tokens

    def joint_acceptance(self, prompts: list[list[int]]) -> list[float]:
        """Counted one verification at a time, past the end of each answer as the engine does."""
        num_verifications, accepted_at = 0, [0] * NUM_DRAFTS
        for prompt in prompts:
            num_left = len(self.answer(prompt)) - 1
            state = prompt[-1]
            while num_left > 0:
                draft = int(self.two_later[state])
                is_draftable = FIRST_DRAFTED <= draft < FIRST_DRAFTED + W
                state = int(self.next_token[state])
                num_accepted = 0
                while is_draftable and num_accepted < NUM_DRAFTS and int(self.next_token[state]) == draft:
                    accepted_at[num_accepted] += 1
                    num_accepted += 1
                    state = int(self.next_token[state])
                num_verifications += 1
                num_left -= num_accepted + 1
        return [accepted / num_verifications for accepted in accepted_at]


def write_table_run(run: Path) -> None:
    """Writes the directory of a complete run of the table models."""
    model = TableModel()
    target = model.target()
    target.save_pretrained(run / "target")
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(V)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{ALSO_STOPS}").save_pretrained(run / "target")
    export_drafter(
        model.drafter(),
        algorithm="eagle3",
        target_config=target.config,
        dimensions=DraftDimensions.of_target(target.config),
        aux_layers=(2, 4, 5),
        dtype=torch.float32,
        out_dir=run / "export",
        provenance=Provenance("c0ffee", {}, "table", "f00d", "5eed"),
        card="# a drafter",
    )
    prompts = [[first, (first * 7) % V, (first * 11 + 2) % V] for first in range(12)]
    answers = [{"prompt_ids": prompt, "answer_ids": model.answer(prompt), "extra_ids": []} for prompt in prompts]
    (run / "answers").mkdir()
    (run / "answers" / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    joint = model.joint_acceptance(prompts)
    report = {"tau": 1 + sum(joint), "joint_acceptance": joint, "draft_length": NUM_DRAFTS, "num_prompts": len(prompts)}
    (run / "report.json").write_text(json.dumps(report))
    (run / "config.json").write_text(json.dumps({"target": {"model": str(run / "target"), "revision": None}}))
