"""Codec folders: the same bytes come back, and whatever was changed in them is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic import CacheSource, fitted, fitted_to, with_other_id
from torch import Tensor

from kvalign.align.basis import fit_basis, head_weights
from kvalign.artifact import CONFIG_NAME, TENSORS_NAME, Artifact, BaseModel, StoredGroup, load_artifact
from kvalign.capture import CacheShape, run
from kvalign.errors import ArtifactInvalid, PayloadInvalid
from kvalign.rope import Rope
from kvalign.statistics import Statistics, feature_groups


@pytest.fixture
def folder(artifact: Artifact, tmp_path: Path) -> Path:
    artifact.save(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG_NAME).read_text())
    (folder / CONFIG_NAME).write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / TENSORS_NAME)
    change(tensors)
    save_file(tensors, folder / TENSORS_NAME, metadata={"format": "kvalign-1"})


def test_a_loaded_codec_reads_and_writes_the_same_bytes(
    folder: Path, artifact: Artifact, source: CacheSource, tmp_path: Path
) -> None:
    loaded = load_artifact(folder)
    assert loaded.codec_id == artifact.codec_id
    assert loaded.base == artifact.base
    assert loaded.curve == artifact.curve
    assert (loaded.token_beta, loaded.recommended_step) == (0.4, -10)
    before, after = artifact.codec(), loaded.codec()
    cache = source.cache(150)
    data = before.encode(cache, ratio=8)
    assert after.encode(cache, ratio=8) == data
    for a, b in zip(before.decode_dense(data).layers, after.decode_dense(data).layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
    loaded.save(tmp_path / "again")
    for name in (CONFIG_NAME, TENSORS_NAME):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_the_same_codec_gives_the_same_bytes_each_time(artifact: Artifact) -> None:
    """safetensors orders its metadata by chance, differently at each call."""
    assert {replace(artifact).tensor_bytes for _ in range(20)} == {artifact.tensor_bytes}


def test_every_change_of_meaning_changes_the_id(artifact: Artifact) -> None:
    ropes = artifact.shape.ropes
    other_pairing = CacheShape(artifact.shape.geometry, (Rope("interleaved", ropes[0].inv_freq, 1.1), *ropes[1:]))
    other_scaling = CacheShape(artifact.shape.geometry, (Rope("half", ropes[0].inv_freq, 1.2), *ropes[1:]))
    ids = {
        artifact.codec_id,
        with_other_id(artifact).codec_id,
        replace(artifact, shape=other_pairing).codec_id,
        replace(artifact, shape=other_scaling).codec_id,
    }
    assert len(ids) == 4
    # Payloads carry these themselves, or never depend on them.
    for kept in (replace(artifact, sink_tokens=9), artifact.with_curve((), 5), replace(artifact, token_beta=0.0)):
        assert kept.codec_id == artifact.codec_id


def test_saving_leaves_nothing_else_behind(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted([CONFIG_NAME, TENSORS_NAME])


def test_the_tensor_file_holds_no_more_than_it_says(folder: Path) -> None:
    tensors = load_file(folder / TENSORS_NAME)
    assert {name for name, tensor in tensors.items() if name.startswith("inv_freq")} == {"inv_freq.0", "inv_freq.2"}
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("directions.")} == {torch.int8}
    largest = max(tensors, key=lambda name: tensors[name].numel())
    assert largest == "tables"


# ---- changed by hand


def _move_intercept(tensors: dict[str, torch.Tensor]) -> None:
    tensors["intercept.keys.0-2"] = tensors["intercept.keys.0-2"] + 1e-6


def _swap_tables(tensors: dict[str, torch.Tensor]) -> None:
    tensors["tables"] = tensors["tables"].flip(0).contiguous()


def _flip_direction(tensors: dict[str, torch.Tensor]) -> None:
    tensors["directions.values.0-2"][3, 4] ^= 1


@pytest.mark.parametrize("change", [_move_intercept, _swap_tables, _flip_direction])
def test_tensors_that_were_changed_are_refused_by_the_id(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    edit_tensors(folder, change)
    with pytest.raises(ArtifactInvalid, match=f"codec_id in {CONFIG_NAME} is not that of {TENSORS_NAME}"):
        load_artifact(folder)


def test_every_flipped_byte_of_a_stretch_is_refused(folder: Path) -> None:
    data = bytearray((folder / TENSORS_NAME).read_bytes())
    for at in [*range(0, 400, 7), *range(len(data) - 300, len(data), 13)]:
        data[at] ^= 0x10
        (folder / TENSORS_NAME).write_bytes(data)
        with pytest.raises(ArtifactInvalid):
            load_artifact(folder)
        data[at] ^= 0x10


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_tensor_file_cut_short_is_refused(folder: Path, kept: int) -> None:
    data = (folder / TENSORS_NAME).read_bytes()
    (folder / TENSORS_NAME).write_bytes(data[:kept])
    with pytest.raises(ArtifactInvalid):
        load_artifact(folder)


def _drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def _set(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("tables"), "lacks 'tables'"),
        (_drop("weights.keys.1"), r"lacks 'weights\.keys\.1'"),
        (_drop("inv_freq.2"), "rotary frequencies are missing"),
        (
            _set("intercept.keys.0-2", lambda x: x[:-1]),
            r"group keys\.0-2 is torch\.float32 \(31,\), not torch\.float32 \(32,\)",
        ),
        (_set("intercept.keys.0-2", lambda x: x * float("nan")), r"group keys\.0-2 is not finite"),
        (_set("directions.values.0-2", lambda x: x.float()), r"not torch\.int8"),
        (_set("scales.keys.0-2", lambda x: x.flip(0)), r"scales of group keys\.0-2 do not fall"),
        (_set("weights.values.2", lambda x: x * 0), r"weight of group values\.0-2 is not positive definite"),
        (_set("tables", lambda x: x * 0), "the escape a frequency"),
        (_set("tables", lambda x: x[:, :-1]), "uint16 of shape"),
        (_set("tables", lambda x: x.to(torch.bfloat16)), "do not fit"),
    ],
)
def test_tensors_that_cannot_be_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    edit_tensors(folder, change)
    with pytest.raises(ArtifactInvalid, match=message):
        load_artifact(folder)


def _changed(config: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    here: Any = config
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema_version",), 2, "has schema version 2; this kvalign reads 1"),
        (("codec_id",), "0" * 32, "codec_id"),
        (("codec_id",), None, "codec_id"),
        (("ropes", 0, "pairing"), "interleaved", "codec_id"),
        (("ropes", 0, "pairing"), "spiral", "unknown rotary pairing 'spiral'"),
        (("ropes", 0, "scaling"), 1.0, "codec_id"),
        (("ropes",), [], "ropes and geometry differ"),
        (("geometry",), [], "differ in layers"),
        (("geometry", 0, "kv_heads"), 10**9, "takes other features"),
        (("geometry", 0), "x", "do not fit"),
        (("groups",), [], "not the keys of each stored layer in turn"),
        (("groups", 0, "kind"), "values", "features|lacks|not the keys"),
        (("groups", 0, "kind"), "moods", "features|lacks|not the keys"),
        (("groups", 0, "start"), 4, "takes other features"),
        (("groups", 0, "end_layer"), 2, "takes other features"),
        (("groups", 0, "end_layer"), 10**15, "outside the geometry"),
        (("groups", 0, "first_layer"), -1, "outside the geometry"),
        (("groups", 0, "rank"), 5, "not torch.int8"),
        (("groups", 0, "rank"), "five", "do not fit"),
        (("sink_tokens",), -1, "sink_tokens is -1, outside 0 to"),
        (("recent_tokens",), 1.5, "recent_tokens is '1.5', not a number"),
        (("recommended_step",), 99_999, "recommended_step is 99999, outside -1600 to 1600"),
        (("recommended_step",), None, "not a number"),
        (("token_beta",), float("nan"), "token_beta is nan"),
        (("token_beta",), "much", "not a number"),
        (("operating_points", 0, "kl_mean"), "low", "kl_mean is 'low', not a number"),
        (("operating_points", 0, "step"), True, "not a number"),
        (("operating_points", 0), [], "do not fit"),
        (("base", "weights"), [1], "do not fit"),
        (("base",), None, "do not fit"),
    ],
)
def test_configs_that_were_changed_are_refused_by_name(folder: Path, path: Any, value: Any, message: str) -> None:
    config = _changed(json.loads((folder / CONFIG_NAME).read_text()), *path, value=value)
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises(ArtifactInvalid, match=message):
        load_artifact(folder)


@pytest.mark.parametrize(
    "name", ["base", "geometry", "recomputed_layers", "ropes", "groups", "recommended_step", "token_beta"]
)
def test_what_a_config_lacks_is_named(folder: Path, name: str) -> None:
    config = json.loads((folder / CONFIG_NAME).read_text())
    del config[name]
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises(ArtifactInvalid, match=f"lacks '{name}'"):
        load_artifact(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema_version": "1"}'])
def test_configs_that_are_none_are_refused(folder: Path, text: bytes) -> None:
    (folder / CONFIG_NAME).write_bytes(text)
    with pytest.raises(ArtifactInvalid, match=CONFIG_NAME):
        load_artifact(folder)


def test_a_folder_without_a_codec_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactInvalid, match=f"empty holds no {CONFIG_NAME}"):
        load_artifact(tmp_path / "empty")
    (folder / TENSORS_NAME).unlink()
    with pytest.raises(ArtifactInvalid, match=f"{TENSORS_NAME} cannot be read"):
        load_artifact(folder)


def test_a_grouped_codec_comes_back(source: CacheSource, tmp_path: Path) -> None:
    grouped = fitted(source, layer_group_size=2)
    grouped.save(tmp_path)
    loaded = load_artifact(tmp_path)
    assert [stored.group.name for stored in loaded.groups] == ["keys.0-1", "keys.2-2", "values.0-1", "values.2-2"]
    with pytest.raises(PayloadInvalid, match="made by codec"):
        fitted(source).codec().decode(loaded.codec().encode(source.cache(10)))


# ---- recomputed layers


@pytest.fixture(scope="module")
def recomputed(tiny_model: Callable[[str], Any]) -> Artifact:
    return fitted_to(tiny_model("smollm3"), recomputed=2)


@pytest.fixture
def recomputed_folder(recomputed: Artifact, tmp_path: Path) -> Path:
    recomputed.save(tmp_path)
    return tmp_path


def test_a_codec_that_predicts_comes_back(
    recomputed: Artifact, recomputed_folder: Path, tiny_model: Callable[[str], Any], tmp_path: Path
) -> None:
    loaded = load_artifact(recomputed_folder)
    assert (loaded.codec_id, loaded.shape.recomputed) == (recomputed.codec_id, 2)
    for found, wanted in zip(loaded.groups, recomputed.groups, strict=True):
        assert found.group.first_layer == 2
        assert found.predictor.dtype == torch.int8
        assert found.predictor.shape == (32, found.group.width)
        assert found.predictor.any()
        for name in ("predictor", "feature_scale", "predictor_scale", "intercept"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))
    ids = torch.arange(60)[None]
    with torch.no_grad():
        _, cache = run(tiny_model("smollm3"), ids)
    data = recomputed.codec(tiny_model("smollm3")).encode(cache, input_ids=ids)
    assert loaded.codec(tiny_model("smollm3")).encode(cache, input_ids=ids) == data
    loaded.save(tmp_path / "again")
    for name in (CONFIG_NAME, TENSORS_NAME):
        assert (tmp_path / "again" / name).read_bytes() == (recomputed_folder / name).read_bytes()
    assert loaded.cut(recomputed.recommended_step).groups[0].predictor.shape == loaded.groups[0].predictor.shape


def test_the_id_says_what_is_recomputed_and_what_it_predicts(recomputed: Artifact) -> None:
    """A payload means something else under another of them."""
    first, *others = recomputed.groups
    ids = {
        recomputed.codec_id,
        replace(recomputed, shape=replace(recomputed.shape, recomputed=1)).codec_id,
        *(
            replace(recomputed, groups=(replace(first, **{name: getattr(first, name) + 1}), *others)).codec_id
            for name in ("predictor", "feature_scale", "predictor_scale")
        ),
    }
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("predictor.keys.2-3"), r"lacks 'predictor\.keys\.2-3'"),
        (_drop("feature_scale.keys.2-3"), r"lacks 'feature_scale\.keys\.2-3'"),
        (_drop("predictor_scale.values.2-3"), r"lacks 'predictor_scale\.values\.2-3'"),
        (_set("predictor.keys.2-3", lambda x: x.float()), r"torch\.float32 \(32, 32\), not torch\.int8"),
        (_set("predictor.keys.2-3", lambda x: x[:, 1:]), r"int8 \(32, 31\), not torch\.int8 \(32, 32\)"),
        (_set("predictor.keys.2-3", lambda x: x[1:]), r"float32 \(32,\), not torch\.float32 \(31,\)"),
        (_set("feature_scale.values.2-3", lambda x: x[1:]), r"float32 \(31,\), not torch\.float32 \(32,\)"),
        (_set("predictor_scale.values.2-3", lambda x: x[1:]), r"float32 \(31,\), not torch\.float32 \(32,\)"),
        (_set("feature_scale.keys.2-3", lambda x: x * float("inf")), r"group keys\.2-3 is not finite"),
        (_set("predictor_scale.keys.2-3", lambda x: x * float("nan")), r"group keys\.2-3 is not finite"),
        (_set("predictor.keys.2-3", lambda x: x ^ 1), "codec_id"),
        (_set("feature_scale.keys.2-3", lambda x: 2 * x), "codec_id"),
        (_set("predictor_scale.keys.2-3", lambda x: 2 * x), "codec_id"),
    ],
)
def test_predictions_that_cannot_be_are_named(
    recomputed_folder: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    edit_tensors(recomputed_folder, change)
    with pytest.raises(ArtifactInvalid, match=message):
        load_artifact(recomputed_folder)


def _features(name: str, count: int) -> Callable[[dict[str, Tensor]], None]:
    """One group predicted from so many features, its parts fitting each other."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"predictor.{name}"] = tensors[f"predictor.{name}"][:count].contiguous()
        tensors[f"feature_scale.{name}"] = tensors[f"feature_scale.{name}"][:count].contiguous()

    return change


