"""Pictures of a report card: what the axes say, what the files hold, and shapes at their smallest."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import image as images
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvalign.geometry import KINDS
from kvalign.report import figures
from kvalign.report.figures import (
    ActivationMaps,
    Curve,
    Drawn,
    HeadMaps,
    Point,
    PositionSeries,
)


def head_maps(heads: int, seed: int = 0) -> HeadMaps:
    rng = np.random.default_rng(seed)
    before, after = (rng.uniform(-0.2, 1, (heads, heads)).astype(np.float32) for _ in range(2))
    return HeadMaps(before, after)


def activation_maps(heads: int, channels: int, seed: int = 0) -> ActivationMaps:
    rng = np.random.default_rng(seed)
    absolute, variance = (rng.uniform(0, 1, (heads, channels)).astype(np.float32) for _ in range(2))
    return ActivationMaps(absolute, variance)


def point(ratio: float, kl: float, label: str = "step 0") -> Point:
    return Point(ratio, kl, kl / 1.3, kl * 1.3, label)


CHOSEN = point(11, 0.01, "recommended")
CURVES = (
    Curve("kvalign", (point(30, 0.05), CHOSEN, point(5, 0.002))),
    Curve("KVTC", (point(4, 0.004), point(9, 0.03))),
    Curve("fp8", (point(2, 0.0), point(2.1, 0.1))),
)


def series(tokens: int, name: str = "R", seed: int = 0) -> PositionSeries:
    mean = np.random.default_rng(seed).lognormal(-5, 1, tokens)
    return PositionSeries(name, np.arange(tokens) + 100, mean, mean / 2, mean * 2)


def pixels(folder: Path, drawn: Drawn) -> np.ndarray:
    found = images.imread(folder / drawn.image)
    height, width, _ = found.shape
    assert 1000 <= width <= 1400
    assert 400 <= height <= 1500
    return found[..., :3]


def arrays(folder: Path, drawn: Drawn) -> dict[str, np.ndarray]:
    with np.load(folder / drawn.data, allow_pickle=False) as found:
        return dict(found)


def draw_all(folder: Path) -> list[Drawn]:
    bits = {kind: np.linspace(8, 0, 40) for kind in KINDS}
    return [
        figures.head_alignment(folder, {kind: head_maps(12) for kind in KINDS}),
        figures.activations(folder, {kind: activation_maps(12, 64) for kind in KINDS}),
        figures.rate_distortion(folder, CURVES, CHOSEN),
        figures.bits(folder, bits, {kind: np.array([2.0, 3, 4]) for kind in KINDS}, [3, 7, 11]),
        figures.sensitivity(folder, {kind: np.full(8, 1 / 16) for kind in KINDS}),
        figures.kl_by_position(folder, [series(200), series(40, "C")]),
    ]


def test_files_lie_where_the_record_says_and_hold_what_it_says(tmp_path: Path) -> None:
    for drawn in draw_all(tmp_path):
        assert pixels(tmp_path, drawn).std() > 0.01
        for name, digest in ((drawn.image, drawn.image_sha256), (drawn.data, drawn.data_sha256)):
            assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
        assert drawn.image == f"{drawn.name}.png"
        assert drawn.caption.endswith(".")
        assert "\n" not in drawn.caption
    assert len(list(tmp_path.iterdir())) == 12


def test_equal_data_gives_equal_bytes_at_another_time_and_with_another_matplotlibrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = draw_all(tmp_path)
    later = time.time() + 10_000_000
    monkeypatch.setattr(time, "time", lambda: later)
    monkeypatch.setitem(os.environ, "TZ", "Pacific/Auckland")
    with mpl.rc_context({"font.size": 30, "image.cmap": "gray", "axes.facecolor": "red"}):
        assert draw_all(tmp_path) == first
        assert mpl.rcParams["font.size"] == 30


def test_an_images_metadata_names_no_program_and_no_date(tmp_path: Path) -> None:
    drawn = figures.rate_distortion(tmp_path, CURVES, CHOSEN)
    data = (tmp_path / drawn.image).read_bytes()
    assert not any(chunk in data for chunk in (b"tEXt", b"iTXt", b"zTXt", b"tIME"))


def test_matrices_read_back_equal_with_what_is_drawn_otherwise(tmp_path: Path) -> None:
    maps = head_maps(5)
    maps.after[1, 2] = np.nan
    drawn = figures.head_alignment(tmp_path, {"values": maps})
    found = arrays(tmp_path, drawn)
    assert list(found) == ["values_before", "values_after"]
    assert found["values_before"].dtype == np.float32
    np.testing.assert_array_equal(found["values_before"], maps.before)
    np.testing.assert_array_equal(found["values_after"], maps.after)
    assert found["values_before"].min() < 0
    assert "drawn as 0" in drawn.caption
    assert "grey cells" in drawn.caption
    shapes = activation_maps(3, 20)
    found = arrays(tmp_path, figures.activations(tmp_path, {"keys": shapes}))
    np.testing.assert_array_equal(found["keys_absolute"], shapes.absolute)
    np.testing.assert_array_equal(found["keys_variance"], shapes.variance)


def test_the_order_of_memory_and_of_the_mapping_does_not_change_the_bytes(tmp_path: Path) -> None:
    keys, values = head_maps(6), head_maps(6, seed=1)
    turned = HeadMaps(np.asfortranarray(keys.before), keys.after.astype(np.float64))
    first = figures.head_alignment(tmp_path, {"keys": keys, "values": values})
    assert figures.head_alignment(tmp_path, {"values": values, "keys": turned}) == first


def test_curves_read_back_equal(tmp_path: Path) -> None:
    found = json.loads((tmp_path / figures.rate_distortion(tmp_path, CURVES, CHOSEN).data).read_text())
    assert [Curve(curve["name"], tuple(Point(**one) for one in curve["points"])) for curve in found["curves"]] == list(
        CURVES
    )
    assert Point(**found["chosen"]) == CHOSEN

    bits = {"keys": np.array([3.5, 1.25], np.float32)}
    found = json.loads((tmp_path / figures.bits(tmp_path, bits, {"values": np.array([2.5])}, [4]).data).read_text())
    assert found == {"at_rest": {"keys": [3.5, 1.25]}, "resident": {"values": [2.5]}, "layers": [4]}

    one = series(3)
    (found,) = json.loads((tmp_path / figures.kl_by_position(tmp_path, [one]).data).read_text())
    assert (found["name"], found["positions"]) == ("R", [100, 101, 102])
    assert [found[column] for column in ("mean", "low", "high")] == [x.tolist() for x in (one.mean, one.low, one.high)]

    shares = {"keys": np.array([0.25, 0.75])}
    assert json.loads((tmp_path / figures.sensitivity(tmp_path, shares).data).read_text()) == {"keys": [0.25, 0.75]}


def test_axes_of_the_head_maps() -> None:
    figure = figures._head_alignment_figure({kind: head_maps(90) for kind in KINDS})
    *panels, bar = figure.axes
    assert [axis.get_title() for axis in panels] == ["Before Alignment", "After Alignment"] * 2
    assert [text.get_text() for text in figure.texts] == ["(a) Keys", "(b) Values"]
    assert bar.get_ylabel() == "Cosine Similarity"
    assert bar.get_ylim() == (0, 1)
    for axis in panels:
        assert axis.get_xlabel() == axis.get_ylabel() == "Head Index"
        assert axis.get_xlim() == (0.5, 90.5)
        assert axis.get_ylim() == (90.5, 0.5)
        assert list(axis.get_xticks()) == list(axis.get_yticks()) == [1, 16, 32, 48, 64, 80]
        assert axis.images[0].get_clim() == (0, 1)
        assert axis.images[0].get_interpolation() == "nearest"


def test_one_kind_is_one_row_under_its_own_name() -> None:
    figure = figures._head_alignment_figure({"values": head_maps(4)})
    assert [text.get_text() for text in figure.texts] == ["(a) Values"]
    assert len(figure.axes) == 3


def test_axes_of_the_activation_maps() -> None:
    figure = figures._activations_figure({"keys": activation_maps(90, 64), "values": activation_maps(90, 8)})
    keys, _, values, _, bar = figure.axes
    assert [axis.get_title().splitlines()[0] for axis in (keys, values)] == ["Absolute Activation"] * 2
    assert "divided by the head's largest" in keys.get_title()
    assert (keys.get_xlabel(), keys.get_ylabel()) == ("Channel Index", "Head Index")
    assert list(keys.get_xticks()) == [1, 16, 32, 48, 64]
    assert list(values.get_xticks()) == list(range(1, 9))
    assert keys.get_ylim() == (90.5, 0.5)
    assert bar.get_ylim() == (0, 1)


@pytest.mark.parametrize(
    ("count", "ticks"),
    [
        (1, [1]),
        (2, [1, 2]),
        (10, [1, 2, 4, 6, 8, 10]),
        (90, [1, 16, 32, 48, 64, 80]),
        (256, [1, 32, 64, 96, 128, 160, 192, 224, 256]),
        (320, [1, 50, 100, 150, 200, 250, 300]),
    ],
)
def test_ticks(count: int, ticks: list[int]) -> None:
    assert figures._ticks(count) == ticks


def test_there_are_four_to_nine_ticks_and_the_last_is_the_last_round_one() -> None:
    for count in range(4, 5000):
        ticks = figures._ticks(count)
        assert 4 <= len(ticks) <= 9
        assert count - ticks[-1] < ticks[-1] - ticks[-2] + (len(ticks) == 2)


@pytest.mark.parametrize("colours", [figures._SIMILARITY, figures._ACTIVATION])
def test_maps_rise_in_grey_and_hold_no_grey(colours: Any) -> None:
    shades = colours(np.arange(colours.N))[:, :3]
    assert (np.diff(luminance(shades)) > 0).all()
    assert np.abs(shades - colours(np.ma.masked)[:3]).max(axis=1).min() > 0.1


def luminance(shades: np.ndarray) -> np.ndarray:
    linear = np.where(shades <= 0.04045, shades / 12.92, ((shades + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def holds(picture: np.ndarray, colour: tuple[float, float, float], *, least: int = 1000) -> bool:
    return int((np.abs(picture - np.array(colour)).max(axis=2) < 0.02).sum()) >= least


def test_nothing_is_black_and_one_is_light_yellow_and_missing_is_grey(tmp_path: Path) -> None:
    found = np.array([[1, -0.9], [0, np.nan]], np.float32)
    picture = pixels(tmp_path, figures.head_alignment(tmp_path, {"keys": HeadMaps(found, found)}))
    panel = picture[100:540, 130:590]  # inside the first panel's cells
    assert holds(panel, (0, 0, 0.02), least=60_000)  # two cells: 0 and what lies below it
    assert holds(panel, (0.988, 1, 0.645), least=30_000)
    assert holds(panel, (0.604, 0.604, 0.604), least=30_000)

    found = np.array([[1, 0]], np.float32)
    picture = pixels(tmp_path, figures.activations(tmp_path, {"keys": ActivationMaps(found, found)}))
    red, green, blue = figures._ACTIVATION(0.0)[:3]
    assert blue > 0.2 > red > green
    assert holds(picture, (red, green, blue))
    assert holds(picture, (0.987, 0.991, 0.75))


def test_row_one_is_at_the_top_and_column_one_at_the_left() -> None:
    found = np.zeros((4, 4), np.float32)
    found[0, 3] = 1
    figure = figures._head_alignment_figure({"keys": HeadMaps(found, found)})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axis = figure.axes[0]
    x, y = axis.transData.transform((4, 1))
    shades = np.asarray(canvas.buffer_rgba())
    np.testing.assert_allclose(shades[shades.shape[0] - int(y), int(x)][:3], (252, 255, 164), atol=2)


def test_axes_of_the_rate_distortion_curve() -> None:
    figure = figures._rate_distortion_figure(CURVES, CHOSEN)
    (axis,) = figure.axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert "Ratio of coded tokens" in axis.get_xlabel()
    assert axis.get_ylabel() == "Mean KL (nats a token)"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["2", "4", "8", "16", "32"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["kvalign", "KVTC", "fp8"]
    ours, *baselines, ring = axis.lines
    assert list(ours.get_xdata()) == [5, 11, 30]
    assert len({line.get_marker() for line in baselines}) == len({line.get_color() for line in baselines}) == 2
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (11, 0.01)
    assert axis.texts[0].get_text() == "recommended"
    # No KL at all is drawn at the lower edge, not lost.
    assert min(baselines[1].get_ydata()) >= axis.get_ylim()[0] > 0
    assert min(baselines[1].get_ydata()) < 0.002


def test_what_is_clamped_is_said(tmp_path: Path) -> None:
    assert "is drawn there" in figures.rate_distortion(tmp_path, CURVES, CHOSEN).caption
    assert "is drawn there" not in figures.rate_distortion(tmp_path, CURVES[:2], CHOSEN).caption


@pytest.mark.parametrize("label", ["step 3 $x_1$", "50 % of_it \\frac{"])
def test_labels_are_text_and_no_formula(tmp_path: Path, label: str) -> None:
    figures.rate_distortion(tmp_path, [Curve(label, (point(3, 0.1),))], point(3, 0.1, label))


def test_axes_of_bits_and_sensitivity() -> None:
    at_rest = {kind: np.linspace(9, 0, 300) for kind in KINDS}
    figure = figures._bits_figure(at_rest, {"keys": np.array([2.0, 3])}, [5, 11])
    left, right = figure.axes
    assert left.get_xscale() == "log"
    assert left.lines[0].get_xdata()[0] == 1
    assert list(right.lines[0].get_xdata()) == [5, 11]
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["keys", "values"]
    assert len(figures._bits_figure(at_rest, {}, []).axes) == 1

    (axis,) = figures._sensitivity_figure({"keys": np.array([0.1, 0.3]), "values": np.array([0.2, 0.4])}).axes
    assert sum(bar.get_height() for bar in axis.patches) == pytest.approx(100)
    assert "%" in axis.get_ylabel()


def test_one_layer_and_one_position_have_whole_ticks() -> None:
    (bars,) = figures._sensitivity_figure({"keys": np.ones(1)}).axes
    (points,) = figures._kl_by_position_figure([series(1)]).axes
    for axis, only in ((bars, 0), (points, 100)):
        low, high = axis.get_xlim()
        ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert only in ticks
        assert all(tick == round(tick) for tick in ticks)


def test_running_mean_and_common_scale_of_positions() -> None:
    long, short = series(64), series(15, "C", seed=1)
    first, second = figures._kl_by_position_figure([long, short]).axes
    points, thick = first.lines
    np.testing.assert_array_equal(points.get_xdata(), long.positions)
    assert thick.get_xdata()[0] == pytest.approx(long.positions[:16].mean())
    assert thick.get_ydata()[0] == pytest.approx(long.mean[:16].mean())
    assert len(thick.get_ydata()) == 64 - 15
    assert len(second.lines) == 1
    assert first.get_ylim() == second.get_ylim()
    assert (first.get_title(), second.get_title()) == ("R", "C")


def test_the_smallest_of_everything_is_drawn(tmp_path: Path) -> None:
    one = np.ones((1, 1), np.float32)
    alone, nothing = point(3, 0.1, "only"), Point(1, 0, 0, 0, "verbatim")
    for drawn in [
        figures.head_alignment(tmp_path, {"keys": HeadMaps(one, one)}),
        figures.head_alignment(tmp_path, {"keys": HeadMaps(one * np.nan, one)}),
        figures.activations(tmp_path, {"values": ActivationMaps(one, one * 0)}),
        figures.rate_distortion(tmp_path, [Curve("kvalign", (alone,))], alone),
        figures.rate_distortion(tmp_path, [Curve("kvalign", ()), Curve("KVTC", ())], nothing),
        figures.rate_distortion(tmp_path, [], nothing),
        figures.bits(tmp_path, {"keys": np.zeros(1)}, {"keys": np.zeros(1)}, [0]),
        figures.bits(tmp_path, {"values": np.ones(1)}, {}, []),
        figures.sensitivity(tmp_path, {"keys": np.array([0.4]), "values": np.array([0.6])}),
        figures.kl_by_position(tmp_path, [series(1)]),
        figures.kl_by_position(tmp_path, [PositionSeries("none", np.arange(20), *[np.zeros(20)] * 3)]),
    ]:
        pixels(tmp_path, drawn)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: HeadMaps(np.ones((2, 3)), np.ones((2, 3))),
        lambda: HeadMaps(np.ones((2, 2)), np.ones((3, 3))),
        lambda: HeadMaps(np.ones((2, 2)), np.full((2, 2), 1.5)),
        lambda: ActivationMaps(np.ones((2, 3)), np.ones((2, 4))),
        lambda: ActivationMaps(np.ones((2, 3)), np.full((2, 3), -0.5)),
        lambda: Point(2, float("nan"), 0, 1, ""),
        lambda: Point(0, 1, 1, 1, ""),
        lambda: PositionSeries("", np.arange(3), np.ones(3), np.ones(3), np.full(3, np.inf)),
        lambda: PositionSeries("", np.array([0, 2, 1]), np.ones(3), np.ones(3), np.ones(3)),
        lambda: figures._sensitivity_figure({"keys": np.array([0.5, 0.1])}),
        lambda: figures._bits_figure({"keys": np.ones(3)}, {"keys": np.ones(3)}, [1, 2]),
        lambda: figures._head_alignment_figure({}),
    ],
)
def test_what_callers_must_hold(wrong: Any) -> None:
    with pytest.raises(AssertionError):
        wrong()


def test_no_state_of_pyplot() -> None:
    assert isinstance(figures._rate_distortion_figure(CURVES, CHOSEN), Figure)
    assert "pyplot" not in Path(figures.__file__).read_text().replace("no state of pyplot", "")
