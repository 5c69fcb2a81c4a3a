"""Completions of token ids through a server's OpenAI API: streamed, timed, with as many at once as wanted.

Place in the flow: eval/sweep.py sends the held-out prompts with this. vLLM and SGLang both take a list of token ids as the prompt and give the
answer's token ids back (`return_token_ids`), so that nothing is tokenised twice. A busy server (429, 503) and a broken connection are tried
again; everything else is an error that says what the server said.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from data.openai_client import api_key
from data.vllm_engine import EngineError
from eval.vllm_server import is_loopback

ATTEMPTS = 6
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
# Of silence on an open connection. A prompt may have to wait for its turn, and a CPU is slow.
SILENCE_S = 600.0
RESTING_READS = 20
_BUSY = (429, 503)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Endpoint:
    """A server and the model that is meant.

    Attributes:
        base_url: without the /v1 of the API.
        model: the name that requests have to say.
        require_alive: raises an EngineError when the server is known to have ended.
    """

    base_url: str
    model: str
    require_alive: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: with the token that ended it.
        first_token_s: seconds from the request to the first token.
        seconds: from the request to the end.
        num_retries: requests before this one that the server refused or broke off.
    """

    token_ids: list[int]
    first_token_s: float
    seconds: float
    num_retries: int

    @property
    def later_token_s(self) -> float:
        """Mean seconds of a token after the first; zero where there is none."""
        return (self.seconds - self.first_token_s) / max(1, len(self.token_ids) - 1)


