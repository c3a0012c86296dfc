"""The form of report.json: every number, its unit, and what it is a share of. Measures nothing.

docs/report.schema.json is made from here; a change of form raises SCHEMA_VERSION.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

SCHEMA_VERSION = 2


def _with_8192(ratios: dict[str, float]) -> dict[str, float]:
    """What cards and comparisons show."""
    if "8192" not in ratios:
        raise ValueError("there is no ratio at 8192 tokens")
    return ratios


Nats = Annotated[float | None, Field(description="nats a token; null where not a number")]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Tokens = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}$")]
ByTokens = Annotated[dict[Tokens, Ratio], AfterValidator(_with_8192)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


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
    failures: list[str]


class WeightFile(_Part):
    sha256: Sha256
    size: Bytes


class Source(_Part):
    """The base model, pinned. carried: licence, language and gate fields of its own card."""

    repo: str
    commit: str
    model_type: str
    config_sha256: Sha256
    weights: dict[str, WeightFile]
    carried: dict[str, Any]


class TargetFacts(_Part):
    """What was asked for: the repo to publish to, and its layout."""

    repo: str
    visibility: Literal["private", "public"]
    layout: Literal["full", "codec"]
    on_existing: Literal["fail", "update"]


class CodecFacts(_Part):
    """The at-rest codec. recommended_step in sixteenths of an octave; ranks and features by feature group."""

    codec_id: str
    target: dict[str, float | None]
    recommended_step: int
    sink_tokens: Count
    recent_tokens: Count
    recomputed_layers: Count
    layers: Count
    ranks: dict[str, int]
    features: dict[str, int]


class Payloads(_Part):
    """Bytes of all measured payloads together, by purpose."""

    coded: Bytes
    verbatim: Bytes
    side_info: Bytes
    body_tokens: Count
    verbatim_tokens: Count


class Sizes(_Part):
    """Rates of the at-rest form; each *_means says what is divided by what."""

    ratio_means: str
    coded_ratio: Ratio
    cache_ratio_means: str
    cache_ratio_by_tokens: ByTokens
    cache_ratio_with_artifact_spread_over_tokens: dict[Tokens, Ratio]
    raw_bytes_per_token: Bytes
    measured_payloads: Payloads
    artifact_bytes: Bytes
    artifact_over_weights: float
    artifact_break_even_tokens: Count


class Quality(_Part):
    """Against the uncompressed cache, over all scored tokens; kl_low, kl_high: 95 % bootstrap over windows."""

    kl_mean: Nats
    kl_low: Nats
    kl_high: Nats
    kl_p99: Nats
    kl_max: Nats
    total_variation: Annotated[float | None, Field(description="half the L1 distance of distributions")]
    top1: Share
    nll_delta: Nats
    tokens: Count
    windows: Count


class QualityAtRatio(Quality):
    """Quality, and the ratios of the payloads that it was measured on."""

    ratio: Ratio
    cache_ratio: Ratio


class WorstWindow(_Part):
    domain: str
    kl_mean: Nats
    kl_max: Nats
    top1: Share


class AtRestQuality(_Part):
    """Protocol R at the recommended step."""

    protocol: Literal["R"]
    prefix_tokens: Count
    continuation_tokens: Count
    floor_limit: Nats
    overall: QualityAtRatio
    domains: dict[str, QualityAtRatio]
    worst_windows: list[WorstWindow]


class ResidentQuality(_Part):
    """Protocol C."""

    protocol: Literal["C"]
    chunk_tokens: Count
    single_tokens: Count
    floor_kl: Nats
    overall: Quality
    domains: dict[str, Quality]


class Kernel(_Part):
    """Which kernels ran while protocol C was measured, and how far the fused one is from plain attention."""

    calls: dict[str, Count]
    dense_layers: Count
    relative_error: float | None
    limit: float


class Resident(_Part):
    """The form that attention reads."""

    bits: float
    bits_per_value: float
    basis: str
    coded_layers: Count
    page_tokens: Count
    recent_tokens: Count
    coded_ratio_means: str
    coded_ratio: Ratio
    cache_ratio_means: str
    cache_ratio_by_tokens: ByTokens
    quality: ResidentQuality
    kernel: Kernel


class OperatingPoint(_Part):
    """One measured step of the at-rest codec."""

    step: int
    ratio: Ratio
    kl_mean: Nats
    kl_p99: Nats
    top1: Share


class BaselinePoint(_Part):
    """Another codec on the same windows by protocol R, with the same sink and recent tokens in 16 bit."""

    name: str
    setting: str
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
    scores: dict[str, Share]


class GreedyText(_Part):
    """How long greedy text agrees with that of the uncompressed cache."""

    new_tokens: Count
    mean_agreeing_tokens: float
    identical: Share
    agreeing: list[Count]


class Speed(_Part):
    """Measured in turns on the machine below; not verified elsewhere."""

    prefix_tokens: Count
    prefill_s: float
    encode_s: float
    decode_s: float
    prefill_over_encode: float
    prefill_over_decode: float
    dynamic_tokens_per_s: float
    resident_tokens_per_s: float | None
    resident_over_dynamic: float | None


class Heads(_Part):
    """Mean cosine similarity over all pairs of different heads, on text that rotations were not fitted on.

    columns, rows: shares of the variance of the pictures of channels that channels, and heads, explain
    """

    heads: Count
    head_dim: Count
    left_out: Count
    before: float
    after: float
    absolute: dict[Literal["columns", "rows"], Share]
    variance: dict[Literal["columns", "rows"], Share]
    says: str


class ByKind(_Part):
    keys: Heads
    values: Heads


class FigureFiles(_Part):
    """A picture and the data behind it, in the folder figures."""

    name: str
    image: str
    data: str
    image_sha256: Sha256
    data_sha256: Sha256
    caption: str


class CalibrationFacts(_Part):
    """The calibration text, by the SHA-256 of its documents, and how it was read; metric of the sensitivity."""

    dataset: str
    domains: list[str]
    documents: list[Sha256]
    fingerprint: Sha256
    sequences: Count
    sequence_length: Count
    tokens: Count
    metric: str
    seed: Count


class ValidationFacts(_Part):
    """The held-out text."""

    dataset: str
    domains: list[str]
    windows: Annotated[int, Field(ge=1)]
    fingerprint: Sha256


class Hardware(_Part):
    machine: str
    system: str
    cores: int | None
    device: str


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
    versions: dict[str, str]
    stage_seconds: dict[str, float]
    not_measured: list[str]


def json_schema() -> dict[str, Any]:
    """JSON Schema of report.json, draft 2020-12."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Report.model_json_schema()}
