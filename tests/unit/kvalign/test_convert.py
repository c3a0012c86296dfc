"""A whole conversion of a tiny model: what it leaves, how it goes on after being stopped, and what it refuses."""

import json
import random
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvalign.artifact import CONFIG_NAME, TENSORS_NAME, load_artifact
from kvalign.capture import load_model, run
from kvalign.config import ConversionConfig
from kvalign.convert import ConversionResult, convert
from kvalign.errors import (
    ConfigInvalid,
    DatasetInvalid,
    KvalignError,
    QualityGate,
    SourceInvalid,
    SourceNotFound,
    SourceUnsupported,
)
from kvalign.report.facts import STAGES
from kvalign.stages import StageProgress

Folders = Callable[[str], Path]


class Stop(Exception):
    """The caller wants no more."""


def config(**sections: Any) -> ConversionConfig:
    data: dict[str, Any] = {
        "source": {"repo": "org/tiny"},
        "target": {"repo": "me/tiny-kvalign"},
        "codec": {"ratio": 8, "recent_tokens": 8},
        "calibration": {"tokens": 2048, "sequence_length": 128},
        "validation": {"windows": 2, "gate": {"max_kl": 10, "min_top1": 0}},
    }
    return ConversionConfig.parse({**data, **sections})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Calibration and validation text of two domains each, letters with some order in them."""
    folder = tmp_path_factory.mktemp("texts")
    letters = random.Random(5)
    words = ["".join(letters.choices("etaoinshrdlu", k=letters.randint(2, 7))) for _ in range(60)]
    for part in ("calibration", "validation"):
        (folder / part).mkdir()
        for domain in ("prose", "verse"):
            documents = [" ".join(letters.choices(words, k=300)) for _ in range(6)]
            (folder / part / f"{domain}.txt").write_text("\n=====\n".join(documents))
    return folder / "calibration", folder / "validation"


class Conversion:
    """Calls convert on one source, and notes what it is told."""

    def __init__(self, source: Path, texts: tuple[Path, Path], folder: Path) -> None:
        self.source, self.texts = source, texts
        self.out, self.work = folder / "out", folder / "work"
        self.told: list[StageProgress] = []

    def __call__(
        self, *, stop: Callable[[StageProgress], bool] = lambda progress: False, commit: str = "c0ffee", **sections: Any
    ) -> ConversionResult:
        def on_progress(progress: StageProgress) -> None:
            self.told.append(progress)
            if stop(progress):
                raise Stop

        return convert(
            self.source,
            self.out,
            config(**sections),
            work_dir=self.work,
            source_commit=commit,
            calibration_path=self.texts[0],
            validation_path=self.texts[1],
            on_progress=on_progress,
        )

    def stages_told(self) -> list[str]:
        return list(dict.fromkeys(progress.stage for progress in self.told))


@pytest.fixture
def conversion(tiny_folder: Folders, texts: tuple[Path, Path], tmp_path: Path) -> Conversion:
    return Conversion(tiny_folder("llama"), texts, tmp_path)


@pytest.fixture(scope="module")
def finished(
    tiny_folder: Folders, texts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Conversion, ConversionResult]:
    """One conversion, finished without being stopped; tests must not write to it."""
    conversion = Conversion(tiny_folder("llama"), texts, tmp_path_factory.mktemp("finished"))
    return conversion, conversion()


def test_a_codec_folder_and_its_report_are_left(finished: tuple[Conversion, ConversionResult]) -> None:
    conversion, result = finished
    assert result.artifact_dir == conversion.out
    names = {path.name for path in conversion.out.iterdir()}
    assert {CONFIG_NAME, TENSORS_NAME, "report.json", "README.md"} <= names
    assert json.loads((conversion.out / "report.json").read_text()) == result.report
    assert (conversion.out / "README.md").read_text().startswith("---\n")


def test_the_target_is_met_on_held_out_text(finished: tuple[Conversion, ConversionResult]) -> None:
    _, result = finished
    report = result.report
    assert 8 <= report["summary"]["ratio"] < 8 * 1.15
    assert report["summary"]["floor_kl"] < 1e-6
    assert 0 < report["summary"]["kl_mean"] < 10
    assert set(report["quality"]["domains"]) == {"prose", "verse"}
    assert report["gate"]["passed"]
    points = report["operating_points"]
    assert [point["step"] for point in points] == sorted(point["step"] for point in points)
    ratios = [point["ratio"] for point in points]
    assert ratios == sorted(ratios)
    assert ratios[0] < 8 < ratios[-1]
    assert report["codec"]["recommended_step"] in [point["step"] for point in points]


def test_the_codec_works_on_the_models_caches(finished: tuple[Conversion, ConversionResult]) -> None:
    conversion, _ = finished
    model = load_model(conversion.source)
    codec = load_artifact(conversion.out).codec(model)
    assert codec.shape.recomputed == 1
    tokens = torch.randint(97, 122, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, cache = run(model, tokens)
    low, high = codec.curve[0].ratio, codec.curve[-1].ratio
    sizes = [codec.sizes(codec.encode(cache, input_ids=tokens, ratio=ratio)).total for ratio in (low, 8, high)]
    assert sizes == sorted(sizes, reverse=True)
    # A random model's features hardly depend on each other, so that half of their energy goes at this ratio.
    for step, most in ((None, 0.8), (-400, 1e-3)):
        decoded = codec.decode_dense(codec.encode(cache, input_ids=tokens, step=step))
        for layer, found in zip(cache.layers, decoded.layers, strict=True):
            assert (found.keys - layer.keys).norm() < most * layer.keys.norm()


def test_provenance_names_text_and_tools(finished: tuple[Conversion, ConversionResult]) -> None:
    conversion, result = finished
    calibration = result.report["calibration"]
    assert calibration["domains"] == ["prose", "verse"]
    assert calibration["tokens"] == 2048
    assert (calibration["sequences"], calibration["sequence_length"]) == (16, 128)
    assert len(calibration["documents"]) == 12
    assert result.report["source"]["commit"] == "c0ffee"
    artifact = load_artifact(conversion.out)
    assert artifact.provenance is not None
    assert artifact.provenance["calibration"] == calibration
    artifact.base.check(conversion.source)


def test_progress_goes_through_the_stages_in_order(finished: tuple[Conversion, ConversionResult]) -> None:
    conversion, result = finished
    assert tuple(conversion.stages_told()) == STAGES
    assert set(result.stage_seconds) == set(STAGES)
    for stage in STAGES:
        told = [progress for progress in conversion.told if progress.stage == stage]
        assert (told[0].done, told[0].total) == (0, 1)
        assert (told[-1].done, told[-1].total) == (1, 1)
        assert all(0 <= progress.done <= progress.total for progress in told)
    # An eighth of the sixteen is kept aside.
    assert [progress.done for progress in conversion.told if progress.unit == "sequences"] == list(range(15))


def test_a_finished_conversion_is_not_done_again(finished: tuple[Conversion, ConversionResult], tmp_path: Path) -> None:
    conversion, first = finished
    again = Conversion(conversion.source, conversion.texts, tmp_path)
    again.work = conversion.work
    result = again()
    assert again.stages_told() == []
    for name in (CONFIG_NAME, TENSORS_NAME):
        assert (again.out / name).read_bytes() == (conversion.out / name).read_bytes()
    assert result.report["summary"] == first.report["summary"]


# ---- stopped


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        *(("within", "calibrate"), ("at its end", "fit"), ("within", "validate")),
        *(("at its start", "align"), ("at its start", "report"), ("at its end", "align"), ("at its end", "validate")),
    ],
)
def test_stopped_in_any_stage_it_goes_on_to_the_same_artifact(
    conversion: Conversion, finished: tuple[Conversion, ConversionResult], stage: str, place: str
) -> None:
    def stop(progress: StageProgress) -> bool:
        if progress.stage != stage:
            return False
        if place == "within":
            return bool(progress.unit) and progress.done >= min(2, progress.total)
        return not progress.unit and progress.done == (place == "at its end")

    with pytest.raises(Stop):
        conversion(stop=stop)
    assert not (conversion.out / CONFIG_NAME).exists()
    conversion.told.clear()
    result = conversion()
    assert conversion.stages_told() == list(STAGES[STAGES.index(stage) :])
    for name in (CONFIG_NAME, TENSORS_NAME):
        assert (conversion.out / name).read_bytes() == (finished[0].out / name).read_bytes()
    assert result.report["summary"] == finished[1].report["summary"]
    assert result.report["operating_points"] == finished[1].report["operating_points"]


def test_other_settings_reuse_what_does_not_depend_on_them(
    conversion: Conversion, finished: tuple[Conversion, ConversionResult]
) -> None:
    shutil.copytree(finished[0].work, conversion.work)
    conversion(codec={"ratio": 6, "recent_tokens": 8})
    assert conversion.stages_told() == ["fit", "validate", "report"]
    conversion.told.clear()
    conversion(validation={"windows": 3, "gate": {"max_kl": 10, "min_top1": 0}})
    assert conversion.stages_told() == ["validate", "report"]
    conversion.told.clear()
    conversion(calibration={"tokens": 2048, "sequence_length": 128, "seed": 1})
    assert conversion.stages_told() == list(STAGES)


def test_other_weights_of_the_same_size_are_calibrated_anew(
    conversion: Conversion, finished: tuple[Conversion, ConversionResult], tmp_path: Path
) -> None:
    """A model trained on has the sizes of the one before."""
    shutil.copytree(finished[0].work, conversion.work)
    conversion.source = Path(shutil.copytree(conversion.source, tmp_path / "source"))
    weights = load_file(conversion.source / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"] *= 1.5
    save_file(weights, conversion.source / "model.safetensors", metadata={"format": "pt"})
    conversion()
    assert conversion.stages_told() == list(STAGES)
    artifact = load_artifact(conversion.out)
    assert artifact.base != load_artifact(finished[0].out).base


# ---- recomputed layers


def test_every_layer_is_stored_where_none_is_recomputed(conversion: Conversion) -> None:
    conversion(codec={"ratio": 4, "recent_tokens": 8, "recomputed_layers": 0})
    artifact = load_artifact(conversion.out)
    assert artifact.shape.recomputed == 0
    assert {stored.predictor.shape[0] for stored in artifact.groups} == {0}
    with torch.no_grad():
        _, cache = run(load_model(conversion.source), torch.arange(40)[None])
    codec = artifact.codec()
    assert codec.decode_dense(codec.encode(cache)).get_seq_length() == 40


def test_the_default_is_none_where_the_model_cannot_run_its_first_layers(
    conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvalign.recompute.works", lambda model, count: False)
    conversion(codec={"ratio": 4, "recent_tokens": 8}, calibration={"tokens": 1024, "sequence_length": 128})
    assert load_artifact(conversion.out).shape.recomputed == 0


@pytest.mark.parametrize("wanted", [2, 3, 64])
def test_at_least_one_layer_is_stored(conversion: Conversion, wanted: int) -> None:
    with pytest.raises(ConfigInvalid, match=f"recomputed_layers is {wanted}; this model has 2 layers"):
        conversion(codec={"ratio": 8, "recent_tokens": 8, "recomputed_layers": wanted})
    assert not conversion.out.exists()


def test_layers_that_the_model_cannot_run_alone_are_refused(
    conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("kvalign.convert"), "works", lambda model, count: False)
    with pytest.raises(ConfigInvalid, match="first 1 layers of this model cannot be run by themselves"):
        conversion(codec={"ratio": 8, "recent_tokens": 8, "recomputed_layers": 1})


def test_other_counts_of_recomputed_layers_are_calibrated_anew(
    conversion: Conversion, finished: tuple[Conversion, ConversionResult]
) -> None:
    shutil.copytree(finished[0].work, conversion.work)
    conversion(codec={"ratio": 4, "recent_tokens": 8, "recomputed_layers": 0})
    assert conversion.stages_told() == list(STAGES)


@pytest.mark.parametrize("recomputed", [0, 1])
def test_without_gradients_a_conversion_weighs_all_errors_alike(conversion: Conversion, recomputed: int) -> None:
    result = conversion(
        codec={"ratio": 4, "recent_tokens": 8, "recomputed_layers": recomputed},
        calibration={"tokens": 1024, "sequence_length": 128, "metric": "none"},
    )
    assert result.report["calibration"]["metric"] == "none"
    for stored in load_artifact(conversion.out).groups:
        for weight in stored.weights:
            torch.testing.assert_close(weight, weight[0, 0, 0] * torch.eye(8).expand_as(weight))


# ---- refused


def test_a_failed_gate_leaves_the_report_and_no_artifact(conversion: Conversion) -> None:
    with pytest.raises(
        QualityGate, match=r"failed its quality gate: mean KL on 'prose' is .*; mean KL on 'verse'"
    ) as caught:
        conversion(validation={"windows": 2, "gate": {"max_kl": 1e-6, "min_top1": 0}})
    assert caught.value.remedy
    assert {CONFIG_NAME, TENSORS_NAME}.isdisjoint(path.name for path in conversion.out.iterdir())
    report = json.loads((conversion.out / "report.json").read_text())
    assert report["gate"]["passed"] is False
    assert len(report["gate"]["failures"]) == 4
    assert "Not published" in (conversion.out / "README.md").read_text()


def test_validation_text_that_was_calibrated_on_is_refused(conversion: Conversion, tmp_path: Path) -> None:
    validation = Path(shutil.copytree(conversion.texts[1], tmp_path / "validation"))
    document = (conversion.texts[0] / "prose.txt").read_text().split("\n=====\n")[3]
    with (validation / "verse.txt").open("a") as file:
        file.write(f"\n=====\n{document}\n")
    conversion.texts = (conversion.texts[0], validation)
    with pytest.raises(DatasetInvalid, match="A document of 'verse' is in the calibration text too, in 'prose'"):
        conversion()
    assert conversion.stages_told() == []


@pytest.mark.parametrize("text", ["", " \n=====\n \n"])
def test_empty_validation_text_is_refused(conversion: Conversion, tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.txt").write_text(text)
    conversion.texts = (conversion.texts[0], tmp_path / "empty.txt")
    with pytest.raises(DatasetInvalid, match="empty"):
        conversion()


def test_too_little_calibration_text_is_refused(conversion: Conversion) -> None:
    with pytest.raises(DatasetInvalid, match="1024 were asked for"):
        conversion(calibration={"tokens": 131_072, "sequence_length": 128})


def test_too_little_validation_text_is_refused_before_calibration(conversion: Conversion) -> None:
    with pytest.raises(DatasetInvalid, match=r"windows of 256 tokens; \d+ were asked for"):
        conversion(validation={"windows": 256})
    assert [progress.unit for progress in conversion.told] == [""]


def test_settings_that_leave_nothing_to_code_are_refused_also_when_calibration_is_done(
    conversion: Conversion, finished: tuple[Conversion, ConversionResult]
) -> None:
    shutil.copytree(finished[0].work, conversion.work)
    with pytest.raises(ConfigInvalid, match="Nothing would be coded"):
        conversion(codec={"ratio": 8, "recent_tokens": 4000})


def test_a_target_beyond_reach_is_refused_with_what_was_found(conversion: Conversion) -> None:
    with pytest.raises(ConfigInvalid, match="ratio 256 cannot be reached"):
        conversion(codec={"ratio": 256, "recent_tokens": 8})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda folder: shutil.rmtree(folder), SourceNotFound),
        (lambda folder: (folder / "config.json").unlink(), SourceNotFound),
        (lambda folder: (folder / "config.json").write_text("{"), SourceInvalid),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "mamba"}'), SourceUnsupported),
        (lambda folder: (folder / "tokenizer.json").unlink(), SourceInvalid),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), SourceInvalid),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), SourceInvalid),
    ],
)
def test_sources_that_cannot_be_converted_are_refused(
    conversion: Conversion, tmp_path: Path, change: Callable[[Path], Any], error: type[KvalignError]
) -> None:
    conversion.source = Path(shutil.copytree(conversion.source, tmp_path / "source"))
    change(conversion.source)
    with pytest.raises(error):
        conversion()
    assert not conversion.out.exists()


# ---- other families


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "smollm3", "cohere"])
def test_other_families_convert(tiny_folder: Folders, texts: tuple[Path, Path], tmp_path: Path, family: str) -> None:
    conversion = Conversion(tiny_folder(family), texts, tmp_path)
    result = conversion(codec={"max_kl": 0.5, "recent_tokens": 8}, calibration={"tokens": 1024, "sequence_length": 128})
    assert result.report["summary"]["kl_mean"] <= 0.5
    assert result.report["summary"]["ratio"] > 3
    assert load_artifact(conversion.out).base.model_type == family


# ---- heads that say little


def spoilt(tiny_folder: Callable[[str], Path], folder: Path, change: Callable[[Any], None], **shape: int) -> Path:
    """A tiny llama with its weights changed, as a folder."""
    source = tiny_folder("llama")
    shutil.copytree(source, folder)
    if shape:
        settings = AutoConfig.from_pretrained(source)
        for name, value in shape.items():
            setattr(settings, name, value)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(settings)
    else:
        model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return folder


def silence(model: Any) -> None:
    """The first head of the last layer keeps nothing: its keys and values are zero."""
    for projection in (model.model.layers[-1].self_attn.k_proj, model.model.layers[-1].self_attn.v_proj):
        projection.weight[:8] = 0


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (silence, {}),
        (lambda model: None, {"num_hidden_layers": 1}),
        (lambda model: None, {"num_key_value_heads": 1}),
        (lambda model: None, {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    ],
    ids=["a silent head", "one layer", "one head a layer", "one head"],
)
def test_models_of_few_or_silent_heads_convert(
    conversion: Conversion, tiny_folder: Callable[[str], Path], tmp_path: Path, change: Any, shape: dict[str, int]
) -> None:
    conversion.source = spoilt(tiny_folder, tmp_path / "spoilt", change, **shape)
    report = conversion(codec={"ratio": 6, "recent_tokens": 8}).report
    for found in report["head_alignment"].values():
        assert -1 <= found["before"] <= 1
        assert -1 <= found["after"] <= 1
    assert len(report["figures"]) >= 5


def test_a_model_whose_cache_is_not_finite_is_refused_by_the_layer(
    conversion: Conversion, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    def overflow(model: Any) -> None:
        model.model.layers[1].self_attn.v_proj.weight.fill_(3e38)

    conversion.source = spoilt(tiny_folder, tmp_path / "spoilt", overflow)
    with pytest.raises(SourceInvalid, match="The values of layer 1 are not finite"):
        conversion(codec={"ratio": 6, "recent_tokens": 8})
