"""Other codecs beside ours: the same tokens in 16 bit, ratios of what is left, and KVTC at the ratio that ours has."""

from typing import Any

import pytest
import tiny_models
import torch

from kvalign.capture import capture, layer_tensors, measure_shape
from kvalign.evaluate.baselines import Baseline, Kivi, fit_kvtc
from kvalign.evaluate.comparison import keeping_recent, measure_baselines
from kvalign.evaluate.protocol import PreparedWindow, prepare
from kvalign.geometry import KINDS
from kvalign.statistics import Statistics, feature_groups
from kvalign.text import Window


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build("llama")


@pytest.fixture(scope="module")
def prepared(model: Any) -> list[PreparedWindow]:
    tokens = torch.randint(256, (2, 120), generator=torch.Generator().manual_seed(3))
    return list(prepare(model, [Window("noise", row[:100], row[100:]) for row in tokens]))


@pytest.mark.parametrize("recent", [0, 5, 96])
def test_the_newest_tokens_stay_as_they_were(model: Any, prepared: list[PreparedWindow], recent: int) -> None:
    shape = measure_shape(model)
    coder = Baseline(shape, Kivi(shape, 2), sink_tokens=4)
    cache, sizes = keeping_recent(coder, recent)(prepared[0])
    tokens = prepared[0].window.prefix.numel()
    kept = min(recent, tokens)
    assert (sizes.verbatim_tokens, sizes.body_tokens) == (min(tokens, kept + 4), max(0, tokens - kept - 4))
    for (keys, values), (own_keys, own_values) in zip(
        layer_tensors(cache), layer_tensors(prepared[0].cache), strict=True
    ):
        for found, own in ((keys, own_keys), (values, own_values)):
            assert found.shape == own.shape
            torch.testing.assert_close(found[:, :, tokens - kept :], own[:, :, tokens - kept :], rtol=2**-8, atol=1e-6)
    if not recent:
        plain_cache, plain_sizes = coder(prepared[0])
        assert plain_sizes == sizes
        assert all(
            torch.equal(a, b)
            for one, other in zip(layer_tensors(cache), layer_tensors(plain_cache), strict=True)
            for a, b in zip(one, other, strict=True)
        )


def test_finer_settings_are_nearer_and_larger(model: Any, prepared: list[PreparedWindow]) -> None:
    shape = measure_shape(model)
    found = measure_baselines(model, shape, prepared, None, ratio=20, sink_tokens=4, recent_tokens=8)
    assert [(item.name, item.setting) for item in found] == [
        ("fp8", "E4M3"),
        *(("KIVI-style", f"{bits} bit") for bits in (4, 3, 2)),
    ]
    kl = {item.setting: item.summary.kl_mean for item in found}
    ratio = {item.setting: item.ratio for item in found}
    assert kl["E4M3"] < kl["4 bit"] < kl["3 bit"] < kl["2 bit"]
    assert ratio["4 bit"] < ratio["3 bit"] < ratio["2 bit"]
    assert ratio["E4M3"] == pytest.approx(2, abs=0.3)
    assert all(item.summary.windows == 2 for item in found)


def test_kvtc_is_tried_as_published_and_at_our_ratio(model: Any, prepared: list[PreparedWindow]) -> None:
    shape = measure_shape(model)
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(256, (150,), generator=generator) for _ in range(4)]
    # The first layer is in no group, as where it is recomputed; KVTC's basis holds it all the same.
    statistics = Statistics(feature_groups(shape.geometry, first=1), shape.geometry)
    *fitting, aside = capture(model, shape, iter(sequences))
    for captured in fitting:
        statistics.update({kind: captured.of(kind) for kind in KINDS}, captured.features)
    kvtc = fit_kvtc(statistics.whole(), shape, [aside], smallest_ratio=8)
    found = measure_baselines(model, shape, prepared, kvtc, ratio=30, sink_tokens=4, recent_tokens=8)
    ours = [item for item in found if item.name == "KVTC"]
    assert len(ours) == 2
    assert ours[0].setting.startswith("16 times nominally, values x ")
    assert ours[1].setting.startswith("27.27 times nominally, values x ")
    assert ours[0].ratio < ours[1].ratio
    assert ours[0].artifact_bytes > 0
