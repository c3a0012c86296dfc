"""How long the stretches of text are that a codec is tuned and judged on. Pure integers; knows no text and no model."""

from kvalign.config import ConversionConfig
from kvalign.errors import ConfigInvalid

WINDOW_TOKENS = 1024


def prefix_tokens(window_tokens: int) -> int:
    """How much of a window is coded; the rest is scored on what came back.

    >>> prefix_tokens(1024)
    768
    """
    return window_tokens * 3 // 4


def check_room(config: ConversionConfig, position_limit: int | None) -> None:
    """Refuse sinks and recent tokens that fill a whole prefix: nothing would be coded, and there is no ratio.

    position_limit  the longest sequence that the model takes; None when it has no limit
    Raises ConfigInvalid.
    """
    kept = config.codec.sink_tokens + config.codec.recent_tokens
    lengths = {
        "calibration.sequence_length": config.calibration.sequence_length,
        "a validation window": WINDOW_TOKENS,
        "the longest sequence of the model": position_limit or WINDOW_TOKENS,
    }
    shortest = min(lengths, key=lambda name: lengths[name])
    prefix = prefix_tokens(lengths[shortest])
    if kept >= prefix:
        raise ConfigInvalid(
            f"codec.sink_tokens + codec.recent_tokens is {kept}, and prefixes have {prefix} tokens: three quarters of"
            f" {shortest} ({lengths[shortest]}). Nothing would be coded.",
            "Lower codec.recent_tokens, or raise calibration.sequence_length.",
        )
