"""Turns what the routes answer into HTML: templates, how numbers and times read, the headers of a page.

Everything is escaped unless a template of ours says otherwise, and none does. Must not know what is shown.
"""

import math
from datetime import UTC, datetime
from typing import Any

from fastapi import Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from service.pages.assets import asset_url
from service.words import amount

PAGE_HEADERS = {
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
            "form-action 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
        ]
    ),
    # Not no-referrer: with that, browsers hide from us where our own forms come from.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Vary": "Cookie",
}


def page(template: str, *, status: int = 200, **shown: Any) -> Response:
    """A page of HTML, with the headers that every page has."""
    return Response(rendered(template, **shown), status_code=status, media_type="text/html", headers=dict(PAGE_HEADERS))


def rendered(template: str, **shown: Any) -> str:
    return _templates.get_template(template).render(shown, now=datetime.now(UTC))


def number(value: float | None, digits: int = 3) -> str:
    """Rounded to significant digits, with thousands apart.

    >>> [number(v) for v in (105.97, 1.9999, 0.019312, 27239636, 0.00001, None)]
    ['106', '2', '0.0193', '27,239,636', '0.00001', 'not a number']
    """
    if value is None or not math.isfinite(value):
        return "not a number"
    if abs(value) >= 10 ** (digits - 1) or value == round(value):
        return f"{value:,.0f}"
    places = min(10, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}".rstrip("0").rstrip(".")


def percent(share: float | None) -> str:
    return f"{100 * share:.1f} %" if share is not None and math.isfinite(share) else "not a number"


def size(count: float | None) -> str:
    """Bytes as people say them, in powers of ten.

    >>> size(27239636), size(1500), size(12)
    ('27.2 MB', '1.5 kB', '12 bytes')
    """
    if count is None:
        return "unknown"
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """A length of time in its two largest units.

    >>> [duration(s) for s in (0.4, 9.04, 75, 3725, 200_000)]
    ['0.4 s', '9.0 s', '1 min 15 s', '1 h 2 min', '2 d 7 h']
    """
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for name, length, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= length:
            rest = int(seconds % length // part)
            return f"{seconds // length:.0f} {name}" + (f" {rest} {small}" if rest else "")
    raise AssertionError("a minute or more has a unit")


def ago(then: datetime, now: datetime) -> str:
    """How long ago, roughly.

    >>> ago(datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, 15, 30, tzinfo=UTC))
    '3 h ago'
    """
    seconds = (now - then).total_seconds()
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {name} ago"
    return "just now" if seconds < 10 else f"{seconds // 10 * 10:.0f} s ago"


def clock(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def time_of_day(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%H:%M:%S")


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("service.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for form in (number, percent, size, duration, ago, clock, time_of_day):
        made.filters[form.__name__] = form
    made.filters["isoformat"] = datetime.isoformat
    made.globals.update(asset=asset_url, amount=amount)
    return made


_templates = _environment()
