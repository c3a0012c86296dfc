"""Which local files become which files of the published repo, and of the report. Must not copy or send any.

full   the source's files byte for byte, save its README.md; then the artifact's, README.md among them
codec  the artifact's files, and the source's licence papers
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvalign.errors import KvalignError

REPORT_FILE_BYTES = 20_000_000
REPORT_FILES = 50

_CARD = "README.md"
_PAPERS = re.compile(r"(LICENSE|LICENCE|NOTICE|COPYING|USE_POLICY)[\w\-]*(\.txt|\.md)?", re.ASCII | re.IGNORECASE)
_REPORT = re.compile(r"report\.json|README\.md|figures/[\w.\-]+", re.ASCII)


def files_to_publish(layout: Literal["full", "codec"], source: Path, artifact: Path) -> dict[str, Path]:
    """Name in the repo to local path. Raises KvalignError for anything that is no plain file."""
    base = dict(_plain_files(source))
    base.pop(_CARD, None)
    if layout == "codec":
        base = {name: path for name, path in base.items() if _PAPERS.fullmatch(name)}
    return base | dict(_plain_files(artifact))


def report_files(artifact: Path) -> dict[str, Path]:
    """What is kept of an artifact for its owner to read; whatever of it is there, at most REPORT_FILES."""
    if not artifact.is_dir():
        return {}
    found = {
        name: path
        for name, path in _plain_files(artifact)
        if _REPORT.fullmatch(name) and path.stat().st_size <= REPORT_FILE_BYTES
    }
    return dict(sorted(found.items())[:REPORT_FILES])


def _plain_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """A link could lead out of the folder, to what only this process may read; the child has no use for one."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise KvalignError(f"{name} is not a plain file.", "Retry the job.")
        if path.is_file() and not name.startswith("."):
            yield name, path
