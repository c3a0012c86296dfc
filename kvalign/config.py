"""What a caller may choose for one conversion; frozen and self-checking. Must not import torch or the Hub."""

import base64
import binascii
import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from kvalign.errors import ConfigInvalid

BUILTIN_DATASET = "builtin"
# About what the coarsest step that is searched gives (kvalign.convert).
LARGEST_RATIO = 256.0

# Owner and name begin and end with a letter, a digit or '_', as the Hub's client demands.
_NAME = r"\w(?:[\w\-.]{0,94}\w)?"
_REPO = re.compile(rf"(?:{_NAME}/)?{_NAME}", re.ASCII)
_REVISION = re.compile(r"(?!/)(?!.*\.\.)[\w\-./+]{1,128}", re.ASCII)

# Of the Standard Webhooks scheme: 24 to 64 random bytes.
_SECRET = re.compile(r"whsec_([A-Za-z0-9+/]{32,88}={0,2})", re.ASCII)
_VISIBLE = re.compile(r"[\x21-\x7e]+")

Metric = Literal["gradient", "forward", "none"]
WebhookEvent = Literal["job.queued", "job.running", "job.cancelling", "job.succeeded", "job.failed", "job.canceled"]
Label = Annotated[str, Field(max_length=200)]


# What the checks below accept, in the words of JSON Schema, for those who make requests from /openapi.json.
_PART = r"[A-Za-z0-9_]+(?:(?:-(?:\.-)*\.?|\.(?:-\.)*-?)[A-Za-z0-9_]+)*"
_REPO_SCHEMA: dict[str, Any] = {
    "pattern": f"^(?:{_PART}/)?{_PART}$",
    "allOf": [{"pattern": "^(?:[^/]{1,96}/)?[^/]{1,96}$"}],
    "not": {"pattern": r"\.git$"},
}
_REVISION_SCHEMA: dict[str, Any] = {"pattern": r"^[A-Za-z0-9_\-./+]{1,128}$", "not": {"pattern": r"^/|\.\."}}
_URL_SCHEMA: dict[str, Any] = {"pattern": "^[Hh][Tt][Tt][Pp][Ss]?://[!-~]+$"}
_SECRET_SCHEMA: dict[str, Any] = {"pattern": "^whsec_[A-Za-z0-9+/]{32,88}={0,2}$"}
_ONE_TARGET_SCHEMA: dict[str, Any] = {
    "not": {
        "required": ["max_kl", "ratio"],
        "properties": {"max_kl": {"type": "number"}, "ratio": {"type": "number"}},
    }
}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        """Refuse unknown keys by name, with the nearest known one beside it."""
        if not isinstance(data, dict):
            return data
        for key in data:
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(cls.model_fields)}"
                raise ValueError(f"unknown key {str(key)[:80]!a}; {hint}")
        return data


def _checked_repo(name: str) -> str:
    if not _REPO.fullmatch(name) or ".." in name or "--" in name or name.endswith(".git"):
        raise ValueError(
            f"{name[:200]!a} is not a Hub repo name; write 'owner/name' with letters, digits, '-', '_' and '.'"
        )
    return name


class Source(_Section):
    """The model to convert: a Hub repo at a revision."""

    repo: str = Field(json_schema_extra=_REPO_SCHEMA)
    revision: str = Field(default="main", json_schema_extra=_REVISION_SCHEMA)

    _repo = field_validator("repo")(_checked_repo)

    @field_validator("revision")
    @classmethod
    def _checked_revision(cls, revision: str) -> str:
        if not _REVISION.fullmatch(revision):
            raise ValueError(f"{revision[:200]!a} is not a branch, tag or commit")
        return revision


class Target(_Section):
    """Where the converted model goes, and in which shape."""

    repo: str = Field(json_schema_extra=_REPO_SCHEMA)
    visibility: Literal["private", "public"] = "private"
    layout: Literal["full", "codec"] = "full"
    on_existing: Literal["fail", "update"] = "fail"

    _repo = field_validator("repo")(_checked_repo)


class CodecOptions(_Section):
    """How small, how good. Exactly one of max_kl and ratio is the target; max_kl = 0.02 when none is given."""

    model_config = ConfigDict(json_schema_extra=_ONE_TARGET_SCHEMA)

    max_kl: float | None = Field(default=None, gt=0, le=10)
    ratio: float | None = Field(default=None, gt=1)
    sink_tokens: int = Field(default=4, ge=0, le=64)
    recent_tokens: int = Field(default=64, ge=0, le=4096)
    # None: one layer in ten, where the model can run its first layers alone.
    recomputed_layers: int | None = Field(default=None, ge=0, le=64)
    # None: as many layers share a basis as keep it within 8,192 numbers of a token.
    layer_group_size: int | None = Field(default=None, ge=1, le=1024)
    # Bits for each number of a token in the resident cache, scales included.
    resident_bits: float = Field(default=4.0, ge=2.0, le=8.0)

    @field_validator("ratio")
    @classmethod
    def _within_reach(cls, ratio: float | None) -> float | None:
        if ratio is not None and ratio > LARGEST_RATIO:
            raise ValueError(
                f"{ratio:g} is beyond the {LARGEST_RATIO:g} that is searched up to; ask for less, or for a quality by"
                " 'max_kl'"
            )
        return ratio

    @model_validator(mode="before")
    @classmethod
    def _default_target(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("max_kl") is None and data.get("ratio") is None:
            return {**data, "max_kl": 0.02}
        return data

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.max_kl is None) == (self.ratio is None):
            raise ValueError("give exactly one of 'max_kl' (a quality target) and 'ratio' (a size target)")
        return self


