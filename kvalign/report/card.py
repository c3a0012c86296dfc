"""README.md of a converted model, rendered from report.json alone. Escapes whatever came from the source repo."""

import re
from decimal import Decimal
from typing import Any

import yaml

from kvalign.printable import printable
from kvalign.report.structure import counted

# What Markdown or HTML could act on, and what is made a link of without being marked as one.
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&@]|:(?=//)|(?<=[wW])\.)")


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
    relation = "quantized" if report["target"]["layout"] == "full" else "adapter"
    base = {"base_model": report["source"]["repo"], "base_model_relation": relation} if _on_hub(report) else {}
    return {
        **report["source"]["carried"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **base,
        "tags": ["kvalign", "kv-cache-compression"],
        "model-index": [{"name": report["target"]["repo"].split("/")[-1], "results": _results(report)}],
    }


_METRICS = (
    ("kl_nats_mean", "Mean KL (nats)", "kl_mean", 4),
    ("top1_agreement", "Top-1 agreement", "top1", 4),
    ("coded_ratio", "Ratio of coded tokens", "ratio", 4),
)


def _on_hub(report: dict[str, Any]) -> bool:
    """Whether the base is a repo at a commit, not a folder on somebody's machine."""
    return bool(report["source"]["commit"])


def _results(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "task": {"type": "text-generation", "name": "KV cache compression"},
            "dataset": {"name": f"kvalign held-out text: {name}", "type": report["validation"]["dataset"]},
            "metrics": [
                {"type": kind, "name": title, "value": float(f"{found[key]:.{digits}g}")}
                for kind, title, key, digits in _METRICS
                if found[key] is not None
            ],
        }
        for name, found in report["quality"]["domains"].items()
    ]


def _head(report: dict[str, Any]) -> str:
    summary, sizes, source = report["summary"], report["sizes"], report["source"]
    at_8k = sizes["cache_ratio_by_tokens"]["8192"]
    verdict = "" if report["gate"]["passed"] else _failed(report)
    base = (
        f"[{escape(source['repo'])}](https://huggingface.co/{source['repo']}) at commit `{source['commit'][:12]}`"
        if _on_hub(report)
        else f"The model of a local folder, {escape(source['repo'])}"
    )
    return f"""# {escape(report["target"]["repo"].split("/")[-1])}

{verdict}{base}, with a
codec that stores its KV cache **{summary["ratio"]:.1f} times smaller** than bfloat16 (coded tokens;
{at_8k:.1f} times for a whole cache of 8,192 tokens) at a mean KL of **{_kl(summary["kl_mean"])} nats** a token and
**{100 * summary["top1"]:.1f} %** top-1 agreement with the uncompressed cache, on held-out text.
{missed_aim(report)}"""


def missed_aim(report: dict[str, Any]) -> str:
    """A line where what was asked for lies beyond the steps that are searched; empty where it was met closely."""
    aim, overall = report["codec"]["target"], report["quality"]["overall"]
    if aim["ratio"] is not None and overall["ratio"] > _FAR_OFF * aim["ratio"]:
        return (
            f"Asked for was a ratio of {aim['ratio']:g}; the finest step that is searched already gives"
            f" {overall['ratio']:.2f}.\n"
        )
    if aim["max_kl"] is not None and (overall["kl_mean"] or aim["max_kl"]) * _FAR_OFF < aim["max_kl"]:
        return (
            f"Asked for was a mean KL of at most {aim['max_kl']:g}; the coarsest step that is searched stays at"
            f" {_kl(overall['kl_mean'])}.\n"
        )
    return ""


_FAR_OFF = 1.25


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
        f" | {point['ratio']:.2f} | {_kl(point['kl_mean'])} | {_kl(point['kl_p99'])} | {100 * point['top1']:.1f} % |"
        for point in report["operating_points"]
    )
    worst = ", ".join(
        f"{escape(window['domain'])} {_kl(window['kl_mean'])} (largest {_kl(window['kl_max'])})"
        for window in quality["worst_windows"]
    )
    codec = report["codec"]
    recomputed = codec["recomputed_layers"]
    what = f", the first {recomputed} of {codec['layers']} layers as token ids alone" if recomputed else ""
    return f"""## Quality

Protocol R: {quality["prefix_tokens"]} tokens are read by the uncompressed model, their cache is stored as bytes{what}
and read back, and the next {quality["continuation_tokens"]} tokens are scored on what came back. The first
{codec["sink_tokens"]} and the last {codec["recent_tokens"]} tokens of the prefix stay in 16 bit. The uncompressed
model against itself by the same route: KL {_kl(report["summary"]["floor_kl"])} nats.

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
        f"{_kl(found['kl_mean'])} ({_interval(found)})",
        _kl(found["kl_p99"]),
        _kl(found["kl_max"]),
        f"{100 * found['top1']:.1f} %",
        _signed(found["nll_delta"]),
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
        f"| {escape(name)} | {_kl(row['kl_mean'])} ({_interval(row)}) | {_kl(row['kl_p99'])}"
        f" | {100 * row['top1']:.1f} % | {row['windows']} |"
        for name, row in rows
    )
    lengths = ", ".join(f"{ratio:.2f} at {int(tokens):,}" for tokens, ratio in found["cache_ratio_by_tokens"].items())
    ran = ", ".join(f"{escape(name)} {calls:,}" for name, calls in kernel["calls"].items())
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
{quality["chunk_tokens"]} and the last {quality["single_tokens"]} tokens one by one. {_scored(found)}

| text | KL, nats (95 % interval) | 99th percentile | top-1 | windows |
| --- | --- | --- | --- | --- |
{table}
"""


