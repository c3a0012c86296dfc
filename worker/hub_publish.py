"""Puts a converted model on the Hub: one commit a job, whatever breaks on the way.

A job's commit carries the job's id in its title, so an unclear answer is settled by reading the history back;
parent_commit makes a late first try and its repetition exclude each other. Knows the Hub through HubClient.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, ModelInfo
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from kvalign.config import Target
from kvalign.errors import (
    Canceled,
    ConfigInvalid,
    HubUnavailable,
    KvalignError,
    TargetError,
    TargetExists,
    TargetForbidden,
)
from worker.hub_client import (
    CLIENT_ERRORS,
    INFO_TIMEOUT_S,
    HubClient,
    asked_wait_s,
    is_transient,
    sensible,
    target_subject,
)
from worker.hub_download import is_model_file
from worker.hub_types import Account, Gate, OnBytes, Published, RemoteFile, SourceInfo, remote_files
from worker.hub_upload import LocalFile, hashed, uploaded

logger = logging.getLogger(__name__)

_MARK = "kvalign_config.json"
_FIRST_FILES = {".gitattributes"}

_Operation = CommitOperationAdd | CommitOperationCopy | CommitOperationDelete  # the client's list is invariant


class Publisher:
    """One job's dealings with its target.

    created  the job said earlier that it would make the repo, at a moment when there was none
    """

    def __init__(
        self, client: HubClient, account: Account, target: Target, job_id: str | None, created: bool = False
    ) -> None:
        self._client = client
        self._account = account
        self._target = target
        self._job_id = job_id
        self._created = created
        self._repo = account.full_name(target.repo)
        self._subject = target_subject(self._repo)

    def check(self, source: SourceInfo | None) -> str:
        """Whether this job may publish there; the repo's full name. Raises as Hub.check_target says."""
        self._check_rights()
        if source is not None:
            self._check_source(source)
        state = self._look()
        if state is not None and state.commit_of(self._job_id) is None:
            self._check_ours(state)
        return self._repo

    def publish(
        self,
        source: SourceInfo,
        files: Mapping[str, Path],
        *,
        message: str,
        on_bytes: OnBytes,
        before_commit: Callable[[], None],
        before_create: Callable[[], None],
    ) -> Published:
        """See Hub.publish."""
        self._check_rights()
        self._check_source(source)
        state = self._look()
        if state is not None:
            if commit := state.commit_of(self._job_id):
                return self._published(commit)
            self._check_ours(state)
        local = hashed(files, on_bytes)
        if state is None:
            before_create()
            state = self._create()
        try:
            self._gate(source, state)
            commit = self._commit(state, local, message, on_bytes, before_commit)
        except (Canceled, ConfigInvalid, TargetError):
            self._try_to_settle()
            raise
        self._verify(commit, local)
        return self._published(commit)

    def settle(self) -> Published | None:
        """See Hub.settle."""
        state = self._look()
        if state is None:
            return None
        if commit := state.commit_of(self._job_id):
            return self._published(commit)
        if self._created and self._is_untouched(state):
            self._client.ask(self._subject, lambda: self._client.api.delete_repo(self._repo, missing_ok=True))
        return None

    def _check_rights(self) -> None:
        name = self._account.name
        if not self._account.owns(self._repo):
            raise TargetForbidden(
                f"{self._repo} belongs neither to {name} nor to one of their organisations.",
                f"Publish to {name}/... or to an organisation of yours.",
            )
        if not self._account.may_write(self._repo):
            raise TargetForbidden(
                f"The token of {name} may not write to {self._repo}.", "Send a token with write access there."
            )

    def _check_source(self, source: SourceInfo) -> None:
        if source.repo.lower() == self._repo.lower():
            raise ConfigInvalid(f"The target {self._repo} is the source itself.", "Choose another target.repo.")
        if source.restricted and self._target.visibility == "public":
            kind = "private" if source.private else "gated"
            raise ConfigInvalid(
                f"The source {source.repo} is {kind}, so its conversion cannot be public.",
                "Set target.visibility to private.",
            )

    def _check_ours(self, state: "_State") -> None:
        """Whether what is there may be written to. Raises TargetExists, ConfigInvalid."""
        own = self._created and self._is_untouched(state)
        update = self._target.on_existing == "update" and _MARK in state.files
        if state.name.lower() != self._repo.lower():
            raise TargetExists(f"{self._repo} was renamed to {state.name}.", "Choose another target.repo.")
        if not own and not update:
            holds = f"holds no {_MARK}" if self._target.on_existing == "update" else "was not made by this job"
            raise TargetExists(
                f"{self._repo} exists and {holds}.",
                "Choose another target.repo, or set on_existing to update for a repo that kvalign made.",
            )
        if self._target.visibility == "private" and not state.private:
            raise ConfigInvalid(
                f"{self._repo} is public, and target.visibility is private.",
                "Make the repo private on the Hub, or set target.visibility to public.",
            )

    @staticmethod
    def _is_untouched(state: "_State") -> bool:
        return len(state.commits) <= 1 and state.files.keys() <= _FIRST_FILES

    def _look(self) -> "_State | None":
        """The target as it is now; None when there is no such repo."""
        info = self._info()
        if info is None:
            return None
        commits = self._client.ask(self._subject, lambda: self._client.api.list_repo_commits(self._repo))
        return sensible(
            lambda: _State(
                name=info.id,
                private=bool(info.private),
                gated=info.gated or None,
                files=remote_files(info.siblings),
                commits=tuple(_Commit(item.commit_id, item.title or "", item.message or "") for item in commits),
            )
        )

    def _info(self, revision: str | None = None) -> ModelInfo | None:
        def request() -> ModelInfo | None:
            try:
                return self._client.api.model_info(
                    self._repo, revision=revision, files_metadata=True, timeout=INFO_TIMEOUT_S
                )
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None

        return self._client.ask(self._subject, request)

    def _create(self) -> "_State":
        """Make the repo. A conflict means somebody else's, unless an earlier try of ours went unanswered."""
        tries = 0

        def request() -> None:
            nonlocal tries
            tries += 1
            try:
                self._client.api.create_repo(self._repo, private=self._target.visibility == "private")
            except HfHubHTTPError as error:
                if error.response.status_code != httpx2.codes.CONFLICT or (tries == 1 and not self._created):
                    raise

        self._client.ask(self._subject, request)
        self._created = True
        state = self._look()
        if state is None:
            raise HubUnavailable(f"The Hub made {self._repo} and does not show it.", "Try again later.")
        self._check_ours(state)
        return state

    def _gate(self, source: SourceInfo, state: "_State") -> None:
        """Carry the source's gate over, before anything is there to read."""
        gate = source.gated
        if gate is not None and state.gated != gate:
            self._client.ask(self._subject, lambda: self._client.api.update_repo_settings(self._repo, gated=gate))

    def _commit(
        self,
        state: "_State",
        local: list[LocalFile],
        message: str,
        on_bytes: OnBytes,
        before_commit: Callable[[], None],
    ) -> str:
        """Commit once, however often it takes. Returns the commit's id."""
        pauses = iter(self._client.pauses_s)
        while True:
            operations: list[_Operation] = [
                *uploaded(self._client, self._subject, self._repo, local, on_bytes),
                *_removals(state, local),
            ]
            before_commit()
            try:
                return self._client.api.create_commit(
                    self._repo,
                    operations,
                    commit_message=f"{message} ({self._job_id})",
                    parent_commit=state.head,
                ).oid
            except (*CLIENT_ERRORS, KeyError) as error:
                if not _is_unclear(error):
                    raise self._client.translated(error, self._subject) from None
                pause_s = next(pauses, None)
                logger.warning("the commit to %s went unanswered (%s): reading back", self._repo, type(error).__name__)
                time.sleep(max(pause_s or 0.0, asked_wait_s(error)))
            except ValueError as error:
                raise KvalignError(f"The Hub refuses the model card: {str(error)[:300]}") from None
            now = self._look()
            if now is None:
                raise TargetForbidden(f"{self._repo} is gone.", "Retry the job to make it again.")
            if commit := now.commit_of(self._job_id):
                return commit
            if pause_s is None:
                raise HubUnavailable(f"The Hub does not take the commit to {self._repo}.", "Retry the job later.")
            self._check_ours(now)
            state = now

    def _verify(self, commit: str, local: list[LocalFile]) -> None:
        """Compare what the commit holds with what was sent."""
        info = self._info(commit)
        there = sensible(lambda: remote_files(info.siblings if info else None))
        for file in local:
            held = there.get(file.name)
            if held is None or (held.sha256 != file.sha256 if held.sha256 else held.git_sha1 != file.git_sha1):
                raise HubUnavailable(
                    f"{file.name} in {self._repo} at {commit[:12]} is not what was sent.",
                    "Retry the job; if it happens again, delete the repo first.",
                )

    def _published(self, commit: str) -> Published:
        return Published(self._repo, commit, f"{self._client.endpoint}/{self._repo}")

    def _try_to_settle(self) -> None:
        try:
            self.settle()
        except KvalignError as error:
            logger.warning("could not remove the empty target %s: %s", self._repo, error.message)


@dataclass(frozen=True)
class _Commit:
    id: str
    title: str
    message: str


@dataclass(frozen=True)
class _State:
    """A target repo as the Hub shows it; commits newest first."""

    name: str
    private: bool
    gated: Gate | None
    files: Mapping[str, RemoteFile]
    commits: tuple[_Commit, ...]

    @property
    def head(self) -> str | None:
        return self.commits[0].id if self.commits else None

    def commit_of(self, job_id: str | None) -> str | None:
        """The commit that a job made, wherever in the history."""
        if not job_id:
            return None
        return next((item.id for item in self.commits if job_id in item.title or job_id in item.message), None)


def _removals(state: _State, local: list[LocalFile]) -> list[CommitOperationDelete]:
    """Model files of an earlier conversion that this one does not have: mixing two models would load wrongly."""
    kept = {file.name for file in local}
    return [CommitOperationDelete(name) for name in state.files if name not in kept and is_model_file(name)]


def _is_unclear(error: Exception) -> bool:
    """Whether the commit may have happened, or may when tried again."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return (
            status in {httpx2.codes.CONFLICT, httpx2.codes.PRECONDITION_FAILED} or status >= 500 or is_transient(error)
        )
    return is_transient(error) or isinstance(error, KeyError)