@pytest.mark.parametrize("count", [0, 31])
def test_groups_that_are_predicted_from_different_features_are_refused(recomputed_folder: Path, count: int) -> None:
    edit_tensors(recomputed_folder, _features("keys.2-3", count))
    with pytest.raises(ArtifactInvalid, match="predicted from different features"):
        load_artifact(recomputed_folder)


def test_groups_that_are_predicted_from_nothing_are_refused(recomputed_folder: Path) -> None:
    for name in ("keys.2-3", "values.2-3"):
        edit_tensors(recomputed_folder, _features(name, 0))
    with pytest.raises(ArtifactInvalid, match="predicted from different features"):
        load_artifact(recomputed_folder)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "not the keys of each stored layer in turn"),
        (0, "not the keys of each stored layer in turn"),
        (3, "not the keys of each stored layer in turn"),
        (4, "recomputed_layers is 4, outside 0 to 3"),
        (-1, "recomputed_layers is -1, outside 0 to 3"),
        (True, "recomputed_layers is 'True', not a number"),
        ("2", "recomputed_layers is '2', not a number"),
        (None, "not a number"),
    ],
)
def test_other_counts_of_recomputed_layers_are_refused(recomputed_folder: Path, value: Any, message: str) -> None:
    edit_config(recomputed_folder, recomputed_layers=value)
    with pytest.raises(ArtifactInvalid, match=message):
        load_artifact(recomputed_folder)


