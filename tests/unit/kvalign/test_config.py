"""What a conversion's settings accept and refuse, and how the refusal reads."""

import subprocess
import sys
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvalign.config import BUILTIN_DATASET, ConversionConfig, is_local_dataset
from kvalign.errors import ConfigInvalid

LEAST: dict[str, Any] = {"source": {"repo": "org/model"}, "target": {"repo": "me/model-kvalign"}}


def parse(**sections: Any) -> ConversionConfig:
    return ConversionConfig.parse(LEAST | sections)


def test_defaults() -> None:
    config = parse()
    assert config.source.revision == "main"
    assert (config.target.visibility, config.target.layout, config.target.on_existing) == ("private", "full", "fail")
    assert (config.codec.max_kl, config.codec.ratio) == (0.02, None)
    assert (config.codec.sink_tokens, config.codec.recent_tokens, config.codec.resident_bits) == (4, 64, 4.0)
    assert config.calibration.dataset == config.validation.dataset == BUILTIN_DATASET
    assert config.codec.recomputed_layers is config.codec.layer_group_size is None
    assert (config.calibration.tokens, config.calibration.sequence_length, config.calibration.seed) == (32_768, 1024, 0)
    assert config.calibration.metric == "gradient"
    assert (config.validation.windows, config.validation.gate.max_kl, config.validation.gate.min_top1) == (
        8,
        0.05,
        0.85,
    )
    assert config.webhook is None
    assert config.labels == {}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"codec": {"max_lk": 0.1}}, "codec: unknown key 'max_lk'; did you mean 'max_kl'?"),
        ({"calibrations": {}}, "config: unknown key 'calibrations'; did you mean 'calibration'?"),
        ({"validation": {"gate": {"min_top": 1}}}, "validation.gate: unknown key 'min_top'; did you mean 'min_top1'?"),
        ({"target": {"repo": "me/x", "zzz": 1}}, "known keys: repo, visibility, layout, on_existing"),
        ({"codec": {"\n\x1b[31m": 1}}, r"unknown key '\n\x1b[31m'"),
        ({"codec": {"k" * 500: 1}}, "unknown key '" + "k" * 80 + "';"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse(**sections)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("codec", "target"),
    [
        ({}, (0.02, None)),
        ({"max_kl": None, "ratio": None}, (0.02, None)),
        ({"max_kl": 0.5}, (0.5, None)),
        ({"ratio": 12}, (None, 12.0)),
        ({"ratio": 12, "max_kl": None}, (None, 12.0)),
    ],
)
def test_one_target(codec: dict[str, Any], target: tuple[float | None, float | None]) -> None:
    config = parse(codec=codec)
    assert (config.codec.max_kl, config.codec.ratio) == target


def test_a_ratio_beyond_reach_is_refused_with_what_to_ask_for() -> None:
    with pytest.raises(ConfigInvalid, match=r"codec\.ratio: 1000 is beyond the 256 .* ask for less, or .* 'max_kl'"):
        parse(codec={"ratio": 1000})


def test_two_targets_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="codec: give exactly one of 'max_kl'"):
        parse(codec={"max_kl": 0.02, "ratio": 20})


