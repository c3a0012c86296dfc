"""A folder of files as the newest commit of a repo; knows no HTTP."""

from pathlib import Path

from devhub.errors import BadRequest, RepoNotFound
from devhub.names import RepoId, check_path
from devhub.repository import DEFAULT_BRANCH, Commit, Repository
from devhub.storage import SYSTEM_AUTHOR, HubStorage
from devhub.tree import Change, DeleteFile, Put
from devhub.upload_mode import DEFAULT_ATTRIBUTES

_SKIPPED_FOLDERS = {".git", ".cache", "__pycache__"}
_ATTRIBUTES = ".gitattributes"


def import_folder(storage: HubStorage, repo: RepoId, folder: Path) -> Commit:
    """Make the repo's main branch hold exactly the folder's files; makes the repo when it is not there.

    Large files are linked where the file system allows, so they must not be edited in place afterwards. A
    folder that is there already makes no new commit, and its large files are not read again.
    Raises BadRequest for a folder that is missing or empty.
    """
    paths = _files(folder)
    if not paths:
        raise BadRequest(f"{folder} is no folder with files in it.")
    target = _repo(storage, repo)
    head = target.at(DEFAULT_BRANCH)
    attributes = paths[_ATTRIBUTES].read_text(errors="replace") if _ATTRIBUTES in paths else DEFAULT_ATTRIBUTES
    wanted = {path: storage.store(target, path, source, attributes) for path, source in paths.items()}
    if _ATTRIBUTES not in wanted:
        wanted[_ATTRIBUTES] = storage.store(target, _ATTRIBUTES, DEFAULT_ATTRIBUTES.encode(), DEFAULT_ATTRIBUTES)
    changes: list[Change] = [DeleteFile(path) for path in head.files if path not in wanted]
    changes += [Put(path, entry) for path, entry in wanted.items() if head.files.get(path) != entry]
    if not changes:
        return head
    return target.commit(changes, branch=DEFAULT_BRANCH, title="Import files", author=SYSTEM_AUTHOR, parent=head.oid)


def _repo(storage: HubStorage, repo: RepoId) -> Repository:
    try:
        return storage.find(repo)
    except RepoNotFound:
        return storage.create_repo(repo.name, kind=repo.kind)


def _files(folder: Path) -> dict[str, Path]:
    """Path in the repo -> the file itself. Links are followed: a Hub cache is made of them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not _SKIPPED_FOLDERS & set(inside.parts[:-1]):
            found[check_path(inside.as_posix())] = path.resolve()
    return found
