"""A claim of a report beside what it should be. Knows no report and measures nothing."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MISSING = "(missing)"
# What adding float32 numbers in another order costs.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Claim:
    """One claim, measured again. tolerance is absolute, around what was measured; None: exact.

    skipped  it is in the report and was not measured again: it neither holds nor fails
    """

    name: str
    claimed: Any
    measured: Any
    tolerance: float | None
    skipped: bool = False

    @property
    def holds(self) -> bool:
        if self.skipped:
            return True
        if self.tolerance is None or not (_is_number(self.claimed) and _is_number(self.measured)):
            return bool(self.claimed == self.measured)
        return abs(self.claimed - self.measured) <= self.tolerance


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def known(value: float | None) -> float | None:
    """As a report has it: null where it is no number."""
    return value if value is not None and math.isfinite(value) else None


def close(name: str, claimed: Any, measured: Any, relative: float = ROUNDING) -> Claim:
    """Equal but for rounding."""
    numeric = isinstance(measured, float) and _is_number(measured)
    return Claim(name, claimed, measured, max(relative * abs(measured), 1e-12) if numeric else None)


def at_most(name: str, claimed: float | None, limit: float | None) -> Claim:
    """The claim is a number up to the limit."""
    if claimed is None or limit is None or claimed <= limit * (1 + ROUNDING):
        return Claim(name, claimed, claimed, None)
    return Claim(name, claimed, f"at most {limit:g}", None)


def each(name: str, claimed: Any, measured: Any, relative: float = 1e-9) -> Iterator[Claim]:
    """A claim for every leaf of what was measured, and for what is claimed beside it."""
    if isinstance(measured, Mapping) and isinstance(claimed, Mapping):
        for key in dict.fromkeys((*measured, *claimed)):
            yield from each(f"{name}.{key}", claimed.get(key, MISSING), measured.get(key, MISSING), relative)
    elif isinstance(measured, list) and isinstance(claimed, list) and len(measured) == len(claimed):
        for index, (one, other) in enumerate(zip(claimed, measured, strict=True)):
            yield from each(f"{name}.{index}", one, other, relative)
    else:
        yield close(name, claimed, measured, relative)
