"""What is read from a stranger's README: licence, language and gate text, whatever else stands there."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kvalign.report.schema import Carried
from kvalign.report.source_card import carried_fields


def carried(folder: Path, front: str, *, body: str = "\n# Model\n") -> dict[str, Any]:
    (folder / "README.md").write_text(f"---\n{front}\n---\n{body}", encoding="utf-8")
    return carried_fields(folder)


def test_licence_language_and_gate_text_are_carried(tmp_path: Path) -> None:
    front = """
license: other
license_name: tiny-licence-1.0
license_link: https://example.org/licence
language: [en, de]
extra_gated_prompt: "Read these *terms* first."
extra_gated_fields:
  Company: text
  I agree: checkbox
  Country:
    type: country
extra_gated_button_content: Agree
extra_gated_heading: Terms
extra_gated_eu_disallowed: true
tags: [x]
base_model: evil/elsewhere
pipeline_tag: text-generation
"""
    assert carried(tmp_path, front) == {
        "license": "other",
        "license_name": "tiny-licence-1.0",
        "license_link": "https://example.org/licence",
        "language": ["en", "de"],
        "extra_gated_prompt": "Read these *terms* first.",
        "extra_gated_fields": {"Company": "text", "I agree": "checkbox"},
        "extra_gated_button_content": "Agree",
        "extra_gated_heading": "Terms",
        "extra_gated_eu_disallowed": True,
    }


def test_one_language_is_a_list_of_one(tmp_path: Path) -> None:
    assert carried(tmp_path, "language: en") == {"language": ["en"]}


@pytest.mark.parametrize(
    "front",
    [
        "license: [mit, apache-2.0]",
        "license: {name: mit}",
        "license: 3",
        "license:",
        "license: 2020-01-01",
        "language: {a: b}",
        "language: 5",
        "extra_gated_prompt: [a]",
        "extra_gated_prompt: 5",
        "- license: mit",
        "just text",
        "",
        "null",
        "license: mit\nlicense: [",
        "a: &x [1]\nlicense: mit\nb: *x",
        "\tlicense: mit",
        "license: !!python/object/apply:os.system ['true']",
        "x: !!python/name:os.system\nlicense: mit",
    ],
)
def test_other_types_and_unsafe_or_broken_yaml_carry_nothing(tmp_path: Path, front: str) -> None:
    assert carried(tmp_path, front) == {}


@pytest.mark.parametrize(
    "value",
    [
        *('!!int ""', '!!float ""', '!!bool "maybe"', '!!timestamp "soon"', "!!binary ü", "!!omap [1]", "!!set [1]"),
        *("!!int x", "2001-99-99", "1e400", "!!null x", "!!merge x", "<<: 5", "? [a]\n: b", "=: =", "0o99:"),
    ],
)
def test_values_that_a_parser_trips_over_do_no_harm(tmp_path: Path, value: str) -> None:
    found = carried(tmp_path, f"license: mit\nother: {value}")
    assert found in ({}, {"license": "mit"})


def test_a_bomb_of_aliases_is_not_unfolded(tmp_path: Path) -> None:
    layers = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30))
    assert carried(tmp_path, f"l0: &l0 [lol]\n{layers}\nlicense: mit") == {}
    merged = "a: &a {x: 1}\nb: {<<: *a}\nlicense: mit"
    assert carried(tmp_path, merged) == {}


def test_deep_nesting_is_bounded(tmp_path: Path) -> None:
    assert carried(tmp_path, "x: " + "[" * 20_000 + "]" * 20_000 + "\nlicense: mit") == {}


def test_long_text_is_cut(tmp_path: Path) -> None:
    found = carried(
        tmp_path,
        f"license_name: {'n' * 5000}\nextra_gated_prompt: {'p' * 5000}\nlanguage: [{', '.join(['x' * 90] * 99)}]\n"
        f"extra_gated_{'k' * 90}: x",
    )
    assert len(found["license_name"]) == len(found["extra_gated_prompt"]) == 2000
    assert len(found["language"]) == 50
    assert {len(item) for item in found["language"]} == {40}
    assert len(found) == 3


def test_front_matter_larger_than_any_card_carries_nothing(tmp_path: Path) -> None:
    assert carried(tmp_path, "license: mit\n" + "# padding\n" * 10_000) == {}


@pytest.mark.parametrize(
    "text",
    ["", "# No front matter", "---\nlicense: mit\n", "--- \nlicense: mit\n---\n", "\n---\nlicense: mit\n---\n", "---"],
)
def test_readmes_without_front_matter_carry_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert carried_fields(tmp_path) == {}


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"---\r\nlicense: mit\r\n---\r\ntext")
    assert carried_fields(tmp_path) == {"license": "mit"}


def test_no_readme_carries_nothing(tmp_path: Path) -> None:
    assert carried_fields(tmp_path) == {}
    (tmp_path / "README.md").mkdir()
    assert carried_fields(tmp_path) == {}


@given(st.binary(max_size=200))
@example(b"license: !!int ''")
@example(b"\xff\xfe")
def test_no_bytes_at_all_do_harm(tmp_path_factory: pytest.TempPathFactory, front: bytes) -> None:
    folder = tmp_path_factory.mktemp("card")
    (folder / "README.md").write_bytes(b"---\n" + front + b"\n---\n")
    _check_plain(carried_fields(folder))


@given(
    st.dictionaries(
        st.sampled_from(["license", "language", "license_name", "extra_gated_prompt", "extra_gated_fields", "tags"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.dates() | st.floats(),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
            ),
            max_leaves=8,
        ),
    )
)
def test_whatever_yaml_says_only_plain_text_comes_out(
    tmp_path_factory: pytest.TempPathFactory, front: dict[str, Any]
) -> None:
    _check_plain(carried(tmp_path_factory.mktemp("card"), yaml.safe_dump(front)))


def _check_plain(found: dict[str, Any]) -> None:
    for name, value in found.items():
        assert name in {"license", "license_name", "license_link", "language"} or name.startswith("extra_gated_")
        parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
        assert all(isinstance(part, str | bool) for part in parts)
        assert not any(isinstance(part, datetime.date) for part in parts)
    yaml.safe_dump(found)


def test_characters_that_steer_or_cannot_be_written_are_not_carried(tmp_path: Path) -> None:
    texts = ('license_name: "a\\e[31mb\\ud800"', 'extra_gated_prompt: "one\\ntwo\\u202e"', 'language: ["\\x07"]')
    found = carried(tmp_path, "\n".join((*texts, "extra_gated_x y: z")))
    assert found == {"license_name": "a?[31mb?", "extra_gated_prompt": "one\ntwo?", "language": ["?"]}
    TypeAdapter(Carried).validate_python(found, strict=True)
