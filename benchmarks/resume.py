"""Is decoding a stored prefix quicker than computing it again? Prefill against encode and decode, side by side.

    python -m benchmarks.resume --model DIR --json OUT

Without --artifact the codec is fitted on the text that comes with kvalign, at about the product's own range.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.environment import describe, median_seconds, say, write_json
from benchmarks.fitting import Subject, calibrated, fitted, joined_tokens
from kvalign import accounting
from kvalign.artifact import Artifact, load_artifact
from kvalign.capture import load_model, run
from kvalign.codec import Codec
from kvalign.convert import TOKEN_BETA
from kvalign.text import builtin_documents
from kvalign.watch import Watched

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
    models = {"float32": subject.model, "bfloat16": load_model(arguments.model, torch.bfloat16)}
    lengths = [length for length in arguments.lengths if length <= subject.position_limit]
    text = joined_tokens(subject.tokenizer, builtin_documents("validation"), max(lengths, default=0))
    rows = []
    for length in lengths:
        rows.append(measured(models, artifact, text[:length], arguments.repeats))
        say(str(rows[-1]))
    result = {
        "benchmark": "resume",
        "environment": describe(),
        "units": UNITS,
        "setup": {
            "model": subject.describe(),
            "repeats": arguments.repeats,
            "step": artifact.recommended_step,
            "token_beta": artifact.token_beta,
            "recomputed_layers": artifact.shape.recomputed,
            "sink_tokens": artifact.sink_tokens,
            "recent_tokens": artifact.recent_tokens,
            "artifact_bytes": len(artifact.tensor_bytes),
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
def measured(models: dict[str, Any], artifact: Artifact, tokens: Tensor, repeats: int) -> dict[str, Any]:
    """One length: seconds of each step and what they promise. Codes the cache of whichever prefill is faster."""
    prefills = {
        f"prefill_{name}_s": partial(run, model, tokens[None], logits_to_keep=1) for name, model in models.items()
    }
    quickest = median_seconds(prefills, 2)
    name = min(models, key=lambda name: quickest[f"prefill_{name}_s"])
    codec, ids = artifact.codec(models[name]), tokens[None]
    cache, watched = watched_prefill(models[name], codec, tokens)
    data = codec.encode(cache, input_ids=ids, watched=watched)
    seconds = median_seconds(
        {
            **prefills,
            "encode_s": lambda: codec.encode(cache, input_ids=ids, watched=watched),
            "decode_s": lambda: codec.decode_dense(data),
        },
        repeats,
    )
    prefill = min(seconds[name] for name in prefills)
    return {
        "tokens": tokens.numel(),
        "cache_dtype": name,
        "ratio": round(accounting.coded_ratio(codec.shape.geometry, codec.sizes(data)), 4),
        **{name: round(value, 5) for name, value in seconds.items()},
        "prefill_over_encode": round(prefill / seconds["encode_s"], 3),
        "prefill_over_decode": round(prefill / seconds["decode_s"], 3),
    }


def watched_prefill(model: Any, codec: Codec, tokens: Tensor) -> tuple[DynamicCache, Watched]:
    """The cache of a prefix, and what the codec watched."""
    with codec.watch() as watched:
        _, cache = run(model, tokens[None], logits_to_keep=1)
    return cache, watched


if __name__ == "__main__":
    main()
