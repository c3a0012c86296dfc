"""The Hub as one account sees it: who it is, what may be read and written, files down, a model up.

huggingface_hub is used here and in worker.hub_*, nowhere else in worker or service; no torch. A Hub acts with
the token it is given and with no other, shares no cache, and keeps nothing between jobs.
"""

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from kvalign.config import Target
from kvalign.errors import DatasetInvalid, SourceForbidden
from worker.hub_client import (
    ACCOUNT,
    INFO_TIMEOUT_S,
    RETRY_PAUSES_S,
    HubClient,
    TokenInvalid,
    dataset_subject,
    sensible,
    source_subject,
)
from worker.hub_download import Downloader, RemoteFiles, names_to_download
from worker.hub_publish import Publisher
from worker.hub_types import Account, DatasetInfo, OnBytes, Published, RemoteFile, SourceInfo, remote_files

__all__ = ["Account", "DatasetInfo", "Hub", "Published", "RemoteFile", "RemoteFiles", "SourceInfo", "TokenInvalid"]

_DATASET_LIMIT_BYTES = 2_000_000_000


class Hub:
    """One account's view of one Hub. An empty token is anonymous: it may read public repos only.

    account  whose token it is, where that is known already; else the Hub is asked when it matters
    """

    def __init__(
        self, endpoint: str, token: str, *, pauses_s: tuple[float, ...] = RETRY_PAUSES_S, account: Account | None = None
    ) -> None:
        self._client = HubClient(endpoint, token, pauses_s)
        self._known_account = account

    @property
    def endpoint(self) -> str:
        return self._client.endpoint

    def whoami(self) -> Account:
        """The account of the token, asked once. Raises TokenInvalid, HubUnavailable."""
        return self._known_account or self._account

    @cached_property
    def _account(self) -> Account:
        if not self._client.has_token:
            raise TokenInvalid("No Hub token was sent.", "Send one as Authorization: Bearer.")
        return sensible(lambda: Account.of(self._client.ask(ACCOUNT, self._client.api.whoami)))

    def source(self, repo: str, revision: str = "main") -> SourceInfo:
        """A model repo at a revision, whose files this account may read.

        Raises SourceNotFound, SourceForbidden, SourceGated, HubUnavailable.
        """
        subject = source_subject(repo)
        info = self._client.ask(
            subject,
            lambda: self._client.api.model_info(repo, revision=revision, files_metadata=True, timeout=INFO_TIMEOUT_S),
        )
        if info.disabled:
            raise SourceForbidden(f"The model {repo} was disabled by the Hub.", "Choose another model.")
        self._client.ask(subject, lambda: self._client.api.auth_check(repo))
        return sensible(
            lambda: SourceInfo(
                repo=info.id,
                revision=revision,
                commit=_commit(info.sha),
                files=remote_files(info.siblings),
                private=bool(info.private),
                gated=info.gated or None,
                card=_carried(vars(info.card_data) if info.card_data else {}),
            )
        )

    def files(self, source: SourceInfo) -> RemoteFiles:
        """The source's files for kvalign.source's checks, read by range request."""
        return RemoteFiles(self._client, source_subject(source.repo), source)

    def download(self, source: SourceInfo, into: Path, on_bytes: OnBytes) -> None:
        """Fetch what a conversion needs of a source: allow-listed names, checked hashes.

        Finished and half-finished files in the folder are taken up. Raises what on_bytes raises, at once, and
        SourceInvalid, WeightsUnsafe, SourceUnsupported, DiskFull, HubUnavailable and refusals of the source.
        """
        wanted = [source.files[name] for name in names_to_download(self.files(source))]
        Downloader.of_source(self._client, source_subject(source.repo), source).fetch_all(wanted, into, on_bytes)

    def dataset(self, repo: str, revision: str = "main") -> DatasetInfo:
        """A dataset repo, and the text file in it that is used: train before others, then by name.

        Raises DatasetInvalid, HubUnavailable.
        """
        info = self._client.ask(
            dataset_subject(repo),
            lambda: self._client.api.dataset_info(repo, revision=revision, files_metadata=True, timeout=INFO_TIMEOUT_S),
        )
        self._client.ask(dataset_subject(repo), lambda: self._client.api.auth_check(repo, repo_type="dataset"))
        files = sensible(lambda: remote_files(info.siblings))
        texts = sorted(
            (file for file in files.values() if file.name.endswith((".parquet", ".jsonl", ".txt"))),
            key=lambda file: ("train" not in file.name, file.name.startswith("."), file.name),
        )
        if not texts:
            raise DatasetInvalid(
                f"The dataset {repo} holds no .parquet, .jsonl or .txt file.", "Choose a dataset of text."
            )
        if texts[0].size > _DATASET_LIMIT_BYTES:
            raise DatasetInvalid(
                f"{texts[0].name} of dataset {repo} has {texts[0].size} bytes; the limit is {_DATASET_LIMIT_BYTES}.",
                "Choose a smaller dataset: calibration reads a few megabytes of text.",
            )
        return DatasetInfo(info.id, sensible(lambda: _commit(info.sha)), texts[0])

    def download_dataset(self, repo: str, revision: str, into: Path, on_bytes: OnBytes) -> Path:
        """Fetch the text file of a dataset repo; returns its path. Raises as `dataset` and `download` do."""
        dataset = self.dataset(repo, revision)
        downloader = Downloader.of_dataset(self._client, dataset_subject(repo), dataset)
        downloader.fetch_all([dataset.file], into, on_bytes)
        return into / Path(dataset.file.name).name

    def check_target(
        self, target: Target, *, job_id: str | None, source: SourceInfo | None = None, created: bool = False
    ) -> str:
        """Whether a job may publish to its target; returns the repo's full name.

        created  this job said before that it would make the repo (see publish)
        Raises TargetForbidden, TargetExists, HubUnavailable, and ConfigInvalid where a private or gated source
        would become public.
        """
        return self._publisher(target, job_id, created).check(source)

    def publish(
        self,
        target: Target,
        source: SourceInfo,
        files: Mapping[str, Path],
        *,
        job_id: str,
        message: str,
        on_bytes: OnBytes,
        before_commit: Callable[[], None],
        created: bool = False,
        before_create: Callable[[], None] = lambda: None,
    ) -> Published:
        """Put files (name in the repo to local path) into the target as one commit, exactly once for a job.

        before_create  called just before the repo is made, if it has to be: remember it, and pass created=True
                       when the job comes back, or its own empty repo will be TargetExists to it
        before_commit  called before each try to commit: the last moment to give up
        Access to the source is checked again. Raises what the callbacks raise and what check_target and source
        raise. When it fails for good before the commit, a repo it made is removed again.
        """
        current = self.source(source.repo, source.commit)
        return self._publisher(target, job_id, created).publish(
            current,
            files,
            message=message,
            on_bytes=on_bytes,
            before_commit=before_commit,
            before_create=before_create,
        )

    def settle(self, target: Target, *, job_id: str, created: bool) -> Published | None:
        """End a publish() that was left hanging. Returns its commit, if that has happened after all.

        Otherwise a repo that this job made (created) is deleted while it is empty, so that a commit still on its
        way finds no repo to land in; one that goes to an older repo may still land.
        """
        return self._publisher(target, job_id, created).settle()

    def _publisher(self, target: Target, job_id: str | None, created: bool) -> Publisher:
        return Publisher(self._client, self.whoami(), target, job_id, created)


def _commit(sha: str | None) -> str:
    if not sha or not re.fullmatch(r"[0-9a-f]{40}", sha):
        raise ValueError("no commit")
    return sha


_CARRIED = re.compile(r"license(_name|_link)?|base_model|language|pipeline_tag|extra_gated_\w{1,40}", re.ASCII)


def _carried(card: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a source's card that a converted model must carry, of bounded size."""
    kept = {key: value for key, value in card.items() if value is not None and _CARRIED.fullmatch(str(key))}
    return {key: value for key, value in kept.items() if len(str(value)) <= 10_000}
