"""README.md of a converted model, rendered from report.json alone. Escapes whatever came from the source repo."""

import math
import re
from typing import Any

import yaml

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")


def render(report: dict[str, Any]) -> str:
    """Front matter that the Hub accepts, then the card."""
    front = yaml.safe_dump(front_matter(report), sort_keys=False, allow_unicode=True, width=1000)
    sections = [
        _head(report),
        _usage(report),
        _quality(report),
        _beyond_likelihood(report),
        _comparison(report),
        _resident(report),
        _sizes(report),
        _speed(report),
        _heads(report),
        _codec(report),
        _provenance(report),
        _caveats(report),
    ]
    return f"---\n{front}---\n\n" + "\n".join(sections)


def front_matter(report: dict[str, Any]) -> dict[str, Any]:
    """Hub metadata: licence and gate text carried from the source, results in model-index."""
    layout = report["target"]["layout"]
    return {
        **report["source"]["carried"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": report["source"]["repo"],
        "base_model_relation": "quantized" if layout == "full" else "adapter",
        "tags": ["kvalign", "kv-cache-compression"],
        "model-index": [{"name": report["target"]["repo"].split("/")[-1], "results": _results(report)}],
    }


def _results(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "task": {"type": "text-generation", "name": "KV cache compression"},
            "dataset": {"name": f"kvalign held-out text: {name}", "type": report["validation"]["dataset"]},
            "metrics": [
                {"type": "kl_nats_mean", "name": "Mean KL (nats)", "value": round(found["kl_mean"], 6)},
                {"type": "top1_agreement", "name": "Top-1 agreement", "value": round(found["top1"], 4)},
                {"type": "coded_ratio", "name": "Ratio of coded tokens", "value": round(found["ratio"], 2)},
            ],
        }
        for name, found in report["quality"]["domains"].items()
    ]


def _head(report: dict[str, Any]) -> str:
    summary, sizes, source = report["summary"], report["sizes"], report["source"]
    at_8k = sizes["cache_ratio_by_tokens"]["8192"]
    verdict = "" if report["gate"]["passed"] else _failed(report)
    commit = f" at commit `{source['commit'][:12]}`" if source["commit"] else ""
    return f"""# {escape(report["target"]["repo"].split("/")[-1])}

{verdict}[{escape(source["repo"])}](https://huggingface.co/{source["repo"]}){commit}, with a
codec that stores its KV cache **{summary["ratio"]:.1f} times smaller** than bfloat16 (coded tokens;
{at_8k:.1f} times for a whole cache of 8,192 tokens) at a mean KL of **{summary["kl_mean"]:.4f} nats** a token and
**{100 * summary["top1"]:.1f} %** top-1 agreement with the uncompressed cache, on held-out text.
"""


def _failed(report: dict[str, Any]) -> str:
    lines = "\n".join(f"> - {escape(line)}" for line in report["gate"]["failures"])
    return f"> **Not published: the quality gate failed.**\n{lines}\n\n"


def _usage(report: dict[str, Any]) -> str:
    return f"""## Use

```python
import kvalign
model, tokenizer, codec = kvalign.load("{report["target"]["repo"]}")
model.set_attn_implementation("kvalign")    # attention reads the cache's codes
cache = codec.cache(model)
model.generate(**inputs, cache=cache)       # past_key_values=cache before transformers 5.24
blob = codec.encode(cache, input_ids=ids)   # a finished prefix and its tokens, as bytes
cache = codec.decode(blob)                  # ready to go on generating
```

`with codec.watch() as watched:` around the reading, and `watched=watched` to encode, make the bytes as good as below.
"""


def _quality(report: dict[str, Any]) -> str:
    quality = report["quality"]
    rows = [("all", quality["overall"]), *quality["domains"].items()]
    table = "\n".join(_quality_row(name, found) for name, found in rows)
    points = "\n".join(
        f"| {point['step']}{' (recommended)' if point['step'] == report['codec']['recommended_step'] else ''}"
        f" | {point['ratio']:.2f} | {point['kl_mean']:.4f} | {point['kl_p99']:.3f} | {100 * point['top1']:.1f} % |"
        for point in report["operating_points"]
    )
    worst = ", ".join(
        f"{escape(window['domain'])} {_number(window['kl_mean'], '.4f')} (largest {_number(window['kl_max'], '.2f')})"
        for window in quality["worst_windows"]
    )
    codec = report["codec"]
    recomputed = codec["recomputed_layers"]
    what = f", the first {recomputed} of {codec['layers']} layers as token ids alone" if recomputed else ""
    return f"""## Quality

Protocol R: {quality["prefix_tokens"]} tokens are read by the uncompressed model, their cache is stored as bytes{what}
and read back, and the next {quality["continuation_tokens"]} tokens are scored on what came back. The first
{codec["sink_tokens"]} and the last {codec["recent_tokens"]} tokens of the prefix stay in 16 bit. The uncompressed
model against itself by the same route: KL {report["summary"]["floor_kl"]:.1g} nats.

| text | ratio of coded tokens | KL, nats (95 % interval) | 99th percentile | largest | top-1 | NLL, nats | windows |
| --- | --- | --- | --- | --- | --- | --- | --- |
{table}

The windows that fared worst: {worst}.

One artifact serves every ratio; the step is chosen when a cache is encoded:

| step | ratio of coded tokens | mean KL, nats | 99th percentile | top-1 agreement |
| --- | --- | --- | --- | --- |
{points}

{_figures(report, "kl_by_position")}"""


