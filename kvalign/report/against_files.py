"""A report beside the files that lie with it: the card, the pictures, and the data behind them, which says numbers too.

The data is a stranger's: it is read within bounds, and what cannot be read is a claim that does not hold.
"""

import difflib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvalign.align.procrustes import different_heads
from kvalign.artifact import Artifact, sha256_of
from kvalign.geometry import KINDS, Kind
from kvalign.report import card, figures
from kvalign.report.claims import Claim, close, each, known
from kvalign.report.draw import FOLDER, component_bits_by_kind, layer_bits
from kvalign.report.figures import ActivationMaps, Array, Curve, HeadMaps, Point, PositionSeries
from kvalign.report.structure import column_and_row_structure, describe_structure

Report = Mapping[str, Any]

_MOST_BYTES = 1 << 28
_UNREADABLE = "(unreadable)"
_AS_DRAWN = 1e-4  # float32 arrays, summed in another order
# What hostile bytes trip zipfile and numpy over, json, and then arithmetic; it is told as a claim, never passed over.
_TRIPS = (
    *(OSError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile),
    *(ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError),
    *(AssertionError, ArithmeticError),
)


def claims_of_files(folder: Path, artifact: Artifact, report: Report) -> Iterator[Claim]:
    """Every comparison with README.md and figures/; the report must be of the form of schema.py."""
    yield Claim("README.md is the report's card", "", first_difference(folder, report), None)
    for figure in report["figures"]:
        for kind in ("image", "data"):
            name = f"{FOLDER}/{figure[kind]}"
            found = _sha256(folder / name)
            yield Claim(f"SHA-256 of {name}", figure[f"{kind}_sha256"], found, None)
            if found != figure[f"{kind}_sha256"]:
                break
        else:
            yield from _data(folder / FOLDER / figure["data"], figure, artifact, report)


def _sha256(file: Path) -> str:
    try:
        return sha256_of(file) if file.is_file() else "(missing)"
    except OSError:
        return _UNREADABLE


def first_difference(folder: Path, report: Report) -> str:
    """The first line of the card that the report does not say; empty when there is none."""
    try:
        file = folder / "README.md"
        written = file.read_bytes().decode().splitlines() if file.is_file() else []
    except (OSError, ValueError):
        return "(it cannot be read as UTF-8 text)"
    rendered = card.render(dict(report)).splitlines()
    for kind, start, end, *_ in difflib.SequenceMatcher(None, written, rendered, autojunk=False).get_opcodes():
        if kind != "equal":
            line = written[start] if start < end else "(a line is missing)"
            return f"line {start + 1}: {line[:120]}"
    return ""


def _data(file: Path, figure: Report, artifact: Artifact, report: Report) -> Iterator[Claim]:
    """What the data behind one picture says beside what the report says, and the caption that it makes."""
    name = figure["name"]
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("too large")
        claims, caption = _READERS[name](file, artifact, report)
    except _TRIPS:
        yield Claim(f"{FOLDER}/{file.name}: data of its picture", "as the report says", _UNREADABLE, None)
        return
    yield from claims
    yield Claim(f"figures.{name}.caption", figure["caption"], caption, None)


Read = tuple[list[Claim], str]


def _head_alignment(file: Path, artifact: Artifact, report: Report) -> Read:
    arrays, claims, maps = _arrays(file), [], dict[Kind, HeadMaps]()
    for kind in KINDS:
        told, heads = report["head_alignment"][kind], report["head_alignment"][kind]["heads"]
        for when in ("before", "after"):
            found = arrays[f"{kind}_{when}"]
            claims.append(Claim(f"{FOLDER}/{file.name}: {kind}, {when}", list(found.shape), [heads, heads], None))
            mean = known(different_heads(torch.from_numpy(found)))
            name = f"head_alignment.{kind}.{when} and its picture"
            claims.append(
                Claim(name, told[when], mean, _AS_DRAWN) if mean is not None else close(name, told[when], mean)
            )
        maps[kind] = HeadMaps(arrays[f"{kind}_before"], arrays[f"{kind}_after"])
    return claims, figures.head_alignment_caption(maps)


def _activations(file: Path, artifact: Artifact, report: Report) -> Read:
    arrays, claims, maps = _arrays(file), [], dict[Kind, ActivationMaps]()
    for kind in KINDS:
        told = report["head_alignment"][kind]
        maps[kind] = ActivationMaps(arrays[f"{kind}_absolute"], arrays[f"{kind}_variance"])
        shape = [told["heads"], told["head_dim"]]
        claims.append(Claim(f"{FOLDER}/{file.name}: {kind}", list(maps[kind].absolute.shape), shape, None))
        for what in ("absolute", "variance"):
            shares = dict(zip(("columns", "rows"), column_and_row_structure(arrays[f"{kind}_{what}"]), strict=True))
            claims += each(f"head_alignment.{kind}.{what}", told[what], shares, _AS_DRAWN)
        says = describe_structure(kind, maps[kind].absolute, maps[kind].variance)
        claims.append(Claim(f"head_alignment.{kind}.says", told["says"], says, None))
    return claims, figures.activations_caption(maps)


