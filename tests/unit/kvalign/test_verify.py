"""Claims measured again: those of an untouched conversion hold, and each that was tampered with is named.

The model is run once; many reports are then compared with what was measured.
"""

import copy as copies
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import ValidationError

from kvalign.artifact import Artifact, load_artifact
from kvalign.cli import main
from kvalign.config import ConversionConfig
from kvalign.convert import convert
from kvalign.errors import ArtifactInvalid, DatasetInvalid, SourceNotFound
from kvalign.report import card
from kvalign.report.against_artifact import claims_of_artifact
from kvalign.report.against_files import claims_of_files
from kvalign.report.consistency import claims_within
from kvalign.report.read import read_report
from kvalign.report.schema import Report
from kvalign.text import read_documents
from kvalign.verify import Claim, Measured, measure_again, measured_claims, verify, written_claims

Folders = Callable[[str], Path]
Change = Callable[[dict[str, Any]], None]

# Domains of two windows and of one, which has no interval.
CONFIG = ConversionConfig.parse(
    {
        "source": {"repo": "ada/llama"},
        "target": {"repo": "ada/llama-kvalign"},
        "codec": {"recent_tokens": 4, "ratio": 8, "resident_bits": 2.5},
        "calibration": {"tokens": 1024, "sequence_length": 128},
        "validation": {"dataset": "held-out", "windows": 3, "gate": {"max_kl": 10, "min_top1": 0}},
    }
)


def letters(seed: int) -> str:
    chance = random.Random(seed)
    return " ".join("".join(chance.choices("abcdef", k=5)) for _ in range(400))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "held-out"
    folder.mkdir()
    (folder / "law.txt").write_text(letters(2))
    (folder / "news.txt").write_text(letters(4))
    return folder


