"""File contents by their hash: small ones by git blob id, large ones by sha256; knows no repos.

A blob is never changed once its name stands, so readers need no lock. Who may read one is decided elsewhere.
"""

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from devhub.disk import CHUNK_BYTES, link_or_copy, read_json, temp_beside, write_json
from devhub.errors import BadRequest
from devhub.tree import Entry, large_entry, regular_entry


class BlobStore:
    """Contents under `root`; a large file is streamed, linked or renamed in, never read into memory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known_hashes = root / "known-hashes"

    def path(self, entry: Entry) -> Path:
        return self._sha256_path(entry.sha256) if entry.sha256 else self._sharded("git", entry.oid)

    def large_size(self, sha256: str) -> int | None:
        """Bytes of a large blob, None when it is not here."""
        try:
            return self._sha256_path(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def put_small(self, content: bytes) -> Entry:
        entry = regular_entry(content)
        target = self.path(entry)
        if not target.exists():
            temp = temp_beside(target)
            temp.write_bytes(content)
            temp.replace(target)
        return entry

    def new_temp(self) -> Path:
        """Where to write a large blob before `adopt`."""
        folder = self._root / "incoming"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / secrets.token_hex(16)

    def adopt(self, temp: Path, *, sha256: str, expected: tuple[str, int]) -> Entry:
        """Take over a finished file whose hash was computed while it was written.

        expected  the (sha256, bytes) its sender announced. Raises BadRequest when they differ.
        """
        size = temp.stat().st_size
        if (sha256, size) != expected:
            raise BadRequest(
                f"The upload has {size} bytes with sha256 {sha256}; announced were {expected[1]} with {expected[0]}."
            )
        temp.replace(self._sha256_path(sha256))
        return large_entry(sha256, size)

    def put_large(self, content: bytes) -> Entry:
        """For content that is in memory anyway."""
        sha256, temp = hashlib.sha256(content).hexdigest(), self.new_temp()
        temp.write_bytes(content)
        return self.adopt(temp, sha256=sha256, expected=(sha256, len(content)))

    def import_large(self, source: Path) -> Entry:
        """Link or copy a file in. Its hash is remembered by path, size and time: a second time is quick."""
        stat = source.stat()
        identity = [str(source), stat.st_size, stat.st_mtime_ns, stat.st_ino]
        note = self._known_hashes / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}.json"
        sha256 = _remembered(note) or sha256_of_file(source)
        target = self._sha256_path(sha256)
        if not target.exists():
            link_or_copy(source, target)
        write_json(note, sha256)
        return large_entry(sha256, stat.st_size)

    def _sha256_path(self, sha256: str) -> Path:
        return self._sharded("sha256", sha256)

    def _sharded(self, kind: str, name: str) -> Path:
        folder = self._root / kind / name[:2]
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _remembered(note: Path) -> str | None:
    try:
        value: Any = read_json(note)
    except FileNotFoundError:
        return None
    return str(value)
