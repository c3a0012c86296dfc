"""Who may see, read and write a repo; the rules alone, no disk and no request."""

from devhub.accounts import Account
from devhub.errors import Forbidden, GatedAnonymous, GatedRepo, LoginNeeded, RepoHidden, RepoNotFound
from devhub.names import RepoId
from devhub.repository import Settings


def check_visible(account: Account | None, repo: RepoId, settings: Settings) -> None:
    """A private repo looks to a stranger as if it were missing. Raises RepoNotFound."""
    if settings.private and not _is_member(account, repo.owner):
        raise not_found(account, repo.name)


def not_found(account: Account | None, name: str) -> RepoNotFound:
    """The one answer for repos that are missing and for those that are hidden."""
    if account is None:
        return RepoHidden("Invalid username or password.")
    return RepoNotFound(f"Repository {name} not found.")


def check_readable(account: Account | None, repo: RepoId, settings: Settings) -> None:
    """Whether the files may be read; listing them is open to all who see the repo. Raises GatedRepo."""
    if not settings.gated or _is_member(account, repo.owner):
        return
    if account is None:
        raise GatedAnonymous(f"Access to {repo} is restricted. You must be authenticated to access it.")
    if account.name not in settings.accepted:
        raise GatedRepo(f"Access to {repo} is restricted and you are not in the authorized list.")


def check_namespace_writable(account: Account | None, owner: str | None) -> Account:
    """Whether repos of `owner` may be made and changed. Raises LoginNeeded, Forbidden."""
    if account is None:
        raise LoginNeeded("Invalid username or password.")
    if account.role != "write":
        raise Forbidden("You must use a write token: this one may only read")
    if not _is_member(account, owner):
        raise Forbidden(f"You don't have the rights to write to the namespace {owner or 'of repos without an owner'}")
    return account


def _is_member(account: Account | None, owner: str | None) -> bool:
    return account is not None and owner in account.namespaces