def _quality_row(name: str, found: dict[str, Any]) -> str:
    cells = [
        escape(name),
        f"{found['ratio']:.2f}",
        f"{_number(found['kl_mean'], '.4f')} ({_number(found['kl_low'], '.4f')} to {_number(found['kl_high'], '.4f')})",
        _number(found["kl_p99"], ".3f"),
        _number(found["kl_max"], ".3f"),
        f"{100 * found['top1']:.1f} %",
        _number(found["nll_delta"], "+.4f"),
        str(found["windows"]),
    ]
    return f"| {' | '.join(cells)} |"


def _resident(report: dict[str, Any]) -> str:
    found = report["resident"]
    if not found["coded_layers"]:
        return """## While generating

No layer of this model has full attention; the resident cache leaves all of them as they are.
"""
    quality, kernel = found["quality"], found["kernel"]
    rows = [("all", quality["overall"]), *quality["domains"].items()]
    table = "\n".join(
        f"| {escape(name)} | {row['kl_mean']:.4f} ({row['kl_low']:.4f} to {row['kl_high']:.4f}) | {row['kl_p99']:.3f}"
        f" | {100 * row['top1']:.1f} % | {row['windows']} |"
        for name, row in rows
    )
    lengths = ", ".join(f"{ratio:.2f} at {int(tokens):,}" for tokens, ratio in found["cache_ratio_by_tokens"].items())
    ran = ", ".join(f"{name} {calls:,}" for name, calls in kernel["calls"].items())
    off = kernel["relative_error"]
    held = (
        ""
        if off is None
        else f" It is within {off:.1g} of plain attention on the same codes (limit {kernel['limit']:g})."
    )
    return f"""## While generating

`codec.cache(model)` holds {found["coded_layers"]} layers as codes of {found["bits_per_value"]:.2f} bits a number,
scales included: **{found["coded_ratio"]:.2f} times smaller** than bfloat16 for tokens on pages, and for a whole cache,
with the first {report["codec"]["sink_tokens"]} tokens, the newest {found["recent_tokens"]} and up to a page more in
16 bit: {lengths} tokens. Attention reads the codes as they are; calls while this was measured: {ran};
layers uncompressed: {kernel["dense_layers"]}.{held}

Protocol C: every window is read through the compressed cache from its first token on, in chunks of
{quality["chunk_tokens"]} and the last {quality["single_tokens"]} tokens one by one.

| text | KL, nats (95 % interval) | 99th percentile | top-1 | windows |
| --- | --- | --- | --- | --- |
{table}
"""


def _beyond_likelihood(report: dict[str, Any]) -> str:
    lines = []
    for name, found in report["greedy"].items():
        lines.append(
            f"- Greedy text from the {escape(name)} cache is that of the uncompressed one for"
            f" {found['mean_agreeing_tokens']:.1f} of {found['new_tokens']} tokens on average, and to the end in"
            f" {100 * found['identical']:.0f} % of {len(found['agreeing'])} windows."
        )
    lines += [_recall(found) for found in report["recall"]]
    return "## Beyond likelihood\n\n" + "\n".join(lines) + "\n"


_TASKS = {
    "key_value": ("one of {} key-value pairs", "a list of two key-value pairs"),
    "needle": ("a number of {} digits hidden in other text", "a number of three digits hidden in other text"),
}


def _recall(found: dict[str, Any]) -> str:
    """One task, protocol S."""
    asked, easiest = _TASKS[found["task"]]
    if not found["applicable"]:
        return (
            f"- Recall of {easiest}: not applicable, the uncompressed model itself answers fewer than nine of ten"
            " (or there was too little text to ask)."
        )
    scores = ", ".join(f"{escape(name)} {100 * score:.0f} %" for name, score in found["scores"].items())
    return (
        f"- Recall of {asked.format(found['difficulty'])}, asked for after {found['prefix_tokens']} tokens were coded"
        f" (protocol S, {found['items']} items, exact): {scores}."
    )


def _comparison(report: dict[str, Any]) -> str:
    overall = report["quality"]["overall"]
    rows = [(found["name"], found["setting"], found["artifact_bytes"], found) for found in report["baselines"]] + [
        ("**kvalign**", "recommended step", report["summary"]["artifact_bytes"], overall)
    ]
    table = "\n".join(
        f"| {name} | {setting} | {found['ratio']:.2f} | {_number(found['kl_mean'], '.4f')}"
        f" ({_number(found['kl_low'], '.4f')} to {_number(found['kl_high'], '.4f')}) | {100 * found['top1']:.1f} %"
        f" | {size:,} |"
        for name, setting, size, found in sorted(rows, key=lambda row: row[3]["ratio"])
    )
    return f"""## Beside other codecs

On the same windows by protocol R, through bytes, with the same first and last tokens in 16 bit. KVTC is our own
implementation of the published method, fitted on the same calibration text.

| codec | setting | ratio of coded tokens | KL, nats (95 % interval) | top-1 | artifact, bytes |
| --- | --- | --- | --- | --- | --- |
{table}

{_figures(report, "rate_distortion")}"""


