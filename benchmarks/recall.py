"""Does a stored prefix still hold a detail that is asked for later? Exact recall of values in a list and of a number.

    python -m benchmarks.recall --model DIR --artifact DIR --json OUT

The tasks are those of kvalign.evaluate.recall; here they are put to a codec at several steps around its own.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from benchmarks.environment import describe, say, write_json
from benchmarks.fitting import Subject
from kvalign import accounting
from kvalign.accounting import PayloadSizes
from kvalign.artifact import Artifact, load_artifact
from kvalign.codec import Codec
from kvalign.evaluate.coders import round_trip
from kvalign.evaluate.protocol import PreparedWindow
from kvalign.evaluate.recall import RecallResult, measure_recall
from kvalign.text import builtin_documents

OFFSETS = (-32, -16, 0, 16)
UNITS = {
    "difficulty": "pairs of the list, digits of the number; the hardest at which the uncompressed model holds",
    "recall": "share of items answered exactly",
    "ratio": "bf16 bytes of the coded tokens / bytes they take, side information included, sinks not",
}


@dataclass
class Setting:
    """A codec at one step, and what its bytes came to, by task."""

    codec: Codec
    step: int
    token_beta: float
    sizes: dict[str, list[PayloadSizes]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"step {self.step}, token_beta {self.token_beta:g}"

    def __call__(self, prepared: PreparedWindow) -> DynamicCache:
        cache, sizes = round_trip(self.codec, self.step)(prepared)
        self.sizes.setdefault(prepared.window.domain, []).append(sizes)
        return cache

    def ratio(self, task: str) -> float:
        return accounting.coded_ratio(self.codec.shape.geometry, accounting.merged(self.sizes[task]))


def main() -> None:
    arguments = _arguments()
    subject = Subject.load(arguments.model)
    artifact = load_artifact(arguments.artifact)
    settings = list(_settings(subject, artifact, arguments.betas))
    found = measure_recall(
        subject.model,
        subject.tokenizer,
        builtin_documents("validation"),
        {setting.name: setting for setting in settings},
        items=arguments.items,
        prefix_tokens=arguments.tokens,
        seed=arguments.seed,
    )
    rows = [row for result in found for row in _rows(result, settings)]
    for row in rows:
        say(str(row))
    result = {
        "benchmark": "recall",
        "environment": describe(),
        "units": UNITS,
        "setup": {
            "model": subject.describe(),
            "items": arguments.items,
            "prefix_tokens": found[0].prefix_tokens,
            "applicable": {result.task: result.applicable for result in found},
            "seed": arguments.seed,
            "recent_tokens": artifact.recent_tokens,
            "sink_tokens": artifact.sink_tokens,
            "recomputed_layers": artifact.shape.recomputed,
            "recommended_step": artifact.recommended_step,
        },
        "rows": rows,
    }
    write_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recall", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--artifact", type=Path, required=True, metavar="DIR", help="a codec folder of this model")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--items", type=int, default=20, metavar="N")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each prefix")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.3], metavar="B", help="token_beta to try")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _settings(subject: Subject, artifact: Artifact, betas: Sequence[float]) -> Iterator[Setting]:
    for beta in betas:
        codec = replace(artifact, token_beta=beta).codec(subject.model)
        for offset in OFFSETS:
            yield Setting(codec, artifact.recommended_step + offset, beta)


def _rows(result: RecallResult, settings: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """The uncompressed model first; the settings only where it holds."""
    task = {"task": result.task, "difficulty": result.difficulty}
    if "uncompressed" in result.scores:
        recall = round(result.scores["uncompressed"], 4)
        yield task | {"setting": "uncompressed", "token_beta": None, "ratio": 1.0, "recall": recall}
    for setting in settings if result.applicable else ():
        yield task | {
            "setting": f"step {setting.step}",
            "token_beta": setting.token_beta,
            "ratio": round(setting.ratio(result.task), 3),
            "recall": round(result.scores[setting.name], 4),
        }


if __name__ == "__main__":
    main()
