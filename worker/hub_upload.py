"""Sends large files to the Hub ahead of the commit that names them, watched byte by byte.

Knows neither targets nor jobs: worker.hub_publish decides what is sent where.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd

from worker.hub_client import CLIENT_ERRORS, HubClient, Subject
from worker.hub_download import git_blob_hash
from worker.hub_types import OnBytes

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class LocalFile:
    """A file to publish: its name in the repo, where it lies, and both hashes the Hub may list it under."""

    name: str
    path: Path
    size: int
    sha256: str
    git_sha1: str


def hashed(files: Mapping[str, Path], on_bytes: OnBytes) -> list[LocalFile]:
    """Hash files before they are sent; on_bytes is only asked whether to go on. Cost: one read of them all."""
    total = sum(path.stat().st_size for path in files.values())
    local = []
    for name, path in files.items():
        size = path.stat().st_size
        sha256, git_sha1 = hashlib.sha256(), git_blob_hash(size)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                sha256.update(chunk)
                git_sha1.update(chunk)
                on_bytes(0, total)
        local.append(LocalFile(name, path, size, sha256.hexdigest(), git_sha1.hexdigest()))
    return local


def uploaded(
    client: HubClient, subject: Subject, repo: str, local: list[LocalFile], on_bytes: OnBytes
) -> Iterator[CommitOperationAdd]:
    """Upload what the Hub keeps as large files, one by one; yields the operations that name them."""
    total = sum(file.size for file in local)
    done = 0
    for file in local:
        operation = CommitOperationAdd(file.name, str(file.path))
        operation.upload_info.sha256 = bytes.fromhex(file.sha256)
        with _Watched(file.path, done, total, on_bytes) as reader:
            operation.path_or_fileobj = reader
            _upload(client, subject, repo, operation)
        if operation.path_or_fileobj is reader:
            operation.path_or_fileobj = str(file.path)
        done += file.size
        on_bytes(done, total)
        yield operation


def _upload(client: HubClient, subject: Subject, repo: str, operation: CommitOperationAdd) -> None:
    try:
        client.api.preupload_lfs_files(repo, [operation], num_threads=1)
    except CLIENT_ERRORS as error:
        raise client.translated(error, subject) from None
    except RuntimeError as error:  # the client wraps whatever stopped an upload
        cause = error.__cause__ or error
        if isinstance(cause, CLIENT_ERRORS):
            raise client.translated(cause, subject) from None
        raise cause from None


class _Watched(io.BufferedReader):
    """A file whose reading is reported; what on_bytes raises ends the upload that reads it."""

    def __init__(self, path: Path, base: int, total: int, on_bytes: OnBytes) -> None:
        super().__init__(io.FileIO(path))
        self._base, self._total, self._on_bytes = base, total, on_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._on_bytes(self._base + self.tell(), self._total)
        return data
