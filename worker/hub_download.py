"""Files of Hub repos: parts of them by range request, whole ones streamed to a folder and checked.

Only names on the allow-list are ever fetched. Must not know jobs; knows the Hub through HubClient.
"""

import errno
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx2
from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # exported lazily

from kvalign.errors import DiskFull, HubUnavailable, SourceInvalid
from kvalign.source import SINGLE_WEIGHTS, WEIGHTS_INDEX, SourceFiles, find_weights
from worker.hub_client import CLIENT_ERRORS, HubClient, Subject, asked_wait_s, is_transient, wait
from worker.hub_types import DatasetInfo, OnBytes, RemoteFile, SourceInfo

_CHUNK_BYTES = 1 << 20
_SMALL_FILE_LIMIT_BYTES = 64_000_000
_STALL_S = 20.0  # no byte for so long is a broken connection: the next try resumes

_MODEL_TEXTS = re.compile(
    r"config\.json|generation_config\.json"
    r"|tokenizer\.json|tokenizer\.model|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.json|merges\.txt|vocab\.txt|spiece\.model|sentencepiece\.bpe\.model"
    r"|chat_template\.(jinja|json)",
    re.ASCII,
)
_PAPERS = re.compile(
    r"README\.md|(LICENSE|LICENCE|NOTICE|COPYING|USE_POLICY)[\w\-]*(\.txt|\.md)?", re.ASCII | re.IGNORECASE
)
_WEIGHTS = re.compile(r"[\w.\-]+\.safetensors(\.index\.json)?|figures/[\w.\-]+", re.ASCII)


def is_model_file(name: str) -> bool:
    """Whether a file belongs to a published conversion: it is replaced, or removed, by the next one."""
    return bool(_MODEL_TEXTS.fullmatch(name) or _WEIGHTS.fullmatch(name))


class RemoteFiles:
    """kvalign.source.SourceFiles of a model repo: the checks of a folder, before it is downloaded."""

    def __init__(self, client: HubClient, subject: Subject, source: SourceInfo) -> None:
        self._client = client
        self._subject = subject
        self._source = source

    def sizes(self) -> Mapping[str, int]:
        return {name: file.size for name, file in self._source.files.items() if "/" not in name}

    def read(self, name: str, start: int, length: int) -> bytes:
        """A range of one file. Raises what HubClient.ask raises."""
        if length <= 0:
            return b""
        return self._client.ask(self._subject, lambda: self._range(name, start, length))

    def _range(self, name: str, start: int, length: int) -> bytes:
        url = hf_hub_url(self._source.repo, name, revision=self._source.commit, endpoint=self._client.endpoint)
        with _stream(url, self._client.headers | {"Range": f"bytes={start}-{start + length - 1}"}) as response:
            skip = start if response.status_code == httpx2.codes.OK else 0
            held = bytearray()
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                held += chunk
                if len(held) >= skip + length:
                    break
        return bytes(held[skip : skip + length])


def names_to_download(files: SourceFiles) -> list[str]:
    """The files of a source that a conversion needs, small ones first.

    Weights are those that transformers would load; raises what find_weights raises, and SourceInvalid for a
    text file of absurd size.
    """
    sizes = files.sizes()
    small = sorted(name for name in sizes if _MODEL_TEXTS.fullmatch(name) or _PAPERS.fullmatch(name))
    weight_map = find_weights(files)
    if weight_map is not None:
        small.append(WEIGHTS_INDEX)
    for name in small:
        if sizes[name] > _SMALL_FILE_LIMIT_BYTES:
            raise SourceInvalid(
                f"{name} has {sizes[name]} bytes; the limit is {_SMALL_FILE_LIMIT_BYTES}.", "Choose another revision."
            )
    return [*small, *([SINGLE_WEIGHTS] if weight_map is None else sorted({*weight_map.values()}))]


