"""Conversations written anew through an OpenAI-compatible server.

Place in the flow: `Questions` -> `Dialogue` by `Dialogue`, as many at a time as the server is to have -> data/rewritten_file.py. A conversation's
turns follow each other, so there are never more requests in flight than conversations.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data.openai_client import OpenAIClient, RequestFailed, ServerConfig, for_each
from data.progress import Progress
from data.rewrite import Dialogue, Questions, RewriteChoices, read_answer
from data.rewritten_file import Failure, RewrittenFile

_CHAT = "chat/completions"


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: share of the probability that is drawn from.
        seed: each turn's own seed is made of it, so that going on draws the same; None leaves it to the server.
        max_new_tokens: longest answer.
        extra_body: further fields of every request.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 2048
    extra_body: dict[str, Any] = field(default_factory=dict)

    def body(self, key: str, turn: int) -> dict[str, Any]:
        """The request's fields beside model and messages."""
        body: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_new_tokens}
        if self.seed is not None:
            body["seed"] = (self.seed + zlib.crc32(f"{key}:{turn}".encode())) % 2**31
        return {**body, **self.extra_body}


def rewrite_through(server: ServerConfig, waiting: Sequence[Questions], choices: RewriteChoices, sampling: Sampling, output: RewrittenFile) -> None:
    """Writes all waiting conversations.

    Raises:
        ServerError: if the server serves another model or cannot be worked with any more; what is finished is in the output.
    """
    asyncio.run(_rewrite_all(server, waiting, choices, sampling, output))


def check_server(server: ServerConfig) -> None:
    """Raises ServerError unless the server is there and serves the model."""

    async def check() -> None:
        async with OpenAIClient(server) as client:
            await client.check_model()

    asyncio.run(check())


async def _rewrite_all(
    server: ServerConfig, waiting: Sequence[Questions], choices: RewriteChoices, sampling: Sampling, output: RewrittenFile
) -> None:
    progress = Progress("regenerate", "conversations", len(waiting))
    async with OpenAIClient(server) as client:
        longest = await client.check_model()
        if longest is not None and sampling.max_new_tokens >= longest:
            # vLLM refuses every request that asks for more than its whole context.
            print(f"regenerate: the server's context is {longest:,} tokens, so answers are at most {longest - 1:,}", flush=True)
            sampling = replace(sampling, max_new_tokens=longest - 1)

        async def work(questions: Questions) -> None:
            await _rewrite(client, Dialogue(questions, choices), sampling, output)
            progress.advance(1)

        try:
            await for_each(waiting, server.concurrency, work)
        finally:
            progress.close()


async def _rewrite(client: OpenAIClient, dialogue: Dialogue, sampling: Sampling, output: RewrittenFile) -> None:
    questions, message = dialogue.questions, ""
    while not dialogue.is_done:
        body = {"messages": dialogue.prompt(), **sampling.body(questions.key, len(dialogue.answers))}
        try:
            answer, num_retries = await client.post(_CHAT, body, read_answer)
        except RequestFailed as failed:
            message = str(failed)
            if not failed.is_final:
                # Nothing of it is kept: the next run asks all of its turns again.
                output.fail(Failure(questions.key, questions.id, failed.reason, message, False))
                return
            dialogue.ended_by = failed.reason
        else:
            dialogue.take(replace(answer, num_retries=num_retries))
    output.store(dialogue, message)
