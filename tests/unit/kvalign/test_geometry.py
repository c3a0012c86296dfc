"""Shapes of caches and the split of their tokens, against hand counts."""

import json

from hypothesis import given
from hypothesis import strategies as st

from kvalign.geometry import KINDS, Geometry, LayerGeometry, TokenSplit

UNEVEN = Geometry((LayerGeometry(2, 8, 4), LayerGeometry(1, 16, 16), LayerGeometry(3, 2, 6)))


def test_widths_and_offsets() -> None:
    assert UNEVEN.offsets("keys") == [0, 16, 32, 38]
    assert UNEVEN.offsets("values") == [0, 8, 24, 42]
    assert [UNEVEN.width(kind) for kind in KINDS] == [38, 42]
    assert UNEVEN.values_per_token == 80


def test_json_round_trip() -> None:
    assert Geometry.from_json(json.loads(json.dumps(UNEVEN.to_json()))) == UNEVEN


@given(st.integers(0, 5000), st.integers(0, 64), st.integers(0, 4096))
def test_a_split_covers_every_token_once_sinks_first(tokens: int, sink: int, recent: int) -> None:
    split = TokenSplit.of(tokens, sink, recent)
    assert split.sink + split.body + split.recent == tokens
    assert min(split.sink, split.body, split.recent) >= 0
    assert split.verbatim == split.sink + split.recent
    assert split.sink == min(tokens, sink)
    # A token is coded only when both ends have all that they keep.
    assert split.body == 0 or (split.sink, split.recent) == (sink, recent)
