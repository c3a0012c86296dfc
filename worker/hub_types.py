"""What the Hub tells us, as plain frozen data. Must not import huggingface_hub."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Gate = Literal["auto", "manual"]

OnBytes = Callable[[int, int], None]
"""Called as on_bytes(done, total) while bytes move and while waiting; what it raises stops the transfer."""


@dataclass(frozen=True)
class Account:
    """Whom a token belongs to, and where it may write.

    orgs    organisations the account is in
    role    of the token: read, write, fineGrained; empty when the Hub does not say (OAuth)
    scopes  names (account, organisation or repo) that a fineGrained token may write to
    guest   organisations the account may only read
    """

    name: str
    orgs: tuple[str, ...] = ()
    role: str = ""
    scopes: frozenset[str] = frozenset()
    guest: frozenset[str] = frozenset()

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Account":
        """Read the answer of whoami-v2; raises KeyError or TypeError when it is not one."""
        orgs = answer.get("orgs") or []
        access = (answer.get("auth") or {}).get("accessToken") or {}
        scoped = (access.get("fineGrained") or {}).get("scoped") or []
        return cls(
            name=str(answer["name"]),
            orgs=tuple(str(org["name"]) for org in orgs),
            role=str(access.get("role") or ""),
            scopes=frozenset(
                str(scope["entity"].get("name", "")) for scope in scoped if "repo.write" in scope.get("permissions", [])
            ),
            guest=frozenset(str(org["name"]) for org in orgs if org.get("roleInOrg") == "read"),
        )

    @property
    def can_write(self) -> bool:
        """Whether the token may write anywhere at all, as far as the Hub tells."""
        return self.role != "read" and (self.role != "fineGrained" or bool(self.scopes))

    def full_name(self, repo: str) -> str:
        """A repo name with its owner; one without an owner is the account's own."""
        return repo if "/" in repo else f"{self.name}/{repo}"

    def owns(self, repo: str) -> bool:
        """Whether a repo's owner is this account or one of its organisations."""
        return self.full_name(repo).partition("/")[0] in {self.name, *self.orgs}

    def may_write(self, repo: str) -> bool:
        """Whether the token's role allows writing to a repo of this account or its organisations."""
        name = self.full_name(repo)
        owner = name.partition("/")[0]
        if not self.can_write or owner in self.guest:
            return False
        return self.role != "fineGrained" or bool(self.scopes & {owner, name})


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repo at one commit; sha256 for large files, git_sha1 (of the blob) for small ones."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class SourceInfo:
    """A model repo at one commit.

    revision  as asked for; commit is what it resolved to
    gated     "auto" or "manual" when the owner asks for terms to be accepted first
    card      licence and gating fields of the source's card: data to carry on, never to execute
    """

    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]
    private: bool = False
    gated: Gate | None = None
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def restricted(self) -> bool:
        return self.private or self.gated is not None


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset repo at one commit, and the one text file of it that is used."""

    repo: str
    commit: str
    file: RemoteFile


@dataclass(frozen=True)
class Published:
    repo: str
    commit: str
    url: str


def remote_files(siblings: Any) -> dict[str, RemoteFile]:
    """The listing of a repo; raises TypeError or ValueError when it lacks sizes or hashes."""
    files = {}
    for item in siblings or []:
        sha256 = item.lfs.sha256 if item.lfs else None
        if not isinstance(item.size, int) or item.size < 0 or not (sha256 or item.blob_id):
            raise ValueError(f"no size or hash of {item.rfilename[:80]}")
        files[str(item.rfilename)] = RemoteFile(str(item.rfilename), item.size, sha256, item.blob_id)
    return files
