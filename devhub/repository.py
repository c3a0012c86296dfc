"""One repo in its folder: settings, branches, tags and commits; knows no accounts and no HTTP.

    repo.json           who may see it, since when it exists
    refs.json           {"branches": {name: commit}, "tags": {name: commit}}
    commits/<id>.json   the whole tree of every commit
    lfs/<sha256>        an empty mark: this repo was given that large file, so its commits may name it

A large file is kept once for all repos, but a repo must be given it: else knowing a hash would be enough to
read a private file.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from devhub.disk import locked, read_json, write_json
from devhub.errors import BadRequest, Conflict, RepoNotFound, RevisionNotFound, StaleParent
from devhub.names import RepoId, check_ref_name
from devhub.tree import Change, Entry, Files, apply_changes

Gate = Literal[False, "auto", "manual"]
DEFAULT_BRANCH = "main"

_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True)
class Settings:
    created_at: str
    private: bool = False
    gated: Gate = False
    accepted: tuple[str, ...] = ()  # accounts let through the gate


@dataclass(frozen=True)
class Commit:
    """A commit with its whole tree. `date` is ISO 8601 in UTC; `title` the first line, `message` the rest."""

    oid: str
    parents: tuple[str, ...]
    title: str
    message: str
    author: str
    date: str
    files: Files


@dataclass(frozen=True)
class Refs:
    branches: dict[str, str]
    tags: dict[str, str]


class Repository:
    """One repo. Reading takes no lock; every change holds the repo's, and notices when it was deleted."""

    def __init__(self, repo: RepoId, folder: Path, lock: Path) -> None:
        self.id = repo
        self._folder = folder
        self._lock = lock

    def settings(self) -> Settings:
        """Raises RepoNotFound."""
        try:
            stored = read_json(self._folder / "repo.json")
        except FileNotFoundError:
            raise RepoNotFound(f"Repository {self.id} not found.") from None
        return Settings(**{**stored, "accepted": tuple(stored["accepted"])})

    def change_settings(self, **changes: Any) -> Settings:
        """Replace fields of Settings. Raises RepoNotFound."""
        with locked(self._lock):
            changed = replace(self.settings(), **changes)
            self._write_settings(changed)
        return changed

    def accept(self, account: str) -> None:
        """Let an account through the gate."""
        with locked(self._lock):
            now = self.settings()
            self._write_settings(replace(now, accepted=tuple(sorted({*now.accepted, account}))))

    def _write_settings(self, settings: Settings) -> None:
        write_json(self._folder / "repo.json", asdict(settings))

    def initialise(self, settings: Settings, files: Iterable[Change], *, author: str) -> None:
        """Write the first commit, under the caller's lock. repo.json comes last: it makes the repo."""
        (self._folder / "lfs").mkdir(parents=True, exist_ok=True)
        first = _new_commit((), "initial commit", "", author, apply_changes({}, files))
        self._write_commit(first)
        self._write_refs(Refs({DEFAULT_BRANCH: first.oid}, {}))
        self._write_settings(settings)

    # Revisions

    def refs(self) -> Refs:
        """Raises RepoNotFound."""
        try:
            return Refs(**read_json(self._folder / "refs.json"))
        except FileNotFoundError:
            raise RepoNotFound(f"Repository {self.id} not found.") from None

    def resolve(self, revision: str) -> str:
        """The commit of a branch, tag, full ref, commit id or its first 7 and more digits.

        Raises RevisionNotFound.
        """
        refs = self.refs()
        for name, table in (
            (revision.removeprefix("refs/heads/"), refs.branches),
            (revision.removeprefix("refs/tags/"), refs.tags),
        ):
            if name in table:
                return table[name]
        if _SHORT_COMMIT.fullmatch(revision):
            found = [path.stem for path in (self._folder / "commits").glob(f"{revision}*.json")]
            if len(found) == 1:
                return found[0]
        raise RevisionNotFound(f"Invalid rev id: {revision[:200]}")

    def at(self, revision: str) -> Commit:
        """Raises RevisionNotFound."""
        return self._read_commit(self.resolve(revision))

    def history(self, revision: str) -> Iterator[Commit]:
        """The commit of a revision and those before it, newest first. Raises RevisionNotFound."""
        commit = self.at(revision)
        yield commit
        while commit.parents:
            commit = self._read_commit(commit.parents[0])
            yield commit

    # Changes

    def commit(
        self,
        changes: Iterable[Change],
        *,
        branch: str,
        title: str,
        message: str = "",
        author: str,
        parent: str | None = None,
    ) -> Commit:
        """Put one commit on a branch.

        parent  the commit (or its first 7 and more digits) the branch must still be at
        Raises RevisionNotFound for a branch that is not there, StaleParent, and what apply_changes raises.
        """
        branch = branch.removeprefix("refs/heads/")
        with locked(self._lock):
            refs = self.refs()
            head = refs.branches.get(branch)
            if head is None:
                raise RevisionNotFound(f"Invalid rev id: {branch[:200]} is no branch, and only those take commits.")
            if parent is not None and not (_SHORT_COMMIT.fullmatch(parent) and head.startswith(parent)):
                raise StaleParent(
                    f"A commit has happened since: {branch} is at {head}, not {parent[:40]}. Refresh first."
                )
            commit = _new_commit((head,), title, message, author, apply_changes(self._read_commit(head).files, changes))
            self._write_commit(commit)
            self._write_refs(Refs({**refs.branches, branch: commit.oid}, refs.tags))
        return commit

    def create_branch(self, name: str, *, start: str) -> None:
        """Raises InvalidName, Conflict, RevisionNotFound."""
        check_ref_name(name)
        with locked(self._lock):
            refs = self.refs()
            if name in refs.branches:
                raise Conflict(f"Reference already exists: branch {name}.")
            self._write_refs(Refs({**refs.branches, name: self.resolve(start)}, refs.tags))

    def delete_branch(self, name: str) -> None:
        """Raises BadRequest for the default branch, RevisionNotFound."""
        if name == DEFAULT_BRANCH:
            raise BadRequest(f"The branch {DEFAULT_BRANCH} cannot be deleted.")
        with locked(self._lock):
            refs = self.refs()
            if name not in refs.branches:
                raise RevisionNotFound(f"No such branch: {name[:200]}.")
            self._write_refs(Refs({k: v for k, v in refs.branches.items() if k != name}, refs.tags))

    def create_tag(self, name: str, *, revision: str) -> None:
        """Raises InvalidName, Conflict, RevisionNotFound."""
        check_ref_name(name)
        with locked(self._lock):
            refs = self.refs()
            if name in refs.tags:
                raise Conflict(f"Tag reference exists already: {name}.")
            self._write_refs(Refs(refs.branches, {**refs.tags, name: self.resolve(revision)}))

    def delete_tag(self, name: str) -> None:
        """Raises RevisionNotFound."""
        with locked(self._lock):
            refs = self.refs()
            if name not in refs.tags:
                raise RevisionNotFound(f"No such tag: {name[:200]}.")
            self._write_refs(Refs(refs.branches, {k: v for k, v in refs.tags.items() if k != name}))

    # Large files

    def admit(self, sha256: str) -> None:
        """Mark that this repo was given a large file. Raises RepoNotFound when it was deleted meanwhile."""
        try:
            (self._folder / "lfs" / sha256).touch()
        except FileNotFoundError:
            raise RepoNotFound(f"Repository {self.id} not found.") from None

    def was_given(self, sha256: str) -> bool:
        return (self._folder / "lfs" / sha256).exists()

    # Disk

    def _read_commit(self, oid: str) -> Commit:
        stored = read_json(self._folder / "commits" / f"{oid}.json")
        files = {path: Entry(**entry) for path, entry in stored.pop("files").items()}
        return Commit(oid=oid, parents=tuple(stored.pop("parents")), files=files, **stored)

    def _write_commit(self, commit: Commit) -> None:
        write_json(self._folder / "commits" / f"{commit.oid}.json", _commit_json(commit))

    def _write_refs(self, refs: Refs) -> None:
        write_json(self._folder / "refs.json", asdict(refs))


def now() -> str:
    """The time as the real Hub writes it: 2026-01-31T12:34:56.789Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _new_commit(parents: tuple[str, ...], title: str, message: str, author: str, files: Files) -> Commit:
    draft = Commit("", parents, title, message, author, now(), files)
    text = json.dumps(_commit_json(draft), sort_keys=True)
    return replace(draft, oid=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _commit_json(commit: Commit) -> dict[str, Any]:
    """A commit without its id, which is the hash of this."""
    return {
        "parents": list(commit.parents),
        "title": commit.title,
        "message": commit.message,
        "author": commit.author,
        "date": commit.date,
        "files": {path: entry.to_json() for path, entry in commit.files.items()},
    }
