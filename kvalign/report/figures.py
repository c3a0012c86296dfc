"""Pictures of a report card, drawn from arrays, each with its data beside it; knows no model and no codec.

Equal data gives equal bytes on one version of matplotlib: no date, no name of a program, no state of pyplot.
"""

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from kvalign.geometry import KINDS, Kind
from kvalign.report.structure import counted

Array = NDArray[np.floating[Any]]

_WIDTH_IN = 9.0
_DPI = 150
_STYLE = {
    "font.size": 12,
    "axes.titlesize": 12,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.frameon": False,
    "text.parse_math": False,
}

_MISSING = "#9a9a9a"  # neither map holds a grey
_SIMILARITY = mpl.colormaps["inferno"].with_extremes(bad=_MISSING)
# From dark purple on, so that 0 is not black; the map's own 216 colours, none twice.
_ACTIVATION = ListedColormap(mpl.colormaps["magma"](np.arange(40, 256)), "activation").with_extremes(bad=_MISSING)

# Okabe and Ito's colours, told apart in grey by marker and dash as well.
_OURS = {"color": "#000000", "marker": "o", "linestyle": "-", "linewidth": 2.4, "markersize": 6, "zorder": 4}
_BASELINES: tuple[dict[str, Any], ...] = (
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#0072B2", "marker": "^", "linestyle": "-."},
    {"color": "#E69F00", "marker": "D", "linestyle": ":"},
    {"color": "#009E73", "marker": "v", "linestyle": (0, (5, 1))},
    {"color": "#CC79A7", "marker": "P", "linestyle": (0, (3, 1, 1, 1, 1, 1))},
    {"color": "#56B4E9", "marker": "X", "linestyle": (0, (1, 1))},
)
_BY_KIND: dict[Kind, dict[str, Any]] = {
    "keys": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "values": {"color": "#E69F00", "marker": "s", "linestyle": "--"},
}

_SPACINGS = (1, 2, 4, 8, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 1000, 2000, 5000, 10000)
_MOST_TICKS = 9
_CHANNEL_SPACING = 16

_LEAST_KL = 1e-7  # nats; below what float32 logits can tell from nothing
_MOST_DECADES = 5
_RUNNING = 16


@dataclass(frozen=True)
class Drawn:
    """One picture on disk and the data it was drawn from; file names are relative to the folder."""

    name: str
    image: str
    data: str
    image_sha256: str
    data_sha256: str
    caption: str


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """Mean token-wise cosine similarity of every two heads, [N, N] float32; NaN where it is not known."""

    before: Array
    after: Array

    def __post_init__(self) -> None:
        assert self.before.ndim == 2
        assert self.before.shape == self.after.shape == self.before.shape[::-1]
        assert self.before.size
        for found in (self.before, self.after):
            assert not (np.abs(found) > 1.001).any(), "a cosine lies between -1 and 1"


@dataclass(frozen=True, eq=False)
class ActivationMaps:
    """Head by channel, [N, D] float32 from 0 to 1, each row divided by the head's largest; NaN where not known."""

    absolute: Array
    variance: Array

    def __post_init__(self) -> None:
        assert self.absolute.ndim == 2
        assert self.absolute.shape == self.variance.shape
        assert self.absolute.size
        for found in (self.absolute, self.variance):
            assert not ((found < 0) | (found > 1.001)).any(), "rows are divided by their largest"


@dataclass(frozen=True)
class Point:
    """One setting: bfloat16 bytes over coded bytes, and mean KL with its interval in nats a token."""

    ratio: float
    kl: float
    kl_low: float
    kl_high: float
    label: str

    def __post_init__(self) -> None:
        assert self.ratio > 0
        assert all(map(math.isfinite, (self.ratio, self.kl, self.kl_low, self.kl_high)))


