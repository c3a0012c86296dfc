"""The submit form: its fields, and the way between them and a configuration. Checks nothing itself.

Fields are named by their place in the configuration, `codec.max_kl`; what is left empty takes the default. What a
value may be is said by kvalign.config alone: its messages are shown at the fields they name.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kvalign.config import CodecOptions, ConversionConfig
from kvalign.errors import KvalignError

KEY = "idempotency_key"
_A_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Field:
    """One thing to fill in. `name` is its place in the configuration; choices, range and default are read there."""

    name: str
    label: str
    hint: str = ""

    @property
    def choices(self) -> list[str]:
        annotation = _info(self.name).annotation
        return [str(value) for value in get_args(annotation)] if "Literal" in str(annotation) else []

    @property
    def default(self) -> str:
        info = _info(self.name)
        value = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
        return "" if value in (None, {}) else str(value)

    @property
    def limits(self) -> str:
        """As in "64 to 32,768"; empty for what is no number."""
        found = {
            name: getattr(rule, name)
            for rule in _info(self.name).metadata
            for name in ("gt", "ge", "le")
            if getattr(rule, name, None) is not None
        }
        if "le" not in found:
            return ""
        least = f"{found['ge']:,} to" if "ge" in found else f"above {found['gt']:,}, up to"
        return f"{least} {found['le']:,}"


@dataclass(frozen=True)
class Section:
    title: str
    fields: list[Field]
    advanced: bool = False


_USUAL_KL = CodecOptions().max_kl

SECTIONS = [
    Section(
        "Source",
        [
            Field("source.repo", "Model repo", "owner/name on the Hub"),
            Field("source.revision", "Revision", "branch, tag or commit"),
        ],
    ),
    Section(
        "Target",
        [
            Field("target.repo", "New repo", "owner/name; made by the job, with your token"),
            Field("target.visibility", "Visibility"),
        ],
    ),
    Section(
        "Aim: one of these",
        [
            Field("codec.max_kl", "Quality: mean KL at most", f"nats a token; {_USUAL_KL:g} when both are empty"),
            Field("codec.ratio", "Size: ratio of coded tokens"),
        ],
    ),
    Section(
        "Calibration and validation",
        [
            Field("calibration.tokens", "Calibration tokens"),
            Field("validation.windows", "Validation windows"),
            Field("validation.gate.max_kl", "Gate: mean KL at most", "nats a token; else nothing is published"),
            Field("validation.gate.min_top1", "Gate: top-1 agreement at least"),
        ],
    ),
    Section(
        "Text",
        [
            Field("calibration.dataset", "Calibration dataset", "'builtin', or a dataset repo"),
            Field("validation.dataset", "Validation dataset", "'builtin', or a dataset repo"),
            Field("calibration.sequence_length", "Sequence length", "tokens"),
            Field("calibration.metric", "Metric", "how errors are weighed"),
            Field("calibration.seed", "Seed"),
        ],
        advanced=True,
    ),
    Section(
        "Codec",
        [
            Field("codec.sink_tokens", "Sink tokens", "first tokens, kept in 16 bit"),
            Field("codec.recent_tokens", "Recent tokens", "last tokens, kept in 16 bit"),
            Field("codec.recomputed_layers", "Recomputed layers", "empty: one layer in ten"),
            Field("codec.layer_group_size", "Layers that share a basis", "empty: as many as fit"),
            Field("codec.resident_bits", "Resident bits", "for each number, scales included"),
        ],
        advanced=True,
    ),
    Section(
        "Publishing",
        [
            Field("target.layout", "Layout", "full: the whole model; codec: what kvalign adds to it"),
            Field("target.on_existing", "If the target exists"),
        ],
        advanced=True,
    ),
]

LABELS = Field("labels", "Labels", "one key=value a line")

# Where an error of a code belongs, when its words do not name a field.
_PLACES = {"source": "source.repo", "weights": "source.repo", "target": "target.repo"}


@dataclass
class Entered:
    """What a person typed, and what was wrong with it.

    values  by field name, as typed
    errors  by field name; under "" what belongs to no field
    """

    values: dict[str, str]
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Makes one job of a form, however often it is sent."""
        if not _A_KEY.fullmatch(self.values.get(KEY, "")):
            self.renew_key()
        return self.values[KEY]

    def renew_key(self) -> None:
        """For a form that was sent already, and changed since."""
        self.values[KEY] = secrets.token_hex(16)

    @property
    def has_advanced(self) -> bool:
        """Whether something beneath the fold was set, or is wrong."""
        hidden = [one for section in SECTIONS if section.advanced for one in section.fields] + [LABELS]
        return any(one.name in self.errors or self.value(one) != one.default for one in hidden)

    def value(self, one: Field) -> str:
        return self.values.get(one.name, one.default)

    def config(self) -> ConversionConfig | None:
        """The configuration; None when the form has errors, which are noted at their fields."""
        data = self._nested()
        try:
            config = ConversionConfig.model_validate(data)
        except ValidationError as error:
            for item in error.errors(include_url=False, include_context=False):
                self._note([str(part) for part in item["loc"]], item["msg"].removeprefix("Value error, "))
            return None
        return None if self.errors else config

    def refuse(self, error: KvalignError) -> None:
        """Note what the API said about the configuration as a whole, at the field that it is about."""
        named = error.message.partition(" ")[0]
        place = named if _is_field(named) else _PLACES.get(error.code.partition("_")[0], "")
        self.errors[place] = f"{error.message} {error.remedy}".strip()

    def _nested(self) -> dict[str, Any]:
        data: dict[str, Any] = {"source": {"repo": ""}, "target": {"repo": ""}}
        for name, text in self.values.items():
            if not _is_field(name) or name == LABELS.name or not text.strip():
                continue
            *sections, last = name.split(".")
            place = data
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = text.strip()
        data["labels"] = self._labels()
        return data

    def _labels(self) -> dict[str, str]:
        lines = [line.strip() for line in self.values.get("labels", "").splitlines() if line.strip()]
        pairs = [line.partition("=") for line in lines]
        if any(not key or not equals for key, equals, _ in pairs):
            self.errors["labels"] = "Write each label as key=value, on a line of its own."
        return {key.strip(): value.strip() for key, _, value in pairs}

    def _note(self, loc: list[str], message: str) -> None:
        name = ".".join(loc)
        if name == "codec":  # it asks for exactly one of two
            name = "codec.max_kl"
        elif loc[:1] == ["labels"]:
            name = "labels"
        place = name if _is_field(name) else ""
        if place and not self.values.get(place, "").strip() and _info(place).is_required():
            message = "Fill this in."
        self.errors[place] = f"{self.errors[place]}; {message}" if place in self.errors else message


def copied(config: ConversionConfig) -> Entered:
    """A form filled in with the settings of an earlier job."""
    values = {name: text for name, text in _flat(config.model_dump(mode="json")) if _is_field(name)}
    values["labels"] = "\n".join(f"{key}={value}" for key, value in config.labels.items())
    return Entered(values)


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found.append((f"{prefix}{key}", str(value)))
    return found


def _is_field(name: str) -> bool:
    return name in _NAMES


_NAMES = {one.name for section in SECTIONS for one in section.fields} | {LABELS.name}


def _info(name: str) -> FieldInfo:
    """The configuration's own word on a field."""
    model: type[BaseModel] = ConversionConfig
    *sections, last = name.split(".")
    for section in sections:
        annotation = model.model_fields[section].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return model.model_fields[last]
