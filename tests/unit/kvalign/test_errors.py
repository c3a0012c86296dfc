"""The error tree: its drawing, its codes, and the way back from a code."""

import re

import pytest

from kvalign import errors
from kvalign.errors import KvalignError, SourceInvalid, from_code
from worker.jobs import ErrorCode

BRANCH = re.compile(r"^(?P<indent>[| ]*)[|`]- (?P<name>\w+)(?: +(?P<code>[a-z_]+))?(?:  +\S.*)?$")


def own_errors() -> dict[str, type[KvalignError]]:
    return {
        name: item for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, KvalignError)
    }


def drawn() -> dict[str, tuple[str, str | None]]:
    """Name: (parent, code) of each line of the docstring's drawing."""
    found: dict[str, tuple[str, str | None]] = {}
    parents = ["KvalignError"]
    _, drawing = (errors.__doc__ or "").split("\nKvalignError\n")
    for line in drawing.rstrip().splitlines():
        match = BRANCH.match(line)
        assert match, f"not a line of the drawing: {line!r}"
        depth = len(match["indent"]) // 3
        del parents[depth + 1 :]
        found[match["name"]] = (parents[-1], match["code"])
        parents.append(match["name"])
    return found


def test_the_drawing_is_the_tree() -> None:
    real = {name: error.__bases__[0].__name__ for name, error in own_errors().items() if error is not KvalignError}
    assert {name: parent for name, (parent, _) in drawn().items()} == real


def test_the_drawing_gives_every_code() -> None:
    codes = {name: error.code if "code" in vars(error) else None for name, error in own_errors().items()}
    del codes["KvalignError"]
    assert {name: code for name, (_, code) in drawn().items()} == codes


def test_every_code_is_one_of_the_api() -> None:
    api = {code.value for code in ErrorCode}
    assert {error.code for error in own_errors().values()} <= api


@pytest.mark.parametrize("code", sorted({error.code for error in own_errors().values()}))
def test_an_error_comes_back_from_its_code(code: str) -> None:
    error = from_code(code, "fact", "remedy")
    assert (error.code, error.message, error.remedy) == (code, "fact", "remedy")


def test_damaged_sources_win_over_other_owners_of_their_code() -> None:
    assert type(from_code("source_invalid", "x")) is SourceInvalid


def test_unknown_codes_become_the_root() -> None:
    assert type(from_code("from_the_future", "x")) is KvalignError


def test_text_is_message_then_remedy() -> None:
    assert str(KvalignError("The fact.", "The remedy.")) == "The fact. The remedy."
    assert str(KvalignError("The fact.")) == "The fact."
