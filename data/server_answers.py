"""Greedy answers to token-id prompts through an OpenAI-compatible server, with the token ids that the server itself wrote.

Place in the flow: the prompts that a recipe's regenerate stage has chosen (data/regenerate_stage.py) -> this -> token ids.

Prompts go to /v1/completions as token ids, so nobody applies a chat template a second time, and `return_token_ids` asks for the answer's ids back
(vLLM, and SGLang where it knows the field). A server that ignores it gives text, which is tokenised here: nearly always the same ids, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from data.openai_client import NothingAnswered, OpenAIClient, RequestFailed, ServerConfig, ServerError, for_each
from data.target_files import TargetConfig, base_and_adapter, load_tokenizer

OnAnswer = Callable[[int, list[int]], None]


def end_token_ids(target: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer, as `Target.end_ids`, without the model: the generation config's (else the config's) and the tokenizer's."""
    base, _ = base_and_adapter(target)
    try:
        eos = GenerationConfig.from_pretrained(base.model, revision=base.revision or "main").eos_token_id
    except OSError:  # no such file
        eos = AutoConfig.from_pretrained(base.model, revision=base.revision or "main").get_text_config().eos_token_id
    configured = eos if isinstance(eos, (list, tuple)) else [eos]
    return frozenset(int(token) for token in [*configured, tokenizer.eos_token_id] if token is not None)


@dataclass
class ServerAnswers:
    """Answers prompts through a server; made by `of`.

    Attributes:
        server: which one.
        tokenizer: the target's, for a server that gives no token ids.
        end_ids: tokens that end an answer.
        counts: what the report adds: answers that were tokenised here, requests asked again, prompts that failed.
    """

    server: ServerConfig
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    counts: dict[str, int] = field(default_factory=lambda: {"retokenised": 0, "asked_again": 0, "failed": 0})

    @classmethod
    def of(cls, target: TargetConfig, server: ServerConfig) -> ServerAnswers:
        """For a target whose model is loaded by the server only."""
        tokenizer = load_tokenizer(target)
        return cls(server, tokenizer, end_token_ids(target, tokenizer))

    def identity(self) -> dict[str, Any]:
        """What the answers depend on; not where the server stands."""
        return {"server_model": self.server.model}

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, on_answer: OnAnswer) -> None:
        """Answers every prompt; `on_answer` is called with its index as soon as each is there, and never for one that the server refuses.

        What the server failed at, which is not what it refused, is asked once more when all others are answered.

        Raises:
            ServerError: if the server serves another model, reads other tokens than were sent, or cannot be worked with any more.
        """
        asyncio.run(self._answer_all(prompts, max_new_tokens, on_answer))

    async def _answer_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, on_answer: OnAnswer) -> None:
        failed: dict[int, RequestFailed] = {}

        async def ask(client: OpenAIClient, index: int) -> None:
            try:
                reply, _ = await client.post("completions", self._body(prompts[index], max_new_tokens), _Reply.of)
            except RequestFailed as failure:
                failed[index] = failure
                print(f"regenerate: prompt {index} has no answer: {failure.reason} ({failure})", flush=True)
            else:
                failed.pop(index, None)
                on_answer(index, self._ids(reply, prompts[index]))

        await self._ask_each(range(len(prompts)), ask)
        again = [index for index, failure in failed.items() if not failure.is_final]
        if again:  # the server may have been another one by then: started again, or less busy
            print(f"regenerate: {len(again):,} prompts that the server failed at are asked once more", flush=True)
            try:
                await self._ask_each(again, ask)
            except NothingAnswered as error:  # these had failed before: it says nothing of the server
                print(f"regenerate: {error}: what is left of them is not asked any more", flush=True)
        self.counts["failed"] += len(failed)
        if self.counts["retokenised"]:
            print(f"regenerate: the server gave no token ids: {self.counts['retokenised']:,} answers are tokenised again from its text", flush=True)

    async def _ask_each(self, indices: Iterable[int], ask: Callable[[OpenAIClient, int], Awaitable[None]]) -> None:
        """Asks for each, so many at a time as the server is to have."""
        async with OpenAIClient(self.server) as client:
            await client.check_model()
            try:
                await for_each(indices, self.server.concurrency, lambda index: ask(client, index))
            finally:
                self.counts["asked_again"] += client.num_retries

    def _body(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        return {
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            # vLLM and SGLang take it from the target's generation config where it is not said; a drafter learns the target's own choices.
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.end_ids),
            "return_token_ids": True,
        }

    def _ids(self, reply: _Reply, prompt: Sequence[int]) -> list[int]:
        if reply.prompt_ids is not None and reply.prompt_ids != list(prompt):
            raise ServerError(
                f"{self.server.shown_url} read {len(reply.prompt_ids)} prompt tokens where {len(prompt)} others were sent: it must not add any"
            )
        ids = reply.ids
        if ids is None:
            self.counts["retokenised"] += 1
            ids = self.tokenizer(reply.text, add_special_tokens=False)["input_ids"]
        if reply.has_ended and (not ids or ids[-1] not in self.end_ids):
            ids = [*ids, reply.stop_id if reply.stop_id in self.end_ids else self.tokenizer.eos_token_id]
        return list(ids)


@dataclass(frozen=True)
class _Reply:
    """A reply of /completions.

    Attributes:
        ids: None where the server gives none; `prompt_ids` likewise.
        stop_id: the token that ended it, where the server says so.
    """

    text: str
    ids: list[int] | None
    prompt_ids: list[int] | None
    has_ended: bool
    stop_id: int | None

    @classmethod
    def of(cls, reply: dict[str, Any]) -> _Reply:
        """Raises KeyError, TypeError, ValueError or IndexError if it is no such reply."""
        choice = reply["choices"][0]
        text, finish_reason, stop_id = choice["text"], choice["finish_reason"], choice.get("stop_reason")
        if not isinstance(text, str) or finish_reason not in ("stop", "length"):
            raise ValueError(f"finish_reason {finish_reason!r}")
        ids, prompt_ids = choice.get("token_ids"), choice.get("prompt_token_ids")
        return cls(
            text.encode("utf-8", "replace").decode("utf-8"),
            None if ids is None else [int(token) for token in ids],
            None if prompt_ids is None else [int(token) for token in prompt_ids],
            finish_reason == "stop",
            stop_id if isinstance(stop_id, int) else None,
        )
