"""Whether a prefix has tokens left to code, by every length that can be the shortest."""

from typing import Any

import pytest

from kvalign.config import ConversionConfig
from kvalign.errors import ConfigInvalid
from kvalign.windows import WINDOW_TOKENS, check_room


def config(**sections: Any) -> ConversionConfig:
    return ConversionConfig.parse({"source": {"repo": "a/b"}, "target": {"repo": "c/d"}, **sections})


@pytest.mark.parametrize("limit", [None, 256, 131_072])
def test_the_defaults_leave_room(limit: int | None) -> None:
    check_room(config(), limit)


@pytest.mark.parametrize(
    ("recent", "length", "limit", "shortest"),
    [
        (92, 128, None, "calibration.sequence_length (128)"),
        (764, 4096, None, f"a validation window ({WINDOW_TOKENS})"),
        (188, 1024, 256, "the longest sequence of the model (256)"),
    ],
)
def test_the_shortest_length_decides(recent: int, length: int, limit: int | None, shortest: str) -> None:
    def of(recent_tokens: int) -> ConversionConfig:
        return config(codec={"recent_tokens": recent_tokens}, calibration={"sequence_length": length})

    check_room(of(recent - 1), limit)
    with pytest.raises(ConfigInvalid, match="Nothing would be coded") as refused:
        check_room(of(recent), limit)
    assert shortest in refused.value.message
