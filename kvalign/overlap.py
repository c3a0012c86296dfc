"""Whether text to validate on was calibrated on: documents are compared by their runs of words. Knows no model.

A run is eight words behind one another, whatever case, spaces and punctuation stand between them (shingles: Broder
1997). A copy with words added, commas moved or half of it left out still holds most of its runs; two texts written
apart share next to none (docs/log.md).
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvalign.errors import DatasetInvalid
from kvalign.text import Document

RUN_WORDS = 8
# Of a document's runs. The builtin parts share 0.0 %, a copy with every twentieth word changed 66 % (docs/log.md).
LARGEST_SHARE = 0.1
# A shorter document may well be a phrase of another without being copied; only the whole of it tells.
_TELLING_CHARACTERS = 200
_MOST_RUNS = 20_000_000  # held at once: of more, every second is taken, or fourth, and so on
# Scripts without spaces: a character is a word.
_IDEOGRAMS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAMS}]|[^\W{_IDEOGRAMS}]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)


def refuse_overlap(calibration: Sequence[Document], validation: Sequence[Document]) -> None:
    """Raise DatasetInvalid naming the document when one to validate on was calibrated on, or stands in two domains.

    A tenth of its runs is enough; short documents only count as a whole.
    Cost: a pass over all words; 16 bytes for each run of the calibration text, up to 20 million.
    """
    _refuse_twice(validation)
    index = _Index.of(calibration)
    wholes = {tuple(_words(document.text)): document for document in calibration}
    for document in validation:
        words = _words(document.text)
        twin, share = wholes.get(tuple(words)) if words else None, 1.0
        if twin is None and len(document.text) >= _TELLING_CHARACTERS:
            nearest, share = index.nearest(words)
            twin = calibration[nearest] if share >= LARGEST_SHARE else None
        if twin is not None:
            raise DatasetInvalid(
                f"A document of '{document.domain}' is in the calibration text too, in '{twin.domain}':"
                f" {document.text.strip()[:80]!r}. {100 * share:.0f} % of its runs of {RUN_WORDS} words are there,"
                f" {100 * LARGEST_SHARE:.0f} % is the limit.",
                "Validate on text that was not calibrated on.",
            )


def _refuse_twice(validation: Sequence[Document]) -> None:
    """The same text under two domains would be judged twice, and look like two."""
    seen: dict[tuple[str, ...], Document] = {}
    for document in validation:
        words = tuple(_words(document.text))
        twin = seen.setdefault(words, document) if words else document
        if twin.domain != document.domain:
            raise DatasetInvalid(
                f"A document of '{document.domain}' to validate on is in '{twin.domain}' too:"
                f" {document.text.strip()[:80]!r}.",
                "Give each text in one domain only.",
            )


@dataclass(frozen=True)
class _Index:
    """Which document each run is in: runs [N] uint64, rising, and owners [N]. every: a power of two, of runs kept."""

    runs: NDArray[np.uint64]
    owners: NDArray[np.int64]
    every: int

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "_Index":
        found = [_runs(_words(document.text)) for document in documents]
        every = 1
        while sum(runs.size for runs in found) > _MOST_RUNS:
            every *= 2
            found = [_sample(runs, every) for runs in found]
        runs = np.concatenate([*found, np.zeros(0, np.uint64)])
        owners = np.repeat(np.arange(len(found)), [part.size for part in found])
        order = np.argsort(runs, kind="stable")
        return cls(runs[order], owners[order], every)

    def nearest(self, words: list[str]) -> tuple[int, float]:
        """Which share of these words' runs is in any document, and the document that holds most of them."""
        asked = _sample(_runs(words), self.every)
        at = np.searchsorted(self.runs, asked)
        known = at < self.runs.size
        known[known] = self.runs[at[known]] == asked[known]
        if not known.any():
            return 0, 0.0
        held = np.bincount(self.owners[at[known]])
        return int(held.argmax()), float(known.mean())


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _runs(words: list[str]) -> NDArray[np.uint64]:
    """A hash of each run of words, [N - 7]; equal within one process only."""
    hashes = np.fromiter((hash(word) for word in words), np.int64, len(words)).view(np.uint64)
    count = max(0, len(words) - RUN_WORDS + 1)
    found = np.zeros(count, np.uint64)
    for offset in range(RUN_WORDS):
        found = found * _BASE + hashes[offset : offset + count]
    return found


def _sample(runs: NDArray[np.uint64], every: int) -> NDArray[np.uint64]:
    """Those whose hash ends so: the same ones of equal texts."""
    return runs[(runs >> np.uint64(7)) % np.uint64(every) == 0]