@dataclass(frozen=True)
class Curve:
    """The settings of one codec; the one of the name `kvalign` is drawn as ours, every other as a baseline."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, eq=False)
class PositionSeries:
    """KL in nats a token by position, all arrays [T], positions rising."""

    name: str
    positions: NDArray[Any]
    mean: Array
    low: Array
    high: Array

    def __post_init__(self) -> None:
        assert self.positions.ndim == 1
        assert self.positions.size
        assert (np.diff(self.positions) > 0).all()
        for found in (self.mean, self.low, self.high):
            assert found.shape == self.positions.shape
            assert np.isfinite(found).all()


@contextmanager
def _style() -> Iterator[None]:
    """matplotlib's own defaults and ours on top, whatever the user's matplotlibrc says."""
    with style.context(["default", _STYLE]):
        yield


def head_alignment(folder: Path, maps: Mapping[Kind, HeadMaps]) -> Drawn:
    """Heat maps of head by head similarity before and after alignment, a row for each kind; arrays `KIND_before`..."""
    data = {f"{kind}_{when}": getattr(maps[kind], when) for kind in _kinds(maps) for when in ("before", "after")}
    figure, caption = _head_alignment_figure(maps), head_alignment_caption(maps)
    return _write(folder, "head_alignment", figure, _npz(data), "npz", caption)


def head_alignment_caption(maps: Mapping[Kind, HeadMaps]) -> str:
    kinds = _kinds(maps)
    values = np.concatenate([found.ravel() for kind in kinds for found in (maps[kind].before, maps[kind].after)])
    heads = " and ".join(f"{_possessive(len(maps[kind].before))} {kind}" for kind in kinds)
    return (
        f"Mean token-wise cosine similarity (no unit, 1 being the same direction) of every two of the {heads},"
        " before alignment and after it"
        + ("; negative similarity is drawn as 0" if (values < 0).any() else "")
        + ("; grey cells hold no number" if np.isnan(values).any() else "")
        + "."
    )


def _possessive(heads: int) -> str:
    """A number of heads, and that something is theirs."""
    return f"{heads} head's" if heads == 1 else f"{heads} heads'"


@_style()
def _head_alignment_figure(maps: Mapping[Kind, HeadMaps]) -> Figure:
    kinds = _kinds(maps)
    figure, rows, bar = _panels(kinds, height=3.0)
    for kind, row in zip(kinds, rows, strict=True):
        for axis, found, title in zip(row, (maps[kind].before, maps[kind].after), ("Before", "After"), strict=True):
            image = _heat_map(axis, found, _SIMILARITY)
            axis.set(title=f"{title} Alignment", xlabel="Head Index", ylabel="Head Index")
            axis.set_xticks(_ticks(len(found)))
    figure.colorbar(image, cax=bar, label="Cosine Similarity")
    return figure


def activations(folder: Path, maps: Mapping[Kind, ActivationMaps]) -> Drawn:
    """Heat maps of head by channel, size and variance, a row for each kind; arrays `KIND_absolute`, `KIND_variance`."""
    data = {f"{kind}_{what}": getattr(maps[kind], what) for kind in _kinds(maps) for what in ("absolute", "variance")}
    return _write(folder, "activations", _activations_figure(maps), _npz(data), "npz", activations_caption(maps))


def activations_caption(maps: Mapping[Kind, ActivationMaps]) -> str:
    kinds = _kinds(maps)
    shapes = {kind: maps[kind].absolute.shape for kind in kinds}
    sizes = " and ".join(
        f"{kind} ({counted(shapes[kind][0], 'head')} of {counted(shapes[kind][1], 'channel')})" for kind in kinds
    )
    unknown = any(np.isnan(found).any() for kind in kinds for found in (maps[kind].absolute, maps[kind].variance))
    return (
        f"Mean absolute activation and variance of each channel of each head's {sizes}, as a share of that head's"
        f" largest channel (0 to 1, no unit){'; grey cells hold no number' if unknown else ''}."
    )


@_style()
def _activations_figure(maps: Mapping[Kind, ActivationMaps]) -> Figure:
    kinds = _kinds(maps)
    figure, rows, bar = _panels(kinds, height=2.9, title_lines=2)
    for kind, row in zip(kinds, rows, strict=True):
        pictures = (maps[kind].absolute, maps[kind].variance)
        for axis, found, title in zip(row, pictures, ("Absolute Activation", "Variance"), strict=True):
            image = _heat_map(axis, found, _ACTIVATION)
            axis.set(title=f"{title}\n(divided by the head's largest)", xlabel="Channel Index", ylabel="Head Index")
            channels = found.shape[1]
            axis.set_xticks(_ticks(channels, _CHANNEL_SPACING if channels >= _CHANNEL_SPACING else 1))
    figure.colorbar(image, cax=bar, label="Share of the head's largest")
    return figure


def rate_distortion(folder: Path, curves: Sequence[Curve], chosen: Point) -> Drawn:
    """Mean KL against the ratio of coded tokens, both on log axes, with intervals; `chosen` is ringed and labelled."""
    data = {"curves": [asdict(curve) for curve in curves], "chosen": asdict(chosen)}
    figure, caption = _rate_distortion_figure(curves, chosen), rate_distortion_caption(curves, chosen)
    return _write(folder, "rate_distortion", figure, _json(data), "json", caption)


def rate_distortion_caption(curves: Sequence[Curve], chosen: Point) -> str:
    points = [chosen, *(point for curve in curves for point in curve.points)]
    lowest = _lowest_drawn(np.array([point.kl for point in points]), np.array([point.kl_low for point in points]))
    least = min(min(point.kl, point.kl_low) for point in points)
    names = ", ".join(curve.name for curve in curves if curve.points) or "the chosen setting"
    bars = "bars are confidence intervals and " if any(point.kl_low < point.kl_high for point in points) else ""
    return (
        f"Mean KL to the uncompressed cache (nats a token) against the ratio of coded tokens (bfloat16 bytes over coded"
        f" bytes), both on log axes, for {names}; {bars}the ring marks {chosen.label}{_clamped(least, lowest)}."
    )


@_style()
def _rate_distortion_figure(curves: Sequence[Curve], chosen: Point) -> Figure:
    points = [chosen, *(point for curve in curves for point in curve.points)]
    lowest = _lowest_drawn(np.array([point.kl for point in points]), np.array([point.kl_low for point in points]))
    figure = Figure(figsize=(_WIDTH_IN, 6), dpi=_DPI, layout="constrained")
    axis = figure.subplots()
    baselines = cycle(_BASELINES)
    for curve in curves:
        look = _OURS if curve.name == "kvalign" else {"linewidth": 1.5, "markersize": 7, **next(baselines)}
        found = sorted(curve.points, key=lambda point: point.ratio)
        if found:
            ratios, kls, lows, highs = zip(*((p.ratio, p.kl, p.kl_low, p.kl_high) for p in found), strict=True)
            axis.plot(ratios, np.maximum(kls, lowest), label=curve.name, **look)
            bars = np.maximum(lows, lowest), np.maximum(highs, lowest)
            axis.vlines(ratios, *bars, colors=look["color"], linewidth=1.2, zorder=look.get("zorder", 2))
    _ratio_axis(axis, [point.ratio for point in points], chosen)
    _kl_axis(axis, lowest, max(max(point.kl, point.kl_high) for point in points))
    _ring(axis, chosen, lowest)
    _legend(figure, axis)
    return figure


def _ratio_axis(axis: Axes, ratios: Sequence[float], chosen: Point) -> None:
    """At least a factor of 4 wide, so that powers of two give ticks, and with room for the label of the ring."""
    middle = math.sqrt(min(ratios) * max(ratios))
    low, high = min(min(ratios) / 1.15, middle / 2), max(max(ratios) * 1.15, middle * 2)
    taken = min(0.05 + 0.012 * len(chosen.label), 0.5)  # of the axis' length, from the ring on
    high = max(high, low * (chosen.ratio / low) ** (1 / (1 - taken)))
    ticks = [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    axis.set(xscale="log", xlim=(low, high), xlabel="Ratio of coded tokens (bfloat16 bytes / coded bytes)")
    axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())


def _ring(axis: Axes, chosen: Point, lowest: float) -> None:
    """The label stands at the lower right: curves rise to the right, and other codecs lie above."""
    place = (chosen.ratio, max(chosen.kl, lowest))
    axis.plot(*place, "o", markersize=17, markerfacecolor="none", markeredgecolor="#000000", markeredgewidth=1.6)
    at_edge = chosen.kl < lowest
    axis.annotate(
        chosen.label,
        place,
        xytext=(14, 0 if at_edge else -8),
        textcoords="offset points",
        va="center" if at_edge else "top",
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        zorder=5,
    )


def bits(folder: Path, at_rest: Mapping[Kind, Array], resident: Mapping[Kind, Array], layers: Sequence[int]) -> Drawn:
    """Bits of each stored component, [R] a kind, R may be 0, and mean bits a number in the resident cache, one a layer.

    Without anything resident the second panel is left out.
    """
    data = {
        "at_rest": {kind: at_rest[kind].tolist() for kind in _kinds(at_rest)},
        "resident": {kind: resident[kind].tolist() for kind in KINDS if kind in resident},
        "layers": [int(layer) for layer in layers],
    }
    figure, caption = _bits_figure(at_rest, resident, layers), bits_caption(bool(resident))
    return _write(folder, "bits", figure, _json(data), "json", caption)


def bits_caption(resident: bool) -> str:
    beside = "; beside it, mean bits a number in the resident cache by layer" if resident else ""
    return (
        "Bits that each stored component is coded in at the recommended step, by its rank among them on a log axis"
        f"{beside}."
    )


@_style()
def _bits_figure(at_rest: Mapping[Kind, Array], resident: Mapping[Kind, Array], layers: Sequence[int]) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, 4.4), dpi=_DPI, layout="constrained")
    stored, *held = figure.subplots(1, 2 if resident else 1, squeeze=False)[0]
    for kind in _kinds(at_rest):
        coded = at_rest[kind]
        assert coded.ndim == 1
        assert np.isfinite(coded).all()
        look = {**_BY_KIND[kind], "marker": _BY_KIND[kind]["marker"] if coded.size <= _RUNNING else ""}
        stored.plot(np.arange(1, coded.size + 1), coded, label=kind, linewidth=1.6, markersize=5, **look)
    most = max(coded.size for coded in at_rest.values())
    stored.set(xscale="log", xlim=(0.9, max(most, 2) * 1.1), title="At rest", xlabel="Component, by Falling Bits")
    stored.set_ylabel("Bits of the component")
    stored.xaxis.set_major_formatter(FuncFormatter(_plain))
    stored.xaxis.set_minor_locator(NullLocator())
    for axis in held:
        for kind in _kinds(resident):
            assert resident[kind].shape == (len(layers),)
            assert np.isfinite(resident[kind]).all()
            axis.plot(layers, resident[kind], label=kind, linewidth=1.6, markersize=5, **_BY_KIND[kind])
        axis.set(title="Resident", ylabel="Mean bits a number")
        _layer_axis(axis, layers)
    for axis, found in zip((stored, *held), (at_rest, resident), strict=False):
        axis.set_ylim(0, max(1.0, *(1.08 * float(one.max(initial=0)) for one in found.values())))
        axis.grid(alpha=0.3)
    _legend(figure, stored, *held)
    return figure


def sensitivity(folder: Path, shares: Mapping[Kind, Array]) -> Drawn:
    """Bars of each layer's share of the whole sensitivity, [L] a kind, all kinds together 1."""
    data = {kind: shares[kind].tolist() for kind in _kinds(shares)}
    return _write(
        folder, "sensitivity", _sensitivity_figure(shares), _json(data), "json", sensitivity_caption(list(data))
    )


