"""Is decoding a stored prefix quicker than computing it again? Prefill against encode and decode, side by side.

    python -m benchmarks.resume --model DIR --json OUT

Without --artifact the codec is fitted on the text that comes with kvalign, at about the product's own range.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.environment import describe, median_seconds, say, write_json
from benchmarks.fitting import Subject, calibrated, fitted, joined_tokens
from kvalign import accounting
from kvalign.artifact import load_artifact
from kvalign.capture import load_model, run
from kvalign.codec import Codec
from kvalign.convert import TOKEN_BETA
from kvalign.text import builtin_documents
from kvalign.watch import RecentQueries, watch_queries

LENGTHS = (512, 1024, 2048)
UNITS = {
    "*_s": "seconds, median over the repeats after one round to warm up; all steps in turn within a round",
    "prefill_over_*": "seconds of the faster prefill / seconds",
    "ratio": "bf16 bytes of the coded tokens / bytes they take, side information included, sinks not",
}
# One octave finer than the step for a ratio of 20, as convert keeps for its range.
_FINEST_RATIO = 10.0


def main() -> None:
    arguments = _arguments()
    subject = Subject.load(arguments.model)
    if arguments.artifact:
        artifact = load_artifact(arguments.artifact)
    else:
        calibration = calibrated(subject, builtin_documents("calibration"), tokens=arguments.calibration_tokens, seed=0)
        artifact = fitted(subject, calibration, finest_ratio=_FINEST_RATIO, token_beta=arguments.token_beta)
    codec = artifact.codec()
    half = load_model(arguments.model, torch.bfloat16)
    lengths = [length for length in arguments.lengths if length <= subject.position_limit]
    text = joined_tokens(subject, builtin_documents("validation"), max(lengths, default=0))
    rows = []
    for length in lengths:
        rows.append(measured(subject.model, half, codec, text[:length], arguments.repeats))
        say(str(rows[-1]))
    result = {
        "benchmark": "resume",
        "environment": describe(),
        "units": UNITS,
        "setup": {
            "model": subject.describe(),
            "repeats": arguments.repeats,
            "step": codec.recommended,
            "token_beta": codec.token_beta,
            "sink_tokens": codec.sink_tokens,
            "recent_tokens": codec.recent_tokens,
            "artifact_bytes": len(artifact.tensor_bytes),
            "cache_dtype": "float32",
        },
        "rows": rows,
    }
    write_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument(
        "--artifact", type=Path, metavar="DIR", help="a codec folder of this model, as convert writes it"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N", help="tokens of each prefix")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--calibration-tokens", type=int, default=32_768, metavar="N")
    parser.add_argument("--token-beta", type=float, default=TOKEN_BETA)
    return parser.parse_args()


@torch.no_grad()
def measured(model: Any, half: Any, codec: Codec, tokens: Tensor, repeats: int) -> dict[str, Any]:
    """One length: seconds of each step and what they promise."""
    cache, queries = watched_prefill(model, tokens)
    data = codec.encode(cache, queries=queries)
    seconds = median_seconds(
        {
            "prefill_float32_s": lambda: run(model, tokens[None], logits_to_keep=1),
            "prefill_bfloat16_s": lambda: run(half, tokens[None], logits_to_keep=1),
            "encode_s": lambda: codec.encode(cache, queries=queries),
            "decode_s": lambda: codec.decode(data, model),
        },
        repeats,
    )
    prefill = min(seconds["prefill_float32_s"], seconds["prefill_bfloat16_s"])
    return {
        "tokens": tokens.numel(),
        "ratio": round(accounting.coded_ratio(codec.shape.geometry, codec.sizes(data)), 4),
        **{name: round(value, 5) for name, value in seconds.items()},
        "prefill_over_encode": round(prefill / seconds["encode_s"], 3),
        "prefill_over_decode": round(prefill / seconds["decode_s"], 3),
    }


def watched_prefill(model: Any, tokens: Tensor) -> tuple[DynamicCache, RecentQueries]:
    """The cache of a prefix, with its last queries."""
    with watch_queries(model) as queries:
        _, cache = run(model, tokens[None], logits_to_keep=1)
    return cache, queries


if __name__ == "__main__":
    main()
