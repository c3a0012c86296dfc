"""How good the resident cache is at a size, and what going to bytes and back costs besides.

    python -m benchmarks.resident_quality --model DIR --eval-text FILE... --json OUT

Protocol C without a recent window for each number of bits; and by protocol R, the continuation of a prefix scored on
its cache as it went from form to form. Without --eval-text the validation text that comes with kvalign.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from benchmarks.environment import describe, say, write_json
from benchmarks.fitting import SINK_TOKENS, Subject, calibrated, fitted, fitted_resident
from benchmarks.held_out import draw_windows, window_lengths
from kvalign import accounting
from kvalign.artifact import Artifact
from kvalign.capture import layer_tensors, run
from kvalign.codec import Codec
from kvalign.convert import TOKEN_BETA
from kvalign.evaluate.metrics import divergence, summarise
from kvalign.evaluate.protocol import Coder, PreparedWindow, prepare
from kvalign.evaluate.resident import measure_resident
from kvalign.resident.cache import fill
from kvalign.resident.interface import fused_attention
from kvalign.text import Document, builtin_documents, read_documents

BITS = (8.0, 5.0, 4.1, 4.0, 3.5, 3.07, 3.0, 2.5)
TRANSCODED_BITS = 4.0
_FINEST_RATIO = 10.0
UNITS = {
    "bits": "for each number of a coded token, scales included, as asked for",
    "coded_ratio": "bf16 bytes of the tokens on pages / bytes of their pages, scales included",
    "kl_*": "nats a token, against the uncompressed model by the same route; low and high: 95 % bootstrap over windows",
    "transcoding.kl_mean": "nats a token of the continuation, protocol R without a recent window",
}


def main() -> None:
    arguments = _arguments()
    subject = Subject.load(arguments.model)
    calibration = calibrated(subject, builtin_documents("calibration"), tokens=arguments.calibration_tokens, seed=0)
    documents = _documents(arguments.eval_text)
    prefix, continuation = window_lengths(subject.position_limit)
    windows = draw_windows(
        documents,
        subject.tokenizer,
        windows=arguments.windows,
        prefix=prefix,
        continuation=continuation,
        seed=arguments.seed,
    )
    rows = []
    for bits in arguments.bits:
        stored = fitted_resident(subject, calibration, bits=bits)
        found = measure_resident(subject.model, stored.plan(SINK_TOKENS, 0), windows)
        for text, summary in {"all": found.summary, **found.domains}.items():
            rows.append(
                {
                    "bits": bits,
                    "basis": stored.basis,
                    "text": text,
                    "coded_ratio": round(found.coded_ratio, 4),
                    **asdict(summary),
                    "floor_kl": found.floor_kl,
                    "kernel_error": found.kernel_error,
                }
            )
        say(str({key: rows[-len(found.domains) - 1][key] for key in ("bits", "coded_ratio", "kl_mean", "top1")}))
    artifact = replace(
        fitted(subject, calibration, finest_ratio=_FINEST_RATIO, token_beta=TOKEN_BETA),
        resident=fitted_resident(subject, calibration, bits=TRANSCODED_BITS),
    )
    result = {
        "benchmark": "resident_quality",
        "environment": describe(),
        "units": UNITS,
        "setup": {
            "model": subject.describe(),
            "windows": len(windows),
            "texts": sorted({window.domain for window in windows}),
            "seed": arguments.seed,
            "calibration_tokens": calibration.tokens,
            "sink_tokens": SINK_TOKENS,
            "recent_tokens": 0,
            "transcoded_bits": TRANSCODED_BITS,
            "at_rest_ratios": arguments.ratios,
        },
        "rows": rows,
        "transcoding": transcoding(subject.model, artifact, list(prepare(subject.model, windows)), arguments.ratios),
    }
    write_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resident_quality", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--eval-text", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--windows", type=int, default=8, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--bits", type=float, nargs="+", default=BITS, metavar="B")
    parser.add_argument("--ratios", type=float, nargs="+", default=(20.0, 60.0), metavar="R")
    parser.add_argument("--calibration-tokens", type=int, default=32_768, metavar="N")
    return parser.parse_args()


def _documents(files: list[Path]) -> list[Document]:
    if not files:
        return builtin_documents("validation")
    return [document for file in files for document in read_documents(file)]


@torch.no_grad()
def transcoding(
    model: Any, artifact: Artifact, prepared: list[PreparedWindow], ratios: list[float]
) -> list[dict[str, Any]]:
    """KL of the continuation after each way of a prefix's cache from form to form."""
    codec = artifact.codec(model)
    steps = {ratio: _step_of(codec, prepared[0], ratio) for ratio in ratios}

    def resident(window: PreparedWindow) -> Cache:
        return fill(codec.cache(), layer_tensors(window.cache), torch.zeros(1, dtype=torch.int64))

    def stored(window: PreparedWindow, cache: Any, step: int) -> bytes:
        return codec.encode(cache, input_ids=window.window.prefix[None], step=step, watched=window.watched)

    def dense_again(step: int) -> Coder:
        return lambda window: codec.decode_dense(stored(window, window.cache, step))

    def resident_again(step: int) -> Coder:
        return lambda window: codec.decode(stored(window, window.cache, step))

    def resident_twice(step: int) -> Coder:
        return lambda window: codec.decode(stored(window, resident(window), step))

    ways: dict[tuple[str, ...], Coder] = {("uncompressed", "resident"): resident}
    for ratio, step in steps.items():
        rest = f"at rest, {ratio:g}x"
        ways["uncompressed", rest, "uncompressed"] = dense_again(step)
        ways["uncompressed", rest, "resident"] = resident_again(step)
        ways["uncompressed", "resident", rest, "resident"] = resident_twice(step)
    rows = []
    for way, cache_of in ways.items():
        scores = []
        for window in prepared:
            with fused_attention(model):
                logits = run(model, window.window.continuation[None, :-1], cache_of(window))[0][0]
            scores.append(divergence(window.reference, logits, window.window.continuation[1:]))
        summary = summarise(scores)
        rows.append({"way": " -> ".join(way), "kl_mean": summary.kl_mean, "top1": summary.top1})
        say(str(rows[-1]))
    return rows


def _step_of(codec: Codec, window: PreparedWindow, ratio: float) -> int:
    """Step at which one window comes nearest to a ratio of coded tokens."""
    low, high = codec.recommended - 64, codec.recommended + 128
    while high - low > 1:
        middle = (low + high) // 2
        data = codec.encode(window.cache, input_ids=window.window.prefix[None], step=middle, watched=window.watched)
        if accounting.coded_ratio(codec.shape.geometry, codec.sizes(data)) < ratio:
            low = middle
        else:
            high = middle
    return high


if __name__ == "__main__":
    main()
