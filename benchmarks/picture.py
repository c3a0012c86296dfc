"""Draw the results of rate_distortion, and put its gains into a table: several seeds of the same set-up together.

    python -m benchmarks.picture RESULT... --svg OUT

Prints a Markdown table; measures nothing.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

_NAMES = {"kvalign": "kvalign", "kvtc": "KVTC", "kivi": "KIVI-style", "fp8": "fp8 (E4M3)"}
_COLOURS = {"kvalign": "#0b6e4f", "kvtc": "#c1440e", "kivi": "#5b6c8f", "fp8": "#8a8a8a"}
_RATIOS = [2, 4, 8, 16, 32, 64, 128, 256, 512]
_PROTOCOLS = {"R": "own continuation (protocol R)", "S": "another continuation (protocol S)"}


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--svg", type=click.Path(path_type=Path), help="Where to draw to.")
def main(results: tuple[Path, ...], svg: Path | None) -> None:
    """Table of gains over all seeds; with --svg, the picture too."""
    found = [json.loads(path.read_text()) for path in results]
    if svg:
        _draw(found, svg)
    click.echo(table(found))


def table(found: list[dict[str, Any]]) -> str:
    """Gain over KVTC by KL, protocol and kind of text: geometric mean over seeds, smallest and largest.

    Where our coarsest setting stays below a KL, its ratio stands for the one at that KL, which is larger: `at least`.
    """
    lines = [
        "| text | protocol | KL, nats | kvalign | KVTC | gain (smallest to largest of the seeds) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key in [(row["domain"], row["protocol"], row["kl"]) for row in found[0]["summary"]]:
        pairs = [_ratios(result, *key) for result in found]
        known = [(ours, theirs, bound) for ours, theirs, bound in pairs if ours and theirs]
        domain, protocol, kl = key
        if len(known) < len(found):
            lines.append(f"| {domain} | {protocol} | {kl:g} | not reached by every seed | | |")
            continue
        gains = [ours / theirs for ours, theirs, _ in known]
        least = "at least " if any(bound for *_, bound in known) else ""
        ours, theirs, gain = (
            statistics.geometric_mean(x) for x in ([o for o, _, _ in known], [t for _, t, _ in known], gains)
        )
        lines.append(
            f"| {domain} | {protocol} | {kl:g} | {least}{ours:.1f} | {theirs:.1f}"
            f" | {least}{gain:.2f} ({min(gains):.2f} to {max(gains):.2f}) |"
        )
    return "\n".join(lines)


def _ratios(result: dict[str, Any], domain: str, protocol: str, kl: float) -> tuple[float | None, float | None, bool]:
    """Ratios of ours and of KVTC at a KL, and whether ours is only a lower bound."""
    (row,) = (row for row in result["summary"] if (row["domain"], row["protocol"], row["kl"]) == (domain, protocol, kl))
    if row["ratio_ours"]:
        return row["ratio_ours"], row["ratio_kvtc"], False
    known = result["setup"]["evaluation"]["domains"]
    members = [name for name, kind in known.items() if domain in ("overall", kind, name)]
    ratio, largest_kl = curves(result, protocol, members)["kvalign"][-1]
    return (ratio if largest_kl < kl else None), row["ratio_kvtc"], True


def curves(
    result: dict[str, Any], protocol: str, domains: Sequence[str] | None = None
) -> dict[str, list[tuple[float, float]]]:
    """(ratio, mean KL) of each codec's settings over some domains, by rising ratio; of equal budgets the better one."""
    settings: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["protocol"] == protocol and (domains is None or row["domain"] in domains):
            settings.setdefault((row["codec"], row["setting"]), []).append(row)
    points: dict[str, list[tuple[float, float]]] = {}
    for (codec, _), rows in settings.items():
        tokens = sum(row["scored_tokens"] for row in rows)
        kl = sum(row["kl_mean"] * row["scored_tokens"] for row in rows) / tokens
        points.setdefault(codec, []).append((statistics.harmonic_mean([row["ratio"] for row in rows]), kl))
    return {codec: _outer(sorted(found)) for codec, found in points.items()}


def _outer(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the points that another beats in both ratio and KL."""
    best = math.inf
    kept = []
    for ratio, kl in reversed(points):
        if kl < best:
            best = kl
            kept.append((ratio, kl))
    return kept[::-1]


def _draw(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "kvalign", "font.size": 10})
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, axes = pyplot.subplots(1, len(_PROTOCOLS), figsize=(9.5, 4.2), sharey=True, layout="constrained")
    for axis, (protocol, title) in zip(axes, _PROTOCOLS.items(), strict=True):
        for result in found:
            for codec, points in curves(result, protocol).items():
                ratios, kls = zip(*points, strict=True)
                axis.plot(ratios, kls, marker="o", markersize=3, linewidth=1.2, color=_COLOURS[codec])
        axis.set(xscale="log", yscale="log", title=title, xlabel="times smaller than bfloat16 (coded tokens)")
        axis.set_xticks(_RATIOS, labels=[str(ratio) for ratio in _RATIOS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean KL to the uncompressed cache, nats a token")
    lines = [Line2D([], [], color=colour, marker="o", markersize=3) for colour in _COLOURS.values()]
    axes[0].legend(lines, list(_NAMES.values()), loc="lower right")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
