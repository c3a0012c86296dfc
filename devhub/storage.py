"""All repos, users and contents of one devhub, in one folder; the only file that joins them. Knows no HTTP.

    users.json                        accounts.py
    blobs/                            blobs.py
    uploads/                          uploads.py
    repos/<kind>/<owner or ->/<name>  repository.py
    moved/<kind>/<owner or ->/<name>  where a renamed repo went

Several processes may use one folder at a time; everything is read anew at each question.
"""

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from devhub.accounts import Account, Accounts
from devhub.blobs import BlobStore
from devhub.disk import locked, read_json, write_json
from devhub.errors import Conflict, RepoNotFound
from devhub.names import KINDS, RepoId, repo_id
from devhub.repository import DEFAULT_BRANCH, Commit, Gate, Repository, Settings, now
from devhub.tree import DeleteFile, Entry, Put
from devhub.upload_mode import DEFAULT_ATTRIBUTES, upload_mode
from devhub.uploads import Uploads

SYSTEM_AUTHOR = "system"
_NO_OWNER = "-"


class HubStorage:
    """A devhub's folder. Made when it is not there."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self.accounts = Accounts(self.root / "users.json")
        self.blobs = BlobStore(self.root / "blobs")
        self.uploads = Uploads(self.root / "uploads", self.blobs)

    def add_user(self, name: str, token: str, *, role: str = "write", orgs: Iterable[str] = ()) -> Account:
        """Raises BadRequest; see Accounts.add."""
        return self.accounts.add(name, token, role=role, orgs=tuple(orgs))

    # Repos

    def create_repo(
        self,
        name: str,
        *,
        kind: str = "models",
        private: bool = False,
        gated: Gate = False,
        author: str = SYSTEM_AUTHOR,
    ) -> Repository:
        """A new repo with one commit that holds .gitattributes. Raises InvalidName, Conflict."""
        repo = self._handle(repo_id(kind, name))
        with locked(self._lock(repo.id)):
            if self._folder(repo.id).exists():
                raise Conflict(f"You already created this {kind.removesuffix('s')} repo: {repo.id}", repo.id.url_path)
            attributes = Put(".gitattributes", self.blobs.put_small(DEFAULT_ATTRIBUTES.encode()))
            repo.initialise(Settings(created_at=now(), private=private, gated=gated), [attributes], author=author)
        return repo

    def repo(self, name: str, *, kind: str = "models") -> Repository:
        """Raises InvalidName, RepoNotFound."""
        return self.find(repo_id(kind, name))

    def find(self, repo: RepoId) -> Repository:
        """Raises RepoNotFound."""
        if not (self._folder(repo) / "repo.json").exists():
            raise RepoNotFound(f"Repository {repo} not found.")
        return self._handle(repo)

    def repos(self) -> Iterator[RepoId]:
        """Every repo there is, in the order of their names."""
        for kind in KINDS:
            for marker in sorted((self.root / "repos" / kind).glob("*/*/repo.json")):
                owner, name = marker.parts[-3:-1]
                yield RepoId(kind, name if owner == _NO_OWNER else f"{owner}/{name}")

    def delete_repo(self, repo: RepoId) -> None:
        """Raises RepoNotFound. Contents stay in the blob store: another repo may use them."""
        with locked(self._lock(repo)):
            self.find(repo)
            doomed = self.root / "deleted" / secrets.token_hex(16)
            doomed.parent.mkdir(exist_ok=True)
            self._folder(repo).rename(doomed)
        shutil.rmtree(doomed)

    def move_repo(self, source: RepoId, target: RepoId) -> None:
        """Rename a repo and remember where it went. Raises RepoNotFound, Conflict."""
        with ExitStack() as locks:
            for lock in sorted({self._lock(source), self._lock(target)}):
                locks.enter_context(locked(lock))
            self.find(source)
            if self._folder(target).exists():
                raise Conflict(f"A repo named {target} already exists.", target.url_path)
            self._folder(target).parent.mkdir(parents=True, exist_ok=True)
            self._folder(source).rename(self._folder(target))
            write_json(self._moved_note(source), target.name)

    def moved_to(self, repo: RepoId) -> RepoId | None:
        """Where a repo is now, however often it was renamed; None when it never was there or is gone."""
        seen = {repo}
        while (next_one := self._next_after(repo)) is not None and next_one not in seen:
            if (self._folder(next_one) / "repo.json").exists():
                return next_one
            seen.add(next_one)
            repo = next_one
        return None

    # Shortcuts for code that keeps no client at hand

    def commit(
        self,
        name: str,
        files: Mapping[str, bytes | Path],
        *,
        kind: str = "models",
        title: str = "Add files",
        branch: str = DEFAULT_BRANCH,
        author: str = SYSTEM_AUTHOR,
        delete: Iterable[str] = (),
    ) -> Commit:
        """Put contents, given as bytes or as files to link or copy, into a repo.

        Raises what Repository.commit does.
        """
        repo = self.repo(name, kind=kind)
        attributes = self.text(repo.at(branch).files, ".gitattributes")
        changes = [Put(path, self.store(repo, path, content, attributes)) for path, content in sorted(files.items())]
        removals = [DeleteFile(path) for path in delete]
        return repo.commit([*changes, *removals], branch=branch, title=title, author=author)

    def store(self, repo: Repository, path: str, content: bytes | Path, attributes: str) -> Entry:
        """Keep one file's content, small or large as the rules of `attributes` have it."""
        sample, size = _sample_and_size(content)
        if upload_mode(path, size, sample, attributes) == "regular":
            return self.blobs.put_small(content if isinstance(content, bytes) else content.read_bytes())
        entry = self.blobs.put_large(content) if isinstance(content, bytes) else self.blobs.import_large(content)
        if entry.sha256 is not None:
            repo.admit(entry.sha256)
        return entry

    def text(self, files: Mapping[str, Entry], path: str, *, max_bytes: int = 1 << 20) -> str:
        """The text of a small file, "" when it is missing, large or no UTF-8."""
        entry = files.get(path)
        if entry is None or entry.sha256 is not None or entry.size > max_bytes:
            return ""
        try:
            return self.blobs.path(entry).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return ""

    # Places

    def _handle(self, repo: RepoId) -> Repository:
        return Repository(repo, self._folder(repo), self._lock(repo))

    def _folder(self, repo: RepoId) -> Path:
        return self._place("repos", repo)

    def _lock(self, repo: RepoId) -> Path:
        return self._place("locks", repo)

    def _moved_note(self, repo: RepoId) -> Path:
        return self._place("moved", repo)

    def _place(self, what: str, repo: RepoId) -> Path:
        owner = repo.owner or _NO_OWNER
        return self.root / what / repo.kind / owner / repo.name.split("/")[-1]

    def _next_after(self, repo: RepoId) -> RepoId | None:
        try:
            return repo_id(repo.kind, read_json(self._moved_note(repo)))
        except FileNotFoundError:
            return None


def _sample_and_size(content: bytes | Path) -> tuple[bytes, int]:
    if isinstance(content, bytes):
        return content[:512], len(content)
    with content.open("rb") as file:
        return file.read(512), content.stat().st_size