@pytest.mark.parametrize(
    ("path", "inside", "outside"),
    [
        ("codec.max_kl", (1e-9, 10), (0, -1, 10.01)),
        ("codec.ratio", (1.001, 256), (1, 0.5, 257)),
        ("codec.sink_tokens", (0, 64), (-1, 65, 1.5)),
        ("codec.recent_tokens", (0, 4096), (-1, 4097)),
        ("codec.recomputed_layers", (0, 64), (-1, 65, 1.5)),
        ("codec.layer_group_size", (1, 1024), (0, 1025)),
        ("codec.resident_bits", (2, 3.5, 8), (1.9, 8.1)),
        ("calibration.tokens", (1024, 4_194_304), (1023, 4_194_305)),
        ("calibration.sequence_length", (64, 32_768), (63, 32_769)),
        ("calibration.seed", (0, 2**32 - 1), (-1, 2**32)),
        ("validation.windows", (1, 256), (0, 257)),
        ("validation.gate.max_kl", (1e-9, 10), (0, 11)),
        ("validation.gate.min_top1", (0, 1), (-0.1, 1.1)),
    ],
)
def test_bounds(path: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    def with_value(value: float) -> ConversionConfig:
        *sections, key = path.split(".")
        data: Any = {key: value}
        for section in reversed(sections):
            data = {section: data}
        return parse(**data)

    for value in inside:
        found: Any = with_value(value)
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value
    for value in (*outside, float("nan"), float("inf"), "x", None if "codec" not in path else []):
        with pytest.raises(ConfigInvalid, match=path):
            with_value(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", ["gradient", "forward", "none"])
def test_metrics_that_are_known(metric: str) -> None:
    assert parse(calibration={"metric": metric}).calibration.metric == metric


@pytest.mark.parametrize("metric", ["", "fisher", None, 0, True])
def test_other_metrics_are_refused(metric: Any) -> None:
    with pytest.raises(ConfigInvalid, match=r"calibration\.metric: Input should be 'gradient', 'forward' or 'none'"):
        parse(calibration={"metric": metric})


@pytest.mark.parametrize("repo", ["model", "org/model", "o_r.g-1/m.o-d_3", "a" * 90 + "/" + "b"])
def test_repo_names_that_the_hub_takes(repo: str) -> None:
    assert parse(source={"repo": repo}).source.repo == repo


@pytest.mark.parametrize(
    "repo",
    [
        *("", "/", "a/", "/b", "a/b/c", "a b/c", "a/../b", "a..b", "a--b/c", "a/b.git", "a/b-", "a/b.", "a/b\n"),
        *("https://x/y", "a\\b", "a/" + "b" * 97, "-a/b", ".a/b", "a/-b", "a/.b", "é/b"),
    ],
)
def test_repo_names_that_the_hub_refuses(repo: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"source\.repo: .* is not a Hub repo name"):
        parse(source={"repo": repo})


@given(st.text(alphabet="aZ0-_./ ", min_size=1, max_size=12))
@example("a/b")
def test_no_repo_name_passes_here_that_the_client_refuses(repo: str) -> None:
    try:
        parse(source={"repo": repo})
    except ConfigInvalid:
        return
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        pytest.fail(f"{repo!r} passed: {error}")


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/3", "a" * 40])
def test_revisions(revision: str) -> None:
    assert parse(source={"repo": "a/b", "revision": revision}).source.revision == revision


@pytest.mark.parametrize("revision", ["", "/main", "a/../b", "a b", "x" * 129, "main\n", "é"])
def test_revisions_refused(revision: str) -> None:
    with pytest.raises(ConfigInvalid, match="is not a branch, tag or commit"):
        parse(source={"repo": "a/b", "revision": revision})


def test_the_source_is_never_overwritten() -> None:
    with pytest.raises(ConfigInvalid, match=r"target\.repo equals source\.repo"):
        parse(source={"repo": "Me/Model"}, target={"repo": "me/model"})


@pytest.mark.parametrize("data", [None, [], "x", 3, {}, {"source": None, "target": 4}])
def test_other_shapes_are_refused(data: Any) -> None:
    with pytest.raises(ConfigInvalid):
        ConversionConfig.parse(data)


def test_every_fault_is_named_up_to_ten() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse(codec={"max_kl": -1, "sink_tokens": 99}, labels={str(i): 5 for i in range(30)})
    assert "codec.max_kl: " in caught.value.message
    assert "codec.sink_tokens: " in caught.value.message
    assert caught.value.message.count("; ") == 9
    assert caught.value.remedy


def test_labels_are_bounded() -> None:
    assert parse(labels={"k" * 64: "v" * 200}).labels
    for labels in ({"k" * 65: ""}, {"k": "v" * 201}, {str(i): "" for i in range(33)}):
        with pytest.raises(ConfigInvalid, match="labels"):
            parse(labels=labels)


def test_settings_are_frozen() -> None:
    config = parse()
    with pytest.raises(ValidationError, match="frozen"):
        config.codec.max_kl = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("codec", [{}, {"ratio": 9.5, "recent_tokens": 0}])
def test_a_dump_parses_to_the_same(codec: dict[str, Any]) -> None:
    config = parse(codec=codec, labels={"a": "b"}, webhook={"url": "https://example.org/hook"})
    assert ConversionConfig.parse(config.model_dump(mode="json")) == config


def test_a_webhook_s_secret_is_in_no_dump() -> None:
    secret = "whsec_" + "A" * 32
    config = parse(webhook={"url": "https://example.org/hook", "secret": secret})
    assert config.webhook is not None
    assert config.webhook.secret is not None
    assert config.webhook.secret.get_secret_value() == secret
    assert secret not in config.model_dump_json() + repr(config) + str(config.model_dump())


@pytest.mark.parametrize("secret", ["A" * 32, "whsec_", "whsec_" + "A" * 31, "whsec_" + "A" * 88, "whsec_" + "é" * 32])
def test_a_webhook_s_secret_has_24_to_64_bytes_and_is_not_repeated_in_errors(secret: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"webhook\.secret") as refusal:
        parse(webhook={"url": "https://example.org/", "secret": secret})
    assert secret.removeprefix("whsec_") not in refusal.value.message or secret == "whsec_"


@pytest.mark.parametrize(
    "url",
    [
        *("", "example.org", "ftp://example.org/", "https://", "https:///x", "https://me:secret@example.org/"),
        *("https://example.org:0/", "https://example.org:99999/", "https://example.org/#a", "https://exämple.org/"),
        *("https://example.org/a b", "https://example.org/\r\nX: y", "https://[::1/", "javascript:alert(1)"),
    ],
)
def test_a_webhook_s_url_is_that_of_a_web_server(url: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"webhook\.url"):
        parse(webhook={"url": url})


@pytest.mark.parametrize("events", [[], ["job.exploded"], ["succeeded"], "job.failed"])
def test_a_webhook_s_events_are_states_that_jobs_enter(events: object) -> None:
    with pytest.raises(ConfigInvalid, match=r"webhook\.events"):
        parse(webhook={"url": "https://example.org/", "events": events})


@pytest.mark.parametrize(
    ("dataset", "local"),
    [
        *(("builtin", False), ("org/texts", False), ("org/texts.v1", False)),
        *(("./x", True), ("../a", True), ("/x", True), ("~/x", True)),
        *(("a.jsonl", True), ("a.parquet", True), ("a.txt", True)),
    ],
)
def test_local_datasets(dataset: str, local: bool) -> None:
    assert is_local_dataset(dataset) is local


def test_settings_load_no_torch() -> None:
    code = "import sys, kvalign, kvalign.config; sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
