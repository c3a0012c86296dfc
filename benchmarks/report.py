"""Time and memory of a report's pictures of heads, on random data of a model's shape.

    python -m benchmarks.report --heads 256 --head-dim 128 --json OUT

Heads are random rotations of a few shared ones with noise, so that there is something to align. Keys and then values:
rotations fitted on one stream of tokens, measured on another, and both pictures drawn. No model is run.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import describe, say, write_json
from kvalign.align.procrustes import different_heads
from kvalign.evaluate.heads import head_pictures
from kvalign.geometry import KINDS, Kind
from kvalign.report import figures
from kvalign.report.figures import ActivationMaps, HeadMaps
from kvalign.report.findings import HEAD_TOKENS

UNITS = {
    "seconds": "of everything for both kinds: random data apart from the rest, which a limit of 180 is for",
    "peak_bytes": "largest memory of the process, the libraries included",
    "before, after": "mean cosine similarity over all pairs of different heads",
}
_SHARED = 4
_NOISE = 0.5
_CHUNK_TOKENS = 512


def main() -> None:
    arguments = _arguments()
    made = 0.0

    def stream(seed: int) -> Iterator[list[Tensor]]:
        nonlocal made
        chunks = _tokens(arguments.heads, arguments.head_dim, arguments.tokens, seed)
        while True:
            begun = time.perf_counter()
            chunk = next(chunks, None)
            made += time.perf_counter() - begun
            if chunk is None:
                return
            yield [chunk]

    rows, maps, channels = [], {}, {}
    begun = time.perf_counter()
    for number, kind in enumerate(KINDS):
        started, made_before = time.perf_counter(), made
        [(before, after, absolute, variance)] = head_pictures(
            [(arguments.heads, arguments.head_dim)], stream(2 * number), stream(2 * number + 1)
        )
        maps[kind] = HeadMaps(before.numpy(), after.numpy())
        channels[kind] = ActivationMaps(absolute.numpy(), variance.numpy())
        rows.append(
            {
                "kind": kind,
                "seconds": round(time.perf_counter() - started - (made - made_before), 2),
                "before": round(different_heads(before), 4),
                "after": round(different_heads(after), 4),
            }
        )
        say(str(rows[-1]))
    drawing = time.perf_counter()
    _draw(maps, channels)
    result = {
        "benchmark": "report",
        "environment": describe(),
        "units": UNITS,
        "setup": {"heads": arguments.heads, "head_dim": arguments.head_dim, "tokens": arguments.tokens},
        "rows": rows,
        "seconds": round(time.perf_counter() - begun - made, 2),
        "drawing_seconds": round(time.perf_counter() - drawing, 2),
        "random_data_seconds": round(made, 2),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    write_json(arguments.json, result)


def _draw(maps: dict[Kind, HeadMaps], channels: dict[Kind, ActivationMaps]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        figures.head_alignment(Path(folder), maps)
        figures.activations(Path(folder), channels)


def _tokens(heads: int, dim: int, tokens: int, seed: int) -> Iterator[Tensor]:
    """[T, N, D] a chunk; the rotations are the same for all seeds of a kind, the tokens are not."""
    turns = torch.linalg.qr(torch.randn(heads, dim, dim, generator=torch.Generator().manual_seed(seed // 2))).Q
    generator = torch.Generator().manual_seed(1000 + seed)
    spread = torch.logspace(0, -1, dim)
    for start in range(0, tokens, _CHUNK_TOKENS):
        count = min(_CHUNK_TOKENS, tokens - start)
        shared = torch.randn(_SHARED, count, dim, generator=generator) * spread
        noise = torch.randn(heads, count, dim, generator=generator) * _NOISE
        yield ((shared[torch.arange(heads) % _SHARED] + noise) @ turns).transpose(0, 1).contiguous()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=256, metavar="N", help="layers times KV heads")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--tokens", type=int, default=HEAD_TOKENS, metavar="N", help="of each of the two texts")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    return parser.parse_args()


if __name__ == "__main__":
    main()
