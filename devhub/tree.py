"""What a commit holds: files by path, and the folders that follow from them; touches no disk.

Large files are kept by sha256 and stand in the tree by the git id of their LFS pointer, as on the real Hub.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from devhub.errors import BadRequest, EntryNotFound
from devhub.names import check_path


@dataclass(frozen=True)
class Entry:
    """One file. `oid` is its git blob id; a large one has a `sha256`, and its `oid` is the pointer's."""

    oid: str
    size: int  # bytes of the content, never of the pointer
    sha256: str | None = None

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid

    def to_json(self) -> dict[str, Any]:
        small: dict[str, Any] = {"oid": self.oid, "size": self.size}
        return small if self.sha256 is None else {**small, "sha256": self.sha256}


Files = Mapping[str, Entry]


@dataclass(frozen=True)
class Put:
    path: str
    entry: Entry


@dataclass(frozen=True)
class DeleteFile:
    path: str


@dataclass(frozen=True)
class DeleteFolder:
    path: str


Change = Put | DeleteFile | DeleteFolder


def apply_changes(files: Files, changes: Iterable[Change]) -> dict[str, Entry]:
    """The tree after `changes`, made in order.

    Raises EntryNotFound when what to delete is not there, BadRequest when a path is both file and folder.
    """
    result = dict(files)
    for change in changes:
        match change:
            case Put(path, entry):
                result[check_path(path)] = entry
            case DeleteFile(path):
                if result.pop(path, None) is None:
                    raise EntryNotFound(f"A file with this name doesn't exist: {path}")
            case DeleteFolder(path):
                prefix = path.rstrip("/") + "/"
                doomed = [name for name in result if name.startswith(prefix)]
                if not doomed:
                    raise EntryNotFound(f"A folder with this name doesn't exist: {path}")
                for name in doomed:
                    del result[name]
    _check_no_file_is_a_folder(result)
    return dict(sorted(result.items()))


def _check_no_file_is_a_folder(files: Files) -> None:
    for folder in _folders(files):
        if folder in files:
            raise BadRequest(f"{folder!r} would be a file and a folder at once.")


def _folders(files: Iterable[str]) -> set[str]:
    """Every folder that holds a file, however deep."""
    return {path[:i] for path in files for i, letter in enumerate(path) if letter == "/"}


def list_folder(files: Files, folder: str, *, recursive: bool) -> list[tuple[str, Entry | None]]:
    """What lies in `folder` ("" is the root), sorted by path; None stands for a folder.

    Raises EntryNotFound when the folder is not there.
    """
    prefix = f"{folder}/" if folder else ""
    inside = {path: entry for path, entry in files.items() if path.startswith(prefix)}
    if folder and not inside:
        raise EntryNotFound(f"{folder} does not exist.")
    listed: dict[str, Entry | None] = dict(inside)
    listed |= {name: None for name in _folders(inside) if name.startswith(prefix)}
    return [(path, entry) for path, entry in sorted(listed.items()) if recursive or "/" not in path[len(prefix) :]]


def changed_paths(old: Files, new: Files) -> set[str]:
    """The files that differ between two trees, and every folder above one."""
    files = {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
    return files | _folders(files)


def is_folder(files: Files, path: str) -> bool:
    return any(name.startswith(f"{path}/") for name in files)


def folder_oid(files: Files, folder: str) -> str:
    """An id that changes when something in the folder does. Not git's own, which nobody recomputes."""
    prefix = f"{folder}/"
    lines = [f"{path} {entry.oid}\n" for path, entry in sorted(files.items()) if path.startswith(prefix)]
    return _git_hash("tree", "".join(lines).encode())


def regular_entry(content: bytes) -> Entry:
    return Entry(_git_hash("blob", content), len(content))


def large_entry(sha256: str, size: int) -> Entry:
    return Entry(_git_hash("blob", lfs_pointer(sha256, size)), size, sha256)


def lfs_pointer(sha256: str, size: int) -> bytes:
    """The text git keeps in place of a large file (git-lfs docs/spec.md)."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def _git_hash(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
