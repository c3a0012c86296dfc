"""The builtin text's files, and what they cannot hold."""

import subprocess
import sys
from typing import Any, get_args

import pytest

from kvalign.builtin_text import Part, builtin_files, check_builtin_text
from kvalign.config import ConversionConfig
from kvalign.errors import DatasetInvalid

NO_LIMIT = 2**31


def config(**sections: Any) -> ConversionConfig:
    return ConversionConfig.parse({"source": {"repo": "a/b"}, "target": {"repo": "c/d"}, **sections})


@pytest.mark.parametrize("part", get_args(Part))
def test_there_is_text_for_each_part(part: Part) -> None:
    assert sum(len(file.read_bytes()) for file in builtin_files(part)) > 100_000


def test_the_defaults_fit() -> None:
    check_builtin_text(config(), NO_LIMIT)


@pytest.mark.parametrize(
    ("sections", "limit", "named"),
    [
        ({"calibration": {"tokens": 4_194_304}}, NO_LIMIT, "calibration.tokens"),
        ({"validation": {"windows": 256}}, NO_LIMIT, "validation.windows"),
    ],
)
def test_what_no_tokenizer_can_cut_from_it_is_refused(sections: dict[str, Any], limit: int, named: str) -> None:
    with pytest.raises(DatasetInvalid, match=r"which has [\d,]+ bytes") as refused:
        check_builtin_text(config(**sections), limit)
    assert named in refused.value.message
    assert named in refused.value.remedy


def test_short_contexts_and_other_datasets_ask_for_less() -> None:
    check_builtin_text(config(validation={"windows": 256}), 128)
    check_builtin_text(config(calibration={"tokens": 4_194_304, "dataset": "a/texts"}), NO_LIMIT)


def test_no_torch_is_loaded() -> None:
    program = "import sys, kvalign.builtin_text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
