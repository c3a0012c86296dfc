"""Held-out windows: drawn by a seed, and prepared for protocol R and for protocol S. Knows no coder."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.fitting import SINK_TOKENS
from kvalign.evaluate.protocol import PreparedWindow, continuation_logits, prepare
from kvalign.text import Document, Window, evaluation_windows

_WINDOW_TOKENS = 1024
# A whole number of KIVI's groups behind the sinks, so that no baseline is charged for a residual in 16 bit.
_GROUP = 32


def window_lengths(position_limit: int) -> tuple[int, int]:
    """Tokens of prefix and continuation: three quarters and a quarter, the prefix sinks and whole groups.

    >>> window_lengths(8192)
    (772, 252)
    """
    length = min(_WINDOW_TOKENS, position_limit)
    prefix = SINK_TOKENS + _GROUP * round((length * 3 / 4 - SINK_TOKENS) / _GROUP)
    return prefix, length - prefix


def draw_windows(
    documents: Sequence[Document], tokenizer: Any, *, windows: int, prefix: int, continuation: int, seed: int
) -> list[Window]:
    """`windows` windows in all, spread evenly over the domains, at least one of each; the seed picks them."""
    domains: dict[str, list[Document]] = {}
    for document in documents:
        domains.setdefault(document.domain, []).append(document)
    drawn = []
    for index, (domain, members) in enumerate(domains.items()):
        share = max(1, (windows + len(domains) - 1 - index) // len(domains))
        lengths = (len(tokenizer(member.text, verbose=False)["input_ids"]) for member in members)
        held = sum(length // (prefix + continuation) for length in lengths)
        found = evaluation_windows(
            members, tokenizer, windows=max(share, held), prefix=prefix, continuation=continuation
        )
        drawn += random.Random(f"{seed}/{domain}").sample(found, share)
    return drawn


@torch.no_grad()
def both_protocols(
    model: Any, windows: Sequence[Window], drawn: Sequence[Window]
) -> Iterator[tuple[PreparedWindow, PreparedWindow]]:
    """Each window prepared for protocol R and for protocol S: the same prefix pass, another continuation."""
    for index, own in enumerate(prepare(model, windows)):
        others = [*drawn[index + 1 :], *drawn[:index]]
        elsewhere = next((window for window in others if window.domain != own.window.domain), others[0])
        window = replace(own.window, continuation=elsewhere.continuation)
        yield own, replace(own, window=window, reference=continuation_logits(model, own.cache, window))