def _speed(report: dict[str, Any]) -> str:
    found, hardware = report["speed"], report["hardware"]
    resident = (
        ""
        if found["resident_over_dynamic"] is None
        else f" Greedy tokens a second behind it: {found['resident_tokens_per_s']:.1f} from the resident cache,"
        f" {found['dynamic_tokens_per_s']:.1f} from the uncompressed one ({found['resident_over_dynamic']:.2f} times)."
    )
    return f"""## Speed

On {hardware["cores"]} cores ({hardware["machine"]}), in turns, {found["prefix_tokens"]} tokens: reading them anew takes
{found["prefill_s"]:.2f} s, encoding their cache {found["encode_s"]:.2f} s ({found["prefill_over_encode"]:.1f} times
quicker), decoding it {found["decode_s"]:.2f} s ({found["prefill_over_decode"]:.1f} times quicker).{resident}
"""


def _heads(report: dict[str, Any]) -> str:
    lines = "\n".join(
        f"- {kind.capitalize()}, {found['heads']} heads of {found['head_dim']} channels: mean cosine similarity of two"
        f" heads {found['before']:.3f} as they stand, {found['after']:.3f} once one is rotated onto the other"
        + (f" ({found['left_out']} heads left out, of another width or for their number)" if found["left_out"] else "")
        + "."
        for kind, found in report["head_alignment"].items()
    )
    says = "\n".join(f"- {found['says']}" for found in report["head_alignment"].values())
    return f"""## Inside the heads

{lines}

{_figures(report, "head_alignment")}
{says}

{_figures(report, "activations")}"""


def _codec(report: dict[str, Any]) -> str:
    return f"""## Where the bits go

{_figures(report, "bits", "sensitivity")}"""


def _figures(report: dict[str, Any], *names: str) -> str:
    """The pictures of these names that there are, each with its caption and a link to its data."""
    return "".join(
        f"![{figure['name'].replace('_', ' ')}](figures/{figure['image']})\n\n"
        f"{figure['caption']} [Data](figures/{figure['data']}).\n\n"
        for figure in report["figures"]
        if figure["name"] in names
    )


def _number(value: float | None, form: str) -> str:
    return "not a number" if value is None or math.isnan(value) else format(value, form)


def _sizes(report: dict[str, Any]) -> str:
    sizes = report["sizes"]
    lengths = "\n".join(
        f"| whole cache of {int(tokens):,} tokens, sinks and recent tokens included | {ratio:.2f} |"
        for tokens, ratio in sizes["cache_ratio_by_tokens"].items()
    )
    spread = "\n".join(
        f"| the longest of these, the codec's own bytes spread over {int(tokens):,} cached tokens | {ratio:.2f} |"
        for tokens, ratio in sizes["cache_ratio_with_artifact_spread_over_tokens"].items()
    )
    return f"""## Size

| what, against bfloat16 ({sizes["raw_bytes_per_token"]:,} bytes a token) | ratio |
| --- | --- |
| coded tokens, all side information included | {sizes["coded_ratio"]:.2f} |
{lengths}
{spread}

The codec weighs {sizes["artifact_bytes"]:,} bytes ({100 * sizes["artifact_over_weights"]:.1f} % of the weights); it has
paid for itself after {sizes["artifact_break_even_tokens"]:,} cached tokens.
"""


def _provenance(report: dict[str, Any]) -> str:
    calibration, hardware = report["calibration"], report["hardware"]
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report["stage_seconds"].items())
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"""## How it was made

Calibrated on {calibration["tokens"]:,} tokens of {escape(calibration["dataset"])}
({", ".join(map(escape, calibration["domains"]))}; seed {calibration["seed"]}, fingerprint
`{calibration["fingerprint"][:16]}`), judged on {escape(report["validation"]["dataset"])}
({", ".join(map(escape, report["validation"]["domains"]))}; fingerprint `{report["validation"]["fingerprint"][:16]}`).

Time each stage took: {stages}.
{hardware["system"]} {hardware["machine"]}, {hardware["cores"]} cores, {hardware["device"]}; {versions}.
"""


def _caveats(report: dict[str, Any]) -> str:
    lines = "\n".join(f"- {line}" for line in report["not_measured"])
    return f"""## What is not claimed

Not measured:

{lines}
"""


def escape(text: str) -> str:
    """Text from elsewhere, on one line, with everything that Markdown or HTML could act on escaped.

    >>> escape("<b>x</b> [y](z)")
    '\\\\<b\\\\>x\\\\</b\\\\> \\\\[y\\\\]\\\\(z\\\\)'
    """
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
