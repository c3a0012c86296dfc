"""Generation with each kind of cache: tokens a second, time to the first token, bytes held, memory at its highest.

    python -m benchmarks.generate --model DIR --json OUT

Each row is measured in a process of its own, so that memory is its own; rows of one context take turns. Without
--artifact the resident form is fitted on the text that comes with kvalign.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from benchmarks.environment import describe, say, write_json
from benchmarks.fitting import SINK_TOKENS, Subject, calibrated, fitted_resident, joined_tokens
from kvalign.artifact import load_artifact
from kvalign.capture import load_model, load_tokenizer, run
from kvalign.resident.cache import ResidentCache
from kvalign.resident.interface import fused_attention
from kvalign.resident.stored import StoredResident
from kvalign.text import builtin_documents

CONTEXTS = (512, 2048, 8192)
RECENT_TOKENS = 64
# transformers' own quantized caches, where what they need is installed.
QUANTIZED = {"fp8": "torch", "quanto-4": "optimum.quanto", "hqq-4": "hqq"}
UNITS = {
    "tokens_per_s": "new tokens over the seconds of their passes, greedy, one row; median of the rounds",
    "ttft_s": "seconds from the prompt to the first new token; median of the rounds",
    "cache_bytes": "bytes that the cache holds at the end; of quantized caches the tensors found in their layers",
    "peak_bytes": "most memory of the process above what it held with the model loaded, before the prompt",
    "over_dynamic": "tokens_per_s of the row over that of cache = dynamic at the same context",
}


def main() -> None:
    arguments = _arguments()
    if arguments.row:
        print(json.dumps(row(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        plan = arguments.artifact or _fitted(arguments, Path(folder))
        rows = [found for context in arguments.contexts for found in _of_context(arguments, context, plan)]
    result = {
        "benchmark": "generate",
        "environment": describe(),
        "units": UNITS,
        "setup": {
            "model": arguments.model.resolve().name,
            "dtype": arguments.dtype,
            "new_tokens": arguments.new_tokens,
            "rounds": arguments.rounds,
            "resident_bits": arguments.bits,
            "not_installed": [name for name, package in QUANTIZED.items() if not _installed(package)],
        },
        "rows": rows,
    }
    write_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--artifact", type=Path, metavar="DIR", help="a codec folder of this model")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--calibration-tokens", type=int, default=32_768, metavar="N")
    parser.add_argument("--row", nargs=2, metavar=("CONTEXT", "CACHE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _of_context(arguments: argparse.Namespace, context: int, plan: Path) -> list[dict[str, Any]]:
    caches = ["kvalign", "dynamic", *(name for name, package in QUANTIZED.items() if _installed(package))]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in caches}
    for _ in range(arguments.rounds):
        for name in caches:
            command = [
                *(sys.executable, "-m", "benchmarks.generate", "--model", str(arguments.model)),
                *("--json", str(arguments.json), "--artifact", str(plan), "--dtype", arguments.dtype),
                *("--new-tokens", str(arguments.new_tokens), "--row", str(context), name),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            say(str(found[name][-1]))
    rows = []
    for name, rounds in found.items():
        rows.append({key: median(one[key] for one in rounds) for key in rounds[0] if key != "cache"} | {"cache": name})
    dynamic = next(item for item in rows if item["cache"] == "dynamic")
    for item in rows:
        item["over_dynamic"] = round(item["tokens_per_s"] / dynamic["tokens_per_s"], 3)
    return rows


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _fitted(arguments: argparse.Namespace, folder: Path) -> Path:
    subject = Subject.load(arguments.model)
    calibration = calibrated(subject, builtin_documents("calibration"), tokens=arguments.calibration_tokens, seed=0)
    stored = fitted_resident(subject, calibration, bits=arguments.bits)
    file = folder / "resident.pt"
    torch.save(stored, file)
    return file


def _plan(path: Path) -> StoredResident:
    if path.is_dir():
        resident = load_artifact(path).resident
        assert resident is not None
        return resident
    stored = torch.load(path, weights_only=False)  # written by this very run
    assert isinstance(stored, StoredResident)
    return stored


@torch.no_grad()
def row(arguments: argparse.Namespace) -> dict[str, Any]:
    """One context with one kind of cache, measured in this process."""
    context, name = int(arguments.row[0]), arguments.row[1]
    documents = [*builtin_documents("calibration"), *builtin_documents("validation")]
    tokens = joined_tokens(load_tokenizer(arguments.model), documents, context)
    model = load_model(arguments.model, getattr(torch, arguments.dtype))
    with fused_attention(model) if name == "kvalign" else nullcontext():
        _generated(model, _cache(name, model, arguments.artifact), tokens[:200], 3)  # compiles, and warms up
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        before = _memory_bytes("VmRSS")
        cache = _cache(name, model, arguments.artifact)
        seconds = _generated(model, cache, tokens, arguments.new_tokens)
    return {
        "context": context,
        "cache": name,
        "tokens_per_s": round((arguments.new_tokens - 1) / sum(seconds[1:]), 3),
        "ttft_s": round(seconds[0], 3),
        "cache_bytes": _held_bytes(cache),
        "peak_bytes": max(0, _memory_bytes("VmHWM") - before),
    }


def _cache(name: str, model: Any, artifact: Path) -> Cache:
    if name == "kvalign":
        return ResidentCache(_plan(artifact).plan(SINK_TOKENS, RECENT_TOKENS), model)
    if name == "dynamic":
        return DynamicCache(config=model.config)
    backend, _, bits = name.partition("-")
    return QuantizedCache(backend, model.config, **({"nbits": int(bits)} if bits else {}))


def _generated(model: Any, cache: Cache, prompt: torch.Tensor, count: int) -> list[float]:
    """Seconds of each new token's pass, the first with the prompt's; greedy."""
    fed, seconds = prompt[None], []
    for _ in range(count):
        begun = time.perf_counter()
        logits, _ = run(model, fed, cache, logits_to_keep=1)
        fed = logits[:, -1].argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - begun)
    return seconds


def _held_bytes(cache: Cache) -> int:
    if isinstance(cache, ResidentCache):
        return cache.sizes().total
    storages = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer), 3):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(item: Any, depth: int) -> list[torch.Tensor]:
    """Plain tensors within objects, to a depth: quantized ones keep theirs in attributes."""
    if isinstance(item, torch.Tensor) and type(item) in (torch.Tensor, torch.nn.Parameter):
        return [item]
    if depth == 0 or isinstance(item, (str, bytes, int, float, type(None))):
        return []
    if isinstance(item, dict):
        parts: Any = item.values()
    elif isinstance(item, (list, tuple)):
        parts = item
    else:
        parts = getattr(item, "__dict__", {}).values()
    return [tensor for part in parts for tensor in _tensors(part, depth - 1)]


def _memory_bytes(name: str) -> int:
    """A line of this process's status: VmRSS, held now, or VmHWM, the highest."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