@pytest.fixture(scope="module")
def made(tiny_folder: Folders, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder of layout `codec`; tests must not write to it."""
    folder = tmp_path_factory.mktemp("verify")
    calibration = folder / "calibration.txt"
    calibration.write_text(letters(3))
    paths = {"calibration_path": calibration, "validation_path": text}
    return convert(tiny_folder("llama"), folder / "out", CONFIG, work_dir=folder / "work", **paths).artifact_dir


@pytest.fixture(scope="module")
def artifact(made: Path) -> Artifact:
    return load_artifact(made)


@pytest.fixture(scope="module")
def measured(made: Path, artifact: Artifact, tiny_folder: Folders, text: Path) -> Iterator[Measured]:
    """Of the untouched report; the calibration text is taken for one that came with kvalign."""
    with pytest.MonkeyPatch.context() as patch:
        calibration = read_documents(made.parent / "calibration.txt")
        patch.setattr("kvalign.verify.builtin_documents", lambda part: calibration)
        patch.setattr("kvalign.verify.BUILTIN_DATASET", CONFIG.calibration.dataset)
        yield measure_again(artifact, read_report(made), tiny_folder("llama"), read_documents(text))


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def changed(folder: Path, change: Change) -> None:
    report = json.loads((folder / "report.json").read_text())
    change(report)
    (folder / "report.json").write_text(json.dumps(report))


def failing(claims: list[Claim]) -> list[str]:
    return [claim.name for claim in claims if not claim.holds]


def run(command: str, *arguments: object) -> Result:
    return CliRunner().invoke(main, [command, *map(str, arguments)])


# ---- what holds


def test_an_untouched_conversion_holds(made: Path, artifact: Artifact, measured: Measured) -> None:
    report = read_report(made)
    claims = [*written_claims(made, artifact, report), *measured_claims(report, measured)]
    assert failing(claims) == []
    assert [claim.name.partition(",")[0] for claim in claims if claim.skipped] == ["KVTC", "KVTC", "speed"]
    names = {claim.name for claim in claims}
    assert {"codec.codec_id", "all text: mean KL", "law: ratio", "fp8, E4M3: mean KL"} <= names
    assert {"keys: likeness of heads before rotation", "resident, news: top-1 agreement"} <= names
    assert report["quality"]["domains"]["news"]["kl_low"] is None


def test_the_command_measures_holds_and_ends_with_1_when_a_claim_fails(
    copy: Path, tiny_folder: Folders, text: Path
) -> None:
    arguments = (copy, "--base", tiny_folder("llama"), "--text", text)
    good = run("verify", *arguments)
    assert good.exit_code == 0, good.output
    assert "claims hold, 4 are not measured again" in good.stdout
    # All at once: numbers that are none, a name that is markup and another that steers, bytes that are no text.
    changed(copy, _broken)
    (copy / "README.md").write_bytes(b"\xff\xfe")
    bad = run("verify", *arguments)
    assert bad.exit_code == 1
    assert isinstance(bad.exception, SystemExit), bad.exception
    assert "DOES NOT HOLD" in bad.stdout
    assert "[/red]" in bad.stdout
    assert "(it cannot be read as UTF-8 text)" in bad.stdout


def _broken(report: dict[str, Any]) -> None:
    report["quality"]["overall"].update(kl_mean=None, kl_low=None, kl_high=None, kl_p99=None, kl_max=None)
    report["quality"]["domains"]["[/red]"] = report["quality"]["domains"].pop("law")
    report["greedy"]["elsewhere"] = report["greedy"]["at rest"]


# ---- what is forged


def leaves(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of a report, parts of it included."""
    if path:
        yield path, item
    for key, value in item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ():
        yield from leaves(value, (*path, key))


def forgeries(value: Any) -> list[Any]:
    """What a hand might put there instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 3, *([value - 1] if value else [])]
    if isinstance(value, float):
        return [1.5 * value, value / 2] if value else [0.25]
    if isinstance(value, str):
        return [("1" if value[:1] == "0" else "0") + value[1:], ""]
    if isinstance(value, list):
        return [[], value[1:], [*value, *value[:1]]]
    if isinstance(value, dict):
        return [{}, dict(list(value.items())[1:])]
    return [0.25]


def put(report: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    forged = copies.deepcopy(report)
    part: Any = forged
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return forged


# What docs/report-card.md names as compared with nothing, or with a limit only.
NOT_COMPARED = (
    "gate.max_kl",
    "gate.min_top1",
    "source.carried",
    "target.",
    "codec.target.",
    "summary.floor_kl",
    "resident.quality.floor_kl",
    "resident.kernel.relative_error",
    "validation.dataset",
    "hardware.",
    "versions.python",
    "stage_seconds.",
)
KVTC_NUMBERS = ("kl_p99", "top1", "artifact_bytes")


def test_every_value_that_is_forged_alone_is_found_but_those_that_the_docs_name(
    made: Path, artifact: Artifact, measured: Measured
) -> None:
    """The card is taken to be rendered anew by the forger."""
    report = read_report(made)
    passed = {
        ".".join(map(str, path))
        for path, value in leaves(report)
        for forged in forgeries(value)
        if forged != value and not _is_found(put(report, path, forged), made, artifact, measured)
    }
    kvtc = [index for index, found in enumerate(report["baselines"]) if found["name"] == "KVTC"]
    named = (*NOT_COMPARED, *(f"baselines.{index}.{name}" for index in kvtc for name in KVTC_NUMBERS))
    assert sorted(name for name in passed if not name.startswith(named)) == []


def _is_found(report: dict[str, Any], folder: Path, artifact: Artifact, measured: Measured) -> bool:
    try:
        Report.model_validate(report)
    except ValidationError:
        return True
    card.render(report)  # of whatever form reports may have
    for claims in (claims_within(report), claims_of_artifact(artifact, report), measured_claims(report, measured)):
        if any(not claim.holds for claim in claims):
            return True
    files = claims_of_files(folder, artifact, report)
    return any(not claim.holds for claim in files if claim.name != "README.md is the report's card")


def _renamed(report: dict[str, Any]) -> None:
    report["baselines"][1]["setting"] = "5 bit"


def _without_kvtc(report: dict[str, Any]) -> None:
    """With the reason that reports give for it, which this artifact does not bear out."""
    report["baselines"] = [found for found in report["baselines"] if found["name"] != "KVTC"]
    reason = "KVTC at equal bytes: its basis over the whole cache of this model is too wide to fit here"
    report["not_measured"].append(reason)


def _consistent_ratio(report: dict[str, Any]) -> None:
    """Everywhere the same, and infinite claims for good measure."""
    report["summary"]["ratio"] = report["sizes"]["coded_ratio"] = report["quality"]["overall"]["ratio"] = 99.0


def _wide_interval(report: dict[str, Any]) -> None:
    report["quality"]["overall"].update(kl_mean=0.5 + report["quality"]["overall"]["kl_max"], kl_low=0.0, kl_high=1e9)


def _two_windows_as_worst(report: dict[str, Any]) -> None:
    worst = report["quality"]["worst_windows"]
    worst[0] = worst[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_renamed, "baselines: every one"),
        (_without_kvtc, "baselines: every one"),
        (_consistent_ratio, "all text: ratio"),
        (_wide_interval, "all text: mean KL"),
        (_two_windows_as_worst, "worst window 1: mean KL"),
        (lambda report: report.update(figures=[]), "figures: every one"),
        (lambda report: report.update(greedy={}), "at rest: agreeing greedy tokens"),
        (lambda report: report.update(operating_points=[]), "operating_points: the recommended step"),
        (lambda report: report.update(recall=report["recall"][:1]), "recall: every task"),
        (lambda report: report["gate"].update(failures=["none"]), "gate.failures"),
        (lambda report: report["source"].update(repo="other/model"), "source.repo"),
        (lambda report: report["source"].update(commit="0" * 40), "source.commit"),
        (lambda report: report["quality"]["domains"].update(void=report["quality"]["overall"]), "void: is in the text"),
    ],
)
def test_what_was_taken_out_renamed_or_made_up_is_named(
    made: Path, artifact: Artifact, measured: Measured, change: Change, named: str
) -> None:
    report = read_report(made)
    change(report)
    Report.model_validate(report)
    assert named in failing([*written_claims(made, artifact, report), *measured_claims(report, measured)])


def test_a_card_edited_by_hand_is_named_by_its_line(copy: Path, artifact: Artifact) -> None:
    lines = (copy / "README.md").read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if "times smaller" in line)
    lines[at] = lines[at].replace("times smaller", "times smaller, and faster")
    (copy / "README.md").write_text("\n".join(lines) + "\n")
    claims = list(written_claims(copy, artifact, read_report(copy)))
    assert failing(claims) == ["README.md is the report's card"]
    (claim,) = (claim for claim in claims if not claim.holds)
    assert claim.measured.startswith(f"line {at + 1}: ")


def test_figures_that_were_changed_or_are_missing_are_named(copy: Path, artifact: Artifact) -> None:
    (copy / "figures" / "bits.json").write_text("{}")
    (copy / "figures" / "activations.png").unlink()
    assert failing(list(written_claims(copy, artifact, read_report(copy)))) == [
        "SHA-256 of figures/activations.png",
        "SHA-256 of figures/bits.json",
    ]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[[1]]", b"PK\x03\x04", b'{"keys": [1e999], "values": [0]}', b"[" * 99_999]
)
def test_data_of_figures_that_says_nothing_is_a_claim_that_fails(copy: Path, artifact: Artifact, data: bytes) -> None:
    """Its hash being forged too."""
    report = read_report(copy)
    for figure in report["figures"]:
        (copy / "figures" / figure["data"]).write_bytes(data)
        figure["data_sha256"] = hashlib.sha256(data).hexdigest()
    claims = list(claims_of_files(copy, artifact, report))
    for figure in report["figures"]:
        assert any(not claim.holds and f"figures/{figure['data']}" in claim.name for claim in claims), figure["name"]


# ---- what is refused


def _without_8192(report: dict[str, Any]) -> None:
    del report["sizes"]["cache_ratio_by_tokens"]["8192"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_without_8192, "8192"),
        (
            lambda report: report["sizes"].update(cache_ratio_by_tokens={"abc": 2.0, "8192": 1.0}),
            "cache_ratio_by_tokens",
        ),
        (lambda report: report["recall"][0].update(task="other"), "recall.0"),
        (lambda report: report["target"].clear(), "target"),
        (lambda report: report["head_alignment"].pop("keys"), "head_alignment.keys"),
        (lambda report: report["validation"].update(windows=0), "validation.windows"),
        (lambda report: report["calibration"].pop("seed"), "calibration.seed"),
        (lambda report: report["summary"].update(top1="high"), r"summary\.top1"),
        (lambda report: report["summary"].update(ratio="8.0"), r"summary\.ratio"),
        (lambda report: report["summary"].update(ratio=float("inf")), r"summary\.ratio"),
        (lambda report: report["quality"]["overall"].update(kl_p99=float("nan")), "kl_p99"),
        (lambda report: report["greedy"]["at rest"].update(new_tokens=float("inf")), "new_tokens"),
        (lambda report: report["quality"].update(prefix_tokens=0), "prefix_tokens"),
        (lambda report: report["quality"].update(continuation_tokens=0), "continuation_tokens"),
        (lambda report: report["summary"].update(artifact_bytes=10**30), "artifact_bytes"),
        (lambda report: report["figures"][0].update(image="../../README.md"), r"figures\.0\.image"),
        (lambda report: report["figures"][0].update(data="x" * 5000), r"figures\.0\.data"),
        (lambda report: report["baselines"][0].update(name="best of all"), r"baselines\.0\.name"),
        (lambda report: report["hardware"].update(machine="\x1b]0;mine\x07"), r"hardware\.machine"),
        (lambda report: report["hardware"].update(machine="\ud800"), r"hardware\.machine"),
        (lambda report: report["source"]["carried"].update(inference=False), r"source\.carried"),
        (lambda report: report["source"]["carried"].update(license=[{"a": 1}]), r"source\.carried"),
        (lambda report: report["source"].update(repo="x](http://evil)"), r"source\.repo"),
        (lambda report: report.update(schema_version=1), "its schema version is 1, not 2"),
    ],
)
def test_reports_of_another_form_are_refused_by_the_place_and_by_every_command(
    copy: Path, change: Change, where: str
) -> None:
    changed(copy, change)
    with pytest.raises(ArtifactInvalid, match=rf"(?s)holds no report\.json that this kvalign reads.*{where}"):
        verify(copy)
    for arguments in (("verify", copy), ("inspect", copy), ("inspect", copy, "--json"), ("compare", copy, copy.parent)):
        done = run(*arguments)
        assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.exception
        assert "holds no report.json that this kvalign reads" in done.output
        assert "\x1b" not in done.output


@pytest.mark.parametrize(
    "content", [None, b"{", b"[]", b'{"schema_version": 2}', b'{"a": 1}', b"\xff\xfe", b"9" * 9999, b"[" * 99_999]
)
def test_a_missing_or_foreign_report_is_refused(copy: Path, content: bytes | None) -> None:
    if content is None:
        (copy / "report.json").unlink()
    else:
        (copy / "report.json").write_bytes(content)
    with pytest.raises(ArtifactInvalid, match=r"no report\.json that this kvalign reads"):
        verify(copy)
    assert run("inspect", copy).exit_code == run("compare", copy, copy.parent).exit_code == 1


def test_a_key_that_is_there_twice_is_refused(copy: Path) -> None:
    written = (copy / "report.json").read_text()
    (copy / "report.json").write_text(written.replace('"summary":', '"summary": {}, "summary":', 1))
    with pytest.raises(ArtifactInvalid, match="a key twice"):
        verify(copy)


def test_other_text_is_refused(made: Path, tiny_folder: Folders, tmp_path: Path) -> None:
    other = tmp_path / "held-out.txt"
    other.write_text("something else " * 400)
    with pytest.raises(DatasetInvalid, match="fingerprint"):
        verify(made, base=tiny_folder("llama"), text=other)
    with pytest.raises(DatasetInvalid, match="does not come with kvalign") as caught:
        verify(made, base=tiny_folder("llama"))
    assert "--text" in caught.value.remedy


def test_a_base_that_was_a_local_folder_is_asked_for_and_not_looked_for_on_the_hub(made: Path, text: Path) -> None:
    with pytest.raises(SourceNotFound, match="was converted from a folder") as caught:
        verify(made, text=text)
    assert "--base" in caught.value.remedy


# ---- several side by side


def test_several_reports_are_shown_side_by_side(made: Path, copy: Path) -> None:
    changed(copy, lambda report: report["summary"].update(artifact_bytes=7))
    changed(copy, lambda report: report["validation"].update(fingerprint="0" * 64))
    changed(copy, lambda report: report["quality"]["overall"].update(kl_mean=None, kl_low=None, kl_high=None))
    done = run("compare", made, copy, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["models"] == [str(made), str(copy)]
    assert found["rows"]["artifact, bytes"][1] == 7
    assert found["rows"]["at rest: mean KL, nats"][1] is None
    report = read_report(made)
    assert found["rows"]["at rest: ratio of coded tokens"] == [report["sizes"]["coded_ratio"]] * 2
    assert found["warnings"] == ["They were judged on different text: KL and recall are not comparable."]
    shown = run("compare", made, copy)
    assert "Note: They were judged on different text" in shown.output
    assert "at rest: mean KL, nats" in shown.output
    one = run("compare", made, made)
    assert one.exit_code == 2
    assert "two different converted models" in one.output
