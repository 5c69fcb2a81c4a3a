"""What the reader of docs/ has: a small chat model, really fine-tuned for a moment, and a file of conversations. For tests/test_docs.py.

The model answers a few kinds of question about animals in few words and always in the same way, so that its greedy answers are long enough to be
drafted, end, and can be learned by a drafter in seconds. Its heads have 32 dimensions, which vLLM's CPU kernels know.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_CONVERSATIONS = 600
VOCABULARY = 512
_NUM_STEPS, _BATCH = 200, 24
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ADJECTIVES = ["red", "old", "small", "quiet", "young", "grey", "brave", "hungry"]
_ANIMALS = ["fox", "cat", "owl", "dog", "crow", "horse", "mouse", "goat"]
_PLACES = ["river", "forest", "barn", "hill", "garden", "lake"]
_TIMES = ["morning", "evening", "winter", "summer"]


def exchanges() -> list[tuple[str, str]]:
    """Distinct questions with their answers, shuffled."""
    found = [
        (
            f"Does the {adjective} {animal} see the {place} in the {time}?",
            f"The {adjective} {animal} sees the {place} in the {time}. "
            f"At the {place} the {animal} rests, and then the {adjective} {animal} comes home.",
        )
        for adjective, animal, place, time in itertools.product(_ADJECTIVES, _ANIMALS, _PLACES, _TIMES)
    ]
    random.Random(0).shuffle(found)
    return found[:NUM_CONVERSATIONS]


def write_conversations(path: Path) -> None:
    """A ShareGPT file of one exchange a record."""
    records = [
        {"id": f"c{number}", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for number, (question, answer) in enumerate(exchanges())
    ]
    path.write_text(json.dumps(records))


def _tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((f"user assistant {question} {answer}" for question, answer in exchanges()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=_CHATML)


def write_model(folder: Path) -> float:
    """Fine-tunes a random Llama on the conversations and saves it in bfloat16 as a user's model would be; the last loss, in nats."""
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.1,  # Wider than usual, as such a narrow model needs it to learn within these few steps.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    rows = []
    for question, answer in exchanges():
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=_NUM_STEPS)
    rng = random.Random(0)
    for _ in range(_NUM_STEPS):
        batch = rng.sample(rows, _BATCH)
        width = max(map(len, batch))
        input_ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        # The padding stands behind the row: causal attention never sees it, and it has no label.
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in batch])
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss.item()
