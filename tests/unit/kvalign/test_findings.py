"""What the report stage found comes back from disk, and every picture is drawn from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from synthetic import findings, fitted_to, made_up_resident, measured, resident_result

from kvalign.align.basis import sensitivity_shares
from kvalign.artifact import Artifact
from kvalign.entropy.classes import component_bits
from kvalign.evaluate.protocol import prepare
from kvalign.evaluate.speed import measure_speed
from kvalign.evaluate.validation import Validation
from kvalign.geometry import KINDS, Geometry, Kind, LayerGeometry
from kvalign.report import figures
from kvalign.report.draw import draw
from kvalign.report.findings import Findings, up_to
from kvalign.statistics import Statistics, feature_groups
from kvalign.text import Window


def validation(kl: float = 0.01) -> Validation:
    return Validation.of(
        [measured(4, kl, 12.0), measured(-8, kl / 2, 8.0)],
        resident_result(),
        floor_kl=1e-9,
        prefix_tokens=768,
        continuation_tokens=256,
    )


def test_findings_come_back_from_disk(tmp_path: Path) -> None:
    found = findings()
    found.save(tmp_path)
    again = Findings.load(tmp_path)
    assert (again.baselines, again.speed) == (found.baselines, found.speed)
    for kind in KINDS:
        for name in ("before", "after", "absolute", "variance"):
            assert torch.equal(getattr(again.heads[kind], name), getattr(found.heads[kind], name))
        assert torch.equal(again.sensitivity[kind], found.sensitivity[kind])


def test_every_picture_is_drawn_with_its_data(artifact: Artifact, tmp_path: Path) -> None:
    whole = replace(artifact, resident=made_up_resident(artifact.shape.geometry))
    drawn = draw(tmp_path / "figures", whole, validation(), findings())
    assert [figure.name for figure in drawn] == [
        "head_alignment",
        "activations",
        "bits",
        "sensitivity",
        "rate_distortion",
        "kl_by_position",
    ]
    files = {file.name for file in (tmp_path / "figures").iterdir()}
    assert files == {name for figure in drawn for name in (figure.image, figure.data)}
    curves = json.loads((tmp_path / "figures" / "rate_distortion.json").read_text())
    assert [curve["name"] for curve in curves["curves"]] == ["kvalign", "KIVI-style"]
    assert curves["chosen"]["kl"] == pytest.approx(0.01)
    bits = json.loads((tmp_path / "figures" / "bits.json").read_text())
    assert bits["at_rest"]["keys"] == sorted(bits["at_rest"]["keys"], reverse=True)
    assert bits["layers"] == [0, 1, 2]
    assert bits["resident"]["values"] == [4.0, 4.0, 4.0]


def test_what_is_no_number_is_not_drawn(artifact: Artifact, tmp_path: Path) -> None:
    whole = replace(artifact, resident=made_up_resident(artifact.shape.geometry))
    none = replace(validation(float("nan")), resident=resident_result(float("nan")))
    drawn = draw(tmp_path, whole, none, replace(findings(float("nan")), sensitivity={}))
    assert [figure.name for figure in drawn] == ["head_alignment", "activations", "bits"]


def test_bits_of_components_are_entropies_of_their_classes(artifact: Artifact) -> None:
    scales = np.array([400, 40, 0, -30, -400], dtype=np.int16)
    found = component_bits(artifact.tables, scales, 0)
    assert (np.diff(found) <= 0).all()
    assert found[-1] == 0
    # An octave is 16 steps of scale, and a bit.
    assert component_bits(artifact.tables, scales[:1] + 16, 0)[0] == pytest.approx(found[0] + 1)


def test_shares_of_sensitivity_weigh_errors_of_the_layers_own_size() -> None:
    geometry = Geometry((LayerGeometry(1, 2, 2), LayerGeometry(1, 2, 2)))
    statistics = Statistics(feature_groups(geometry, first=1), geometry)
    assert sensitivity_shares(statistics) == {}
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([1.0, 1.0, 2.0, 2.0])
    columns: dict[Kind, torch.Tensor] = {kind: torch.randn(4000, 4, generator=generator) * spread for kind in KINDS}
    statistics.update(columns, torch.zeros(4000, 0))
    statistics.update_sensitivity({kind: torch.zeros(10, 4) for kind in KINDS}, torch.ones(10))
    assert sensitivity_shares(statistics) == {}
    slopes: dict[Kind, torch.Tensor] = {"keys": torch.ones(10, 4), "values": torch.zeros(10, 4)}
    statistics.update_sensitivity(slopes, torch.ones(10))
    shares = sensitivity_shares(statistics)
    assert shares["values"].tolist() == [0, 0]
    torch.testing.assert_close(shares["keys"], torch.tensor([0.2, 0.8]), rtol=0.1, atol=0.02)


def test_a_kind_of_which_nothing_is_stored_is_drawn_as_nothing(tmp_path: Path) -> None:
    drawn = figures.bits(tmp_path, {"keys": np.array([2.0, 1.0]), "values": np.zeros(0)}, {}, [])
    assert json.loads((tmp_path / drawn.data).read_text())["at_rest"] == {"keys": [2.0, 1.0], "values": []}
    figures.bits(tmp_path, {"keys": np.zeros(0), "values": np.zeros(0)}, {}, [])


def test_texts_are_taken_up_to_a_length() -> None:
    texts = [torch.zeros(length) for length in (5, 4, 3)]
    assert [len(text) for text in up_to(texts, 9)] == [5, 4]
    assert [len(text) for text in up_to(texts, 1)] == [5]


def test_speeds_are_ratios_of_what_was_timed() -> None:
    model: Any = tiny_models.build("llama")
    tokens = torch.randint(256, (90,), generator=torch.Generator().manual_seed(0))
    prepared = next(iter(prepare(model, [Window("noise", tokens[:80], tokens[80:])])))
    with_resident = fitted_to(model, resident_bits=4.0).codec(model)
    found = measure_speed(model, with_resident, prepared)
    assert found.prefix_tokens == 80
    assert min(found.prefill_s, found.encode_s, found.decode_s) > 0
    assert found.prefill_over_decode == found.prefill_s / found.decode_s
    assert found.resident_tokens_per_s is not None
    assert found.resident_over_dynamic == found.resident_tokens_per_s / found.dynamic_tokens_per_s
    assert measure_speed(model, fitted_to(model).codec(model), prepared).resident_over_dynamic is None
