"""Claims measured again: those of an untouched conversion hold, and each that was tampered with is named."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvalign.cli import main
from kvalign.config import ConversionConfig
from kvalign.convert import convert
from kvalign.errors import ArtifactInvalid, DatasetInvalid
from kvalign.text import read_documents
from kvalign.verify import Claim, verify

Folders = Callable[[str], Path]
CONFIG = ConversionConfig.parse(
    {
        "source": {"repo": "ada/llama"},
        "target": {"repo": "ada/llama-kvalign"},
        "codec": {"recent_tokens": 4, "ratio": 8},
        "calibration": {"tokens": 1024, "sequence_length": 128},
        "validation": {"dataset": "held-out.txt", "windows": 2, "gate": {"max_kl": 10, "min_top1": 0}},
    }
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "held-out.txt"
    letters = random.Random(2)
    file.write_text(" ".join("".join(letters.choices("abcdef", k=5)) for _ in range(400)))
    return file


@pytest.fixture(scope="module")
def made(tiny_folder: Folders, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder of layout `codec`; tests must not write to it."""
    folder = tmp_path_factory.mktemp("verify")
    letters = random.Random(3)
    calibration = folder / "calibration.txt"
    calibration.write_text(" ".join("".join(letters.choices("abcdef", k=5)) for _ in range(400)))
    paths = {"calibration_path": calibration, "validation_path": text}
    return convert(tiny_folder("llama"), folder / "out", CONFIG, work_dir=folder / "work", **paths).artifact_dir


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    report = json.loads((folder / "report.json").read_text())
    change(report)
    (folder / "report.json").write_text(json.dumps(report))


def failing(claims: list[Claim]) -> list[str]:
    return [claim.name for claim in claims if not claim.holds]


