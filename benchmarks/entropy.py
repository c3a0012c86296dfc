"""Our entropy coder beside constriction, zlib and zstd on the same symbols: symbols a second, and bits against ideal.

    python -m benchmarks.entropy --json OUT

The symbols are Laplace variables whose scales fall over the components and vary over the tokens, as quantised
coefficients do; each coder gets them in the arrangement that suits it best. No model is needed.
"""

import argparse
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import constriction  # type: ignore[import-untyped]
import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.environment import describe, median_seconds, write_json
from kvalign.codec import BLOCK_TOKENS
from kvalign.entropy.classes import CLASSES, ESCAPE, HIGHEST, LARGEST, LOWEST, TOTAL, Tables, laplace_tables
from kvalign.entropy.rans import BlockCoder

UNITS = {
    "symbols_per_s": "symbols a second, one thread, median over the repeats after one round to warm up",
    "bits_per_symbol": "bits",
    "over_ideal": "bits / cross-entropy under kvalign's tables",
    "over_entropy": "bits / entropy of the source itself, which is known because it is made up",
    "decode_over": "symbols a second of kvalign's decoder / of this decoder, same run",
}


@dataclass(frozen=True)
class Source:
    """What is coded: symbols [T, R] int32 and classes [T, R] int16, all components coded."""

    symbols: NDArray[np.int32]
    classes: NDArray[np.int16]

    def bits(self) -> float:
        """Bits that these symbols carry under the very distributions they were drawn from."""
        scale = 2.0 ** (self.classes / 4)
        size = np.abs(self.symbols)
        zero = -np.log2(-np.expm1(-0.5 / scale))
        other = 1 + (size - 0.5) / scale / np.log(2) - np.log2(-np.expm1(-1 / scale))
        return float(np.where(size == 0, zero, other).sum())


@dataclass(frozen=True)
class Coder:
    """A coder with its own arrangement of the source.

    decode      gives `expected` back; putting that into order is not asked of the others, and so not timed
    size_bytes  of what encode gives, with all that decoding needs besides the classes
    """

    encode: Callable[[], Any]
    decode: Callable[[Any], Any]
    expected: Any
    size_bytes: Callable[[Any], int]


