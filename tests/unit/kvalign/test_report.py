"""The report, its gate and its card: front matter that the Hub's client takes, hostile text kept from acting."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from hypothesis import given
from hypothesis import strategies as st
from synthetic import findings, greedy_results, made_up_resident, measured, recall_results, resident_result

from kvalign.artifact import Artifact
from kvalign.config import ConversionConfig
from kvalign.evaluate.protocol import FLOOR_LIMIT
from kvalign.evaluate.resident import ResidentResult
from kvalign.evaluate.validation import Validation
from kvalign.printable import printable
from kvalign.report import card
from kvalign.report.build import build_report, gate_failures, to_json
from kvalign.report.figures import Drawn
from kvalign.report.findings import Findings
from kvalign.report.schema import json_schema
from kvalign.text import Document

HOSTILE = (
    "<script>alert(1)</script> [x](javascript:alert(1)) | `code` ![i](http://e/p.png)\n\n# head\n---\n&amp; $x$ *b*"
)


def config(**sections: Any) -> ConversionConfig:
    data = {"source": {"repo": "org/model"}, "target": {"repo": "me/tiny_kv"}}
    return ConversionConfig.parse(data | sections)


def validation(*, floor_kl: float = 1e-9, kl: tuple[float, ...] = (0.01, 0.02), domains: str = "ab") -> Validation:
    trials = tuple(measured(4, value, 12.0, domain).trials[0] for value, domain in zip(kl, domains, strict=True))
    chosen = replace(measured(4, kl[0], 12.0), trials=trials)
    others = [measured(-8, kl[0] / 2, 8.0), measured(10, kl[0] * 2, 16.0)]
    return Validation.of(
        [chosen, *others],
        resident_result(),
        floor_kl=floor_kl,
        prefix_tokens=768,
        continuation_tokens=256,
        recall=recall_results(),
        greedy=greedy_results(),
    )


@pytest.fixture
def report(artifact: Artifact, tmp_path: Path) -> dict[str, Any]:
    return build(artifact, tmp_path)


def split(text: str) -> tuple[str, str]:
    """Front matter and body, parted at lines that are --- and nothing else."""
    _, front, body = re.split(r"^---$\n?", text, maxsplit=2, flags=re.MULTILINE)
    return front, body


def build(
    artifact: Artifact,
    folder: Path,
    found: Validation | None = None,
    found_beside: Findings | None = None,
    **sections: Any,
) -> dict[str, Any]:
    provenance = {
        "calibration": {
            "dataset": "builtin",
            "domains": ["code", "stories"],
            "documents": ["0" * 64],
            "fingerprint": "f" * 64,
            "sequences": 32,
            "sequence_length": 1024,
            "tokens": 32_768,
            "metric": "gradient",
            "seed": 0,
        }
    }
    return build_report(
        config(**sections),
        replace(artifact, provenance=provenance, resident=made_up_resident(artifact.shape.geometry)),
        found or validation(),
        found_beside or findings(),
        [Drawn("bits", "bits.png", "bits.json", "a" * 64, "b" * 64, "Bits of each component.")],
        source_dir=folder,
        held_out=[Document("a", "text"), Document("b", "more text")],
        stage_seconds={"calibrate": 60.0, "report": 12.5},
    )


# ---- the report


def test_the_summary_is_what_was_measured(report: dict[str, Any], artifact: Artifact) -> None:
    summary = report["summary"]
    assert summary["ratio"] == pytest.approx(12, rel=1e-3)
    assert summary["kl_mean"] == pytest.approx(0.015)
    assert summary["kl_p99"] == pytest.approx(0.02, rel=0.01)
    assert summary["top1"] == 1
    assert summary["floor_kl"] == 1e-9
    with_resident = replace(artifact, resident=made_up_resident(artifact.shape.geometry))
    assert summary["artifact_bytes"] == len(with_resident.tensor_bytes)
    assert report["gate"] == {"max_kl": 0.05, "min_top1": 0.85, "passed": True, "failures": []}


def test_a_report_is_plain_json_without_numbers_that_are_none(report: dict[str, Any]) -> None:
    assert json.loads(to_json(report)) == json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_report_keeps_to_the_published_schema(report: dict[str, Any]) -> None:
    published = json.loads((Path(__file__).parents[3] / "docs" / "report.schema.json").read_text())
    assert published == json.loads(json.dumps(json_schema())), "run scripts/write_report_schema.py"
    jsonschema.Draft202012Validator.check_schema(published)
    validator = jsonschema.Draft202012Validator(published)
    validator.validate(json.loads(to_json(report)))
    for spoilt in ({"schema_version": 1}, {"extra": 1}, {"summary": {**report["summary"], "top1": 1.5}}):
        assert not validator.is_valid({**report, **spoilt})


def test_numbers_that_are_none_are_null_and_the_card_says_so(artifact: Artifact, tmp_path: Path) -> None:
    nowhere = float("nan")
    report = build(artifact, tmp_path, validation(kl=(nowhere, 0.01)), findings(nowhere))
    plain = json.loads(to_json(report))
    assert plain["baselines"][0]["kl_mean"] is None
    assert plain["quality"]["domains"]["a"]["kl_mean"] is None
    published = json.loads((Path(__file__).parents[3] / "docs" / "report.schema.json").read_text())
    jsonschema.Draft202012Validator(published).validate(plain)
    assert "not a number" in card.render(report)


def test_the_card_tells_what_the_report_stage_found(report: dict[str, Any]) -> None:
    text = card.render(report)
    assert "| KIVI-style | 4 bit | 3.20 | 0.0300" in text
    assert "| **kvalign** | recommended step | 12.00 |" in text
    assert "one of 8 key-value pairs, asked for after 512 tokens were coded" in text
    assert "uncompressed 95 %, at rest 90 %, resident 95 %" in text
    assert "Recall of a number of three digits hidden in other text: not applicable" in text
    assert "recall, task needle: the uncompressed model does not hold it" in text
    assert "KVTC at equal bytes" in text  # was not measured, and is named
    assert "38.0 of 64 tokens on average, and to the end in 50 % of 2 windows" in text
    assert "(10.0 times" in text
    assert "![bits](figures/bits.png)" in text
    assert "[Data](figures/bits.json)" in text
    assert "calibrate 60 s, report 12 s" in text
    for found in report["head_alignment"].values():
        assert card.escape(found["says"]) in text


def test_sizes_name_their_numerators(report: dict[str, Any]) -> None:
    sizes = report["sizes"]
    assert "bf16" in sizes["ratio_means"]
    assert "bf16" in sizes["cache_ratio_means"]
    by_tokens = list(sizes["cache_ratio_by_tokens"].values())
    assert by_tokens == sorted(by_tokens)
    assert by_tokens[-1] < sizes["coded_ratio"]
    spread = sizes["cache_ratio_with_artifact_spread_over_tokens"]
    assert spread["10000"] < spread["1000000"] < by_tokens[-1]


def test_the_worst_windows_are_listed_first(report: dict[str, Any]) -> None:
    assert [window["domain"] for window in report["quality"]["worst_windows"]] == ["b", "a"]


# ---- the gate


@pytest.mark.parametrize(
    ("found", "gate", "message"),
    [
        (validation(), {"max_kl": 0.019}, "mean KL on 'b' is 0.02 nats, above the gate's 0.019"),
        (validation(), {"min_top1": 1.0}, None),
        (validation(kl=(2.0, 0.02)), {"max_kl": 10, "min_top1": 1.0}, None),
        (validation(floor_kl=1e-5), {}, "the run is void: the uncompressed model differs from itself by KL 1e-05"),
        (validation(floor_kl=FLOOR_LIMIT), {}, "the run is void"),
        (validation(floor_kl=float("nan")), {}, "the run is void"),
        (validation(kl=(float("nan"), 0.01)), {}, "mean KL on 'a' is nan"),
    ],
)
def test_the_gate_judges_each_domain_and_the_floor(
    found: Validation, gate: dict[str, float], message: str | None
) -> None:
    failures = gate_failures(config(validation={"gate": gate}), found)
    assert len(failures) == (message is not None)
    if message:
        assert message in failures[0]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (resident_result(), None),
        (resident_result(0.06), "mean KL of the resident cache on 'a' is 0.06 nats, above the gate's 0.05"),
        (resident_result(float("nan")), "mean KL of the resident cache on 'a' is nan"),
        (resident_result(floor_kl=1e-5), "the resident run is void: its floor is KL 1e-05"),
        (resident_result(kernel_error=2e-4), "the fused kernel is off by 0.0002 (limit 0.0001)"),
        (resident_result(kernel_error=None), None),
    ],
)
def test_the_gate_judges_the_resident_cache(found: ResidentResult, message: str | None) -> None:
    failures = gate_failures(config(), replace(validation(), resident=found))
    assert bool(failures) == (message is not None)
    if message:
        assert message in failures[0]


def test_the_report_and_the_card_tell_of_the_resident_cache(report: dict[str, Any]) -> None:
    found = report["resident"]
    assert found["kernel"] == {
        "calls": {"numba": 960, "tiled": 210},
        "dense_layers": 0,
        "relative_error": 1e-6,
        "limit": 1e-4,
    }
    assert found["quality"]["protocol"] == "C"
    by_tokens = list(found["cache_ratio_by_tokens"].values())
    assert by_tokens == sorted(by_tokens)
    assert by_tokens[-1] < found["coded_ratio"]
    text = card.render(report)
    assert "**3.90 times smaller**" in text
    assert "numba 960, tiled 210" in text
    none = {**report, "resident": {**found, "coded_layers": 0}}
    assert "No layer of this model has full attention" in card.render(none)


def test_the_gate_judges_top1(artifact: Artifact, tmp_path: Path) -> None:
    found = validation()
    low = replace(found.domains["a"], summary=replace(found.domains["a"].summary, top1=0.84))
    found = replace(found, domains={**found.domains, "a": low})
    assert gate_failures(config(), found) == ["top-1 agreement on 'a' is 0.8400, below the gate's 0.85"]
    report = build(artifact, tmp_path, found)
    assert not report["gate"]["passed"]
    assert "Not published: the quality gate failed" in card.render(report)
    assert r"top-1 agreement on 'a' is 0.8400" in card.render(report)


# ---- the card


def test_the_hubs_client_takes_the_front_matter(report: dict[str, Any]) -> None:
    found = ModelCard(card.render(report), ignore_metadata_errors=False)
    data = found.data
    assert isinstance(data, ModelCardData)
    assert data.base_model == "org/model"
    assert data.library_name == "transformers"
    assert data.model_name == "tiny_kv"
    results = {(result.dataset_name, result.metric_type): result.metric_value for result in data.eval_results or []}
    assert results["kvalign held-out text: a", "kl_nats_mean"] == pytest.approx(0.01)
    assert results["kvalign held-out text: b", "coded_ratio"] == pytest.approx(12, rel=1e-3)
    assert len(results) == 6
    again = ModelCardData(**{**data.to_dict(), "ignore_metadata_errors": False})
    assert again.to_dict()["model-index"] == data.to_dict()["model-index"]


@pytest.mark.parametrize(("layout", "relation"), [("full", "quantized"), ("codec", "adapter")])
def test_layouts_say_how_they_relate_to_their_base(
    artifact: Artifact, tmp_path: Path, layout: str, relation: str
) -> None:
    report = build(artifact, tmp_path, target={"repo": "me/tiny_kv", "layout": layout})
    assert card.front_matter(report)["base_model_relation"] == relation


def test_licence_and_gate_text_reach_the_front_matter_and_override_nothing(artifact: Artifact, tmp_path: Path) -> None:
    front = {
        "license": "other",
        "license_name": "x: y\n- z",
        "extra_gated_prompt": HOSTILE,
        "base_model": "evil/model",
        "tags": ["evil"],
    }
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n")
    found = yaml.safe_load(split(card.render(build(artifact, tmp_path)))[0])
    assert found["license_name"] == "x: y\n- z"
    assert found["extra_gated_prompt"] == HOSTILE
    assert found["base_model"] == "org/model"
    assert found["tags"] == ["kvalign", "kv-cache-compression"]


def test_the_card_names_the_numbers_of_the_report(report: dict[str, Any]) -> None:
    text = card.render(report)
    assert "**12.0 times smaller**" in text
    assert "**0.0150 nats**" in text
    assert "| 4 | 12.00 |" in text or "| 4 (recommended) | 12.00 |" in text
    for line in report["not_measured"]:
        assert card.escape(line) in text
    assert 'kvalign.load("me/tiny_kv")' in text


def test_tables_are_whole(report: dict[str, Any]) -> None:
    lines = card.render(report).splitlines()
    for index, line in enumerate(lines):
        if re.fullmatch(r"\|( --- \|)+", line):
            columns = line.count("---")
            row = index - 1
            while row < len(lines) and lines[row].startswith("|"):
                assert len(re.findall(r"(?<!\\)\|", lines[row])) == columns + 1, lines[row]
                row += 1


def test_hostile_names_do_not_act_in_the_card(artifact: Artifact, tmp_path: Path) -> None:
    report = build(artifact, tmp_path, validation(domains="ab"), validation={"dataset": HOSTILE[:90]})
    report["quality"]["domains"] = {HOSTILE: report["quality"]["domains"]["a"]}
    report["calibration"]["domains"] = [HOSTILE]
    report["calibration"]["dataset"] = HOSTILE
    report["validation"] = {**report["validation"], "domains": [HOSTILE], "dataset": HOSTILE}
    report["gate"] = {**report["gate"], "passed": False, "failures": [HOSTILE]}
    report["target"] = {**report["target"], "repo": "me/a_b*c"}
    for part in ("hardware", "versions"):
        report[part] = {name: HOSTILE if isinstance(value, str) else value for name, value in report[part].items()}
    report["stage_seconds"] = {HOSTILE: 1.0}
    report["not_measured"] = [HOSTILE]
    report["figures"] = [{**figure, "caption": HOSTILE} for figure in report["figures"]]
    report["baselines"] = [{**found, "name": HOSTILE, "setting": HOSTILE} for found in report["baselines"]]
    report["resident"]["kernel"]["calls"] = {HOSTILE: 1}
    report["greedy"] = {HOSTILE: report["greedy"]["at rest"]}
    report["recall"][0]["scores"] = {HOSTILE: 1.0}
    for found in report["head_alignment"].values():
        found["says"] = HOSTILE
    text = card.render(report)
    front, body = split(text)
    assert yaml.safe_load(front)["model-index"][0]["name"] == "a_b*c"
    assert "\n# head" not in body
    assert "\n---\n" not in body
    for live in ("<script>", "[x](javascript", "![i](", "`code`", "*b*"):
        assert not re.search(r"(?<!\\)" + re.escape(live), body), live
    ModelCard(text, ignore_metadata_errors=False)


@pytest.mark.parametrize("link", ["https://evil.example/x", "www.evil.example", "mail@evil.example"])
def test_what_would_become_a_link_by_itself_is_escaped(link: str) -> None:
    assert link not in card.escape(f"see {link}")


@given(st.text())
def test_escaped_text_is_one_line_and_reads_as_it_was(text: str) -> None:
    escaped = card.escape(text)
    assert "\n" not in escaped
    assert "\r" not in escaped
    plain = re.sub(r"\\([\\`*_{}\[\]()#+!|<>~$&@:.])", r"\1", escaped)
    assert plain == printable(" ".join(text.split()))
    assert not re.search(r"(?<!\\)(\\\\)*[`*_\[\]<>|#~$&]", escaped)


def test_the_sample_card_is_one() -> None:
    """docs/sample-card is what a real conversion left: of the published form, its card rendered from its report."""
    folder = Path(__file__).parents[3] / "docs" / "sample-card"
    found = json.loads((folder / "report.json").read_text())
    jsonschema.Draft202012Validator(json_schema()).validate(found)
    assert (folder / "README.md").read_text() == card.render(found)
    for figure in found["figures"]:
        for kind in ("image", "data"):
            data = (folder / "figures" / figure[kind]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == figure[f"{kind}_sha256"]


def test_small_numbers_keep_digits_and_one_window_has_no_interval(report: dict[str, Any]) -> None:
    overall, first = report["quality"]["overall"], report["quality"]["domains"]["a"]
    overall.update(kl_mean=0.0000321, kl_low=0.0000298, kl_high=0.0000354)
    report["summary"].update(kl_mean=0.0000321)
    text = card.render(report)
    assert "mean KL of **0.000032 nats**" in text
    assert "0.000032 (0.000030 to 0.000035)" in text
    assert first["windows"] == 1
    assert "| a | 12.00 | 0.0100 (no interval) |" in text
    assert "0.0000" not in text.replace("0.000032", "").replace("0.000030", "").replace("0.000035", "")


def test_one_head_is_one(report: dict[str, Any]) -> None:
    report["head_alignment"]["keys"].update(heads=1, before=1.0, after=1.0)
    text = card.render(report)
    assert "- Keys, 1 head of 6 channels: there is no second head to compare it with." in text
    assert "1 heads" not in text


def test_a_local_folder_is_not_linked_to_the_hub(report: dict[str, Any]) -> None:
    report["source"].update(commit="", repo="My-model")
    text = card.render(report)
    assert "huggingface.co" not in text
    assert "The model of a local folder, My-model" in text
    front = yaml.safe_load(split(text)[0])
    assert "base_model" not in front
    assert "base_model_relation" not in front
    ModelCard(text, ignore_metadata_errors=False)


@pytest.mark.parametrize(
    ("aim", "said"),
    [
        ({"max_kl": None, "ratio": 1.001}, "Asked for was a ratio of 1.001; the finest step that is searched already"),
        ({"max_kl": None, "ratio": 11.5}, None),
        ({"max_kl": 0.5, "ratio": None}, "Asked for was a mean KL of at most 0.5; the coarsest step that is searched"),
        ({"max_kl": 0.016, "ratio": None}, None),
    ],
)
def test_an_aim_that_lies_beyond_the_steps_is_told(
    report: dict[str, Any], aim: dict[str, float | None], said: str | None
) -> None:
    report["codec"]["target"] = aim
    text = card.render(report)
    assert ("Asked for was" in text) == (said is not None)
    assert said is None or said in text


def test_windows_that_were_added_for_a_domain_are_told(report: dict[str, Any]) -> None:
    report["validation"].update(windows_asked=1, windows=2)
    assert "2 windows where 1 was asked for: every domain takes one at least" in card.render(report)


def test_tokens_that_see_nothing_coded_are_told(report: dict[str, Any]) -> None:
    quality = report["resident"]["quality"]
    quality["scored_from"] = 256
    assert "from position 256 on are scored: the first that see a page of codes" in card.render(report)
    quality["scored_from"] = 128
    assert "from position 128 on are scored, of which some or all see no page" in card.render(report)
