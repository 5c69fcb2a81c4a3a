"""The messages that docs/troubleshooting.md and docs/targets.md quote are those that the code prints: a reader searches the page for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data.report import REASONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / name for name in ("troubleshooting.md", "targets.md")]
PACKAGES = ("train", "data", "checkpoints", "eval", "launch")
# Said by others: vLLM's command, its CPU build, the shell, torchrun, wandb.
FOREIGN = ("vllm: command not found", "No package metadata was found for vllm", "Address already in use", "the file ends with an incomplete record")


def source() -> str:
    """All code, its adjacent string literals joined, and each {expression} of an f-string as one mark."""
    text = "\n".join(path.read_text() for package in PACKAGES for path in sorted((ROOT / package).glob("*.py")))
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    while (shorter := re.sub(r"\{[^{}\n]*\}", "\0", text)) != text:
        text = shorter
    return text


def quoted(page: Path) -> list[str]:
    """What stands in code quotes in the first column of a table and is a message: it has several words and is no option."""
    cells = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("|")]
    found = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return [text for text in found if len(text.split()) > 2 and not text.startswith(("-", "python ", "HF_"))]


def is_printed(message: str, code: str) -> bool:
    """Whether the code holds most of the message's words, in runs of at least two; figures, names and what `...` stands for are the reader's own."""
    words = [word for word in message.replace("...", " ").split() if re.search(r"[A-Za-z]", word)]
    found, start = 0, 0
    while start < len(words):
        length = next((end for end in range(len(words) - start, 1, -1) if " ".join(words[start : start + end]) in code), 0)
        found += length
        start += max(1, length)
    return found >= 0.6 * len(words)


def test_the_measure_tells_a_message_from_one_that_is_not_there() -> None:
    code = 'raise ValueError(f"\0 has \0 tokens, expected at most \0: set --data.max-length \0")'
    assert is_printed("the file has 512 tokens, expected at most 100: set --data.max-length 100", code)
    assert not is_printed("there is no file to read the tokens from", code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_quoted_message_is_in_the_code(page: Path) -> None:
    messages, code = quoted(page), source()
    assert len(messages) > 5
    missing = [message for message in messages if message not in FOREIGN and not is_printed(message, code)]
    assert not missing, f"{page.name} quotes what nothing prints: {missing}"


def test_every_reason_of_a_left_out_record_is_explained_and_no_other() -> None:
    text = PAGES[0].read_text().partition("## Conversations are left out")[2].partition("| message |")[0]
    named = {name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == set(REASONS)
