"""The form of report.json: every number, its unit, and what it is a share of. Measures nothing.

docs/report.schema.json is made from here; a change of form raises SCHEMA_VERSION.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

SCHEMA_VERSION = 2

# Control characters, and marks that turn the direction of what is printed behind them.
_UNSEEN = r"\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
_MOST = 2**53 - 1  # what every reader of JSON holds exactly


def _with_8192(ratios: dict[str, float]) -> dict[str, float]:
    """What cards and comparisons show."""
    if "8192" not in ratios:
        raise ValueError("there is no ratio at 8192 tokens")
    return ratios


# A float32 sum may round a KL of nothing, or a share of everything, a little past its end.
Nats = Annotated[float | None, Field(ge=0, description="nats a token; null where not a number")]
Change = Annotated[float | None, Field(description="nats a token; null where not a number")]
Share = Annotated[float, Field(ge=0, le=1 + 1e-6)]
Cosine = Annotated[float | None, Field(ge=-1.001, le=1.001, description="null where not a number")]
Ratio = Annotated[float, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(ge=0, le=_MOST)]
Count = Annotated[int, Field(ge=0, le=_MOST)]
Some = Annotated[int, Field(ge=1, le=_MOST)]
Step = Annotated[int, Field(ge=-1600, le=1600)]
Line = Annotated[str, StringConstraints(max_length=2000, pattern=f"^[^{_UNSEEN}]*$")]
Lines = Annotated[str, StringConstraints(max_length=2000, pattern=f"^(?:[^{_UNSEEN}]|[\\t\\n\\r])*$")]
FileName = Annotated[str, StringConstraints(max_length=100, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$")]
RepoName = Annotated[
    str, StringConstraints(max_length=200, pattern=r"^(?:[A-Za-z0-9_][A-Za-z0-9_.\-]*/)?[A-Za-z0-9_][A-Za-z0-9_.\-]*$")
]
Commit = Annotated[str, StringConstraints(pattern=r"^(?:[A-Za-z0-9_.\-]{1,128})?$")]
Hex = Annotated[str, StringConstraints(max_length=128, pattern=r"^[0-9a-f]+$")]
# What a card's front matter may take over from the source's: see source_card.
CarriedName = Annotated[
    str, StringConstraints(pattern=r"^(?:license|license_name|license_link|language|extra_gated_[A-Za-z0-9_]{1,48})$")
]
Carried = dict[CarriedName, bool | Lines | list[Line] | dict[Lines, bool | Lines]]
Tokens = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}$")]
ByTokens = Annotated[dict[Tokens, Ratio], AfterValidator(_with_8192)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=True, allow_inf_nan=False)


class Overview(_Part):
    """The numbers that lists of jobs and models show."""

    ratio: Ratio
    kl_mean: Nats
    kl_p99: Nats
    top1: Share
    floor_kl: Nats
    artifact_bytes: Bytes


class GateVerdict(_Part):
    """What held-out text had to show."""

    max_kl: Nats
    min_top1: Share
    passed: bool
    failures: list[Line]


class WeightFile(_Part):
    sha256: Sha256
    size: Bytes


class Source(_Part):
    """The base model, pinned; commit is empty, and repo a name alone, where it was a local folder.

    carried: licence, language and gate fields of its own card
    """

    repo: RepoName
    commit: Commit
    model_type: Line
    config_sha256: Sha256
    weights: dict[FileName, WeightFile]
    carried: Carried


class TargetFacts(_Part):
    """What was asked for: the repo to publish to, and its layout."""

    repo: RepoName
    visibility: Literal["private", "public"]
    layout: Literal["full", "codec"]
    on_existing: Literal["fail", "update"]


class Aim(_Part):
    """What the conversion was asked for: a quality or a size, the other being null."""

    max_kl: Positive | None
    ratio: Positive | None


class CodecFacts(_Part):
    """The at-rest codec. recommended_step in sixteenths of an octave; ranks and features by feature group."""

    codec_id: Hex
    target: Aim
    recommended_step: Step
    sink_tokens: Count
    recent_tokens: Count
    recomputed_layers: Count
    layers: Some
    ranks: dict[Line, Count]
    features: dict[Line, Count]


class Payloads(_Part):
    """Bytes of all measured payloads together, by purpose."""

    coded: Bytes
    verbatim: Bytes
    side_info: Bytes
    body_tokens: Count
    verbatim_tokens: Count


class Sizes(_Part):
    """Rates of the at-rest form; each *_means says what is divided by what."""

    ratio_means: Line
    coded_ratio: Ratio
    cache_ratio_means: Line
    cache_ratio_by_tokens: ByTokens
    cache_ratio_with_artifact_spread_over_tokens: dict[Tokens, Ratio]
    raw_bytes_per_token: Bytes
    measured_payloads: Payloads
    artifact_bytes: Bytes
    artifact_over_weights: Positive
    artifact_break_even_tokens: Count


class Quality(_Part):
    """Against the uncompressed cache, over all scored tokens.

    kl_low, kl_high: 95 % bootstrap over windows; null for one window, which says nothing of others
    """

    kl_mean: Nats
    kl_low: Nats
    kl_high: Nats
    kl_p99: Nats
    kl_max: Nats
    total_variation: Annotated[
        float | None, Field(ge=0, le=1 + 1e-6, description="half the L1 distance of distributions; null as above")
    ]
    top1: Share
    nll_delta: Change
    tokens: Some
    windows: Some


class QualityAtRatio(Quality):
    """Quality, and the ratios of the payloads that it was measured on."""

    ratio: Ratio
    cache_ratio: Ratio


class WorstWindow(_Part):
    domain: Line
    kl_mean: Nats
    kl_max: Nats
    top1: Share


class AtRestQuality(_Part):
    """Protocol R at the recommended step."""

    protocol: Literal["R"]
    prefix_tokens: Some
    continuation_tokens: Some
    floor_limit: Nats
    overall: QualityAtRatio
    domains: dict[Line, QualityAtRatio]
    worst_windows: list[WorstWindow]


class ResidentQuality(_Part):
    """Protocol C. scored_from: position of the first token scored, the first that sees a page of codes."""

    protocol: Literal["C"]
    chunk_tokens: Some
    single_tokens: Some
    scored_from: Count
    floor_kl: Nats
    overall: Quality
    domains: dict[Line, Quality]


class Kernel(_Part):
    """Which kernels ran while protocol C was measured, and how far the fused one is from plain attention."""

    calls: dict[Line, Count]
    dense_layers: Count
    relative_error: Annotated[float | None, Field(ge=0)]
    limit: Positive


class Resident(_Part):
    """The form that attention reads."""

    bits: Positive
    bits_per_value: Positive
    basis: Line
    coded_layers: Count
    page_tokens: Some
    recent_tokens: Count
    coded_ratio_means: Line
    coded_ratio: Ratio
    cache_ratio_means: Line
    cache_ratio_by_tokens: ByTokens
    quality: ResidentQuality
    kernel: Kernel


class OperatingPoint(_Part):
    """One measured step of the at-rest codec."""

    step: Step
    ratio: Ratio
    kl_mean: Nats
    kl_p99: Nats
    top1: Share


class BaselinePoint(_Part):
    """Another codec on the same windows by protocol R, with the same sink and recent tokens in 16 bit."""

    name: Literal["fp8", "KIVI-style", "KVTC"]
    setting: Line
    ratio: Ratio
    artifact_bytes: Bytes
    kl_mean: Nats
    kl_low: Nats
    kl_high: Nats
    kl_p99: Nats
    top1: Share


class RecallTask(_Part):
    """Exact recall of what is asked for after the prefix was coded (protocol S).

    difficulty counts pairs of a key_value list, or digits of a needle; scores are shares of items, by cache
    """

    task: Literal["key_value", "needle"]
    applicable: bool
    difficulty: Count
    items: Count
    prefix_tokens: Count
    scores: dict[Line, Share]


class GreedyText(_Part):
    """How long greedy text agrees with that of the uncompressed cache."""

    new_tokens: Count
    mean_agreeing_tokens: Annotated[float, Field(ge=0)]
    identical: Share
    agreeing: Annotated[list[Count], Field(min_length=1)]


class Speed(_Part):
    """Measured in turns on the machine below; not verified elsewhere."""

    prefix_tokens: Some
    prefill_s: Positive
    encode_s: Positive
    decode_s: Positive
    prefill_over_encode: Positive
    prefill_over_decode: Positive
    dynamic_tokens_per_s: Positive
    resident_tokens_per_s: Positive | None
    resident_over_dynamic: Positive | None


class Structure(_Part):
    columns: Share
    rows: Share


class Heads(_Part):
    """Mean cosine similarity over all pairs of different heads, on text that rotations were not fitted on.

    before, after: 1 for one head
    columns, rows: shares of the variance of the pictures of channels that channels, and heads, explain
    """

    heads: Some
    head_dim: Some
    left_out: Count
    before: Cosine
    after: Cosine
    absolute: Structure
    variance: Structure
    says: Line


class ByKind(_Part):
    keys: Heads
    values: Heads


class FigureFiles(_Part):
    """A picture and the data behind it, in the folder figures."""

    name: Literal["head_alignment", "activations", "bits", "sensitivity", "rate_distortion", "kl_by_position"]
    image: FileName
    data: FileName
    image_sha256: Sha256
    data_sha256: Sha256
    caption: Line


class CalibrationFacts(_Part):
    """The calibration text, by the SHA-256 of its documents, and how it was read; metric of the sensitivity."""

    dataset: Line
    domains: list[Line]
    documents: list[Sha256]
    fingerprint: Sha256
    sequences: Some
    sequence_length: Some
    tokens: Some
    metric: Literal["gradient", "forward", "none"]
    seed: Count


class ValidationFacts(_Part):
    """The held-out text. windows_asked: of the settings; every domain takes one window at least."""

    dataset: Line
    domains: list[Line]
    windows_asked: Some
    windows: Some
    fingerprint: Sha256


class Hardware(_Part):
    machine: Line
    system: Line
    cores: Some | None
    device: Line


class Report(_Part):
    """report.json of a converted model."""

    schema_version: Literal[2]
    summary: Overview
    gate: GateVerdict
    source: Source
    target: TargetFacts
    codec: CodecFacts
    sizes: Sizes
    quality: AtRestQuality
    resident: Resident
    operating_points: list[OperatingPoint]
    baselines: list[BaselinePoint]
    recall: list[RecallTask]
    greedy: dict[str, GreedyText]
    speed: Speed
    head_alignment: ByKind
    figures: list[FigureFiles]
    calibration: CalibrationFacts
    validation: ValidationFacts
    hardware: Hardware
    versions: dict[Line, Line]
    stage_seconds: dict[Line, Annotated[float, Field(ge=0)]]
    not_measured: list[Line]


def json_schema() -> dict[str, Any]:
    """JSON Schema of report.json, draft 2020-12."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Report.model_json_schema()}
