"""Which of two answers an Accept header asks for."""

import pytest

from service.negotiation import preferred

OFFERED = ["text/event-stream", "application/json"]


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", "text/event-stream"),
        ("*/*", "text/event-stream"),
        ("text/event-stream", "text/event-stream"),
        ("application/json", "application/json"),
        ("application/json, text/plain, */*", "application/json"),
        ("application/json, */*;q=0.5", "application/json"),
        ("application/*", "application/json"),
        ("TEXT/*; q=0.2 , application/json ;q=0.1", "text/event-stream"),
        ("text/event-stream;q=0, */*", "application/json"),
        ("image/png", None),
        ("*/*;q=nonsense", None),
        (";;;,,,", None),
    ],
)
def test_preferred(accept: str, chosen: str | None) -> None:
    assert preferred(accept, OFFERED) == chosen