class Downloader:
    """Streams files of one repo at one commit into a folder.

    A file is written as NAME.part, resumed after any interruption, and gets its name once its hash is right.
    """

    def __init__(
        self, client: HubClient, subject: Subject, repo: str, commit: str, repo_type: str | None = None
    ) -> None:
        self._client = client
        self._subject = subject
        self._url: Callable[[str], str] = lambda name: hf_hub_url(
            repo, name, repo_type=repo_type, revision=commit, endpoint=client.endpoint
        )

    @classmethod
    def of_source(cls, client: HubClient, subject: Subject, source: SourceInfo) -> "Downloader":
        return cls(client, subject, source.repo, source.commit)

    @classmethod
    def of_dataset(cls, client: HubClient, subject: Subject, dataset: DatasetInfo) -> "Downloader":
        return cls(client, subject, dataset.repo, dataset.commit, "dataset")

    def fetch_all(self, files: list[RemoteFile], into: Path, on_bytes: OnBytes) -> None:
        """Fetch files one after the other; on_bytes counts over all of them.

        Raises HubUnavailable, DiskFull, what the subject maps refusals to, and what on_bytes raises.
        """
        into.mkdir(parents=True, exist_ok=True)
        total = sum(file.size for file in files)
        done = 0
        for file in files:
            self._fetch(file, into / Path(file.name).name, _counting_from(done, total, on_bytes))
            done += file.size
            on_bytes(done, total)

    def _fetch(self, file: RemoteFile, path: Path, on_file_bytes: Callable[[int], None]) -> None:
        part = path.with_name(f"{path.name}.part")
        with _disk_errors(path):
            if path.exists():
                path.replace(part)
            for _ in range(2):
                digest = _Digest(file)
                digest.feed_file(part, on_file_bytes)
                self._transfer(file, part, digest, on_file_bytes)
                if digest.matches():
                    part.replace(path)
                    return
                part.unlink()
        raise HubUnavailable(
            f"{file.name} of {self._subject} arrived twice with another content than the Hub lists.",
            "Upload the file to its repo again, or try later.",
        )

    def _transfer(self, file: RemoteFile, part: Path, digest: "_Digest", on_file_bytes: Callable[[int], None]) -> None:
        """Append to the part until it is whole; a connection that brought nothing new costs one of the tries."""
        pauses = iter(self._client.pauses_s)
        while digest.fed < file.size:
            before = digest.fed
            try:
                self._receive(file, part, digest, on_file_bytes)
                if digest.fed < file.size:
                    raise httpx2.ReadError("the connection ended early")
            except CLIENT_ERRORS as error:
                if digest.fed - before >= _CHUNK_BYTES:
                    pauses = iter(self._client.pauses_s)
                pause_s = next(pauses, None)
                if pause_s is None or not is_transient(error):
                    raise self._client.translated(error, self._subject) from None
                wait(max(pause_s, asked_wait_s(error)), partial(on_file_bytes, digest.fed))

    def _receive(self, file: RemoteFile, part: Path, digest: "_Digest", on_file_bytes: Callable[[int], None]) -> None:
        """One response, from where the part ends. A server that ignores the range sends what we have again."""
        headers = self._client.headers | ({"Range": f"bytes={digest.fed}-"} if digest.fed else {})
        with part.open("ab") as out, _stream(self._url(file.name), headers) as response:
            known = digest.fed if response.status_code == httpx2.codes.OK else 0
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                fresh = chunk[min(known, len(chunk)) :]
                known -= len(chunk) - len(fresh)
                if digest.fed + len(fresh) > file.size:
                    raise HubUnavailable(
                        f"The Hub sends more of {file.name} than the {file.size} bytes it lists.", "Try again later."
                    )
                out.write(fresh)
                digest.feed(fresh)
                on_file_bytes(digest.fed)


def _counting_from(base: int, total: int, on_bytes: OnBytes) -> Callable[[int], None]:
    return lambda now: on_bytes(base + now, total)


class _Digest:
    """The hash that the Hub lists for a file: sha256 of a large one, git's blob sha1 of a small one."""

    def __init__(self, file: RemoteFile) -> None:
        self._expected = file.sha256 or file.git_sha1
        self._hash = hashlib.sha256() if file.sha256 else git_blob_hash(file.size)
        self._size = file.size
        self.fed = 0

    def feed(self, data: bytes) -> None:
        self._hash.update(data)
        self.fed += len(data)

    def feed_file(self, part: Path, on_file_bytes: Callable[[int], None]) -> None:
        """Take up what an earlier attempt left; a part longer than the file is no part of it."""
        if part.exists() and part.stat().st_size > self._size:
            part.unlink()
        part.touch()
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                self.feed(chunk)
                on_file_bytes(self.fed)

    def matches(self) -> bool:
        return self._hash.hexdigest() == self._expected


def git_blob_hash(size: int) -> "hashlib._Hash":
    """A sha1 that, fed a file's bytes, gives the object id git gives them."""
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


@contextmanager
def _stream(url: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
    """One streamed GET, uncompressed so that ranges count file bytes. The token does not follow redirects away."""
    with get_session().stream(
        "GET", url, headers={**headers, "Accept-Encoding": "identity"}, timeout=_STALL_S
    ) as response:
        hf_raise_for_status(response)
        yield response


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        raise DiskFull(
            f"The disk is full while writing {path.name}.", "Free space in the data folder, then retry the job."
        ) from None