def sensitivity_caption(kinds: Sequence[str]) -> str:
    return f"Share of each layer's {' and '.join(kinds)} in the whole sensitivity, in per cent, by layer index."


@_style()
def _sensitivity_figure(shares: Mapping[Kind, Array]) -> Figure:
    kinds = _kinds(shares)
    layers = np.arange(len(shares[kinds[0]]))
    assert layers.size
    assert abs(sum(float(shares[kind].sum()) for kind in kinds) - 1) < 1e-3
    figure = Figure(figsize=(_WIDTH_IN, 4.2), dpi=_DPI, layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(kinds)
    for index, kind in enumerate(kinds):
        assert shares[kind].shape == layers.shape
        assert (shares[kind] >= 0).all()
        places = layers + (index - (len(kinds) - 1) / 2) * width
        axis.bar(places, 100 * shares[kind], width=width, color=_BY_KIND[kind]["color"], label=kind)
    axis.set_ylabel("Share of the whole sensitivity (%)")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    _layer_axis(axis, layers.tolist())
    _legend(figure, axis)
    return figure


def kl_by_position(folder: Path, series: Sequence[PositionSeries]) -> Drawn:
    """KL by position, a panel for each series on one scale: mean and spread over windows, and a running mean."""
    assert series
    columns = ("positions", "mean", "low", "high")
    data = [{"name": one.name, **{column: getattr(one, column).tolist() for column in columns}} for one in series]
    figure, caption = _kl_by_position_figure(series), kl_by_position_caption(series)
    return _write(folder, "kl_by_position", figure, _json(data), "json", caption)


def kl_by_position_caption(series: Sequence[PositionSeries]) -> str:
    least = min(float(min(one.mean.min(), one.low.min())) for one in series)
    long = any(one.positions.size >= _RUNNING for one in series)
    return (
        "KL to the uncompressed cache (nats a token, log axis) by token position, for "
        + ", ".join(one.name for one in series)
        + "; points are the mean over windows at each position, the band what 10 % to 90 % of the windows have"
        + (f", the thick line is the running mean over {_RUNNING} positions" if long else "")
        + f"{_clamped(least, _series_lowest(series))}."
    )


@_style()
def _kl_by_position_figure(series: Sequence[PositionSeries]) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, 0.8 + 2.9 * len(series)), dpi=_DPI, layout="constrained")
    axes = figure.subplots(len(series), 1, squeeze=False)[:, 0]
    lowest = _series_lowest(series)
    top = max(float(max(one.mean.max(), one.high.max())) for one in series)
    for axis, one in zip(axes, series, strict=True):
        low, mean, high = (np.maximum(found, lowest) for found in (one.low, one.mean, one.high))
        axis.fill_between(
            one.positions, low, high, color="#56B4E9", alpha=0.45, linewidth=0.8, label="10 % to 90 % of the windows"
        )
        axis.plot(one.positions, mean, ".", markersize=4, color="#0072B2", label="each position")
        if one.positions.size >= _RUNNING:
            places, smooth = (_running_mean(found) for found in (one.positions, one.mean))
            label = f"running mean over {_RUNNING} positions"
            axis.plot(places, np.maximum(smooth, lowest), color="#000000", linewidth=2.4, label=label)
        axis.set(title=one.name, xlabel="Position (tokens)")
        axis.margins(x=0.01)
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        _kl_axis(axis, lowest, top)
    _legend(figure, *axes)
    return figure


