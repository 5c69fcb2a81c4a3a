"""Requests to an OpenAI-compatible server (vLLM, SGLang, …), and what is done about each thing that can go wrong with one.

Place in the flow: data/rewrite.py (conversations) and data/server_answers.py (token ids, for a recipe) ask -> this -> HTTP.

    what happens                                        what is done
    429 and 503, which may say `Retry-After`            asked again when the server says, or later each time; then the run stops
    408, other 5xx, a cut connection, a time-out,       asked again, later each time; then, if the server still lives, this request has
    a reply that is not what it should be               failed and a later run asks again; if it does not, the run stops
    400, 413, 422, …                                    this request is refused for good, the others go on
    401, 403, 404, another model                        the run stops

"The run stops" is a `ServerError`, one line for the user. The key comes from the environment only and stands in no message.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeVar

import httpx2

from data.report import printable

KEY_VARIABLE = "OPENAI_API_KEY"

_OVERLOADED = (429, 503)
_AGAIN = (408, 425, *_OVERLOADED)
_NOT_ALLOWED = (401, 403)
_NOT_THERE = (404, 405)
_LONGEST_WAIT_S = 30.0
_LONGEST_RETRY_AFTER_S = 300.0
_CONNECT_S = 10.0
_MAX_TIMEOUTS = 3
_SECONDS_BETWEEN_NOTES = 10.0
_MESSAGE_CHARS = 300
_CONTEXT_WORDS = ("context length", "context_length", "maximum context", "max_model_len", "too long", "context window")

T = TypeVar("T")


class ServerError(ValueError):
    """The server cannot be worked with (any more); what is finished is kept. The message is one line for the user."""


class NothingAnswered(ServerError):
    """Many requests in a row have failed, though the server lives."""


class RequestFailed(Exception):
    """One request has no answer.

    Attributes:
        reason: a word to count by: context_too_long, bad_request, timeout, dropped, malformed_reply, http_<status>.
        is_final: whether asking again would give the same; false where the server is at fault.
    """

    def __init__(self, reason: str, message: str, is_final: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_final = is_final


def api_key() -> str:
    """The server's key, empty where none is set.

    Raises:
        ServerError: if it cannot be sent: the HTTP layer would print it.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise ServerError(f"{KEY_VARIABLE} holds characters that no key has, such as a line break in it: set it to the server's key")
    return key


