"""Large files on their way in: one PUT each, or many parts put together; knows no accounts.

An upload's id is its permission: unguessable, for one content of one repo, and useless once that is there.
The client sends no token with these requests, as it does not to the object store behind the real Hub.
"""

import hashlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import BinaryIO

from anyio import to_thread

from devhub.blobs import BlobStore
from devhub.disk import CHUNK_BYTES, read_json, temp_beside, write_json
from devhub.errors import BadRequest, NotFound
from devhub.names import RepoId, repo_id

MAX_PARTS = 10_000
FORGET_AFTER_S = 24 * 3600


@dataclass(frozen=True)
class Upload:
    """A large file that was announced. `part_bytes` is None for one that comes in one piece."""

    id: str
    repo: RepoId
    sha256: str
    size: int  # bytes
    part_bytes: int | None

    @property
    def parts(self) -> int:
        return ceil(self.size / self.part_bytes) if self.part_bytes else 1

    def bytes_of_part(self, number: int) -> int:
        """Parts count from 1. Raises BadRequest."""
        if not 1 <= number <= self.parts:
            raise BadRequest(f"Part {number} of an upload in {self.parts} parts.")
        if self.part_bytes is None:
            return self.size
        return min(self.part_bytes, self.size - (number - 1) * self.part_bytes)


class Uploads:
    """The uploads under way, on disk: they outlive a restart. Those of yesterday are dropped at start."""

    def __init__(self, root: Path, blobs: BlobStore) -> None:
        self._root = root
        self._blobs = blobs
        self._forget_old()

    def begin(self, repo: RepoId, sha256: str, size: int, *, part_bytes: int | None) -> Upload:
        if part_bytes is not None:
            part_bytes = max(part_bytes, ceil(size / MAX_PARTS))
        upload = Upload(secrets.token_urlsafe(24), repo, sha256, size, part_bytes)
        write_json(self._folder(upload.id) / "upload.json", asdict(upload))
        return upload

    def get(self, upload_id: str) -> Upload:
        """Raises NotFound."""
        try:
            stored = read_json(self._folder(upload_id) / "upload.json")
        except FileNotFoundError:
            raise NotFound("No such upload, or it is more than a day old.") from None
        return Upload(**{**stored, "repo": repo_id(**stored["repo"])})

    async def receive(self, upload: Upload, number: int, stream: AsyncIterator[bytes]) -> str:
        """Write one part, or the whole; a second time replaces the first. Returns the sha256 of its bytes.

        Raises BadRequest when there are fewer or more bytes than announced; nothing of them stays then.
        """
        target = self._part(upload.id, number)
        temp = temp_beside(target)
        try:
            sha256 = await _write(stream, temp, expected_bytes=upload.bytes_of_part(number))
            temp.replace(target)
        finally:
            temp.unlink(missing_ok=True)
        return sha256

    def finish(self, upload: Upload, *, sha256: str | None = None) -> None:
        """Make the parts one blob. Asked again after it succeeded, it does nothing.

        sha256  of the whole, where the caller computed it on the way; else everything is read once more
        Raises BadRequest when a part is missing or the content is not the announced one.
        """
        if self._blobs.large_size(upload.sha256) == upload.size and not self._part(upload.id, 1).exists():
            return
        for number in range(1, upload.parts + 1):
            if not self._part(upload.id, number).exists():
                raise BadRequest(f"Part {number} of {upload.parts} was never uploaded.")
        whole = self._part(upload.id, 1) if sha256 else self._blobs.new_temp()
        try:
            sha256 = sha256 or self._join(upload, whole)
            self._blobs.adopt(whole, sha256=sha256, expected=(upload.sha256, upload.size))
        finally:
            whole.unlink(missing_ok=True)
        for number in range(1, upload.parts + 1):
            self._part(upload.id, number).unlink(missing_ok=True)

    def _join(self, upload: Upload, whole: Path) -> str:
        """Write all parts into one file. Returns its sha256."""
        digest = hashlib.sha256()
        with whole.open("wb") as target:
            for number in range(1, upload.parts + 1):
                with self._part(upload.id, number).open("rb") as part:
                    while chunk := part.read(CHUNK_BYTES):
                        digest.update(chunk)
                        target.write(chunk)
        return digest.hexdigest()

    def _folder(self, upload_id: str) -> Path:
        return self._root / hashlib.sha256(upload_id.encode()).hexdigest()

    def _part(self, upload_id: str, number: int) -> Path:
        return self._folder(upload_id) / f"part-{number}"

    def _forget_old(self) -> None:
        for folder in self._root.glob("*"):
            if folder.stat().st_mtime < time.time() - FORGET_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)


async def _write(stream: AsyncIterator[bytes], target: Path, *, expected_bytes: int) -> str:
    """Write a request's body to a file, off the event loop. Returns its sha256, raises BadRequest."""
    digest, written = hashlib.sha256(), 0
    with target.open("wb") as file:
        async for block in _blocks(stream):
            written += len(block)
            if written > expected_bytes:
                raise BadRequest(f"The body is longer than the {expected_bytes} bytes announced.")
            await to_thread.run_sync(_append, file, digest, block)
    if written < expected_bytes:
        raise BadRequest(f"The body has {written} bytes, announced were {expected_bytes}.")
    return digest.hexdigest()


async def _blocks(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in blocks of about CHUNK_BYTES: fewer, larger hops to a thread."""
    block = bytearray()
    async for piece in stream:
        block += piece
        if len(block) >= CHUNK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _append(file: BinaryIO, digest: "hashlib._Hash", block: bytes) -> None:
    digest.update(block)
    file.write(block)
