"""Chooses between the answers a route can give by the Accept header (RFC 9110, 12.5.1); knows no route."""

from collections.abc import Sequence


def preferred(accept: str, offered: Sequence[str]) -> str | None:
    """The offered media type that the header likes best; None if it likes none.

    Among equals one that is named wins over one that a wildcard covers, then the first offered.

    >>> preferred("application/json", ["text/event-stream", "application/json"])
    'application/json'
    >>> preferred("*/*", ["text/event-stream", "application/json"])
    'text/event-stream'
    >>> preferred("text/*;q=0.5, application/json", ["text/event-stream", "application/json"])
    'application/json'
    >>> preferred("image/png", ["text/event-stream"])
    """
    if not accept.strip():
        return offered[0]
    ranges = [_media_range(part) for part in accept.split(",")[:50]]
    liking = {kind: _quality(kind, ranges) for kind in offered}
    best = max(offered, key=lambda kind: liking[kind])
    return best if liking[best][0] > 0 else None


def _media_range(text: str) -> tuple[str, float]:
    kind, *parameters = (part.strip().lower() for part in text.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return kind, min(max(float(value), 0.0), 1.0)
            except ValueError:
                return kind, 0.0
    return kind, 1.0


def _quality(kind: str, ranges: Sequence[tuple[str, float]]) -> tuple[float, int]:
    """Quality and specificity of the most specific range that covers the type; (0, 0) when none does."""
    known = dict(reversed(ranges))
    for specificity, pattern in ((3, kind), (2, f"{kind.partition('/')[0]}/*"), (1, "*/*")):
        if pattern in known:
            return known[pattern], specificity
    return 0.0, 0