class _TryAgain(Exception):
    """A refusal that may pass; `wait_s` is what the server asks for, if it says."""

    def __init__(self, reason: str, wait_s: float | None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def api_headers() -> dict[str, str]:
    """The key of the server, where the user has one: OPENAI_API_KEY."""
    key = api_key()
    return {"Authorization": f"Bearer {key}"} if key else {}


class CompletionClient:
    """Greedy completions from one endpoint; an async context manager.

    Args:
        endpoint: the server.
        stop_token_ids: the tokens that end an answer, and the only ones.
        max_connections: requests at once.
    """

    def __init__(self, endpoint: Endpoint, stop_token_ids: Sequence[int], max_connections: int) -> None:
        self._endpoint = endpoint
        self._stop_token_ids = list(stop_token_ids)
        self._http = httpx2.AsyncClient(
            base_url=endpoint.base_url,
            headers=api_headers(),
            timeout=httpx2.Timeout(SILENCE_S, connect=10.0),
            limits=httpx2.Limits(max_connections=max_connections),
            trust_env=not is_loopback(endpoint.base_url),
        )

    async def __aenter__(self) -> CompletionClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """The greedy answer to a prompt.

        Raises:
            EngineError: if the server gives none.
        """
        (token_ids, first_token_s, seconds), num_retries = await self._retried(lambda: self._streamed(prompt, max_tokens))
        return Completion(token_ids, first_token_s, seconds, num_retries)

    async def top_two_gap(self, prompt: Sequence[int]) -> float:
        """By how many nats the best next token leads the second best."""
        # The same text may belong to two tokens, so tokens are named by their ids.
        body = {**self._body(prompt, 1), "logprobs": 2, "return_tokens_as_token_ids": True}
        answer, _ = await self._retried(lambda: self._posted(body))
        found = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
        if len(found) < 2:
            raise EngineError(f"{self._url} gives {len(found)} log-probabilities where 2 were asked for")
        return float(found[0] - found[1])

    async def metrics(self) -> str:
        """The engine's part of /metrics, when it has come to rest: a step is counted after its tokens are sent."""
        text = await self._metrics()
        for _ in range(RESTING_READS):
            await asyncio.sleep(0.3)
            text, earlier = await self._metrics(), text
            if text == earlier:
                return text
        raise EngineError(f"{self._url} counts on although our requests are answered: somebody else uses it too, so nothing can be measured")

    async def _metrics(self) -> str:
        async def get() -> str:
            response = await self._http.get("/metrics", follow_redirects=True)
            self._require_success(response)
            # Only what is read here: the times and sizes of the process itself never rest.
            return "\n".join(line for line in response.text.splitlines() if line.startswith(("vllm:spec", "sglang:")))

        text, _ = await self._retried(get)
        return text

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._endpoint.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stop_token_ids": self._stop_token_ids,
            "return_token_ids": True,
        }

    async def _posted(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._http.post("/v1/completions", json=body)
        self._require_success(response)
        return response.json()

    async def _streamed(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float, float]:
        """Token ids, seconds to the first of them, and to the end."""
        token_ids: list[int] = []
        started = time.perf_counter()
        first_token_s = 0.0
        async with self._http.stream("POST", "/v1/completions", json={**self._body(prompt, max_tokens), "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
            self._require_success(response)
            async for chunk in _events(response):
                for choice in chunk["choices"]:
                    if choice.get("token_ids") is None:
                        raise EngineError(f"{self._url} answers without token ids: vLLM gives them from version 0.10.2 on, SGLang in 0.5.23")
                    token_ids += choice["token_ids"]
                    if token_ids and not first_token_s:
                        first_token_s = time.perf_counter() - started
        return token_ids, first_token_s, time.perf_counter() - started

    @property
    def _url(self) -> str:
        return self._endpoint.base_url

    def _require_success(self, response: httpx2.Response) -> None:
        code = response.status_code
        if code == 200:
            return
        said = _message(response)
        if code in _BUSY:
            raise _TryAgain(f"{code}: {said}", _retry_after_s(response))
        if code in (401, 403):
            raise EngineError(f"{self._url} refuses the key ({code}): set OPENAI_API_KEY to the one that the server was started with")
        if code == 404:
            raise EngineError(f"{response.url} is not there (404: {said}): does the server still serve {self._endpoint.model}, with its metrics on?")
        raise EngineError(f"{self._url} answers {code}: {said}")

    async def _retried(self, request: Callable[[], Awaitable[_Result]]) -> tuple[_Result, int]:
        """The result, and how often it was tried again."""
        wait_s, reason = FIRST_WAIT_S, ""
        for attempt in range(ATTEMPTS):
            try:
                return await request(), attempt
            except httpx2.ReadTimeout:
                self._endpoint.require_alive()
                raise EngineError(f"{self._url} sent nothing for {SILENCE_S:.0f} s: it hangs, or has far too much to do") from None
            except _TryAgain as refusal:
                reason, asked_s = str(refusal), refusal.wait_s
            except httpx2.TransportError as error:
                reason, asked_s = f"{type(error).__name__}: {error}", None
            except EngineError:  # a server whose engine has died says so by a 500, and then ends: its log knows more
                await asyncio.sleep(FIRST_WAIT_S)
                self._endpoint.require_alive()
                raise
            await asyncio.sleep(min(LONGEST_WAIT_S, wait_s if asked_s is None else asked_s))
            self._endpoint.require_alive()
            wait_s *= 2
        raise EngineError(f"{self._url} did not answer {ATTEMPTS} times, the last time with {reason}: is it running, and not overloaded?")


async def complete_all(
    client: CompletionClient, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int, on_answer: Callable[[], None]
) -> list[Completion]:
    """The answers in the order of the prompts, `concurrency` at a time; `on_answer` is called after each. The first error ends them all."""
    slots = asyncio.Semaphore(concurrency)

    async def complete(prompt: Sequence[int]) -> Completion:
        async with slots:
            completion = await client.complete(prompt, max_tokens)
        on_answer()
        return completion

    tasks = [asyncio.create_task(complete(prompt)) for prompt in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to the [DONE] without which an answer is not whole."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise EngineError(f"{response.url.host}:{response.url.port} broke an answer off: {_error_text(event)}")
        yield event
    raise httpx2.RemoteProtocolError("the answer ended before its [DONE]")


def _message(response: httpx2.Response) -> str:
    try:
        return _error_text(response.json())
    except (ValueError, AttributeError):
        return response.text[:300].strip() or response.reason_phrase


def _error_text(body: dict[str, Any]) -> str:
    """The message of an OpenAI-style error, at either of the places that servers use."""
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _retry_after_s(response: httpx2.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):  # absent, or a date
        return None