def _scored(resident: dict[str, Any]) -> str:
    """From where protocol C counts."""
    first = resident["quality"]["scored_from"]
    if first < resident["page_tokens"] + resident["recent_tokens"]:
        return f"Tokens from position {first:,} on are scored, of which some or all see no page of codes yet."
    return f"Tokens from position {first:,} on are scored: the first that see a page of codes."


def _beyond_likelihood(report: dict[str, Any]) -> str:
    lines = []
    for name, found in report["greedy"].items():
        lines.append(
            f"- Greedy text from the {escape(name)} cache is that of the uncompressed one for"
            f" {found['mean_agreeing_tokens']:.1f} of {found['new_tokens']} tokens on average, and to the end in"
            f" {100 * found['identical']:.0f} % of {counted(len(found['agreeing']), 'window')}."
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
    rows = [
        (escape(found["name"]), escape(found["setting"]), found["artifact_bytes"], found)
        for found in report["baselines"]
    ] + [("**kvalign**", "recommended step", report["summary"]["artifact_bytes"], overall)]
    table = "\n".join(
        f"| {name} | {setting} | {found['ratio']:.2f} | {_kl(found['kl_mean'])} ({_interval(found)})"
        f" | {100 * found['top1']:.1f} % | {size:,} |"
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

On {_cores(hardware)} ({escape(hardware["machine"])}), in turns, {found["prefix_tokens"]} tokens: reading them anew
takes {found["prefill_s"]:.2f} s, encoding their cache {found["encode_s"]:.2f} s ({found["prefill_over_encode"]:.1f}
times quicker), decoding it {found["decode_s"]:.2f} s ({found["prefill_over_decode"]:.1f} times quicker).{resident}
"""


def _heads(report: dict[str, Any]) -> str:
    lines = "\n".join(_likeness(kind, found) for kind, found in report["head_alignment"].items())
    says = "\n".join(f"- {escape(found['says'])}" for found in report["head_alignment"].values())
    return f"""## Inside the heads

{lines}

{_figures(report, "head_alignment")}
{says}

{_figures(report, "activations")}"""


def _likeness(kind: str, found: dict[str, Any]) -> str:
    """One line on keys or values."""
    what = f"- {kind.capitalize()}, {counted(found['heads'], 'head')} of {counted(found['head_dim'], 'channel')}"
    out = found["left_out"]
    rest = f" ({counted(out, 'head')} left out, of another width or for their number)" if out else ""
    if found["heads"] < 2:
        return f"{what}: there is no second head to compare it with{rest}."
    return (
        f"{what}: mean cosine similarity of two heads {_number(found['before'], '.3f')} as they stand,"
        f" {_number(found['after'], '.3f')} once one is rotated onto the other{rest}."
    )


def _codec(report: dict[str, Any]) -> str:
    return f"""## Where the bits go

{_figures(report, "bits", "sensitivity")}"""


def _figures(report: dict[str, Any], *names: str) -> str:
    """The pictures of these names that there are, each with its caption and a link to its data."""
    return "".join(
        f"![{figure['name'].replace('_', ' ')}](figures/{figure['image']})\n\n"
        f"{escape(figure['caption'])} [Data](figures/{figure['data']}).\n\n"
        for figure in report["figures"]
        if figure["name"] in names
    )


def _number(value: float | None, form: str) -> str:
    return "not a number" if value is None else format(value + 0.0 if round(value, 3) else 0.0, form)


def _kl(value: float | None) -> str:
    """Nats, with two digits that say something however small it is.

    >>> _kl(0.01931), _kl(0.000084), _kl(0.00000000123), _kl(0.0), _kl(None)
    ('0.0193', '0.000084', '1.2e-09', '0', 'not a number')
    """
    if value is None:
        return "not a number"
    if value >= 0.001:
        return f"{value:.4f}"
    if value < 1e-6:
        return f"{value:.1e}" if value else "0"
    return f"{Decimal(f'{value:.1e}'):f}"


def _signed(value: float | None) -> str:
    return "not a number" if value is None else f"{'-' if value < 0 else '+'}{_kl(abs(value))}"


def _interval(found: dict[str, Any]) -> str:
    """Of a mean KL."""
    if found["kl_low"] is None or found["kl_high"] is None:
        return "no interval" if found["kl_mean"] is not None else "not a number"
    return f"{_kl(found['kl_low'])} to {_kl(found['kl_high'])}"


def _cores(hardware: dict[str, Any]) -> str:
    return counted(hardware["cores"], "core") if hardware["cores"] else "cores of an unknown number"


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
    stages = ", ".join(f"{escape(name)} {seconds:.0f} s" for name, seconds in report["stage_seconds"].items())
    versions = ", ".join(f"{escape(name)} {escape(version)}" for name, version in report["versions"].items())
    validation = report["validation"]
    machine = ", ".join((f"{hardware['system']} {hardware['machine']}", _cores(hardware), hardware["device"]))
    return f"""## How it was made

Calibrated on {calibration["tokens"]:,} tokens of {escape(calibration["dataset"])}
({", ".join(map(escape, calibration["domains"]))}; seed {calibration["seed"]}, fingerprint
`{calibration["fingerprint"][:16]}`), judged on {escape(validation["dataset"])}
({", ".join(map(escape, validation["domains"]))}; {_windows(validation)}, fingerprint
`{validation["fingerprint"][:16]}`).

Time each stage took: {stages}.
{escape(machine)}; {versions}.
"""


def _windows(validation: dict[str, Any]) -> str:
    asked, taken = validation["windows_asked"], validation["windows"]
    return counted(taken, "window") + (
        "" if asked == taken else f" where {asked} was asked for: every domain takes one at least"
    )


def _caveats(report: dict[str, Any]) -> str:
    lines = "\n".join(f"- {escape(line)}" for line in report["not_measured"])
    return f"""## What is not claimed

Not measured:

{lines}
"""


def escape(text: str) -> str:
    """Text from elsewhere, on one line, with everything that Markdown or HTML could act on escaped.

    >>> escape("<b>x</b> [y](z)")
    '\\\\<b\\\\>x\\\\</b\\\\> \\\\[y\\\\]\\\\(z\\\\)'
    """
    return _SPECIAL.sub(r"\\\1", printable(" ".join(text.split())))