class Calibration(_Section):
    """The text that the codec is fitted on, and how errors are weighed: by gradients, by a stand-in, or all alike."""

    dataset: str = BUILTIN_DATASET
    tokens: int = Field(default=32_768, ge=1024, le=4_194_304)
    sequence_length: int = Field(default=1024, ge=64, le=32_768)
    metric: Metric = "gradient"
    seed: int = Field(default=0, ge=0, le=2**32 - 1)


class Gate(_Section):
    """What held-out text must show before anything is published."""

    max_kl: float = Field(default=0.05, gt=0, le=10)
    min_top1: float = Field(default=0.85, ge=0, le=1)


class Validation(_Section):
    """The text that the codec is judged on, and the gate; windows are spread evenly over its domains."""

    dataset: str = BUILTIN_DATASET
    windows: int = Field(default=8, ge=1, le=256)
    gate: Gate = Gate()


class Webhook(_Section):
    """Whom the service tells of a job's changes of state, by the Standard Webhooks scheme.

    secret  never in a dump of the settings; None has the service make one
    """

    url: str = Field(max_length=2000, json_schema_extra=_URL_SCHEMA)
    secret: Annotated[SecretStr, Field(json_schema_extra=_SECRET_SCHEMA)] | None = Field(default=None, exclude=True)
    events: tuple[WebhookEvent, ...] = Field(
        default=("job.succeeded", "job.failed", "job.canceled"), min_length=1, max_length=6
    )

    @field_validator("url")
    @classmethod
    def _checked_url(cls, url: str) -> str:
        if not _VISIBLE.fullmatch(url):
            raise ValueError(
                "holds spaces or characters beyond ASCII; percent-encode them, and write hosts in punycode"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError("is not a URL; write https://host/path") from None
        if parts.scheme not in {"https", "http"} or not parts.hostname or port == 0:
            raise ValueError("is not the URL of a web server; write https://host/path")
        if "@" in parts.netloc:
            raise ValueError("carries a user or a password; leave them out, deliveries are signed instead")
        if parts.fragment:
            raise ValueError("has a part behind '#', which is never sent; leave it out")
        return url

    @field_validator("secret")
    @classmethod
    def _checked_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and not 24 <= _secret_bytes(secret.get_secret_value()) <= 64:
            raise ValueError("is not 'whsec_' and 24 to 64 bytes in base64; leave it out, and one is made")
        return secret


def _secret_bytes(secret: str) -> int:
    """How long a webhook's secret is; 0 for what is none."""
    found = _SECRET.fullmatch(secret)
    try:
        return len(base64.b64decode(found[1], validate=True)) if found else 0
    except binascii.Error:
        return 0


class ConversionConfig(_Section):
    """One conversion, as sent to the API (JSON) or the CLI (TOML or flags)."""

    source: Source
    target: Target
    codec: CodecOptions = Field(default_factory=CodecOptions)
    calibration: Calibration = Calibration()
    validation: Validation = Validation()
    webhook: Webhook | None = None
    labels: dict[Annotated[str, Field(max_length=64)], Label] = Field(default_factory=dict, max_length=32)

    @model_validator(mode="after")
    def _target_is_not_source(self) -> Self:
        if self.source.repo.lower() == self.target.repo.lower():
            raise ValueError("target.repo equals source.repo; the base model is never overwritten")
        return self

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Check plain data (JSON, TOML); raises ConfigInvalid naming the key, the fact and the limit."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigInvalid(describe(error), "Correct the setting and send it again.") from None


def describe(error: ValidationError) -> str:
    """One line for each thing wrong: `codec.max_kl: Input should be greater than 0`."""
    lines = []
    for item in error.errors(include_url=False, include_context=False)[:10]:
        where = ".".join(str(part) for part in item["loc"]) or "config"
        lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines) + "."


def is_local_dataset(dataset: str) -> bool:
    """Whether a dataset names a file on this machine: the CLI may, the API may not."""
    return dataset != BUILTIN_DATASET and (
        dataset.startswith(("/", "./", "../", "~")) or Path(dataset).suffix in {".txt", ".jsonl", ".parquet"}
    )
