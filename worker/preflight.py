"""Everything about a conversion that can be known before hours of work: a list of checks, and what it will cost.

Reads metadata, config.json and weight headers, never weights. Must not import torch: the API answers with it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvalign.builtin_text import check_builtin_text
from kvalign.config import BUILTIN_DATASET, ConversionConfig, Source, is_local_dataset
from kvalign.errors import ConfigInvalid, DiskFull, HubUnavailable, KvalignError, OutOfMemory, from_code
from kvalign.source import (
    ModelSizes,
    SourceFiles,
    WeightFacts,
    check_tokenizer,
    check_weights,
    find_weights,
    model_sizes,
    read_config,
)
from kvalign.support import check_architecture
from kvalign.windows import check_room
from worker.hub import Hub, SourceInfo
from worker.hub_download import names_to_download

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One question and its answer.

    reason  the fact that decided
    code    the error code a job would end with; None when ok
    """

    name: str
    ok: bool
    reason: str
    code: str | None = None
    remedy: str = ""


@dataclass(frozen=True)
class Estimate:
    """What a conversion will take; all but download_bytes are rough, from the model's size.

    disk_bytes    the most it needs at once: sources, statistics, artifact
    memory_bytes  the most the converting process holds
    seconds       on a small machine without an accelerator
    """

    download_bytes: int
    disk_bytes: int
    memory_bytes: int
    seconds: float


@dataclass(frozen=True)
class Preflight:
    """The answer. A check that needs what another failed to find is left out.

    source    None when it cannot be read
    estimate  None when the source's headers cannot be read
    """

    checks: tuple[Check, ...]
    source: SourceInfo | None
    estimate: Estimate | None

    def first_error(self) -> KvalignError | None:
        """The first failed check as the error it stands for."""
        for check in self.checks:
            if check.code is not None:
                return from_code(check.code, check.reason, check.remedy)
        return None

    def passed(self) -> tuple[SourceInfo, Estimate]:
        """Source and estimate of a preflight without a failed check; raises the first error otherwise."""
        error = self.first_error()
        if error is not None:
            raise error
        assert self.source is not None, "a missing source fails a check"
        assert self.estimate is not None, "unreadable weights fail a check"
        return self.source, self.estimate


@dataclass(frozen=True)
class ModelFacts:
    """What the files of a source say at one commit, whatever is to be made of them.

    sizes, weights, download_bytes  None when a check that they need failed
    """

    checks: tuple[Check, ...]
    sizes: ModelSizes | None
    weights: WeightFacts | None
    download_bytes: int | None


class Lookup:
    """Where preflight learns of a source: here from the Hub, each time anew."""

    def source(self, hub: Hub, source: Source) -> SourceInfo:
        """Raises as Hub.source does."""
        return hub.source(source.repo, source.revision)

    def model(self, hub: Hub, source: SourceInfo) -> ModelFacts:
        return inspect_model(hub.files(source))


def preflight(
    hub: Hub,
    config: ConversionConfig,
    free_disk_bytes: int | None = None,
    memory_bytes: int | None = None,
    *,
    job_id: str | None = None,
    target_created: bool = False,
    lookup: Lookup | None = None,
) -> Preflight:
    """Ask everything there is to ask, and report every answer.

    free_disk_bytes  where the job would run, less what other jobs have reserved; None = not known here
    memory_bytes     what the converting process may hold; None = not known here
    job_id           of the job that is about to run, whose own target is not in its way; None = no job yet
    target_created   the job began to make its target before (see Hub.publish)
    lookup           may remember what it was told of sources; None asks the Hub
    Raises HubUnavailable, since then nothing can be known. Cost: about ten requests, and one a weight file.
    """
    answers = _Answers()
    answers.ask("account", lambda: _account(hub))
    found = lookup or Lookup()
    source = answers.ask("source", lambda: _source(found.source(hub, config.source)))
    estimate = None
    if source is not None:
        answers.ask("licence", lambda: _licence(source))
        estimate = _model(answers, found.model(hub, source), config)
    if estimate is not None:
        answers.ask("disk", lambda: _disk(estimate, free_disk_bytes))
        answers.ask("memory", lambda: _memory(estimate, memory_bytes))
    for section, dataset in (("calibration", config.calibration.dataset), ("validation", config.validation.dataset)):
        if dataset != BUILTIN_DATASET:
            answers.ask(f"{section}_dataset", partial(_dataset, hub, section, dataset))
    if answers.all_ok("account"):
        answers.ask("target", lambda: _target(hub, config, source, job_id, target_created))
    return Preflight(tuple(answers.checks), source, estimate)


