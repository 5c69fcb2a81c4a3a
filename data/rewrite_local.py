"""Conversations written anew by the target itself, greedily, through transformers.

Place in the flow: `Questions` -> data/chat.py prompts -> data/generate.py, many at a time, turn after turn -> data/rewritten_file.py. A group of
conversations is finished and written before the next begins, so an interruption costs one group.
"""

from __future__ import annotations

from collections.abc import Sequence

from data.chat import ChatTokenizer, SampleError
from data.conversations import Turn
from data.generate import GeneratedAnswer, generate_greedy
from data.progress import Progress
from data.rewrite import Answer, Dialogue, Questions, RewriteChoices, split_thinking
from data.rewritten_file import RewrittenFile
from data.target import Target

_GROUP_BATCHES = 4


def rewrite_by(
    target: Target, waiting: Sequence[Questions], choices: RewriteChoices, max_new_tokens: int, batch_sequences: int, output: RewrittenFile
) -> None:
    """Writes all waiting conversations.

    Args:
        target: answers.
        waiting: the conversations.
        choices: what is kept.
        max_new_tokens: longest answer.
        batch_sequences: answers decoded together.
        output: takes each conversation when its group is finished.

    Raises:
        ValueError: if the tokenizer cannot serve.
    """
    chat = ChatTokenizer(target.tokenizer)
    progress = Progress("regenerate", "conversations", len(waiting))
    size = _GROUP_BATCHES * batch_sequences
    for begin in range(0, len(waiting), size):
        dialogues = [Dialogue(questions, choices) for questions in waiting[begin : begin + size]]
        messages: dict[str, str] = {}
        while any(not dialogue.is_done for dialogue in dialogues):
            asked = [(dialogue, prompt) for dialogue in dialogues if (prompt := _prompt(target, chat, dialogue, max_new_tokens, messages))]
            answers = generate_greedy(target, [prompt for _, prompt in asked], max_new_tokens, batch_sequences=batch_sequences)
            for (dialogue, prompt), answer in zip(asked, answers, strict=True):
                dialogue.take(_answer(target, prompt, answer))
        for dialogue in dialogues:
            output.store(dialogue, messages.get(dialogue.questions.key, ""))
        progress.advance(len(dialogues))
    progress.close()


def _prompt(target: Target, chat: ChatTokenizer, dialogue: Dialogue, max_new_tokens: int, messages: dict[str, str]) -> list[int] | None:
    """The next prompt's ids; None for a conversation that is done, which it may be because its prompt cannot be had."""
    if dialogue.is_done:
        return None
    questions = dialogue.questions
    try:
        ids = chat.prompt(questions.id, [Turn(message["role"], message["content"]) for message in dialogue.prompt()])
    except SampleError as error:
        dialogue.ended_by, messages[questions.key] = error.reason, str(error)
        return None
    longest = target.config.to_dict().get("max_position_embeddings")
    if longest is not None and len(ids) + max_new_tokens > longest:
        dialogue.ended_by = "context_too_long"
        messages[questions.key] = f"the prompt has {len(ids)} tokens, and with {max_new_tokens} new ones that is more than the target's {longest}"
        return None
    return ids


def _answer(target: Target, prompt: Sequence[int], generated: GeneratedAnswer) -> Answer:
    ids = generated.answer_ids
    has_ended = ids[-1] in target.end_ids
    text = str(target.tokenizer.decode(ids[:-1] if has_ended else ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    thinking, content, is_open = split_thinking(text)
    return Answer(
        content=content,
        finish_reason="stop" if has_ended else "length",
        thinking=thinking,
        has_open_thinking=is_open,
        num_prompt_tokens=len(prompt),
        num_new_tokens=len(ids),
    )
