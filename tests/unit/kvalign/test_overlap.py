"""Text that was calibrated on is known again, however it was changed; other text is let through."""

import random

import pytest

from kvalign.errors import DatasetInvalid
from kvalign.overlap import LARGEST_SHARE, refuse_overlap
from kvalign.text import Document, builtin_documents

WORDS = [f"word{number}" for number in range(120)]
LONG = " ".join(WORDS)


def thinned(text: str, every: int) -> str:
    """One word in so many is another."""
    chance = random.Random(1)
    return " ".join(f"other{chance.random()}" if chance.randrange(every) == 0 else word for word in text.split())


@pytest.mark.parametrize(
    ("validation", "found"),
    [
        ("Another text.", False),
        ("one  SHORT\ntext", True),  # spaces and cases hide nothing
        ("One short text!", True),
        (LONG, True),
        (LONG[100:400], True),  # a part of a document
        (" ".join(WORDS[:60]), True),  # half of one
        (LONG[100:140], False),  # a phrase
        (LONG[100:400] + " and more", True),
        (LONG + " And a sentence that is new.", True),
        (LONG.replace("word50", "word50,"), True),
        (thinned(LONG, 20), True),
        (" ".join(f"{word} {word}" for word in WORDS), False),
        ("..., !", False),
    ],
)
def test_text_that_was_calibrated_on_is_refused_by_name(validation: str, found: bool) -> None:
    calibration = [Document("prose", "One short text"), Document("verse", f"Before. {LONG} After."), Document("x", "?")]
    held_out = [Document("law", "Something else."), Document("law", validation)]
    if not found:
        refuse_overlap(calibration, held_out)
        return
    with pytest.raises(
        DatasetInvalid,
        match=r"A document of 'law' is in the calibration text too, in '(prose|verse)'.*\d+ % of its runs of 8 words",
    ):
        refuse_overlap(calibration, held_out)


def test_parts_of_several_documents_together_are_found() -> None:
    calibration = [Document("a", " ".join(WORDS[start : start + 30])) for start in range(0, 120, 30)]
    with pytest.raises(DatasetInvalid):
        refuse_overlap(calibration, [Document("b", LONG)])


def test_a_text_without_spaces_is_compared_by_its_characters() -> None:
    chance = random.Random(3)
    text = "".join(chr(chance.randrange(0x4E00, 0x9FA5)) for _ in range(400))
    with pytest.raises(DatasetInvalid):
        refuse_overlap([Document("a", text)], [Document("b", text[:150] + "，" + text[150:300])])


def test_one_text_in_two_domains_is_refused() -> None:
    with pytest.raises(DatasetInvalid, match="A document of 'news' to validate on is in 'law' too"):
        refuse_overlap([], [Document("law", LONG), Document("news", LONG.upper())])
    refuse_overlap([], [Document("law", LONG), Document("law", LONG)])


def test_the_builtin_parts_are_far_from_the_limit_and_changed_copies_beyond_it() -> None:
    """What the limit was chosen by (docs/log.md)."""
    calibration, validation = builtin_documents("calibration"), builtin_documents("validation")
    refuse_overlap(calibration, validation)
    assert LARGEST_SHARE == 0.1
    for document in validation:
        for copy in (thinned(document.text, 10), document.text[: len(document.text) // 2]):
            with pytest.raises(DatasetInvalid):
                refuse_overlap([*calibration, document], [Document("copy", copy)])