def _series_lowest(series: Sequence[PositionSeries]) -> float:
    return _lowest_drawn(np.concatenate([one.mean for one in series]), np.concatenate([one.low for one in series]))


def _running_mean(found: NDArray[Any]) -> Array:
    return np.lib.stride_tricks.sliding_window_view(found, _RUNNING).mean(axis=-1)


def _kinds(found: Mapping[Kind, Any]) -> list[Kind]:
    kinds = [kind for kind in KINDS if kind in found]
    assert kinds, "nothing to draw"
    return kinds


def _panels(kinds: Sequence[Kind], *, height: float, title_lines: int = 1) -> tuple[Figure, list[list[Axes]], Axes]:
    """Two panels a row at fixed places in inches, and one colour bar as tall as all rows."""
    left, width, gap, bar = 0.85, 3.0, 0.95, 0.18
    above, below = 0.38 + 0.22 * title_lines, 0.68
    total = len(kinds) * (above + height + below)
    figure = Figure(figsize=(_WIDTH_IN, total), dpi=_DPI)

    def place(x: float, y: float, wide: float, tall: float) -> Axes:
        return figure.add_axes((x / _WIDTH_IN, y / total, wide / _WIDTH_IN, tall / total))

    rows = []
    for index, kind in enumerate(kinds):
        top = total - index * (above + height + below)
        figure.text(
            0.12 / _WIDTH_IN, (top - 0.1) / total, f"({'ab'[index]}) {kind.capitalize()}", va="top", weight="bold"
        )
        rows.append([place(left + x, top - above - height, width, height) for x in (0, width + gap)])
    return figure, rows, place(left + 2 * width + gap + 0.26, below, bar, total - above - below)


