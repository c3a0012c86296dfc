"""Documents, sequences and windows, with a real tokenizer of one token a byte."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvalign.errors import DatasetInvalid
from kvalign.text import (
    Document,
    builtin_documents,
    evaluation_windows,
    fingerprint,
    read_documents,
    token_sequences,
)

PLAIN = tiny_models.tokenizer(adds_bos=False)
OPENING = tiny_models.tokenizer(adds_bos=True)


def documents(domains: str = "ab", each: int = 5, length: int = 300) -> list[Document]:
    """Random letters, so that no stretch of 16 occurs twice."""
    letters = random.Random(7)
    return [
        Document(domain, "".join(letters.choices("abcdefghijklmnopqrstuvwxyz ", k=length)))
        for domain in domains
        for _ in range(each)
    ]


def text_of(tokens: Tensor) -> str:
    return str(PLAIN.decode(tokens))


def test_sequences_have_the_length_and_number_asked_for() -> None:
    found = token_sequences(documents(), OPENING, tokens=1000, length=100, seed=0)
    assert [sequence.shape for sequence in found] == [(100,)] * 10
    assert {sequence.dtype for sequence in found} == {torch.int64}


def test_every_sequence_opens_as_the_tokenizer_opens_a_text() -> None:
    assert all(
        sequence[0] == tiny_models.BOS
        for sequence in token_sequences(documents(), OPENING, tokens=800, length=80, seed=0)
    )
    assert not any(
        (sequence == tiny_models.BOS).any()
        for sequence in token_sequences(documents(), PLAIN, tokens=800, length=80, seed=0)
    )


def test_sequences_are_the_documents_joined_by_the_end_of_text_token_and_cut() -> None:
    members = documents("a")
    found = token_sequences(members, OPENING, tokens=1500, length=51, seed=3)
    joined = "".join(text_of(sequence[1:]) for sequence in found)
    pieces = joined.split("</s>")
    assert len(pieces) == 5  # 29 sequences of 50 leave only the last document unfinished
    assert {document.text for document in members} >= set(pieces[:-1])
    assert any(document.text.startswith(pieces[-1]) for document in members)
    assert len(set(pieces)) == 5


def test_domains_take_turns() -> None:
    members = documents("abc")
    found = token_sequences(members, PLAIN, tokens=640, length=64, seed=0)

    def domain(sequence: Tensor) -> str:
        longest = max(text_of(sequence).split("</s>"), key=len)
        return next(document.domain for document in members if longest in document.text)

    assert "".join(map(domain, found)) == "abcabcabca"


def test_a_seed_fixes_the_order_and_another_changes_it() -> None:
    def drawn(seed: int) -> str:
        return text_of(torch.cat(token_sequences(documents(), PLAIN, tokens=2000, length=100, seed=seed)))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_order_of_the_documents_does_not_matter() -> None:
    def drawn(members: list[Document]) -> str:
        members = sorted(members, key=lambda document: document.domain)
        return text_of(torch.cat(token_sequences(members, PLAIN, tokens=2000, length=100, seed=1)))

    assert drawn(documents()) == drawn(documents()[::-1])


def test_too_little_text_is_told_in_numbers_and_the_remedy_works() -> None:
    members = documents("a", each=2, length=100)
    with pytest.raises(DatasetInvalid, match=r"holds 3 sequences of 64 tokens; 20 were asked for") as caught:
        token_sequences(members, PLAIN, tokens=1280, length=64, seed=0)
    assert caught.value.remedy == "Set calibration.tokens to at most 192, or name a larger dataset."
    assert len(token_sequences(members, PLAIN, tokens=192, length=64, seed=0)) == 3


def test_no_text_at_all_gets_no_advice_that_cannot_work() -> None:
    members = documents("a", each=1, length=10)
    with pytest.raises(DatasetInvalid) as sequences:
        token_sequences(members, PLAIN, tokens=1280, length=64, seed=0)
    with pytest.raises(DatasetInvalid) as windows:
        evaluation_windows(members, PLAIN, windows=6, prefix=75, continuation=25)
    assert sequences.value.remedy == windows.value.remedy == "Name a larger dataset."


def test_windows_lie_within_one_document_and_overlap_nowhere() -> None:
    members = documents(each=3, length=400)
    found = evaluation_windows(members, OPENING, windows=19, prefix=76, continuation=25)
    assert [window.domain for window in found] == ["a"] * 10 + ["b"] * 9
    spans = []
    for window in found:
        assert (window.prefix.shape, window.continuation.shape) == ((76,), (25,))
        assert window.prefix[0] == tiny_models.BOS
        text = text_of(torch.cat([window.prefix[1:], window.continuation]))
        (home,) = [document for document in members if text in document.text]
        spans += [(home.text, home.text.index(text) + offset) for offset in range(100)]
    assert len(set(spans)) == 19 * 100


def test_windows_take_turns_between_documents() -> None:
    members = documents("a", each=3, length=400)
    found = evaluation_windows(members, PLAIN, windows=4, prefix=75, continuation=25)
    homes = [
        next(i for i, document in enumerate(members) if text_of(window.prefix) in document.text) for window in found
    ]
    assert homes == [0, 1, 2, 0]


def test_short_documents_are_joined_for_windows() -> None:
    members = documents("a", each=30, length=40)
    found = evaluation_windows(members, PLAIN, windows=5, prefix=75, continuation=25)
    joined = "".join(document.text for document in members)
    for number, window in enumerate(found):
        assert text_of(torch.cat([window.prefix, window.continuation])) == joined[100 * number : 100 * (number + 1)]


def test_too_few_windows_are_told_in_numbers_and_the_remedy_works() -> None:
    members = [*documents("a"), *documents("b", each=1, length=250)]
    with pytest.raises(DatasetInvalid, match=r"'b' holds 2 windows of 100 tokens; 3 were asked for") as caught:
        evaluation_windows(members, PLAIN, windows=6, prefix=75, continuation=25)
    assert "at most 4," in caught.value.remedy
    assert len(evaluation_windows(members, PLAIN, windows=4, prefix=75, continuation=25)) == 4


@pytest.mark.parametrize(("windows", "shares"), [(1, "abc"), (3, "abc"), (4, "aabc"), (5, "aabbc"), (7, "aaabbcc")])
def test_windows_are_spread_over_the_domains_and_none_is_left_out(windows: int, shares: str) -> None:
    found = evaluation_windows(documents("abc"), PLAIN, windows=windows, prefix=75, continuation=25)
    assert "".join(window.domain for window in found) == shares


def test_no_text_at_all_is_refused() -> None:
    with pytest.raises(DatasetInvalid):
        token_sequences([], PLAIN, tokens=1000, length=100, seed=0)
    with pytest.raises(DatasetInvalid):
        evaluation_windows([], PLAIN, windows=1, prefix=75, continuation=25)


# ---- reading


def test_txt_is_cut_at_lines_of_equal_signs(tmp_path: Path) -> None:
    file = tmp_path / "tales.txt"
    file.write_text("one\ntwo\n=====\n\nthree ===== not here\n\n=====\n \n=====\nfour\n", encoding="utf-8")
    assert read_documents(file) == [
        Document("tales", "one\ntwo"),
        Document("tales", "three ===== not here"),
        Document("tales", "four"),
    ]


@pytest.mark.parametrize("column", ["text", "content", "document"])
def test_jsonl_and_parquet_text_columns(tmp_path: Path, column: str) -> None:
    rows = [{"id": 1, column: "first ü"}, {"id": 2, column: ""}, {"id": 3, column: "second\nline"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    (tmp_path / "ignored.csv").write_text("x")
    expected = ["first ü", "second\nline"]
    assert [document.text for document in read_documents(tmp_path / "a.jsonl")] == expected
    assert [document.text for document in read_documents(tmp_path / "b.parquet")] == expected
    assert {document.domain for document in read_documents(tmp_path)} == {"a", "b"}


def test_folders_are_read_whole_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("z", "a", "m"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    assert [document.domain for document in read_documents(tmp_path)] == ["a", "m", "z"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bad.txt", b"\xff\xfe\x00"),
        ("bad.jsonl", b'{"text": "good"}\n{"text": '),
        ("list.jsonl", b"[1, 2]\n"),
        ("null.jsonl", b'{"text": null}\n'),
        ("columns.jsonl", b'{"body": "x"}\n'),
        ("deep.jsonl", b"[" * 100_000 + b"\n"),
        ("bytes.jsonl", b'{"text": "\xff"}\n'),
        ("bad.parquet", b"PAR1 nothing PAR1"),
        ("empty.parquet", b""),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DatasetInvalid, match=name) as caught:
        read_documents(file)
    assert len(caught.value.message) < 400


def test_parquet_without_a_text_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DatasetInvalid, match="no column named text, content, document"):
        read_documents(tmp_path)


@pytest.mark.parametrize("name", ["missing.txt", ".", "table.csv"])
def test_places_without_text_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(DatasetInvalid, match=r"no \.txt, \.jsonl or \.parquet file"):
        read_documents(tmp_path / name)


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), min_size=1), max_size=5))
def test_jsonl_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    file = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    assert [document.text for document in read_documents(file)] == [text for text in texts if text.strip()]


# ---- the text that comes with kvalign


def test_builtin_parts_are_large_enough_for_the_defaults_and_share_nothing() -> None:
    parts: dict[str, Any] = {part: builtin_documents(part) for part in ("calibration", "validation")}
    # Default settings ask for 32,768 tokens and for 8 windows of 1024; a token is 3 bytes or more of prose.
    assert sum(len(document.text) for document in parts["calibration"]) > 3.5 * 32_768
    assert len({document.domain for document in parts["validation"]}) >= 2
    lines = {
        part: {line for document in found for line in document.text.splitlines() if len(line) > 40}
        for part, found in parts.items()
    }
    assert lines["calibration"].isdisjoint(lines["validation"])
    assert len({document.sha256 for document in parts["calibration"]}) == len(parts["calibration"])


def test_fingerprints_ignore_order_and_see_every_change() -> None:
    members = documents()
    assert fingerprint(members) == fingerprint(members[::-1])
    assert fingerprint(members) != fingerprint(members[1:])
    assert fingerprint(members) != fingerprint([*members[1:], Document("a", members[0].text + " ")])