@dataclass(frozen=True)
class ServerConfig:
    """Which server is asked, and how.

    Attributes:
        url: up to and including `/v1`.
        model: name under which the server serves it.
        concurrency: requests in flight at most.
        timeout_s: longest time for one answer.
        max_retries: times that a request is asked again.
        first_wait_s: before the first of them; it doubles each time, up to 30 s.
    """

    url: str
    model: str
    concurrency: int = 32
    timeout_s: float = 600.0
    max_retries: int = 6
    first_wait_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the server is {self.url!r}, expected a URL such as http://localhost:8000/v1")
        if self.concurrency < 1 or self.max_retries < 0 or self.timeout_s <= 0:
            raise ValueError(
                f"concurrency is {self.concurrency}, max-retries {self.max_retries}, timeout-s {self.timeout_s}: expected at least 1, at least 0, "
                "above 0"
            )

    @property
    def shown_url(self) -> str:
        """Without a user name and password."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    @property
    def is_loopback(self) -> bool:
        return self.shown_url.partition("://")[2].startswith(("127.0.0.1", "localhost", "[::1]"))


@dataclass(frozen=True)
class _Problem:
    """Why a request is asked again."""

    reason: str
    message: str
    is_overload: bool = False
    retry_after_s: float | None = None


@dataclass
class OpenAIClient:
    """Asks one server; made inside `async with`.

    Attributes:
        num_retries: requests that were asked again, so far.
    """

    config: ServerConfig
    num_retries: int = 0
    _http: Any = field(default=None, repr=False)
    _key: str = field(default_factory=api_key, repr=False)
    _failures_in_a_row: int = 0
    _last_note: float = float("-inf")

    async def __aenter__(self) -> OpenAIClient:
        config = self.config
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx2.Timeout(config.timeout_s, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=config.concurrency + 1, max_keepalive_connections=config.concurrency + 1),
            # A proxy in the environment must not be asked for a server on this machine.
            trust_env=not config.is_loopback,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    # --- which model --------------------------------------------------------------------------------------------------------

    async def check_model(self) -> int | None:
        """Checks that the server serves the wanted model.

        Returns:
            The longest context it serves, in tokens, where it says so (vLLM's and SGLang's `max_model_len`).

        Raises:
            ServerError: if it serves others, or does not answer.
        """
        served = await self._attempt("GET", "models", None, _served_models)
        for attempt in range(self.config.max_retries):
            if not isinstance(served, _Problem):
                break
            await self._wait(attempt, served)
            served = await self._attempt("GET", "models", None, _served_models)
        if isinstance(served, _Problem):
            times = f"asked {self.config.max_retries + 1} times"
            raise ServerError(f"{self.config.shown_url} does not answer ({served.message}), {times}: is the server up, and is this its address?")
        if self.config.model not in served:
            raise ServerError(
                f"{self.config.shown_url} serves {', '.join(map(repr, sorted(served))) or 'no model'}, not {self.config.model!r}: "
                "name one of these, or start the server with the wanted one (vLLM: --served-model-name)"
            )
        return served[self.config.model]

    # --- one request --------------------------------------------------------------------------------------------------------

    async def post(self, path: str, body: dict[str, Any], parse: Callable[[dict[str, Any]], T]) -> tuple[T, int]:
        """Sends one request, again where that can help.

        Args:
            path: below the server's URL.
            body: JSON; the model's name is added.
            parse: makes of the reply what is wanted; a KeyError, TypeError, ValueError or IndexError means that the reply is malformed.

        Returns:
            What was parsed, and how many times it was asked again.

        Raises:
            RequestFailed: if this request has no answer.
            ServerError: if the run cannot go on.
        """
        for attempt in range(self.config.max_retries + 1):
            found = await self._attempt("POST", path, {"model": self.config.model, **body}, parse)
            if not isinstance(found, _Problem):
                self._failures_in_a_row = 0
                return found, attempt
            # What takes too long mostly does so again, and each time costs `timeout_s`.
            if attempt == self.config.max_retries or (found.reason == "timeout" and attempt == _MAX_TIMEOUTS - 1):
                break
            self.num_retries += 1
            await self._wait(attempt, found)
        assert isinstance(found, _Problem)
        await self._give_up(found, attempt + 1)

    async def _attempt(self, method: str, path: str, body: dict[str, Any] | None, parse: Callable[[dict[str, Any]], T]) -> T | _Problem:
        """The parsed reply, or why to ask again."""
        try:
            response = await self._http.request(method, f"{self.config.url.rstrip('/')}/{path}", json=body)
        except httpx2.TimeoutException as error:
            return _Problem("timeout", self._clean(f"{type(error).__name__} after up to {self.config.timeout_s:g} s"))
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            return _Problem("dropped", self._clean(f"{type(error).__name__}: {error}"))
        except httpx2.InvalidURL as error:
            raise ServerError(f"{self.config.shown_url} is no URL: {self._clean(str(error))}") from None
        status = response.status_code
        if status >= 500 or status in _AGAIN:
            after_s = _retry_after_s(response.headers.get("retry-after"))
            return _Problem(f"http_{status}", self._message(response), status in _OVERLOADED, after_s)
        if status >= 300:
            self._refuse(path, response)
        try:
            return parse(response.json())
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            return _Problem("malformed_reply", self._clean(f"{type(error).__name__} in a reply of {len(response.content)} bytes: {error}"))

    def _refuse(self, path: str, response: Any) -> NoReturn:
        status, message, url = response.status_code, self._message(response), self.config.shown_url
        if status in _NOT_ALLOWED:
            given = f"the key in {KEY_VARIABLE} is not accepted" if self._key else f"set {KEY_VARIABLE} to the server's key"
            raise ServerError(f"{url} answers {status}: {given} ({message})")
        if status in _NOT_THERE or status < 400:
            hint = "" if url.rstrip("/").endswith("/v1") else "; the URL usually ends in /v1"
            raise ServerError(f"{url} answers {status} to /{path}: {message}{hint}")
        if path == "models":  # nothing of a conversation's: it must not count as one that was refused
            raise ServerError(f"{url} answers {status} to /{path}: {message}: is this an OpenAI-compatible server, and http or https as it expects?")
        is_context = status in (400, 413, 422) and any(word in message.lower() for word in _CONTEXT_WORDS)
        reason = "context_too_long" if is_context else "bad_request" if status in (400, 413, 422) else f"http_{status}"
        if not is_context:
            self._count_failure(message)
        raise RequestFailed(reason, message, is_final=True)

    # --- asking again, and giving up ----------------------------------------------------------------------------------------

    async def _wait(self, attempt: int, problem: _Problem) -> None:
        if problem.retry_after_s is not None and problem.retry_after_s > _LONGEST_RETRY_AFTER_S:
            raise ServerError(
                f"{self.config.shown_url} asks to come back in {problem.retry_after_s:.0f} s ({problem.message}): run the same command then, it "
                "goes on"
            )
        wait_s = min(_LONGEST_WAIT_S, self.config.first_wait_s * 2**attempt)
        # Apart from each other, so that not all of them come back at once.
        wait_s = wait_s * random.uniform(0.5, 1) if problem.retry_after_s is None else problem.retry_after_s + random.uniform(0, 0.1)
        if time.monotonic() - self._last_note > _SECONDS_BETWEEN_NOTES:
            self._last_note = time.monotonic()
            print(f"{self.config.shown_url}: {problem.reason} ({problem.message}); asking again", flush=True)
        await asyncio.sleep(wait_s)

    async def _give_up(self, problem: _Problem, num_asked: int) -> NoReturn:
        url, times = self.config.shown_url, f"asked {num_asked} times"
        if problem.is_overload:
            raise ServerError(f"{url} is overloaded ({problem.message}), {times}: lower the concurrency, or run the same command later, it goes on")
        alive = await self._attempt("GET", "models", None, _served_models)
        if isinstance(alive, _Problem):
            raise ServerError(f"{url} does not answer any more ({problem.message}), {times}: start it again and run the same command, it goes on")
        self._count_failure(problem.message)
        raise RequestFailed(problem.reason, problem.message, is_final=False)

    def _count_failure(self, message: str) -> None:
        """Many failures and no answer between them are no accident of single conversations."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= max(8, self.config.concurrency):
            raise NothingAnswered(f"{self.config.shown_url} has answered none of the last {self._failures_in_a_row} requests, the last: {message}")

    def _message(self, response: Any) -> str:
        """What the server says about an error, in one line."""
        try:
            value = response.json()
            error = value.get("error", value)
            text = error if isinstance(error, str) else str(error.get("message") or error)
        except (ValueError, AttributeError):
            text = response.text
        return self._clean(text) or response.reason_phrase or "no message"

    def _clean(self, text: str) -> str:
        text = " ".join(printable(text).split())
        return (text.replace(self._key, "***") if self._key else text)[:_MESSAGE_CHARS]


async def for_each(items: Iterable[T], concurrency: int, work: Callable[[T], Awaitable[None]]) -> None:
    """Works on the items in their order, at most `concurrency` at a time; the first error ends all of it and is raised."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    tasks = [asyncio.create_task(worker()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _served_models(reply: dict[str, Any]) -> dict[str, int | None]:
    """Name -> longest context of every model served."""
    return {str(model["id"]): model.get("max_model_len") for model in reply["data"]}


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a `Retry-After` header: a number or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError):
        return None
