"""The text that comes with kvalign, as files, and whether it can be enough. Must not import torch: the API asks."""

from importlib import resources
from importlib.resources.abc import Traversable
from typing import Literal

from kvalign.config import BUILTIN_DATASET, ConversionConfig
from kvalign.errors import DatasetInvalid
from kvalign.windows import WINDOW_TOKENS

Part = Literal["calibration", "validation"]


def builtin_files(part: Part) -> list[Traversable]:
    """One .txt file for each domain, by name."""
    folder = resources.files("kvalign").joinpath("corpus", part)
    return sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)


def check_builtin_text(config: ConversionConfig, position_limit: int) -> None:
    """Refuse what the builtin text cannot hold under any tokenizer, since no token is shorter than a byte.

    position_limit  the longest sequence that the model takes
    Raises DatasetInvalid.
    """
    validation_tokens = config.validation.windows * min(WINDOW_TOKENS, position_limit)
    if config.calibration.dataset == BUILTIN_DATASET:
        _check_bytes("calibration", config.calibration.tokens, "calibration.tokens")
    if config.validation.dataset == BUILTIN_DATASET:
        _check_bytes("validation", validation_tokens, "validation.windows")


def _check_bytes(part: Part, tokens: int, setting: str) -> None:
    held_bytes = sum(len(file.read_bytes()) for file in builtin_files(part))
    if tokens > held_bytes:
        raise DatasetInvalid(
            f"{setting} asks for {tokens:,} tokens of the builtin {part} text, which has {held_bytes:,} bytes.",
            f"Lower {setting}, or name a larger dataset.",
        )
