"""What repos, paths, branches and revisions may be called; touches no disk.

Every name a request brings becomes part of a file path, so it passes here first.
"""

import re
from dataclasses import dataclass
from typing import Literal

from devhub.errors import BadRequest, InvalidName

Kind = Literal["models", "datasets"]
KINDS: tuple[Kind, ...] = ("models", "datasets")

# Words that follow a repo in a URL. A repo called `me/tree` could not be told from the tree of `me`.
# fmt: off
RESERVED_NAMES = frozenset((
    "auth-check", "blob", "branch", "commit", "commits", "git", "paths-info", "preupload", "raw", "refs",
    "resolve", "revision", "settings", "tag", "tree", "user-access-request",
    "xet-read-token", "xet-write-token",
))
# fmt: on
RESERVED_OWNERS = frozenset(("api", "datasets", "devhub", "models", "spaces"))

MAX_REPO_CHARS = 96
MAX_PATH_CHARS = 1024
MAX_SEGMENT_BYTES = 255  # what common file systems allow; clients write these paths to their disks

SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_REF = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=-]*(?:/[A-Za-z0-9_][A-Za-z0-9._+@=-]*)*")
_FORBIDDEN_IN_PATH = re.compile(r"[\x00-\x1f\x7f\\]")


@dataclass(frozen=True)
class RepoId:
    """A repo's kind and its name, `owner/name` or, for the oldest models, `name` alone."""

    kind: Kind
    name: str

    @property
    def owner(self) -> str | None:
        return self.name.split("/")[0] if "/" in self.name else None

    @property
    def url_path(self) -> str:
        """`/me/model` or `/datasets/me/data`: the page of the repo, and the stem of its file URLs."""
        return f"/{self.name}" if self.kind == "models" else f"/{self.kind}/{self.name}"

    def __str__(self) -> str:
        return self.name if self.kind == "models" else f"{self.kind}/{self.name}"


def repo_id(kind: str, name: str) -> RepoId:
    """Check a repo's kind and name. Raises InvalidName."""
    if kind not in KINDS:
        raise InvalidName(f"devhub keeps {' and '.join(KINDS)}, not {kind!r}.")
    parts = name.split("/")
    if len(parts) > 2 or len(name) > MAX_REPO_CHARS or not all(map(_is_part, parts)):
        raise InvalidName(
            f"Invalid repo name {name!r}: `name` or `owner/name` of letters, digits, '-', '_' and '.', "
            f"no '--' or '..', not ending in '-', '.' or '.git', at most {MAX_REPO_CHARS} characters."
        )
    if parts[0] in RESERVED_OWNERS or parts[-1] in RESERVED_NAMES:
        raise InvalidName(f"Invalid repo name {name!r}: it contains a word that means something else in a URL.")
    return RepoId(kind, name)


def parse_repo_spec(spec: str) -> RepoId:
    """`owner/name` of a model, or `datasets/owner/name`. Raises InvalidName."""
    kind, _, rest = spec.partition("/")
    return repo_id(kind, rest) if kind in KINDS else repo_id("models", spec)


def _is_part(part: str) -> bool:
    return bool(_PART.fullmatch(part)) and "--" not in part and ".." not in part and not part.endswith(".git")


def check_path(path: str) -> str:
    """A file's path inside a repo, as it is. Raises BadRequest for one that could leave the repo's folder."""
    segments = path.split("/")
    if (
        not path
        or len(path) > MAX_PATH_CHARS
        or _FORBIDDEN_IN_PATH.search(path)
        or any(segment in ("", ".", "..", ".git") for segment in segments)
        or any(len(segment.encode("utf-8", "surrogatepass")) > MAX_SEGMENT_BYTES for segment in segments)
        or not path.isprintable()
    ):
        raise BadRequest(f"Invalid path in repo: {path[:200]!r}.")
    return path


def check_ref_name(name: str) -> str:
    """A new branch's or tag's name. Raises InvalidName."""
    if name.startswith("refs/") or ".." in name or name.endswith((".lock", ".", "/")) or not _REF.fullmatch(name):
        raise InvalidName(f"Invalid reference for a branch or tag: {name[:200]!r}.")
    return name
