"""Finds what must not leave the machine in files that are about to be published: secrets, and names of this machine and its folders.

Place in the flow: the files of checkpoints/hub.py -> this -> a refusal, or silence. A backstop: what is written for others
(checkpoints/provenance.py, checkpoints/hub_card.py) leaves local names out in the first place.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from huggingface_hub import get_token

# Tokens of the Hub, of OpenAI-compatible services, GitHub and AWS.
_TOKEN_SHAPES = re.compile(rb"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16})\b")
_SECRET_VARIABLES = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD)$")
_SHORTEST_SECRET = 8
_SAFETENSORS_LENGTH_BYTES = 8
_LONGEST_TEXT_BYTES = 64 * 2**20


def refuse_private(files: Mapping[str, Path | bytes], local_paths: Iterable[Path] = ()) -> None:
    """Raises ValueError, naming file and kind but never the value, if a file holds a secret or a local name.

    Args:
        files: name to path or content. Of a safetensors file the header is read, of any other the first 64 MiB.
        local_paths: further folders whose absolute paths are nobody else's business.
    """
    found = []
    forbidden = {**_secrets(), **_local_names(local_paths)}
    for name, source in files.items():
        content = source if isinstance(source, bytes) else _text_of(source)
        kinds = [kind for value, kind in forbidden.items() if value in content]
        if _TOKEN_SHAPES.search(content):
            kinds.append("something with the form of an access token")
        if re.search(_host_name(), content):
            kinds.append("this machine's name")
        found += [f"{name} holds {kind}" for kind in dict.fromkeys(kinds)]
    if found:
        raise ValueError(f"nothing was uploaded: {'; '.join(found)}. Remove it from there, or export from a run without it")


def _text_of(path: Path) -> bytes:
    """The part of a file that can hold text."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            return file.read(int.from_bytes(file.read(_SAFETENSORS_LENGTH_BYTES), "little"))
        return file.read(_LONGEST_TEXT_BYTES)


def _secrets() -> dict[bytes, str]:
    """Values that must not appear, and what they are called in the message."""
    variables = {name: value for name, value in os.environ.items() if _SECRET_VARIABLES.search(name) and len(value) >= _SHORTEST_SECRET}
    secrets = {value.encode(): f"the value of the environment variable {name}" for name, value in variables.items()}
    token = get_token()
    return secrets if token is None else {**secrets, token.encode(): "the Hugging Face token"}


def _local_names(local_paths: Iterable[Path]) -> dict[bytes, str]:
    """Absolute paths, with the slash after them so that they are no part of a word."""
    folders = {path.expanduser().resolve() for path in (Path.home(), Path.cwd(), *local_paths)}
    return {f"{folder}/".encode(): "a path of this machine" for folder in folders if folder != Path("/")}


def _host_name() -> bytes:
    """A pattern of the host's name where it cannot be an ordinary word; else one that matches nothing."""
    host = socket.gethostname()
    is_telling = len(host) > 3 and not host.isalpha() and not host.startswith("localhost")
    return rb"(?<![\w-])" + re.escape(host).encode() + rb"(?![\w-])" if is_telling else rb"(?!)"
