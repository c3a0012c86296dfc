"""Pictures of heads: of every layer of a model, of channels against plain sums, and of widths that differ."""

import pytest
import tiny_models
import torch

from kvalign.align.channels import ChannelSums
from kvalign.capture import capture, measure_shape
from kvalign.evaluate import heads
from kvalign.evaluate.heads import Columns, measure_heads
from kvalign.geometry import KINDS, Geometry, LayerGeometry


def test_channels_are_those_of_plain_sums() -> None:
    x = torch.randn(90, 3, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 2, 5) + 1000
    x[:, 2] = 0
    sums = ChannelSums(3, 5)
    for part in x.split(20):
        sums.update(part)
    absolute, variance = x.abs().mean(0)[:2], x.double().var(0, correction=0)[:2]
    torch.testing.assert_close(sums.absolute()[:2], absolute / absolute.amax(1, keepdim=True))
    torch.testing.assert_close(sums.variance()[:2], (variance / variance.amax(1, keepdim=True)).float())
    assert not sums.absolute()[2].any()
    assert not sums.variance()[2].any()


def test_pictures_are_of_all_layers_and_do_not_depend_on_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama")
    shape = measure_shape(model)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(256, (40,), generator=generator) for _ in range(4)]
    ways = [lambda part=part: capture(model, shape, iter(part)) for part in (texts[:2], texts[2:])]
    found = measure_heads(shape.geometry, *ways, sink_tokens=4)
    assert set(found) == set(KINDS)
    for kind in KINDS:
        assert found[kind].before.shape == found[kind].after.shape == (4, 4)
        assert found[kind].absolute.shape == found[kind].variance.shape == (4, 8)
        assert found[kind].left_out == 0
        captured = torch.cat([item.of(kind)[4:] for item in capture(model, shape, iter(texts[2:]))])
        tokens = captured.unflatten(1, (4, 8))
        units = torch.nn.functional.normalize(tokens, dim=-1)
        torch.testing.assert_close(
            found[kind].before, torch.einsum("tid,tjd->ij", units, units) / len(units), rtol=0, atol=1e-5
        )
    monkeypatch.setattr(heads, "_TOGETHER_BYTES", 0)
    apart = measure_heads(shape.geometry, *ways, sink_tokens=4)
    for kind in KINDS:
        torch.testing.assert_close(apart[kind].after, found[kind].after)


def test_heads_of_another_width_are_left_out_and_counted() -> None:
    geometry = Geometry((LayerGeometry(2, 6, 4), LayerGeometry(1, 8, 4), LayerGeometry(3, 6, 4)))
    columns = Columns.of(geometry, "keys")
    assert (columns.heads, columns.dim, columns.left_out) == (5, 6, 1)
    matrix = torch.arange(38.0).expand(2, 38)
    assert columns.take(matrix)[0, 2].tolist() == [20, 21, 22, 23, 24, 25]  # the first head of the third layer
    assert Columns.of(geometry, "values").left_out == 0


def test_of_very_many_heads_some_layers_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry((LayerGeometry(2, 4, 4),) * 5)
    monkeypatch.setattr(heads, "MOST_NUMBERS", 16)
    columns = Columns.of(geometry, "keys")
    assert columns.slices == (slice(0, 8), slice(24, 32))
    assert (columns.heads, columns.left_out) == (4, 6)
