"""Does a stored prefix still hold a detail that is asked for later? Exact recall of a code hidden in text.

    python -m benchmarks.recall --model DIR --artifact DIR --json OUT

Each item hides one sentence with a number in a stretch of other text. The whole is coded as a prefix before the
question is known, and the answer is read off by greedy decoding (protocol S: the question comes from elsewhere).
"""

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.environment import describe, say, write_json
from benchmarks.fitting import Subject
from kvalign import accounting
from kvalign.artifact import load_artifact
from kvalign.capture import run
from kvalign.evaluate.protocol import copied
from kvalign.text import builtin_documents
from kvalign.watch import Watched, watch

DIGITS = 7
PLACES = (
    "the harbour office",
    "the old mill",
    "the north gate",
    "the seed store",
    "the reading room",
    "the boat house",
)
OFFSETS = (-32, -16, 0, 16)
UNITS = {
    "recall": "share of items whose every digit comes back",
    "digits": "share of digits that come back at their place",
    "ratio": "bf16 bytes of the coded tokens / bytes they take, side information included, sinks not",
}


@dataclass(frozen=True)
class Item:
    """A prefix with a code in it, [1, T]; the question behind it, [1, Q]; the digits wanted, [DIGITS]."""

    prefix: Tensor
    question: Tensor
    answer: Tensor


def main() -> None:
    arguments = _arguments()
    subject = Subject.load(arguments.model)
    artifact = load_artifact(arguments.artifact)
    items = made_items(subject.tokenizer, arguments.items, arguments.tokens, arguments.seed)
    prepared = [_read(subject.model, item, artifact.shape.recomputed) for item in items]
    rows = [_row("uncompressed", None, 1.0, [_digits(subject.model, cache, item) for cache, _, item in prepared])]
    for beta in arguments.betas:
        codec = replace(artifact, token_beta=beta).codec(subject.model)
        for offset in OFFSETS:
            step = artifact.recommended_step + offset
            found, sizes = [], []
            for cache, watched, item in prepared:
                data = codec.encode(cache, input_ids=item.prefix, watched=watched, step=step)
                sizes.append(codec.sizes(data))
                found.append(_digits(subject.model, codec.decode_dense(data), item))
            ratio = accounting.coded_ratio(artifact.shape.geometry, accounting.merged(sizes))
            rows.append(_row(f"step {step}", beta, ratio, found))
            say(str(rows[-1]))
    result = {
        "benchmark": "recall",
        "environment": describe(),
        "units": UNITS,
        "setup": {
            "model": subject.describe(),
            "items": len(items),
            "prefix_tokens": arguments.tokens,
            "digits": DIGITS,
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


def made_items(tokenizer: Any, count: int, tokens: int, seed: int) -> list[Item]:
    """Items of `tokens` prefix tokens each, the hidden sentence anywhere but in the first and last 64."""
    chance = random.Random(seed)
    text = "\n\n".join(document.text for document in builtin_documents("validation"))
    filler = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    items = []
    for _ in range(count):
        place = chance.choice(PLACES)
        code = "".join(chance.choice("0123456789") for _ in range(DIGITS))
        hidden = _ids(tokenizer, f"\n\nNote: the code for {place} is {code}.\n\n")
        start = chance.randrange(len(filler) - tokens)
        rest = filler[start : start + tokens - len(hidden)]
        at = chance.randrange(64, len(rest) - 64)
        question = _ids(tokenizer, f"\n\nQuestion: What is the code for {place}?\nAnswer: The code for {place} is ")
        answer = _ids(tokenizer, code)
        if len(answer) != DIGITS:
            raise SystemExit("this tokenizer does not split digits; recall is counted by the digit")
        items.append(
            Item(
                torch.tensor([[*rest[:at], *hidden, *rest[at:]]]),
                torch.tensor([question]),
                torch.tensor(answer),
            )
        )
    return items


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def _read(model: Any, item: Item, recomputed: int) -> tuple[DynamicCache, Watched, Item]:
    with watch(model, recomputed - 1) as watched:
        _, cache = run(model, item.prefix, logits_to_keep=1)
    return cache, watched, item


@torch.no_grad()
def _digits(model: Any, cache: DynamicCache, item: Item) -> Tensor:
    """Which digits come back by greedy decoding, [DIGITS] bool; the cache is left as it was."""
    own = copied(cache)
    logits, _ = run(model, item.question, own, logits_to_keep=1)
    found = []
    for _ in range(DIGITS):
        found.append(int(logits[0, -1].argmax()))
        logits, _ = run(model, torch.tensor([[found[-1]]]), own)
    return torch.tensor(found) == item.answer


def _row(setting: str, beta: float | None, ratio: float, found: list[Tensor]) -> dict[str, Any]:
    right = torch.stack(found)
    return {
        "setting": setting,
        "token_beta": beta,
        "ratio": round(ratio, 3),
        "recall": round(float(right.all(dim=1).float().mean()), 4),
        "digits": round(float(right.float().mean()), 4),
    }


if __name__ == "__main__":
    main()