def test_a_codec_without_features_recomputes_nothing(folder: Path) -> None:
    """One layer fewer in the groups would be seen before; here the first layer is in them."""
    edit_config(folder, recomputed_layers=1)
    with pytest.raises(ArtifactInvalid, match="not the keys of each stored layer in turn"):
        load_artifact(folder)


def test_rounding_of_the_predictor_costs_each_feature_alike(source: CacheSource) -> None:
    """A feature a thousand times as wide has a thousandth of the weight, and is rounded as finely."""
    geometry = source.shape.geometry
    generator = torch.Generator().manual_seed(3)
    f = torch.randn(2000, 4, generator=generator) * torch.tensor([1e-3, 1.0, 1.0, 1e3])
    B = torch.randn(4, geometry.width("keys"), generator=generator) / f.std(0)[:, None]
    x = source.features(2000, 0)
    statistics = Statistics(feature_groups(geometry), geometry)
    statistics.update({"keys": x["keys"] + f @ B, "values": x["values"]}, f)
    group = statistics.groups[0]
    basis = fit_basis(statistics, group, head_weights(statistics)[group.name])
    # The ridge is a share of the mean variance, so that the narrow feature predicts nothing: it is put back here.
    basis = replace(basis, predictor=B)
    width = group.width
    stored = StoredGroup.of(basis, torch.zeros(width, dtype=torch.int16).numpy(), torch.arange(width), f.std(0))
    again = stored.transform().synthesis[:4]
    # An int8 of the largest of a column: 1/254 of it at most, for a feature at its deviation.
    assert ((again - B) * f.std(0)[:, None]).abs().max() <= (B * f.std(0)[:, None]).abs().max() / 254 * 1.01


# ---- the base model


def test_the_base_model_is_pinned(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = BaseModel.of(tiny_folder("llama"), repo="org/tiny", commit="c" * 40)
    assert base.model_type == "llama"
    assert list(base.weights) == ["model.safetensors"]
    base.check(tiny_folder("llama"))
    assert BaseModel.from_json(json.loads(json.dumps(base.to_json()))) == base
    with pytest.raises(ArtifactInvalid, match="not the one of org/tiny at cccccccccccc"):
        base.check(tiny_folder("llama_linear"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_folder("llama") / name).read_bytes())
    base.check(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ArtifactInvalid, match=r"model\.safetensors is missing or has another size"):
        base.check(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ArtifactInvalid, match=r"config\.json is not the one"):
        base.check(tmp_path)


def test_a_codec_beside_the_weights_is_not_taken_for_weights(tiny_folder: Callable[[str], Path], folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_folder("llama") / name).read_bytes())
    assert list(BaseModel.of(folder, repo="r", commit="").weights) == ["model.safetensors"]
