"""The command line on local folders: what it prints, and with which status it ends."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvalign.artifact import CONFIG_NAME, TENSORS_NAME
from kvalign.cli import main, name_of_folder
from kvalign.config import ConversionConfig

Folders = Callable[[str], Path]

SETTINGS = {
    "codec": {"recent_tokens": 4, "ratio": 8},
    "calibration": {"tokens": 1024, "sequence_length": 128},
    "validation": {"gate": {"max_kl": 10, "min_top1": 0}},
}


def kvalign(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    letters = random.Random(1)
    for name in ("calibration.txt", "held_out.txt"):
        (folder / name).write_text(" ".join("".join(letters.choices("abcdef", k=5)) for _ in range(400)))
    return folder / "calibration.txt", folder / "held_out.txt"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "settings.json"
    file.write_text(json.dumps(SETTINGS))
    return file


@pytest.fixture(scope="module")
def converted(
    tiny_folder: Folders, texts: tuple[Path, Path], settings: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    """A folder converted from the command line, and what that printed; tests must not write to it."""
    out = tmp_path_factory.mktemp("cli") / "out"
    arguments = ("--config", settings, "--calibration-text", texts[0], "--validation-text", texts[1], "--windows", 2)
    return out, kvalign("convert", tiny_folder("llama"), "--out", out, *arguments)


def test_convert_writes_the_folder_and_says_what_came_of_it(converted: tuple[Path, Result]) -> None:
    out, result = converted
    assert result.exit_code == 0, result.output
    assert f"{out}: ratio of coded tokens " in result.stdout
    assert "top-1 agreement" in result.stdout
    for stage in ("calibrate", "align", "fit", "validate", "report"):
        assert f"{stage}: started" in result.stderr
        assert f"{stage}: done" in result.stderr
    assert {CONFIG_NAME, TENSORS_NAME, "report.json", "README.md", ".work"} <= {path.name for path in out.iterdir()}
    report = json.loads((out / "report.json").read_text())
    assert report["calibration"]["dataset"] == "calibration.txt"
    assert report["source"]["repo"] == "llama"
    assert report["target"]["repo"] == "llama-kvalign"


def test_convert_again_ends_with_one_line_of_json(
    converted: tuple[Path, Result], tiny_folder: Folders, texts: tuple[Path, Path], settings: Path
) -> None:
    out, _ = converted
    arguments = ("--config", settings, "--calibration-text", texts[0], "--validation-text", texts[1], "--windows", 2)
    result = kvalign("convert", tiny_folder("llama"), "--out", out, *arguments, "--json")
    assert result.exit_code == 0
    line = json.loads(result.stdout)
    assert line["out"] == str(out)
    assert line["ratio"] >= 8
    assert set(line["seconds"]) == {"calibrate", "align", "fit", "validate", "report"}


def test_inspect_shows_the_card_or_the_report(converted: tuple[Path, Result]) -> None:
    out, _ = converted
    shown = kvalign("inspect", out)
    assert shown.exit_code == 0
    assert "llama-kvalign" in shown.stdout
    assert "base_model:" not in shown.stdout  # the front matter is for the Hub
    report = kvalign("inspect", out, "--json")
    assert json.loads(report.stdout) == json.loads((out / "report.json").read_text())


def test_generate_goes_on_from_both_caches(converted: tuple[Path, Result], tiny_folder: Folders) -> None:
    out, _ = converted
    arguments = ("--base", tiny_folder("llama"), "--max-new-tokens", 4)
    result = kvalign("generate", out, "--prompt", "abcab fedef " * 8, *arguments, "--json")
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout)
    assert line["prompt_tokens"] == 97
    assert line["cache_bytes"] > 0
    assert line["cache_ratio"] > 2
    assert isinstance(line["generated"], str)
    plain = kvalign("generate", out, *arguments, stdin="abcab fedef " * 8)
    assert plain.exit_code == 0
    assert f"compressed ({line['cache_bytes']:,} bytes, " in plain.stdout
    assert "uncompressed:" in plain.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("generate", "OUT", "--base", "BASE", "--prompt", "abc", "--ratio", 900),
            2,
            "outside what this codec was measured",
        ),
        (
            ("generate", "OUT", "--base", "BASE", "--prompt", "abc", "--ratio", 8, "--max-kl", 1),
            2,
            "More than one of max_kl",
        ),
        (("generate", "OUT", "--base", "BASE", "--prompt", ""), 2, "fewer than two tokens"),
        (("generate", "OUT", "--base", "OTHER", "--prompt", "abc"), 1, "not the one of llama"),
        (("generate", "OUT", "--prompt", "abc", "--max-new-tokens", 0), 2, "not in the range"),
        (("generate", "BASE", "--prompt", "abc"), 1, f"holds no {CONFIG_NAME}"),
        (("inspect", "BASE"), 1, "holds no report.json that this kvalign reads"),
        (("convert", "BASE"), 2, "Missing option '--out'"),
        (("convert", "BASE", "--out", "NEW", "--ratio", 0.5), 2, "codec.ratio: Input should be greater than 1"),
        (("convert", "BASE", "--out", "NEW", "--ratio", 5, "--max-kl", 1), 2, "exactly one of 'max_kl'"),
        (("convert", "BASE", "--out", "NEW", "--calibration-text", "/nowhere"), 2, "does not exist"),
        (("convert", "EMPTY", "--out", "NEW"), 1, "no config.json"),
        (("no-such-command",), 2, "No such command"),
    ],
)
def test_failures_end_with_1_and_wrong_usage_with_2(
    converted: tuple[Path, Result],
    tiny_folder: Folders,
    tmp_path: Path,
    arguments: tuple[object, ...],
    code: int,
    said: str,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {
        "OUT": converted[0],
        "BASE": tiny_folder("llama"),
        "OTHER": tiny_folder("llama_linear"),
        "NEW": tmp_path / "new",
        "EMPTY": tmp_path / "empty",
    }
    result = kvalign(*(places.get(str(argument), argument) for argument in arguments))
    assert said in result.stderr
    assert result.exit_code == code
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_failed_gate_ends_with_1_and_leaves_the_report(
    tiny_folder: Folders, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {**SETTINGS, "validation": {"windows": 1, "gate": {"max_kl": 1e-7}}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    arguments = ("--calibration-text", texts[0], "--validation-text", texts[1], "--config", tmp_path / "settings.json")
    result = kvalign("convert", tiny_folder("llama"), "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 1
    assert "Error (quality_gate): The converted model failed its quality gate" in result.stderr
    shown = kvalign("inspect", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert "Not published: the quality gate failed." in shown.stdout
    assert json.loads((tmp_path / "out" / "report.json").read_text())["gate"]["passed"] is False


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("s.json", "{", "cannot be read"),
        ("s.json", "[1]", "does not hold a table"),
        ("s.toml", "codec = ", "cannot be read"),
        ("s.json", "[" * 100_000, "cannot be read"),
        ("s.json", '{"codec": 5}', "codec"),
        ("s.toml", "[codec]\nmax_lk = 1", "did you mean 'max_kl'?"),
    ],
)
def test_settings_that_cannot_be_used_are_wrong_usage(
    tiny_folder: Folders, tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    result = kvalign(
        "convert", tiny_folder("llama"), "--out", tmp_path / "out", "--config", tmp_path / name, "--ratio", 8
    )
    assert result.exit_code == 2
    assert said in result.stderr


def test_flags_override_a_toml_file(tiny_folder: Folders, tmp_path: Path) -> None:
    """Told by what is refused: the file's ratio is fine, the flag's is not."""
    (tmp_path / "s.toml").write_text('[codec]\nratio = 8\n[source]\nrepo = "org/x"\n')
    result = kvalign(
        "convert", tiny_folder("llama"), "--out", tmp_path / "o", "--config", tmp_path / "s.toml", "--ratio", 1
    )
    assert result.exit_code == 2
    assert "codec.ratio" in result.stderr


def test_what_is_shown_comes_from_the_report_and_steers_no_terminal(
    converted: tuple[Path, Result], tmp_path: Path
) -> None:
    report = json.loads((converted[0] / "report.json").read_text())
    report["target"]["repo"] = "me/[red]x"
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert kvalign("inspect", tmp_path).exit_code == 1, "no repo has such a name"
    report["target"]["repo"] = "me/other"
    report["hardware"]["machine"] = "[red]\u00adx"
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "README.md").write_bytes(b"\xff\x1b]0;mine\x07")
    result = kvalign("inspect", tmp_path)
    assert result.exit_code == 0, result.output
    assert "other" in result.stdout
    assert "[red]?x" in result.stdout
    assert "\x1b" not in result.output
    assert kvalign("inspect", tmp_path, "--json").stdout.isascii()


@pytest.mark.parametrize(
    ("folder", "name"), [("My model (v2)", "My-model-v2"), ("a--b..c.git", "a-b-c"), ("\udcff", "model"), ("-x-", "x")]
)
def test_any_local_folder_has_a_name(folder: str, name: str) -> None:
    found = name_of_folder(Path("/models") / folder)
    assert found == name
    ConversionConfig.parse({"source": {"repo": found}, "target": {"repo": f"{found}-kvalign"}})


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).with_name("kvalign")
    ended = [
        subprocess.run([command, *arguments], capture_output=True, text=True, check=False, timeout=120)
        for arguments in (("--version",), ("convert",))
    ]
    assert [done.returncode for done in ended] == [0, 2]
    assert ended[0].stdout == f"kvalign, version {metadata.version('kvalign')}\n"
    assert "Missing argument 'SOURCE'" in ended[1].stderr


def test_every_command_is_listed() -> None:
    result = kvalign("--help")
    assert result.exit_code == 0
    for command in ("convert", "inspect", "generate", "worker", "serve", "submit"):
        assert f"  {command} " in result.stdout
