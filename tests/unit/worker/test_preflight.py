"""The arithmetic and the reporting of preflight; what it asks the Hub is in tests/integration/test_hub_preflight.py."""

import pytest

from kvalign.config import ConversionConfig
from kvalign.errors import DiskFull, SourceNotFound
from kvalign.source import ModelSizes, WeightFacts
from worker.preflight import Check, Preflight, estimated

SMOLLM = ModelSizes(layers=30, hidden=576, query_heads=9, kv_heads=3, head_dim=64, vocabulary=49_152)
WEIGHTS = WeightFacts(("model.safetensors",), parameters=134_515_008, weight_bytes=269_060_552)


def config(**calibration: int) -> ConversionConfig:
    return ConversionConfig.parse({"source": {"repo": "a/b"}, "target": {"repo": "c/d"}, "calibration": calibration})


def test_estimate_of_a_small_model_fits_a_small_machine() -> None:
    estimate = estimated(WEIGHTS, SMOLLM, config(), 272_000_000)
    assert estimate.download_bytes == 272_000_000
    assert 4 * WEIGHTS.parameters < estimate.memory_bytes < 5e9
    assert estimate.download_bytes < estimate.disk_bytes < 4e9
    assert 60 < estimate.seconds < 7200


def test_estimate_grows_with_what_is_asked() -> None:
    small = estimated(WEIGHTS, SMOLLM, config(), 0)
    longer = estimated(WEIGHTS, SMOLLM, config(sequence_length=8192), 0)
    more = estimated(WEIGHTS, SMOLLM, config(tokens=1_048_576), 0)
    larger = estimated(WeightFacts((), 8_000_000_000, 0), SMOLLM, config(), 0)
    assert longer.memory_bytes > small.memory_bytes
    assert more.seconds > small.seconds
    assert more.memory_bytes == small.memory_bytes
    assert larger.memory_bytes > 32e9


def test_passed_raises_the_first_error_as_itself() -> None:
    failed = Preflight(
        (
            Check("account", True, "fine"),
            Check("source", False, "gone", "source_not_found", "look"),
            Check("disk", False, "full", "disk_full"),
        ),
        None,
        None,
    )
    assert isinstance(failed.first_error(), SourceNotFound)
    with pytest.raises(SourceNotFound, match="gone look"):
        failed.passed()


def test_no_failed_check_is_no_error() -> None:
    assert Preflight((Check("account", True, "fine"),), None, None).first_error() is None
    assert isinstance(Preflight((Check("disk", False, "full", "disk_full"),), None, None).first_error(), DiskFull)