def main() -> None:
    arguments = _arguments()
    source = made_up(arguments.tokens, arguments.components, arguments.seed)
    tables = laplace_tables()
    ideal = BlockCoder(tables).ideal_bits(source.symbols, source.classes)
    entropy = source.bits()
    coders = all_coders(source, tables)
    encoded = {name: coder.encode() for name, coder in coders.items()}
    for name, coder in coders.items():
        if not np.array_equal(coder.decode(encoded[name]), coder.expected):
            raise SystemExit(f"{name} does not give its symbols back")
    steps: dict[str, Callable[[], object]] = {}
    for name, coder in coders.items():
        steps[f"{name} encode"] = coder.encode
        steps[f"{name} decode"] = partial(coder.decode, encoded[name])
    seconds = median_seconds(steps, arguments.repeats)
    count = source.symbols.size
    fastest = count / seconds["kvalign decode"]
    rows = [
        {
            "coder": name,
            "encode_symbols_per_s": round(count / seconds[f"{name} encode"]),
            "decode_symbols_per_s": round(count / seconds[f"{name} decode"]),
            "bits_per_symbol": round(8 * coder.size_bytes(encoded[name]) / count, 5),
            "over_ideal": round(8 * coder.size_bytes(encoded[name]) / ideal, 5),
            "over_entropy": round(8 * coder.size_bytes(encoded[name]) / entropy, 5),
            "decode_over": round(fastest * seconds[f"{name} decode"] / count, 3),
        }
        for name, coder in coders.items()
    ]
    result = {
        "benchmark": "entropy",
        "environment": describe(),
        "units": UNITS,
        "setup": {
            "symbols": count,
            "tokens": arguments.tokens,
            "components": arguments.components,
            "block_tokens": BLOCK_TOKENS,
            "source": "Laplace, scales falling over components, log-normal over tokens",
            "seed": arguments.seed,
            "repeats": arguments.repeats,
            "ideal_bits_per_symbol": round(ideal / count, 5),
            "entropy_bits_per_symbol": round(entropy / count, 5),
        },
        "rows": rows,
    }
    write_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.entropy", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--tokens", type=int, default=768, metavar="N")
    parser.add_argument("--components", type=int, default=4096, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def made_up(tokens: int, components: int, seed: int) -> Source:
    """Classes from LOWEST to a little above HIGHEST, most of them low; symbols drawn from the scale of their class."""
    generator = np.random.default_rng(seed)
    # Quarter octaves: a few wide components, a long tail of narrow ones, as eigenvalues fall.
    widest, narrowest = HIGHEST + 4, LOWEST
    levels = widest - (widest - narrowest) * np.linspace(0, 1, components) ** 0.5
    shifts = np.rint(generator.normal(0, 3, tokens))
    classes = np.clip(np.rint(levels)[None, :] + shifts[:, None], LOWEST, widest).astype(np.int16)
    drawn = generator.laplace(0, 1, classes.shape) * 2.0 ** (classes / 4)
    return Source(np.rint(drawn).astype(np.int32), classes)


def all_coders(source: Source, tables: Tables) -> dict[str, Coder]:
    return {
        "kvalign": _ours(source, tables),
        "constriction_laplace": _constriction_laplace(source),
        "constriction_tables": _constriction_tables(source, tables),
        "zlib_6": _bytewise(source, lambda data: zlib.compress(data, 6), zlib.decompress),
        "zlib_9": _bytewise(source, lambda data: zlib.compress(data, 9), zlib.decompress),
        "zstd_3": _bytewise(source, zstandard.ZstdCompressor(3).compress, zstandard.ZstdDecompressor().decompress),
        "zstd_19": _bytewise(source, zstandard.ZstdCompressor(19).compress, zstandard.ZstdDecompressor().decompress),
    }


def _ours(source: Source, tables: Tables) -> Coder:
    """Blocks of tokens that decode alone, as the codec codes them."""
    coder = BlockCoder(tables)
    starts = range(0, len(source.symbols), BLOCK_TOKENS)
    classes = [np.ascontiguousarray(source.classes[start : start + BLOCK_TOKENS]) for start in starts]
    symbols = [np.ascontiguousarray(source.symbols[start : start + BLOCK_TOKENS]) for start in starts]
    return Coder(
        encode=lambda: [coder.encode(*block) for block in zip(symbols, classes, strict=True)],
        decode=lambda blocks: np.concatenate([coder.decode(*block) for block in zip(blocks, classes, strict=True)]),
        expected=source.symbols,
        size_bytes=lambda blocks: sum(map(len, blocks)),
    )


def _constriction_laplace(source: Source) -> Coder:
    """A Laplace model for each symbol, over no wider a range than needed: every symbol in it takes some probability."""
    largest = int(np.abs(source.symbols).max()) + 1
    family = constriction.stream.model.QuantizedLaplace(-largest, largest)
    scales = 2.0 ** (source.classes.ravel() / 4)
    means = np.zeros_like(scales)
    symbols = source.symbols.ravel()

    def encode() -> Any:
        ans = constriction.stream.stack.AnsCoder()
        ans.encode_reverse(symbols, family, means, scales)
        return ans.get_compressed()

    return Coder(
        encode=encode,
        decode=lambda words: constriction.stream.stack.AnsCoder(words).decode(family, means, scales),
        expected=symbols,
        size_bytes=lambda words: words.nbytes,
    )


def _constriction_tables(source: Source, tables: Tables) -> Coder:
    """Our own tables, one class after another: its quickest way. Low bits of wide classes and escapes go beside it."""
    classes, symbols = source.classes.ravel(), source.symbols.ravel()
    raw_bits = np.maximum(0, (classes - HIGHEST + 3) // 4)
    rows = classes - 4 * raw_bits - LOWEST
    high = symbols >> raw_bits
    escaped = (np.abs(high) > LARGEST) | (tables.frequencies[rows, np.clip(high + LARGEST, 0, ESCAPE)] == 0)
    columns = np.where(escaped, ESCAPE, high + LARGEST).astype(np.int32)
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=CLASSES)
    parts = np.split(columns[order], np.cumsum(counts)[:-1])
    models = [
        constriction.stream.model.Categorical((row / TOTAL).astype(np.float32), perfect=False)
        for row in tables.frequencies
    ]
    beside = (int(raw_bits.sum()) + 7) // 8 + 4 * int(escaped.sum())

    def encode() -> Any:
        ans = constriction.stream.stack.AnsCoder()
        for part, model in zip(reversed(parts), reversed(models), strict=True):
            ans.encode_reverse(part, model)
        return ans.get_compressed()

    def decode(words: Any) -> Any:
        ans = constriction.stream.stack.AnsCoder(words)
        return np.concatenate([ans.decode(model, count) for model, count in zip(models, counts.tolist(), strict=True)])

    return Coder(encode, decode, expected=columns[order], size_bytes=lambda words: words.nbytes + beside)


def _bytewise(source: Source, compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes]) -> Coder:
    """Signs folded in, component by component, low bytes before high ones: what suits coders of bytes best."""
    folded = ((source.symbols.T << 1) ^ (source.symbols.T >> 31)).astype("<u4")
    planes = np.ascontiguousarray(folded).view(np.uint8).reshape(-1, 4).T.tobytes()
    return Coder(lambda: compress(planes), decompress, expected=planes, size_bytes=len)


if __name__ == "__main__":
    main()
