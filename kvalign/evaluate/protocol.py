"""Protocol R: code a prefix to bytes, decode it, and score the continuation on the decoded cache only.

One forward pass over a text measures nothing: the model attends to exact keys and values and stores them after.
Here every scored token has seen nothing but what the codec kept. Knows any coder of caches, not only ours.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvalign.accounting import PayloadSizes
from kvalign.capture import layer_tensors, run
from kvalign.evaluate.metrics import Divergence, divergence
from kvalign.text import Window
from kvalign.watch import Watched, watch

FLOOR_LIMIT = 1e-6


class CacheCoder(Protocol):
    """What a codec or a baseline looks like to the protocol."""

    def __call__(self, prepared: "PreparedWindow") -> tuple[DynamicCache, PayloadSizes]:
        """The prefix's cache after a round trip through stored bytes, and what they took.

        Of the window a coder may read the prefix and its last queries; the continuation is not its business.
        """
        ...


@dataclass(frozen=True)
class Trial:
    """One window, coded once."""

    domain: str
    divergence: Divergence
    sizes: PayloadSizes


@dataclass
class PreparedWindow:
    """One window with what the uncompressed model makes of it: computed once, scored many times.

    cache      after the prefix, uncompressed
    watched    what was kept of reading the prefix
    reference  [T, vocab] logits over the continuation
    floor_kl   KL of the uncompressed model against itself by the same route
    """

    window: Window
    cache: DynamicCache
    watched: Watched
    reference: Tensor
    floor_kl: float


# What a coder leaves of a window's prefix, ready to be read on; used once.
Coder = Callable[[PreparedWindow], Cache]


@torch.no_grad()
def prepare(model: Any, windows: Sequence[Window]) -> Iterator[PreparedWindow]:
    """One prefix pass and two continuation passes a window."""
    for window in windows:
        cache, watched = read_prefix(model, window.prefix)
        reference = continuation_logits(model, cache, window)
        again = continuation_logits(model, copied(cache), window)
        floor = divergence(reference, again, _targets(window)).kl.mean()
        yield PreparedWindow(window, cache, watched, reference, float(floor))


def spread(prepared: Sequence[PreparedWindow], count: int) -> Sequence[PreparedWindow]:
    """About so many of the windows, at even distances: less than twice as many, and all where there are few."""
    return prepared[:: max(1, len(prepared) // count)]


@torch.no_grad()
def read_prefix(model: Any, prefix: Tensor) -> tuple[DynamicCache, Watched]:
    """The cache after a prefix, [T] int64, and what was kept of reading it: one pass."""
    with watch(model) as watched:
        _, cache = run(model, prefix[None], logits_to_keep=1)
    return cache, watched


@torch.no_grad()
def try_coder(model: Any, prepared: PreparedWindow, coder: CacheCoder) -> Trial:
    """Score one coder on one window: one round trip and one continuation pass."""
    decoded, sizes = coder(prepared)
    measured = continuation_logits(model, decoded, prepared.window)
    scored = divergence(prepared.reference, measured, _targets(prepared.window))
    return Trial(prepared.window.domain, scored, sizes)


def continuation_logits(model: Any, cache: DynamicCache, window: Window) -> Tensor:
    """[T - 1, vocab]: logits at each continuation token but the last. The cache given is left as it was."""
    logits, _ = run(model, window.continuation[None, :-1], copied(cache))
    return logits[0]


def _targets(window: Window) -> Tensor:
    return window.continuation[1:]


def copied(cache: DynamicCache) -> DynamicCache:
    """A cache of its own with the same keys and values."""
    result = DynamicCache()
    for index, (keys, values) in enumerate(layer_tensors(cache)):
        result.update(keys.clone(), values.clone(), index)
    return result