class _Answers:
    """Collects checks: each question answers with a value and the fact behind it, or raises."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def ask(self, name: str, question: Callable[[], tuple[T, str]]) -> T | None:
        try:
            value, reason = question()
        except HubUnavailable:
            raise
        except KvalignError as error:
            self.checks.append(Check(name, False, error.message, error.code, error.remedy))
            return None
        self.checks.append(Check(name, True, reason))
        return value

    def all_ok(self, *names: str) -> bool:
        return all(check.ok for check in self.checks if check.name in names)


def _account(hub: Hub) -> tuple[str, str]:
    account = hub.whoami()
    return account.name, f"The token belongs to {account.name}."


def _source(source: SourceInfo) -> tuple[SourceInfo, str]:
    kind = "private" if source.private else "gated, and open to this account" if source.gated else "public"
    return source, f"{source.repo} at {source.commit[:12]} is {kind}."


def _licence(source: SourceInfo) -> tuple[str, str]:
    name = str(source.card.get("license_name") or source.card.get("license") or "")[:100]
    return (
        name,
        f"The licence {name} is carried over." if name else "The source names no licence; the card will say so.",
    )


def inspect_model(files: SourceFiles) -> ModelFacts:
    """The checks of kvalign.source, each on its own. Raises HubUnavailable."""
    answers = _Answers()
    answers.ask("tokenizer", lambda: _tokenizer(files))
    settings = answers.ask("config", lambda: _config(files))
    sizes = found = None
    if settings is not None:
        answers.ask("architecture", lambda: _architecture(settings))
        sizes = answers.ask("sizes", lambda: _sizes(settings))
    if sizes is not None:
        found = answers.ask("weights", lambda: _weights(files, sizes))
    weights, download_bytes = found or (None, None)
    return ModelFacts(tuple(answers.checks), sizes, weights, download_bytes)


def _model(answers: _Answers, facts: ModelFacts, config: ConversionConfig) -> Estimate | None:
    """What was found out about the model, whether the text suits it, and the estimate where enough is known."""
    answers.checks += facts.checks
    sizes = facts.sizes
    if sizes is not None:
        answers.ask("windows", lambda: _windows(config, sizes))
    if sizes is None or facts.weights is None or facts.download_bytes is None:
        return None
    return estimated(facts.weights, sizes, config, facts.download_bytes)


def _config(files: SourceFiles) -> tuple[dict[str, Any], str]:
    settings = read_config(files)
    return settings, f"config.json describes a model of type {str(settings.get('model_type'))[:80]}."


def _architecture(settings: Mapping[str, Any]) -> tuple[str, str]:
    family = check_architecture(settings)
    return family.model_type, f"Models of type {family.model_type} are {family.status}."


def _sizes(settings: Mapping[str, Any]) -> tuple[ModelSizes, str]:
    sizes = model_sizes(settings)
    shape = f"{sizes.layers} layers of {sizes.kv_heads} KV heads with {sizes.head_dim} channels"
    return sizes, f"The cache has {shape}."


def _windows(config: ConversionConfig, sizes: ModelSizes) -> tuple[bool, str]:
    check_room(config, sizes.positions)
    check_builtin_text(config, sizes.positions)
    return True, "There is text enough, and sinks and recent tokens leave something of it to code."


def _weights(files: SourceFiles, sizes: ModelSizes) -> tuple[tuple[WeightFacts, int], str]:
    facts = check_weights(files, find_weights(files), sizes)
    listed = files.sizes()
    download_bytes = sum(listed[name] for name in names_to_download(files))
    return (facts, download_bytes), (
        f"{facts.parameters:,} parameters in {len(facts.files)} safetensors file{'s' * (len(facts.files) > 1)}."
    )


def _tokenizer(files: SourceFiles) -> tuple[bool, str]:
    check_tokenizer(files)
    return True, "The model has a tokenizer."


def _disk(estimate: Estimate, free_bytes: int | None) -> tuple[bool, str]:
    need = f"The job needs {_gb(estimate.disk_bytes)} of disk"
    if free_bytes is None:
        return True, f"{need}; the worker checks what is free."
    if estimate.disk_bytes > free_bytes:
        raise DiskFull(
            f"{need}, and {_gb(free_bytes)} are free beside other jobs.",
            "Try again when other jobs have ended, or choose a smaller model.",
        )
    return True, f"{need}, and {_gb(free_bytes)} are free."


def _memory(estimate: Estimate, limit_bytes: int | None) -> tuple[bool, str]:
    need = f"The conversion needs about {_gb(estimate.memory_bytes)} of memory"
    if limit_bytes is None:
        return True, f"{need}; the worker checks what it has."
    if estimate.memory_bytes > limit_bytes:
        raise OutOfMemory(
            f"{need}, and a job may use {_gb(limit_bytes)}.",
            "Choose a smaller model or a shorter calibration.sequence_length, or ask for larger workers.",
        )
    return True, f"{need}, and a job may use {_gb(limit_bytes)}."


def _dataset(hub: Hub, section: str, dataset: str) -> tuple[str, str]:
    if is_local_dataset(dataset):
        raise ConfigInvalid(
            f"{section}.dataset names the file '{dataset[:200]}'; a job reads datasets of the Hub.",
            "Name a dataset repo as owner/name, or 'builtin'.",
        )
    found = hub.dataset(dataset)
    return found.commit, f"{found.file.name} of {found.repo} at {found.commit[:12]} is readable."


def _target(
    hub: Hub, config: ConversionConfig, source: SourceInfo | None, job_id: str | None, created: bool
) -> tuple[str, str]:
    repo = hub.check_target(config.target, job_id=job_id, source=source, created=created)
    return repo, f"{repo} may be written to."


# Measured orders of magnitude, for an estimate only: 32-bit arithmetic on two cores, a common connection.
_FLOPS = 4e10
_BYTES_PER_S = 2e7
_BASE_MEMORY_BYTES = 700_000_000
_BASE_DISK_BYTES = 100_000_000
_BASE_SECONDS = 30.0
_WIDEST_GROUP = 8192  # features that share one basis, as kvalign.statistics cuts them
_VALIDATION_TOKENS = 1024
_VALIDATION_PASSES = 12  # domains times operating points


def estimated(facts: WeightFacts, sizes: ModelSizes, config: ConversionConfig, download_bytes: int) -> Estimate:
    """What converting a model of this size takes; weights are held in 32 bits."""
    features = sizes.layers * sizes.kv_heads * sizes.head_dim
    width = min(features, _WIDEST_GROUP)
    statistics_bytes = 2 * features * width * 4
    sequence = config.calibration.sequence_length
    activations_bytes = sequence * 4 * (3 * sizes.vocabulary + 24 * sizes.layers * sizes.hidden)
    calibration_flops = config.calibration.tokens * (6 * facts.parameters + 4 * features * width)
    fitting_flops = 2 * math.ceil(features / width) * 20 * width**3
    validation_flops = config.validation.windows * _VALIDATION_PASSES * _VALIDATION_TOKENS * 2 * facts.parameters
    return Estimate(
        download_bytes=download_bytes,
        disk_bytes=_BASE_DISK_BYTES + download_bytes + 3 * statistics_bytes,
        memory_bytes=_BASE_MEMORY_BYTES
        + 4 * facts.parameters
        + statistics_bytes
        + 3 * width * width * 4
        + activations_bytes,
        seconds=round(
            _BASE_SECONDS
            + download_bytes / _BYTES_PER_S
            + (calibration_flops + fitting_flops + validation_flops) / _FLOPS,
            1,
        ),
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