def _heat_map(axis: Axes, found: Array, colours: Any) -> Any:
    """Cell k lies about k, from 1; what is below 0 has the colour of 0."""
    rows, columns = found.shape
    axis.set_yticks(_ticks(rows))
    return axis.imshow(
        found,
        cmap=colours,
        vmin=0,
        vmax=1,
        origin="upper",
        interpolation="nearest",
        aspect="auto",
        extent=(0.5, columns + 0.5, rows + 0.5, 0.5),
    )


def _ticks(count: int, least_spacing: int = 1) -> list[int]:
    """1 and round steps up to `count`, at most nine in all.

    >>> _ticks(256)
    [1, 32, 64, 96, 128, 160, 192, 224, 256]
    """
    fitting = (s for s in _SPACINGS if s >= least_spacing and count // s + (s > 1) <= _MOST_TICKS)
    spacing = next(fitting, count)
    return sorted({1, *range(spacing, count + 1, spacing)})


def _layer_axis(axis: Axes, layers: Sequence[int]) -> None:
    axis.set(xlim=(min(layers) - 0.7, max(layers) + 0.7), xlabel="Layer Index")
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 8, 10]))


def _lowest_drawn(means: Array, lows: Array) -> float:
    """Where a KL too small for the axis is drawn: below every other, but not so low that nothing else can be read."""
    positive = means[means > 0]
    if not positive.size:
        return _LEAST_KL
    least = float(positive.min())
    least = max(float(lows[lows > 0].min(initial=least)), least / 10)
    return float(f"{max(least / 2, _LEAST_KL, float(positive.max()) / 10**_MOST_DECADES):.0e}")


