"""Ratio against KL of our codec and of every baseline, on the same windows, through real bytes (protocols R and S).

    python -m benchmarks.rate_distortion --model DIR --calibration-text FILE... --eval-text FILE... \
        --windows N --seed S --json OUT

Each window's prefix is coded once by each coder at each setting; what comes back is scored on the window's own
continuation (R) and on one that comes from elsewhere (S). Methods share the calibration pass.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison import (
    PROTOCOLS,
    UNITS,
    Contender,
    Scored,
    class_of,
    domain_classes,
    rows,
    summary,
)
from benchmarks.environment import describe, say, write_json
from benchmarks.fitting import SINK_TOKENS, Calibration, Subject, artifact_bytes, calibrated, fitted
from benchmarks.held_out import both_protocols, draw_windows, window_lengths
from kvalign import fit
from kvalign.convert import TOKEN_BETA
from kvalign.evaluate.baselines import Baseline, Fp8, Kivi, fit_kvtc
from kvalign.evaluate.coders import round_trip
from kvalign.evaluate.comparison import KIVI_BITS, KVTC_VALUE_WEIGHTS
from kvalign.evaluate.protocol import FLOOR_LIMIT, PreparedWindow, try_coder
from kvalign.overlap import refuse_overlap
from kvalign.text import Document, Window, fingerprint, read_documents

# Coded-token ratios aimed at; what is reported is what the bytes give.
OUR_RATIOS = (4.0, 10.0, 24.0, 45.0, 80.0, 140.0, 250.0, 450.0, 800.0)
KVTC_RATIOS = (8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)


def main() -> None:
    arguments = _arguments()
    started = time.perf_counter()
    torch.manual_seed(arguments.seed)
    calibration_documents, evaluation_documents = (
        _documents(arguments.calibration_text),
        _documents(arguments.eval_text),
    )
    refuse_overlap(calibration_documents, evaluation_documents)
    subject = Subject.load(arguments.model)
    windows, drawn = _windows(subject, evaluation_documents, arguments.windows, arguments.seed)
    calibration = calibrated(subject, calibration_documents, tokens=arguments.calibration_tokens, seed=arguments.seed)
    contenders = all_contenders(subject, calibration, arguments.token_beta)
    scored: list[Scored] = []
    floors: list[float] = []
    for number, (own, other) in enumerate(both_protocols(subject.model, windows, drawn), 1):
        floors.append(own.floor_kl)
        if own.floor_kl > FLOOR_LIMIT:
            raise SystemExit(f"void: the uncompressed model differs from itself by KL {own.floor_kl:.2e}")
        for contender in contenders:
            scored += score(subject.model, contender, own, other)
        say(f"window {number} of {len(windows)} ({own.window.domain}), {time.perf_counter() - started:.0f} s")
    domains = list(dict.fromkeys(window.domain for window in windows))
    classes = domain_classes(domains, [document.domain for document in calibration_documents], arguments.in_domain)
    setup = {
        "model": subject.describe(),
        "source_dtype": "bfloat16",
        "seed": arguments.seed,
        "windows": len(windows),
        "prefix_tokens": windows[0].prefix.numel(),
        "continuation_tokens": windows[0].continuation.numel(),
        "sink_tokens": SINK_TOKENS,
        "recent_tokens": 0,
        "token_beta": arguments.token_beta,
        "recomputed_layers": subject.shape.recomputed,
        "calibration": {
            "tokens": calibration.tokens,
            "domains": sorted({document.domain for document in calibration_documents}),
            "fingerprint": fingerprint(calibration_documents),
        },
        "evaluation": {
            "domains": {name: class_of(name, classes) for name in domains},
            "fingerprint": fingerprint(evaluation_documents),
        },
    }
    result = {
        "benchmark": "rate_distortion",
        "environment": describe(),
        "units": UNITS,
        "setup": setup,
        "floor_kl": max(floors),
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows(scored, domains, subject.shape.geometry),
        "summary": summary(scored, classes, subject.shape.geometry),
    }
    write_json(arguments.json, result)


def _windows(
    subject: Subject, documents: Sequence[Document], count: int, seed: int
) -> tuple[list[Window], list[Window]]:
    """Windows to score, and those that protocol S takes continuations from: two at least."""
    prefix, continuation = window_lengths(subject.position_limit)
    lengths = {"prefix": prefix, "continuation": continuation, "seed": seed}
    windows = draw_windows(documents, subject.tokenizer, windows=count, **lengths)
    if len(windows) > 1:
        return windows, windows
    drawn = draw_windows(documents, subject.tokenizer, windows=2, **lengths)
    return drawn[:1], drawn


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rate_distortion", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--calibration-text", type=Path, required=True, nargs="+", metavar="FILE")
    parser.add_argument("--eval-text", type=Path, required=True, nargs="+", metavar="FILE")
    parser.add_argument("--windows", type=int, required=True, metavar="N", help="in all; at least one a file")
    parser.add_argument("--seed", type=int, default=0, help="order of calibration text, sampled labels, windows")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--calibration-tokens", type=int, default=32_768, metavar="N", help="at most so many")
    parser.add_argument(
        "--token-beta", type=float, default=TOKEN_BETA, help="how much finer tokens are that are attended to"
    )
    parser.add_argument(
        "--in-domain",
        nargs="*",
        metavar="STEM",
        help="evaluation files of a calibrated kind; default: those that share the first word of a calibration file",
    )
    return parser.parse_args()


def _documents(files: Sequence[Path]) -> list[Document]:
    return [document for file in files for document in read_documents(file)]


def all_contenders(subject: Subject, calibration: Calibration, token_beta: float) -> list[Contender]:
    """Our codec at every ratio from one artifact, and every baseline at its settings."""
    shape = subject.shape
    contenders = []
    artifact = fitted(subject, calibration, finest_ratio=OUR_RATIOS[0], token_beta=token_beta)
    codec, size = artifact.codec(subject.model), artifact_bytes(artifact)
    for ratio in OUR_RATIOS:
        step = fit.expected_step(list(codec.transforms), shape.geometry, ratio)
        contenders.append(Contender("kvalign", f"step {step}", round_trip(codec, step), size))
    say("fit: KVTC")
    kvtc = fit_kvtc(
        calibration.statistics.whole(),
        replace(shape, recomputed=0),
        calibration.kept_aside,
        sink_tokens=SINK_TOKENS,
        smallest_ratio=KVTC_RATIOS[0],
    )
    for ratio, weight in itertools.product(KVTC_RATIOS, KVTC_VALUE_WEIGHTS):
        body = kvtc.at(ratio, weight)
        setting = f"{ratio:g}x, values x {weight:g}"
        contenders.append(Contender("kvtc", setting, Baseline(shape, body, SINK_TOKENS), body.artifact_bytes))
    contenders += [
        Contender("kivi", f"{bits} bit", Baseline(shape, Kivi(shape, bits), SINK_TOKENS), 0) for bits in KIVI_BITS
    ]
    return [*contenders, Contender("fp8", "e4m3", Baseline(shape, Fp8(shape), SINK_TOKENS), 0)]


def score(model: Any, contender: Contender, own: PreparedWindow, other: PreparedWindow) -> list[Scored]:
    """One round trip, scored by both protocols."""
    result = contender.coder(own)
    return [
        Scored(contender, protocol, try_coder(model, prepared, lambda window: result))
        for protocol, prepared in zip(PROTOCOLS, (own, other), strict=True)
    ]


if __name__ == "__main__":
    main()
