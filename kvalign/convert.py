"""convert(source_dir, out_dir, config): a model folder in, a codec folder with its report out. No queue, no Hub.

    calibrate   stream keys, values, what predicts them, and gradients of calibration text into sums
    align       weighted principal basis over all layers and heads
    fit         component scales and symbol tables, and the resident form, on calibration text kept aside
    validate    search the step on held-out text, cut the codec to what it needs, measure it by protocol R, and the
                resident form by protocol C through fused attention; recall, and greedy text, of both
    report      look into the heads, measure other codecs and speed; judge the gate; write report.json, the figures,
                the card and the artifact

Each stage leaves its output in work_dir under a hash of its inputs: calling convert again goes on after the last
finished one, and calibration after its last checkpoint.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor

from kvalign import calibrate, fit
from kvalign.align.basis import Basis, fit_basis, head_weights, load_bases, save_bases
from kvalign.artifact import Artifact, BaseModel, StoredGroup, load_artifact
from kvalign.capture import CacheShape, Captured, capture, load_model, load_tokenizer, measure_shape, position_limit
from kvalign.codec import Codec
from kvalign.config import ConversionConfig
from kvalign.errors import ConfigInvalid, QualityGate
from kvalign.evaluate.coders import coders_of
from kvalign.evaluate.greedy import measure_greedy
from kvalign.evaluate.protocol import Coder, PreparedWindow, prepare, spread
from kvalign.evaluate.recall import RecallResult, measure_recall
from kvalign.evaluate.resident import ResidentResult, measure_resident
from kvalign.evaluate.search import Measurement, Target, measure, search_step
from kvalign.evaluate.validation import Validation
from kvalign.overlap import refuse_overlap
from kvalign.recompute import default_count, works
from kvalign.report import card
from kvalign.report.build import build_report, shown_name, to_json
from kvalign.report.draw import FOLDER as FIGURES
from kvalign.report.draw import draw
from kvalign.report.facts import MOST_LISTED_DOCUMENTS
from kvalign.report.figures import Drawn
from kvalign.report.findings import PARTS, Findings, examine
from kvalign.resident.cache import coded_layers
from kvalign.resident.fit import fit_resident
from kvalign.source import check_source
from kvalign.stages import StageProgress, Stages
from kvalign.statistics import Statistics
from kvalign.text import (
    Document,
    Window,
    builtin_documents,
    evaluation_windows,
    fingerprint,
    kept_aside,
    read_documents,
    token_sequences,
)
from kvalign.token_steps import FINEST_SHIFT, SIXTEENTHS_A_SHIFT
from kvalign.weight_index import write_weight_index
from kvalign.windows import WINDOW_TOKENS, check_room, prefix_tokens

_STATISTICS_NAME = "statistics.safetensors"
_DRAWN_NAME = "drawn.json"
_BASES_NAME = "bases.safetensors"
_ROUGH_WINDOWS = 4
_START_RATIO = 20.0
# Measured on SmolLM2 (docs/log.md): 0.25 to 0.4 give the same ratio at equal KL, larger loses again.
TOKEN_BETA = 0.3
# The stored basis holds what the finest token needs at the recommended step; the curve is measured around that.
_FINER = -SIXTEENTHS_A_SHIFT * FINEST_SHIFT
_CURVE_OFFSETS = (-12, -6, 6, 12)
_STEP_RANGE_RATIOS = (2.0, 128.0)


@dataclass(frozen=True)
class ConversionResult:
    """What convert made.

    report         as written to report.json
    stage_seconds  of the run that finished each stage
    """

    artifact_dir: Path
    report: dict[str, Any]
    stage_seconds: dict[str, float]


def convert(
    source_dir: Path,
    out_dir: Path,
    config: ConversionConfig,
    *,
    work_dir: Path,
    source_commit: str = "",
    calibration_path: Path | None = None,
    validation_path: Path | None = None,
    on_progress: Callable[[StageProgress], None] = lambda progress: None,
) -> ConversionResult:
    """Convert the model in source_dir and write the codec folder to out_dir.

    work_dir                            takes finished stages: about 8 P^2 bytes for P features of keys
    calibration_path, validation_path   text files or folders; None takes the text that comes with kvalign
    on_progress                         called after each pass over text; what it raises stops the work

    Raises kvalign.errors: SourceError for a model that cannot be converted, DatasetInvalid, ConfigInvalid for a
    target that cannot be reached, and QualityGate after writing report.json and README.md to out_dir.
    Cost: a forward pass over the calibration text, a backward pass over a quarter of each sequence, an
    eigendecomposition for each feature group, and about eight passes over the validation text.
    """
    check_source(source_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    conversion = _Conversion(source_dir, config, calibration_path, validation_path)
    base = BaseModel.of(source_dir, repo=config.source.repo, commit=source_commit)
    stages = Stages(work_dir, on_progress, conversion.root_inputs(base))
    finished, report, figures = conversion.run(stages, base)
    out_dir.mkdir(parents=True, exist_ok=True)
    shutil.copytree(figures, out_dir / FIGURES, dirs_exist_ok=True)
    if config.target.layout == "full":
        write_weight_index(source_dir, out_dir)
    (out_dir / "report.json").write_text(to_json(report), encoding="utf-8")
    (out_dir / "README.md").write_text(card.render(report), encoding="utf-8")
    if not report["gate"]["passed"]:
        raise QualityGate(
            "The converted model failed its quality gate: " + "; ".join(report["gate"]["failures"]) + ".",
            "Ask for a lower max_kl or ratio, calibrate on text nearer to the use, or widen validation.gate.",
        )
    finished.save(out_dir)
    return ConversionResult(out_dir, report, dict(stages.seconds))


@dataclass(frozen=True)
class Validated:
    """Output of the validate stage: what was found, and the very codec it was found on."""

    found: Validation
    artifact: Artifact

    @classmethod
    def load(cls, folder: Path) -> "Validated":
        return cls(Validation.load(folder), load_artifact(folder))


@dataclass(frozen=True)
class Examined:
    """Output of the report stage: what was found beyond the gate, and the folder of pictures of it all."""

    findings: Findings
    drawn: list[Drawn]
    figures: Path

    @classmethod
    def load(cls, folder: Path) -> "Examined":
        drawn = [Drawn(**item) for item in json.loads((folder / _DRAWN_NAME).read_text())]
        return cls(Findings.load(folder), drawn, folder / FIGURES)


class _Conversion:
    """The stages of one conversion. The model and the texts are read when the first stage needs them."""

    def __init__(
        self, source_dir: Path, config: ConversionConfig, calibration_path: Path | None, validation_path: Path | None
    ) -> None:
        self._source_dir = source_dir
        self._config = config
        self._calibration_path = calibration_path
        self._validation_path = validation_path
        self._windows_prepared: list[PreparedWindow] = []

    def root_inputs(self, base: BaseModel) -> dict[str, Any]:
        """What every stage depends on."""
        return {
            "base": base.to_json(),
            "calibration": self._config.calibration.model_dump(mode="json"),
            "calibration_text": fingerprint(self._calibration_documents),
            "sink_tokens": self._config.codec.sink_tokens,
            "recomputed_layers": self._config.codec.recomputed_layers,
            "layer_group_size": self._config.codec.layer_group_size,
        }

    def run(self, stages: Stages, base: BaseModel) -> tuple[Artifact, dict[str, Any], Path]:
        """The artifact, its report, and the folder of the report's figures."""
        codec_inputs = self._config.codec.model_dump(mode="json")
        validation_inputs = [self._config.validation.model_dump(mode="json"), fingerprint(self._held_out_documents)]
        statistics = stages.run(
            "calibrate", None, lambda folder: self._calibrate(stages, folder), self._load_statistics
        )
        aligned = stages.run(
            "align",
            None,
            lambda folder: _align(statistics(), folder),
            lambda folder: load_bases(folder / _BASES_NAME),
        )
        fitted = stages.run(
            "fit", codec_inputs, lambda folder: self._fit(statistics(), aligned(), base, folder), load_artifact
        )
        validation = stages.run(
            "validate", validation_inputs, lambda folder: self._validate(fitted(), stages, folder), Validated.load
        )
        examined = stages.run(
            "report", None, lambda folder: self._examine(statistics(), validation(), stages, folder), Examined.load
        )
        finished = validation().artifact
        report = build_report(
            self._config,
            finished,
            validation().found,
            examined().findings,
            examined().drawn,
            source_dir=self._source_dir,
            held_out=self._held_out_documents,
            stage_seconds=dict(stages.seconds),
        )
        return finished, report, examined().figures

    # ---- stages

    def _calibrate(self, stages: Stages, folder: Path) -> None:
        check_room(self._config, self._position_limit)
        assert self._windows, "too little text to validate on is refused here, before the long work"
        statistics = calibrate.calibrate(
            self._model,
            self._shape,
            self._basis_sequences,
            seed=self._config.calibration.seed,
            sink_tokens=self._config.codec.sink_tokens,
            token_beta=TOKEN_BETA,
            metric=self._config.calibration.metric,
            layer_group_size=self._config.codec.layer_group_size,
            checkpoint=folder / _STATISTICS_NAME,
            on_progress=lambda done, total: stages.tell("calibrate", done, total, "sequences"),
        )
        statistics.save(folder / _STATISTICS_NAME)

    def _load_statistics(self, folder: Path) -> Statistics:
        return calibrate.load_statistics(folder / _STATISTICS_NAME, self._shape, self._config.codec.layer_group_size)

    def _fit(self, statistics: Statistics, bases: list[Basis], base: BaseModel, folder: Path) -> None:
        """A codec of full rank, which validate cuts down to what the step it finds needs; and the resident form."""
        check_room(self._config, self._position_limit)
        sink_tokens = self._config.codec.sink_tokens
        kept_aside = self._kept_aside
        transforms, orders = fit.full_transforms(bases, kept_aside, sink_tokens)
        start = fit.expected_step(transforms, self._shape.geometry, self._config.codec.ratio or _START_RATIO)
        groups = [
            StoredGroup.of(basis, transform.scales, order, fit.feature_deviation(kept_aside, sink_tokens))
            for basis, transform, order in zip(bases, transforms, orders, strict=True)
        ]
        Artifact(
            base=base,
            shape=self._shape,
            groups=tuple(groups),
            tables=fit.fit_tables(transforms, kept_aside, sink_tokens, start),
            sink_tokens=sink_tokens,
            recent_tokens=self._config.codec.recent_tokens,
            recommended_step=start,
            token_beta=TOKEN_BETA,
            resident=fit_resident(
                statistics,
                self._shape,
                kept_aside,
                bits=self._config.codec.resident_bits,
                sink_tokens=sink_tokens,
                layers=coded_layers(self._model),
                position_limit=self._position_limit,
            ),
            provenance=self._provenance(),
        ).save(folder)

    def _validate(self, fitted: Artifact, stages: Stages, folder: Path) -> None:
        """Search roughly at full rank, cut the rank to the step found, and search and measure what will be stored."""
        prepared = self._prepared(stages, "validate")
        few = spread(prepared, _ROUGH_WINDOWS)
        rough = self._search(fitted.codec(self._model), few, fitted.recommended_step, stages, tolerance=0.25)[0].step
        stored = fitted.cut(rough - _FINER)
        codec = stored.codec(self._model)
        measured = self._search(codec, prepared, rough, stages, tolerance=0.06)
        steps = {found.step for found in measured}
        for offset in _CURVE_OFFSETS:
            step = measured[0].step + offset
            if step not in steps:
                measured.append(self._measure(codec, prepared, step, stages))
        chosen = replace(stored, recommended_step=measured[0].step).codec(self._model)
        coders = coders_of(self._model, chosen)
        validation = Validation.of(
            measured,
            self._measure_resident(stored, stages),
            recall=self._measure_recall(coders, stages),
            greedy=measure_greedy(self._model, prepared, coders),
            floor_kl=max(window.floor_kl for window in prepared),
            prefix_tokens=self._windows[0].prefix.numel(),
            continuation_tokens=self._windows[0].continuation.numel(),
        )
        validation.save(folder)
        stored.with_curve(validation.curve, validation.step).save(folder)

    def _examine(self, statistics: Statistics, validated: Validated, stages: Stages, folder: Path) -> None:
        """Heads, other codecs and speed, on the windows that the gate is judged on; pictures of it all."""
        findings = examine(
            self._model,
            validated.artifact,
            statistics,
            prepared=self._prepared(stages, "report"),
            kept_aside=self._kept_aside,
            ratio=validated.found.overall.ratio,
            on_progress=lambda part: stages.tell("report", PARTS.index(part), len(PARTS), part),
        )
        findings.save(folder)
        drawn = draw(folder / FIGURES, validated.artifact, validated.found, findings)
        (folder / _DRAWN_NAME).write_text(json.dumps([asdict(figure) for figure in drawn]))

    def _prepared(self, stages: Stages, stage: str) -> list[PreparedWindow]:
        """The windows with what the uncompressed model makes of them; made once."""
        if not self._windows_prepared:
            for window in prepare(self._model, self._windows):
                self._windows_prepared.append(window)
                stages.tell(stage, len(self._windows_prepared), len(self._windows), "windows prepared")
        return self._windows_prepared

    def _measure_recall(self, coders: Mapping[str, Coder], stages: Stages) -> list[RecallResult]:
        return measure_recall(
            self._model,
            self._tokenizer,
            self._held_out_documents,
            coders,
            on_item=lambda: stages.tell("validate", len(self._windows), len(self._windows), "recall"),
        )

    def _measure_resident(self, stored: Artifact, stages: Stages) -> ResidentResult:
        assert stored.resident_plan is not None
        windows = iter(range(1, len(self._windows) + 1))
        return measure_resident(
            self._model,
            stored.resident_plan,
            self._windows,
            lambda: stages.tell("validate", next(windows), len(self._windows), "windows through the resident cache"),
        )

    def _search(
        self,
        codec: Codec,
        prepared: Sequence[PreparedWindow],
        start: int,
        stages: Stages,
        *,
        tolerance: float,
    ) -> list[Measurement]:
        target = Target(self._config.codec.max_kl, self._config.codec.ratio, tolerance)
        coarse, fine = sorted(
            (fit.expected_step(list(codec.transforms), codec.shape.geometry, ratio) for ratio in _STEP_RANGE_RATIOS),
            reverse=True,
        )
        return search_step(
            lambda step: self._measure(codec, prepared, step, stages),
            target,
            start=start,
            bounds=(fine, coarse),
        )

    def _measure(self, codec: Codec, prepared: Sequence[PreparedWindow], step: int, stages: Stages) -> Measurement:
        done = 0

        def on_window() -> None:
            nonlocal done
            done += 1
            stages.tell("validate", done, len(prepared), f"windows at step {step}")

        return measure(self._model, codec, prepared, step, on_window)

    # ---- what the stages work on

    @cached_property
    def _model(self) -> Any:
        return load_model(self._source_dir)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._source_dir)

    @cached_property
    def _shape(self) -> CacheShape:
        shape = measure_shape(self._model)
        wanted = self._config.codec.recomputed_layers
        if wanted is None:
            return replace(shape, recomputed=default_count(self._model, shape))
        layers = len(shape.geometry.layers)
        if wanted >= layers or (wanted and not works(self._model, wanted)):
            raise ConfigInvalid(
                f"codec.recomputed_layers is {wanted}; this model has {layers} layers, and at least one must be stored."
                if wanted >= layers
                else f"The first {wanted} layers of this model cannot be run by themselves.",
                "Lower codec.recomputed_layers; 0 stores every layer.",
            )
        return replace(shape, recomputed=wanted)

    @cached_property
    def _calibration_documents(self) -> list[Document]:
        if self._calibration_path:
            return read_documents(self._calibration_path)
        return builtin_documents("calibration")

    @cached_property
    def _held_out_documents(self) -> list[Document]:
        """Validation documents; raises DatasetInvalid when one of them was calibrated on."""
        documents = read_documents(self._validation_path) if self._validation_path else builtin_documents("validation")
        refuse_overlap(self._calibration_documents, documents)
        return documents

    @cached_property
    def _sequences(self) -> list[Tensor]:
        calibration = self._config.calibration
        return token_sequences(
            self._calibration_documents,
            self._tokenizer,
            tokens=calibration.tokens,
            length=min(calibration.sequence_length, self._position_limit),
            seed=calibration.seed,
        )

    @property
    def _basis_sequences(self) -> list[Tensor]:
        return self._sequences[: len(self._sequences) - len(self._kept_aside_sequences)] or self._sequences

    @property
    def _kept_aside_sequences(self) -> list[Tensor]:
        return kept_aside(self._sequences)

    @cached_property
    def _kept_aside(self) -> list[Captured]:
        """What the sequences kept aside leave; held from fit to report."""
        return list(capture(self._model, self._shape, iter(self._kept_aside_sequences)))

    @cached_property
    def _windows(self) -> list[Window]:
        length = min(WINDOW_TOKENS, self._position_limit)
        return evaluation_windows(
            self._held_out_documents,
            self._tokenizer,
            windows=self._config.validation.windows,
            prefix=prefix_tokens(length),
            continuation=length - prefix_tokens(length),
        )

    @property
    def _position_limit(self) -> int:
        return position_limit(self._model, otherwise=WINDOW_TOKENS)

    def _provenance(self) -> dict[str, Any]:
        calibration = self._config.calibration
        documents = self._calibration_documents
        return {
            "calibration": {
                "dataset": shown_name(calibration.dataset),
                "domains": sorted({document.domain for document in documents}),
                "documents": sorted(document.sha256 for document in documents)[:MOST_LISTED_DOCUMENTS],
                "fingerprint": fingerprint(documents),
                "sequences": len(self._sequences),
                "sequence_length": self._sequences[0].numel(),
                "tokens": sum(sequence.numel() for sequence in self._sequences),
                "metric": calibration.metric,
                "seed": calibration.seed,
            },
            "tools": {name: metadata.version(name) for name in ("kvalign", "torch", "transformers", "numba", "numpy")},
        }


def _align(statistics: Statistics, folder: Path) -> None:
    weights = head_weights(statistics)
    save_bases([fit_basis(statistics, group, weights[group.name]) for group in statistics.groups], folder / _BASES_NAME)
