"""From what was measured to the pictures of a report: picks the arrays, figures.py draws them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvalign.artifact import Artifact
from kvalign.curve import OperatingPoint
from kvalign.entropy.classes import component_bits
from kvalign.evaluate.metrics import Summary
from kvalign.evaluate.validation import Validation
from kvalign.geometry import KINDS, Kind
from kvalign.report import figures
from kvalign.report.figures import ActivationMaps, Curve, Drawn, HeadMaps, Point, PositionSeries
from kvalign.report.findings import Findings

FOLDER = "figures"


def draw(folder: Path, artifact: Artifact, validation: Validation, findings: Findings) -> list[Drawn]:
    """Every picture and its data into a folder that is made; what has no finite numbers is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = findings.heads
    drawn = [
        figures.head_alignment(
            folder, {kind: HeadMaps(found.before.numpy(), found.after.numpy()) for kind, found in heads.items()}
        ),
        figures.activations(
            folder,
            {kind: ActivationMaps(found.absolute.numpy(), found.variance.numpy()) for kind, found in heads.items()},
        ),
        figures.bits(folder, component_bits_by_kind(artifact), *layer_bits(artifact)),
    ]
    if findings.sensitivity:
        drawn.append(figures.sensitivity(folder, {kind: share.numpy() for kind, share in findings.sensitivity.items()}))
    if _known(validation.overall.summary):
        drawn.append(figures.rate_distortion(folder, _curves(validation, findings), _chosen(validation)))
    series = _positions(validation)
    if series:
        drawn.append(figures.kl_by_position(folder, series))
    return drawn


def _known(summary: Summary) -> bool:
    return bool(np.isfinite(summary.kl_mean))


def _interval(summary: Summary) -> tuple[float, float]:
    """Of no width where there is none: one window."""
    low, high = summary.kl_low, summary.kl_high
    return (summary.kl_mean, summary.kl_mean) if low is None or high is None else (low, high)


def _chosen(validation: Validation) -> Point:
    found = validation.overall
    summary = found.summary
    return Point(found.ratio, summary.kl_mean, *_interval(summary), "the recommended step")


def _curves(validation: Validation, findings: Findings) -> list[Curve]:
    def of_step(point: OperatingPoint) -> Point:
        # Steps beside the recommended one were measured for the curve alone, without an interval.
        chosen = _chosen(validation)
        low, high = (chosen.kl_low, chosen.kl_high) if point.step == validation.step else (point.kl_mean,) * 2
        return Point(point.ratio, point.kl_mean, low, high, f"step {point.step}")

    curves = [Curve("kvalign", tuple(of_step(point) for point in validation.curve if np.isfinite(point.kl_mean)))]
    for name in dict.fromkeys(found.name for found in findings.baselines):
        points = [
            Point(found.ratio, found.summary.kl_mean, *_interval(found.summary), found.setting)
            for found in findings.baselines
            if found.name == name and _known(found.summary)
        ]
        curves.append(Curve(name, tuple(sorted(points, key=lambda point: point.ratio))))
    return curves


def component_bits_by_kind(artifact: Artifact) -> dict[Kind, NDArray[np.float32]]:
    """Of every stored component at the recommended step, by falling bits."""
    found: dict[Kind, NDArray[np.float32]] = {}
    for kind in KINDS:
        scales = np.concatenate([stored.scales for stored in artifact.groups if stored.group.kind == kind])
        found[kind] = np.sort(component_bits(artifact.tables, scales, artifact.recommended_step).astype(np.float32))[
            ::-1
        ]
    return found


def layer_bits(artifact: Artifact) -> tuple[dict[Kind, NDArray[np.float32]], list[int]]:
    """Mean bits a number in the resident cache, scales left out, of each coded layer; and which layers they are."""
    plan = artifact.resident_plan
    if plan is None or not plan.layers:
        return {}, []
    layers = sorted(plan.layers)
    found: dict[Kind, NDArray[np.float32]] = {}
    for kind in KINDS:
        means = []
        for layer in layers:
            sides = [group.side(kind) for group in plan.layers[layer].groups]
            means.append(sum(sum(side.widths) for side in sides) / sum(side.mean.numel() for side in sides))
        found[kind] = np.array(means, dtype=np.float32)
    return found, layers


def _positions(validation: Validation) -> list[PositionSeries]:
    curves = {"at rest, behind the coded prefix (protocol R)": validation.positions}
    if validation.resident is not None:
        curves["resident, from the first page of codes on (protocol C)"] = validation.resident.positions
    return [
        PositionSeries(
            name, curve.first + np.arange(len(curve.mean)), *map(np.array, (curve.mean, curve.low, curve.high))
        )
        for name, curve in curves.items()
        if np.isfinite([curve.mean, curve.low, curve.high]).all()
    ]