def _arrays(file: Path) -> dict[str, Array]:
    """float32 matrices of an npz, bounded before they are unpacked."""
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
            raise ValueError("too large")
    with np.load(file, allow_pickle=False) as found:
        arrays = {name: np.asarray(found[name]) for name in found.files}
    for array in arrays.values():
        if array.dtype != np.float32 or array.ndim != 2:
            raise ValueError("not a matrix of float32")
    return arrays


def _bits(file: Path, artifact: Artifact, report: Report) -> Read:
    resident, layers = layer_bits(artifact)
    expected = {
        "at_rest": {kind: found.tolist() for kind, found in component_bits_by_kind(artifact).items()},
        "resident": {kind: found.tolist() for kind, found in resident.items()},
        "layers": layers,
    }
    return _alike(file, expected), figures.bits_caption(bool(resident))


def _sensitivity(file: Path, artifact: Artifact, report: Report) -> Read:
    shares = {kind: np.asarray(found, np.float64) for kind, found in _json(file).items()}
    lengths = {kind: found.shape == (len(artifact.shape.geometry.layers),) for kind, found in shares.items()}
    whole = [*shares] == [*KINDS] and all(lengths.values()) and all((found >= 0).all() for found in shares.values())
    total = float(sum(found.sum() for found in shares.values()))
    claims = [
        Claim(f"{FOLDER}/{file.name}: a share of each layer", whole, True, None),
        Claim(f"{FOLDER}/{file.name}: all shares together", total, 1.0, 1e-3),
    ]
    return claims, figures.sensitivity_caption(list(shares))


def _rate_distortion(file: Path, artifact: Artifact, report: Report) -> Read:
    overall, step = report["quality"]["overall"], report["codec"]["recommended_step"]
    chosen = _point(overall, "the recommended step")
    ours = [
        _point({**point, **({} if point["step"] != step else _interval_of(overall))}, f"step {point['step']}")
        for point in report["operating_points"]
        if point["kl_mean"] is not None
    ]
    curves = [Curve("kvalign", tuple(ours))]
    for name in dict.fromkeys(found["name"] for found in report["baselines"]):
        points = [
            _point(found, found["setting"])
            for found in report["baselines"]
            if found["name"] == name and found["kl_mean"] is not None
        ]
        curves.append(Curve(name, tuple(sorted(points, key=lambda point: point.ratio))))
    expected = {"curves": [_plain(curve) for curve in curves], "chosen": chosen.__dict__}
    return _alike(file, expected), figures.rate_distortion_caption(curves, chosen)


def _point(told: Report, label: str) -> Point:
    kl, low, high = told["kl_mean"], told.get("kl_low"), told.get("kl_high")
    return Point(told["ratio"], kl, kl if low is None else low, kl if high is None else high, label)


def _interval_of(told: Report) -> dict[str, Any]:
    return {"kl_low": told["kl_low"], "kl_high": told["kl_high"]}


def _plain(curve: Curve) -> dict[str, Any]:
    return {"name": curve.name, "points": [point.__dict__ for point in curve.points]}


def _kl_by_position(file: Path, artifact: Artifact, report: Report) -> Read:
    found = _json(file)
    series = [
        PositionSeries(
            str(one["name"]), *(np.asarray(one[column], np.float64) for column in ("positions", "mean", "low", "high"))
        )
        for one in found
    ]
    quality, held = report["quality"], report["resident"]["quality"]
    starts = [quality["prefix_tokens"], held["scored_from"]]
    claims = [Claim(f"{FOLDER}/{file.name}: both protocols", len(series), len(starts), None)]
    for one, start, part in zip(series, starts, (quality["overall"], held["overall"]), strict=False):
        length = part["tokens"] // part["windows"]
        wanted = [start, start + length - 1, length]
        told = [int(one.positions[0]), int(one.positions[-1]), one.positions.size]
        claims.append(Claim(f"{FOLDER}/{file.name}: positions", told, wanted, None))
        claims.append(
            close(f"{one.name[:40]}: mean of its picture", part["kl_mean"], float(one.mean.mean()), _AS_DRAWN)
        )
    return claims, figures.kl_by_position_caption(series)


def _alike(file: Path, expected: Any) -> list[Claim]:
    """One claim for the whole file: what it says that the report does not."""
    differing = [claim.name for claim in each("all", _json(file), expected, _AS_DRAWN) if not claim.holds]
    return [Claim(f"{FOLDER}/{file.name} says what the report says", "", "".join(differing[:1]), None)]


def _json(file: Path) -> Any:
    return json.loads(file.read_bytes())


_READERS = {
    "head_alignment": _head_alignment,
    "activations": _activations,
    "bits": _bits,
    "sensitivity": _sensitivity,
    "rate_distortion": _rate_distortion,
    "kl_by_position": _kl_by_position,
}