def _clamped(least: float, lowest: float) -> str:
    return f"; what lies below {_plain(lowest)} is drawn there" if least < lowest else ""


def _kl_axis(axis: Axes, lowest: float, highest: float) -> None:
    top = max(highest * 1.5, lowest * 10)
    axis.set(yscale="log", ylim=(lowest / 1.3, top), ylabel="Mean KL (nats a token)")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top / lowest < 100 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(_plain))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)


def _plain(value: float, _: int = 0) -> str:
    return str(np.format_float_positional(value, precision=9, trim="-"))


def _legend(figure: Figure, *axes: Axes) -> None:
    """One entry a label, above the panels."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if found:
        columns = math.ceil(len(found) / math.ceil(len(found) / 4))
        figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=columns)


def _npz(arrays: Mapping[str, Array]) -> bytes:
    """As np.savez_compressed writes float32 arrays, without the time of day."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array, np.float32), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            archive.writestr(entry, member.getvalue(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _json(data: Any) -> bytes:
    return (json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n").encode()


@_style()
def _write(folder: Path, name: str, figure: Figure, data: bytes, suffix: str, caption: str) -> Drawn:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    image = buffer.getvalue()
    image_name, data_name = f"{name}.png", f"{name}.{suffix}"
    (folder / image_name).write_bytes(image)
    (folder / data_name).write_bytes(data)
    return Drawn(
        name, image_name, data_name, hashlib.sha256(image).hexdigest(), hashlib.sha256(data).hexdigest(), caption
    )