def run(folder: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", str(folder), *map(str, arguments)])


def test_an_untouched_conversion_holds(made: Path, tiny_folder: Folders, text: Path) -> None:
    claims = verify(made, base=tiny_folder("llama"), text=text)
    assert failing(claims) == []
    names = {claim.name for claim in claims}
    assert {"SHA-256 of model.safetensors", "codec_id", "all text: mean KL", "held-out: ratio"} <= names
    (kl,) = (claim for claim in claims if claim.name == "all text: mean KL")
    assert kl.measured == pytest.approx(kl.claimed, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda report: report["quality"]["overall"].update(kl_mean=1e-4), "all text: mean KL"),
        (lambda report: report["quality"]["domains"]["held-out"].update(ratio=99.0), "held-out: ratio"),
        (lambda report: report["quality"]["overall"].update(top1=0.5), "all text: top-1 agreement"),
        (lambda report: report["summary"].update(artifact_bytes=7), "artifact_bytes"),
        (lambda report: report["codec"].update(codec_id="00" * 16), "codec_id"),
        (
            lambda report: report["sizes"]["cache_ratio_by_tokens"].update({"8192": 77.0}),
            "ratio of a cache of 8,192 tokens",
        ),
        (lambda report: report["summary"].update(ratio=50.0), "ratio in the summary and in the table"),
        (lambda report: report["quality"]["domains"].update(void=report["quality"]["overall"]), "void: is in the text"),
    ],
)
def test_a_number_changed_in_the_report_is_named(
    copy: Path, tiny_folder: Folders, text: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    changed(copy, change)
    assert named in failing(verify(copy, base=tiny_folder("llama"), text=text))


def test_a_card_edited_by_hand_is_named_by_its_line(copy: Path, tiny_folder: Folders, text: Path) -> None:
    card = (copy / "README.md").read_text().splitlines()
    at = next(index for index, line in enumerate(card) if "times smaller" in line)
    card[at] = card[at].replace("times smaller", "times smaller, and faster")
    (copy / "README.md").write_text("\n".join(card) + "\n")
    claims = verify(copy, base=tiny_folder("llama"), text=text)
    assert failing(claims) == ["README.md is the report's card"]
    (claim,) = (claim for claim in claims if not claim.holds)
    assert claim.measured.startswith(f"line {at + 1}: ")


def test_the_command_ends_with_1_when_a_claim_fails(copy: Path, tiny_folder: Folders, text: Path) -> None:
    arguments = ("--base", tiny_folder("llama"), "--text", text)
    good = run(copy, *arguments)
    assert good.exit_code == 0, good.output
    assert "claims hold" in good.stdout
    changed(copy, lambda report: report["summary"].update(artifact_bytes=7))
    bad = run(copy, *arguments, "--json")
    assert bad.exit_code == 1
    line = json.loads(bad.stdout)
    assert not line["holds"]
    assert {row["name"] for row in line["claims"] if not row["holds"]} >= {"artifact_bytes"}
    assert "DOES NOT HOLD" in run(copy, *arguments).stdout


def test_other_text_is_refused(made: Path, tiny_folder: Folders, tmp_path: Path) -> None:
    other = tmp_path / "held-out.txt"
    other.write_text("something else " * 400)
    with pytest.raises(DatasetInvalid, match="fingerprint"):
        verify(made, base=tiny_folder("llama"), text=other)
    with pytest.raises(DatasetInvalid, match="does not come with kvalign") as caught:
        verify(made, base=tiny_folder("llama"))
    assert "--text" in caught.value.remedy


@pytest.mark.parametrize("content", [None, "{", "[]", '{"schema_version": 2}', '{"a": 1}'])
def test_a_missing_or_foreign_report_is_refused(
    copy: Path, tiny_folder: Folders, text: Path, content: str | None
) -> None:
    if content is None:
        (copy / "report.json").unlink()
    else:
        (copy / "report.json").write_text(content)
    with pytest.raises(ArtifactInvalid, match=r"no report\.json that this kvalign reads"):
        verify(copy, base=tiny_folder("llama"), text=text)


def test_what_was_measured_beside_the_gate_is_measured_again(made: Path, tiny_folder: Folders, text: Path) -> None:
    names = [claim.name for claim in verify(made, base=tiny_folder("llama"), text=text)]
    report = json.loads((made / "report.json").read_text())
    assert {"at rest: agreeing greedy tokens", "resident: agreeing greedy tokens"} <= set(names)
    assert {"fp8, E4M3: mean KL", "KIVI-style, 2 bit: ratio"} <= set(names)
    assert {f"recall, {task}: applicable" for task in ("key_value", "needle")} <= set(names)
    for figure in report["figures"]:
        assert f"SHA-256 of figures/{figure['data']}" in names


def test_figures_that_were_changed_or_are_missing_are_named(copy: Path, tiny_folder: Folders, text: Path) -> None:
    (copy / "figures" / "bits.json").write_text("{}")
    (copy / "figures" / "activations.png").unlink()
    assert failing(verify(copy, base=tiny_folder("llama"), text=text)) == [
        "SHA-256 of figures/activations.png",
        "SHA-256 of figures/bits.json",
    ]


def test_a_report_of_another_form_is_refused_by_the_place(copy: Path) -> None:
    changed(copy, lambda report: report["summary"].update(top1="high"))
    with pytest.raises(ArtifactInvalid, match=r"summary\.top1"):
        verify(copy)
    changed(copy, lambda report: report.update(schema_version=1))
    with pytest.raises(ArtifactInvalid, match="its schema version is 1, not 2"):
        verify(copy)


def test_several_reports_are_shown_side_by_side(made: Path, copy: Path) -> None:
    changed(copy, lambda report: report["summary"].update(artifact_bytes=7))
    changed(copy, lambda report: report["validation"].update(fingerprint="0" * 64))
    done = CliRunner().invoke(main, ["compare", str(made), str(copy), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["models"] == [str(made), str(copy)]
    assert found["rows"]["artifact, bytes"][1] == 7
    report = json.loads((made / "report.json").read_text())
    assert found["rows"]["at rest: ratio of coded tokens"] == [report["sizes"]["coded_ratio"]] * 2
    assert found["warnings"] == ["They were judged on different text: KL and recall are not comparable."]
    shown = CliRunner().invoke(main, ["compare", str(made), str(copy)])
    assert "Note: They were judged on different text" in shown.output
    assert "at rest: mean KL, nats" in shown.output
    one = CliRunner().invoke(main, ["compare", str(made), str(made)])
    assert one.exit_code == 2
    assert "two different converted models" in one.output


def test_likeness_of_heads_is_measured_again_where_the_calibration_text_is_known(
    made: Path, copy: Path, tiny_folder: Folders, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = read_documents(made.parent / "calibration.txt")
    monkeypatch.setattr("kvalign.verify.builtin_documents", lambda part: calibration)
    names = [
        f"{kind}: likeness of heads {when} rotation" for kind in ("keys", "values") for when in ("before", "after")
    ]
    claims = {claim.name: claim for claim in verify(made, base=tiny_folder("llama"), text=text)}
    assert all(claims[name].holds for name in names)
    changed(copy, lambda report: report["head_alignment"]["values"].update(after=0.999))
    assert names[3] in failing(verify(copy, base=tiny_folder("llama"), text=text))


def _without_8192(report: dict[str, Any]) -> None:
    del report["sizes"]["cache_ratio_by_tokens"]["8192"]


@pytest.mark.parametrize(
    "change",
    [
        _without_8192,
        lambda report: report["sizes"].update(cache_ratio_by_tokens={"abc": 2.0, "8192": 1.0}),
        lambda report: report["recall"][0].update(task="other"),
        lambda report: report["target"].clear(),
        lambda report: report["head_alignment"].pop("keys"),
        lambda report: report["validation"].update(windows=0),
        lambda report: report["calibration"].pop("seed"),
    ],
)
def test_reports_without_what_is_needed_are_refused_before_anything_is_measured(
    copy: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    changed(copy, change)
    with pytest.raises(ArtifactInvalid, match=r"holds no report\.json that this kvalign reads"):
        verify(copy)
    done = CliRunner().invoke(main, ["compare", str(copy), str(copy.parent / "other")])
    assert done.exit_code == 1
    assert "holds no report.json that this kvalign reads" in done.output


def test_claims_that_cannot_be_measured_or_are_left_out_do_not_hold(
    copy: Path, tiny_folder: Folders, text: Path
) -> None:
    def change(report: dict[str, Any]) -> None:
        report["quality"]["overall"].update(kl_mean=None, kl_low=None, kl_high=None, kl_p99=None)
        report["greedy"]["elsewhere"] = report["greedy"]["at rest"]
        del report["recall"][0]
        # An interval as wide as all numbers does not make a false claim hold.
        report["resident"]["quality"]["overall"].update(kl_mean=0.5, kl_low=0.0, kl_high=100.0)

    changed(copy, change)
    assert {
        "all text: mean KL",
        "all text: KL p99",
        "elsewhere: agreeing greedy tokens",
        "recall, key_value: is in the report",
        "resident, all text: mean KL",
    } <= set(failing(verify(copy, base=tiny_folder("llama"), text=text)))
