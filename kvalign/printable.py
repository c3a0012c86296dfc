"""Text from elsewhere, without what steers a terminal or hides in a line. Knows no file and no screen."""

import unicodedata

# Controls, marks of direction and joining, surrogates, private and unassigned characters, separators of lines.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def printable(text: str, keep: str = "") -> str:
    r"""The text with a question mark for each character that is not to be seen, but for those of `keep`.

    >>> printable("red: \x1b[31m, two\nlines")
    'red: ?[31m, two?lines'
    >>> printable("two\nlines", keep="\n")
    'two\nlines'
    """
    return "".join("?" if unicodedata.category(c) in _UNSEEN and c not in keep else c for c in text)
