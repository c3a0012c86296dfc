"""Pulls the converted model as its user would, generates with it, and says what came out. Starts nothing."""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_services import Services
from demo_text import prompt_of_length

NEW_TOKENS = 80
_SUMMARY = ("ratio", "kl_mean", "kl_p99", "top1", "floor_kl", "artifact_bytes")


@dataclass(frozen=True)
class Outcome:
    """What a user of the converted model has of it.

    snapshot      as the Hub's client pulled it
    report        its report.json
    cache_ratio   of the prompt's cache at rest, tokens kept in 16 bit included
    held_ratio    of the resident cache at the end of the text, likewise
    kernels       calls of each fused kernel while the text was made
    """

    snapshot: Path
    report: dict[str, Any]
    generated: str
    generated_uncompressed: str
    prompt_tokens: int
    cache_ratio: float
    held_ratio: float
    kernels: dict[str, int]


def pull_and_generate(job: dict[str, Any], services: Services) -> Outcome:
    """Load the published commit with kvalign.load, and continue one prompt from both caches. Raises KvalignError."""
    from transformers.utils import logging

    import kvalign
    from kvalign.generation import continue_prompt
    from kvalign.load import fetch

    logging.disable_progress_bar()
    published = job["result"]
    where = {"revision": published["commit"], "endpoint": services.hub, "token": services.token}
    model, tokenizer, codec = kvalign.load(published["repo"], **where)
    snapshot = fetch(published["repo"], weights=False, **where)  # the papers, which load has no use for
    prompt = prompt_of_length(_longest_prompt(model, tokenizer))
    said = continue_prompt(model, tokenizer, codec, prompt, max_new_tokens=NEW_TOKENS)
    assert said.text_uncompressed is not None, "it is asked for by default"
    report = json.loads((snapshot / "report.json").read_text(encoding="utf-8"))
    assert said.held_ratio is not None, "this very conversion made a resident form"
    return Outcome(
        snapshot,
        report,
        said.text,
        said.text_uncompressed,
        said.prompt_tokens,
        said.cache_ratio,
        said.held_ratio,
        said.kernels,
    )


def as_json(job: dict[str, Any], outcome: Outcome | None) -> str:
    """One line with all keys, whatever became of the job; what there is none of is null."""
    published, report = job["result"] or {}, outcome.report["summary"] if outcome else {}
    line = {
        "job_id": job["id"],
        "state": job["state"],
        "source": job["config"]["source"]["repo"],
        "target": job["config"]["target"]["repo"],
        "commit": published.get("commit"),
        **{name: report.get(name) for name in _SUMMARY},
        "generated": outcome.generated if outcome else None,
        "generated_uncompressed": outcome.generated_uncompressed if outcome else None,
        "resident": _resident(outcome) if outcome else None,
        "seconds": job["stage_seconds"],
    }
    return json.dumps(line)


def _resident(outcome: Outcome) -> dict[str, Any]:
    """What the report says of the resident cache, and what this generation saw of it."""
    found = outcome.report["resident"]
    return {
        "coded_ratio": found["coded_ratio"],
        "kl_mean": found["quality"]["overall"]["kl_mean"],
        "kernel_error": found["kernel"]["relative_error"],
        "held_ratio": outcome.held_ratio,
        "kernels": outcome.kernels,
    }


def as_text(job: dict[str, Any], outcome: Outcome, services: Services, kept: Path) -> str:
    """The summary for a person."""
    summary, seconds = outcome.report["summary"], job["stage_seconds"]
    source, target = job["config"]["source"]["repo"], job["config"]["target"]["repo"]
    resident, calls = _resident(outcome), ", ".join(f"{name} {count:,}" for name, count in outcome.kernels.items())
    stages = ", ".join(f"{stage} {taken:.1f}" for stage, taken in seconds.items())
    rows = {
        "ratio": f"{summary['ratio']:.2f} (16-bit bytes of the coded tokens / their bytes at rest)",
        "mean KL": f"{summary['kl_mean']:.4g} nats a token (99th percentile {summary['kl_p99']:.4g},"
        f" floor {summary['floor_kl']:.2g})",
        "top-1": f"{100 * summary['top1']:.1f} % of positions agree",
        "resident": f"{resident['coded_ratio']:.2f} (16-bit bytes of tokens on pages / their bytes while generating),"
        f" mean KL {resident['kl_mean']:.4g} nats a token",
        "codec": f"{summary['artifact_bytes']:,} bytes",
        "seconds": f"{sum(seconds.values()):.1f}: {stages}",
        "report card": f"{kept / 'README.md'}",
        "": f"{services.hub}/{target}",
        "job": f"{services.api}{job['links']['self']}",
        "model": f"{kept} (commit {job['result']['commit'][:12]})",
    }
    table = "\n".join(f"  {name:<12} {value}" for name, value in rows.items())
    return (
        f"\n{source} -> {target}\n\n{table}\n\n"
        f"A prompt of {outcome.prompt_tokens} tokens, its cache stored {outcome.cache_ratio:.2f} times smaller"
        f" (sink and recent tokens stay in 16 bit), and\nread back into a resident cache {outcome.held_ratio:.2f} times"
        f" smaller, which attention reads as it is (calls of the kernel: {calls or 'none'}):\n\n"
        f"{_quoted(outcome.generated)}\n\n"
        f"The same with the uncompressed cache:\n\n{_quoted(outcome.generated_uncompressed)}\n"
    )


def _longest_prompt(model: Any, tokenizer: Any) -> int:
    """Characters that surely fit beside the new tokens: a token has one at least, a chat template takes some."""
    limit = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    return max(1, min(int(limit), 1 << 20) - NEW_TOKENS - 64)


def _quoted(text: str) -> str:
    """Indented, and without what could steer a terminal: a model may say anything."""
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text.strip())
    return "\n".join(
        line for part in shown.splitlines() for line in textwrap.wrap(part, 96, initial_indent="    ",
        subsequent_indent="    ") or [""]
    )  # fmt: skip
