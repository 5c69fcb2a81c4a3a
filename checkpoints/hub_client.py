"""Requests to the Hugging Face Hub that outlast a bad minute, and errors of one line that say what to do.

Place in the flow: checkpoints/hub.py -> this -> huggingface_hub. The token comes from where huggingface_hub looks for it (HF_TOKEN, or the file of
`hf auth login`) and is neither printed nor written.
"""

from __future__ import annotations

import email.utils
import itertools
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import parse_ratelimit_headers, validate_repo_id

LOGIN = "set HF_TOKEN or run `hf auth login` with a token that may write (https://huggingface.co/settings/tokens)"
DEFAULT_RETRIES = 5
_LONGEST_BACKOFF_S = 30.0
# A Hub that asks for more is not worth holding a machine for: the same command goes on later.
_LONGEST_WAIT_S = 300.0
_TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
# What vLLM 0.32.0 reads out of the name of a Medusa repository, whatever `method` says (config/speculative.py).
_MEDUSA_NAME_TRAPS = ("eagle-", "eagle3", "dflash", "dspark")

Answer = TypeVar("Answer")


class HubError(ValueError):
    """The Hub refuses, or cannot be reached; the message says what to do.

    Attributes:
        is_passing: whether the same request can succeed later without the user's doing.
    """

    def __init__(self, message: str, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


def check_repo_id(repo: str, algorithm: str) -> None:
    """Raises ValueError unless `repo` is "user/name" as the Hub allows it, and a name under which vLLM serves the algorithm."""
    try:
        validate_repo_id(repo)
        is_valid = repo.count("/") == 1
        reason = "a user or an organisation, a slash, a name"
    except HFValidationError as error:
        is_valid, reason = False, str(error)
    if not is_valid:
        raise ValueError(f"{repo!r} is no repository id of the Hub, expected user/name: {reason}")
    trap = next((trap for trap in _MEDUSA_NAME_TRAPS if trap in repo.lower()), None)
    if algorithm.startswith("medusa") and trap is not None:
        raise ValueError(f"vLLM takes a Medusa drafter named {repo!r} for another method because of {trap!r} in it: choose another name")


def check_access(api: HfApi, repos: Sequence[str], retries: int = DEFAULT_RETRIES) -> None:
    """Raises HubError unless there is a token, the Hub knows it, and it may write to these repositories' owners as far as can be told."""
    if constants.is_offline_mode():
        raise HubError("HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it, or upload later with `python -m checkpoints.hub`")
    token = get_token()
    if token is None:
        raise HubError(f"there is no Hugging Face token to upload to {repos[0]} with: {LOGIN}")
    if not re.fullmatch(r"[\x21-\x7e]+", token):  # the HTTP layer would print it
        raise HubError(f"the Hugging Face token holds characters that no token has: {LOGIN}")
    who = attempt(f"checking the token for {repos[0]}", api.whoami, retries)
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise HubError(f"the Hugging Face token may only read: {LOGIN}")
    namespaces = [who["name"], *(organisation["name"] for organisation in who.get("orgs", []))]
    foreign = [repo for repo in repos if repo.split("/")[0] not in namespaces]
    if role == "write" and foreign:  # a fine-grained token does not say where it may write
        raise HubError(f"the Hugging Face token is {who['name']}'s, who cannot write to {foreign[0]}: name a repository of {' or '.join(namespaces)}")


def check_can_upload(repo: str) -> None:
    """The same before a long run; a Hub that cannot be reached now may be there at its end, so that is only said."""
    try:
        check_access(HfApi(), [repo], retries=1)
    except HubError as error:
        if not error.is_passing:
            raise
        print(f"warning: {error}; the upload at the end of the run will be tried all the same", file=sys.stderr, flush=True)


def attempt(action: str, call: Callable[[], Answer], retries: int) -> Answer:
    """The result of `call`, repeated while the Hub is busy or the network away.

    Args:
        action: what is being done, for the messages.
        call: a request that may be made twice.
        retries: how often it is repeated; waits are 1, 2, 4 ... 30 s, or what the Hub asks for.

    Raises:
        HubError: if the Hub refuses, or is still not there after the last repetition.
    """
    for number in itertools.count(1):
        try:
            return call()
        except (httpx2.HTTPError, OSError, RuntimeError) as error:  # the Hub's own errors are OSErrors, those of hf_xet both
            cause = _cause(error)
            wait_s = _seconds_asked_for(cause) or min(2.0 ** (number - 1), _LONGEST_BACKOFF_S)
            if not _is_passing(cause) or number > retries or wait_s > _LONGEST_WAIT_S:
                raise HubError(f"{action}: {_explain(cause)}", _is_passing(cause)) from error
            print(f"{action}: {_reason(cause)}; again in {wait_s:.0f} s ({number} of {retries})", file=sys.stderr, flush=True)
            time.sleep(wait_s)
    raise AssertionError("unreachable")


def hide_signed_urls() -> None:
    """Keeps the signatures of storage URLs out of the client's own warnings."""
    logging.getLogger("huggingface_hub.utils._http").addFilter(_without_queries)


def _without_queries(record: logging.LogRecord) -> bool:
    record.msg, record.args = re.sub(r"\?\S+", "", record.getMessage()), ()
    return True


def _cause(error: Exception) -> Exception:
    """What lies under the RuntimeError that the client raises around the upload of a file."""
    cause = error.__cause__
    return cause if isinstance(error, RuntimeError) and isinstance(cause, (httpx2.HTTPError, OSError)) else error


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def _is_passing(error: Exception) -> bool:
    is_network = isinstance(error, (httpx2.TransportError, ConnectionError, TimeoutError)) and not isinstance(error, OfflineModeIsEnabled)
    return is_network or _status(error) in _TRANSIENT_STATUS


def _seconds_asked_for(error: Exception) -> float | None:
    """The waiting time that a busy Hub names in its answer."""
    if not isinstance(error, HfHubHTTPError) or _status(error) not in (429, 503):
        return None
    limit = parse_ratelimit_headers(error.response.headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds) + 1
    value = error.response.headers.get("Retry-After", "")
    if value.isdigit():
        return max(1.0, float(value))
    date = email.utils.parsedate_tz(value)
    return None if date is None else max(1.0, email.utils.mktime_tz(date) - time.time())


def _reason(error: Exception) -> str:
    """What happened, in a few words."""
    status = _status(error)
    if status is not None:
        return f"the Hub answers {status}"
    return f"no connection to {constants.ENDPOINT} ({' '.join(str(error).split()) or type(error).__name__})"


def _explain(error: Exception) -> str:
    """One line: what happened and what to do."""
    status = _status(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it to upload"
    if status == 401:
        return f"the Hub does not accept the token (401): {LOGIN}"
    if status == 403:
        return f"the token may not do this (403): give it write access to this repository, or {LOGIN}"
    if status == 404:
        return "the Hub has no such repository or branch (404), or hides it from this token: check the name, and whose token it is"
    if status == 429:
        return "too many requests (429): wait a while, then run the same command again; what is uploaded is not sent twice"
    if _is_passing(error):
        return f"{_reason(error)}: run the same command again when the Hub can be reached; what is uploaded is not sent twice"
    token = get_token()
    said = " ".join(str(error).split())[:400]
    return said.replace(token, "***") if token else said
