"""What calibration costs above the passes it cannot do without: the same forward and backward passes, bare.

    python -m benchmarks.calibration --model DIR --json OUT

Each measurement runs in a process of its own, so that its peak memory is its own: bare, calibration, bare again.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from benchmarks.environment import describe, say, write_json
from benchmarks.fitting import Subject, calibration_sequences
from kvalign import calibrate
from kvalign.capture import layer_tensors, run
from kvalign.config import Calibration
from kvalign.convert import TOKEN_BETA
from kvalign.text import builtin_documents
from kvalign.windows import prefix_tokens

UNITS = {
    "*_s": "seconds, after one pass to warm up",
    "*_bytes": "bytes",
    "peak_bytes": "largest resident memory of the process",
    "loaded_bytes": "resident memory before the first pass, model and text loaded",
    "calibration_over_bare": "seconds of calibration / mean seconds of the bare runs before and after it",
}
_WHAT = {
    "bare": "a forward pass over each sequence, and a backward pass from its last quarter to the cache before it",
    "calibration": "kvalign.calibrate.calibrate, with checkpoints",
}


def main() -> None:
    arguments = _arguments()
    rows = []
    for what in ("bare", "calibration", "bare"):
        rows.append(_in_own_process(what, arguments.model, arguments.tokens))
        say(str(rows[-1]))
    bare = (rows[0]["total_s"] + rows[2]["total_s"]) / 2
    result = {
        "benchmark": "calibration",
        "environment": describe(),
        "units": UNITS,
        "setup": {"model": Subject.load(arguments.model).describe(), "text": "builtin"},
        "rows": rows,
        "summary": {
            "calibration_over_bare": round(rows[1]["total_s"] / bare, 3),
            "extra_peak_bytes": rows[1]["peak_bytes"] - max(rows[0]["peak_bytes"], rows[2]["peak_bytes"]),
        },
    }
    write_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--tokens", type=int, default=Calibration().tokens, metavar="N", help="default: the product's")
    return parser.parse_args()


def _in_own_process(what: str, folder: Path, tokens: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (what, folder, tokens))


def measured(what: str, folder: Path, tokens: int) -> dict[str, Any]:
    """One run in this process: seconds and memory."""
    subject = Subject.load(folder)
    length = min(Calibration().sequence_length, subject.position_limit)
    sequences = calibration_sequences(subject, builtin_documents("calibration"), tokens=tokens, length=length, seed=0)
    passes(subject.model, sequences[:1])
    loaded = _resident_bytes()
    start = time.perf_counter()
    if what == "bare":
        passes(subject.model, sequences)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            calibrate.calibrate(
                subject.model,
                subject.shape,
                sequences,
                seed=0,
                token_beta=TOKEN_BETA,
                checkpoint=Path(scratch) / "statistics.safetensors",
                on_progress=lambda done, total: None,
            )
    return {
        "what": what,
        "doing": _WHAT[what],
        "forward_tokens": sum(sequence.numel() for sequence in sequences),
        "backward_tokens": sum(sequence.numel() - prefix_tokens(sequence.numel()) for sequence in sequences),
        "total_s": round(time.perf_counter() - start, 3),
        "loaded_bytes": loaded,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def passes(model: Any, sequences: list[Tensor]) -> None:
    """The passes that calibration makes, and nothing with what they give."""
    for tokens in sequences:
        prefix = prefix_tokens(tokens.numel())
        with torch.no_grad():
            _, before = run(model, tokens[None, :prefix], logits_to_keep=1)
        cache = DynamicCache()
        with torch.enable_grad():
            for index, pair in enumerate(layer_tensors(before)):
                keys, values = (x.detach().clone().requires_grad_() for x in pair)
                cache.update(keys, values, index)
            logits, _ = run(model, tokens[None, prefix:], cache)
            nn.functional.cross_entropy(logits[0, :-1].float(), tokens[prefix + 1 :], reduction="sum").backward()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
