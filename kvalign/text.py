"""Text to calibrate and to validate on: documents, token sequences, windows. Knows no model but its tokenizer."""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalign.builtin_text import Part, builtin_files
from kvalign.errors import DatasetInvalid
from kvalign.printable import printable

_SEPARATOR = "\n=====\n"
_TEXT_COLUMNS = ("text", "content", "document")
_MAX_DATASET_BYTES = 2 * 1024**3
_KEPT_ASIDE = 8


@dataclass(frozen=True)
class Document:
    """One text, with the domain (the stem of its file) it belongs to."""

    domain: str
    text: str

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Window:
    """A stretch of one domain to evaluate on: a prefix to code, a continuation to score; [T] int64 each."""

    domain: str
    prefix: Tensor
    continuation: Tensor


def builtin_documents(part: Part) -> list[Document]:
    """The text that comes with kvalign: written for it, under its licence. The parts share no domain's source."""
    return [
        document
        for file in builtin_files(part)
        for document in _documents(file.name.removesuffix(".txt"), file.read_text(encoding="utf-8"))
    ]


def read_documents(path: Path) -> list[Document]:
    """Documents of a local file or folder: .txt (cut at lines of =====), .jsonl or .parquet with a text column.

    Raises DatasetInvalid naming the file and what is wrong with it.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    readable = [file for file in files if file.suffix in readers and file.is_file()]
    if not readable:
        raise DatasetInvalid(
            f"{path.name} holds no text: no .txt, .jsonl or .parquet file.",
            "Name a dataset with a text column.",
        )
    documents = []
    for file in readable:
        if file.stat().st_size > _MAX_DATASET_BYTES:
            raise DatasetInvalid(f"{file.name} is larger than {_MAX_DATASET_BYTES:,} bytes.", "Give a smaller file.")
        try:
            documents += readers[file.suffix](file)
        except (OSError, ValueError, RecursionError) as error:
            raise DatasetInvalid(
                f"{file.name} cannot be read: {str(error)[:200]}", "Give UTF-8 text, JSON lines or Parquet."
            ) from error
    return [replace(found, domain=printable(found.domain)) for found in documents if found.text.strip()]


def token_sequences(documents: list[Document], tokenizer: Any, *, tokens: int, length: int, seed: int) -> list[Tensor]:
    """tokens // length sequences of [length] int64, taken in turn from every domain.

    Documents of a domain are shuffled and joined by the end-of-text token; each sequence opens with the
    beginning-of-text token where the tokenizer uses one. Raises DatasetInvalid when the text runs out.
    """
    wanted = max(1, tokens // length)
    bos = opening_tokens(tokenizer)
    body = length - len(bos)
    streams = [
        [bos + part for part in _cut(_joined(members, tokenizer, _order(seed, domain)), body)]
        for domain, members in _by_domain(documents).items()
    ]
    chosen = [sequence for turn in _in_turn(streams) for sequence in turn][:wanted]
    if len(chosen) < wanted:
        raise DatasetInvalid(
            f"The calibration text holds {len(chosen)} sequences of {length} tokens; {wanted} were asked for.",
            _ask_for_less("calibration.tokens", len(chosen) * length),
        )
    return [torch.tensor(sequence) for sequence in chosen]


def kept_aside(sequences: Sequence[Tensor]) -> list[Tensor]:
    """The last eighth of calibration sequences, at least one: bases do not see them, scales and tables are theirs."""
    return list(sequences[-max(1, len(sequences) // _KEPT_ASIDE) :])


def evaluation_windows(
    documents: list[Document], tokenizer: Any, *, windows: int, prefix: int, continuation: int
) -> list[Window]:
    """`windows` windows in all, spread evenly over the domains, each within one document while those are long enough.

    Raises DatasetInvalid when a domain is too short, or there is none.
    """
    if not documents:
        raise DatasetInvalid("The validation text is empty.", "Name a dataset with text in it.")
    bos = opening_tokens(tokenizer)
    length = prefix + continuation - len(bos)
    found = []
    domains = _by_domain(documents)
    for index, (domain, members) in enumerate(domains.items()):
        share = max(1, (windows + len(domains) - 1 - index) // len(domains))
        pieces = [_cut(plain_tokens(tokenizer, document.text), length) for document in members]
        parts = [part for turn in _in_turn(pieces) for part in turn]
        if len(parts) < share:
            parts = _cut([token for document in members for token in plain_tokens(tokenizer, document.text)], length)
        if len(parts) < share:
            raise DatasetInvalid(
                f"The domain '{domain}' holds {len(parts)} windows of {prefix + continuation} tokens;"
                f" {share} were asked for.",
                _ask_for_less("validation.windows", len(parts) * len(domains)),
            )
        for part in parts[:share]:
            whole = torch.tensor(bos + part)
            found.append(Window(domain, whole[:prefix], whole[prefix:]))
    return found


def fingerprint(documents: Iterable[Document]) -> str:
    """One SHA-256 over the documents' own, in any order."""
    return hashlib.sha256("".join(sorted(document.sha256 for document in documents)).encode()).hexdigest()


def _documents(domain: str, text: str) -> list[Document]:
    return [Document(domain, part.strip("\n")) for part in text.split(_SEPARATOR) if part.strip()]


def _read_txt(file: Path) -> list[Document]:
    return _documents(file.stem, file.read_text(encoding="utf-8"))


def _read_jsonl(file: Path) -> list[Document]:
    with file.open(encoding="utf-8") as lines:
        return [Document(file.stem, _text_of(json.loads(line))) for line in lines if line.strip()]


def _read_parquet(file: Path) -> list[Document]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DatasetInvalid(
            "Reading Parquet needs pyarrow.", "pip install pyarrow, or give .jsonl or .txt."
        ) from error
    table = parquet.ParquetFile(file)
    column = next((name for name in _TEXT_COLUMNS if name in table.schema_arrow.names), None)
    if column is None:
        raise ValueError(f"no column named {', '.join(_TEXT_COLUMNS)}")
    return [
        Document(file.stem, str(text))
        for batch in table.iter_batches(columns=[column])
        for text in batch.column(0).to_pylist()
        if text
    ]


def _text_of(row: Any) -> str:
    if isinstance(row, dict):
        for column in _TEXT_COLUMNS:
            if isinstance(row.get(column), str):
                return str(row[column])
    raise ValueError(f"a row has no text column ({', '.join(_TEXT_COLUMNS)})")


def _by_domain(documents: list[Document]) -> dict[str, list[Document]]:
    domains: dict[str, list[Document]] = {}
    for document in documents:
        domains.setdefault(document.domain, []).append(document)
    return domains


def opening_tokens(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer itself puts before every text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _order(seed: int, domain: str) -> random.Random:
    return random.Random(f"{seed}/{domain}")  # noqa: S311  an order to repeat, not a secret


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _joined(documents: list[Document], tokenizer: Any, order: random.Random) -> list[int]:
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    shuffled = sorted(documents, key=lambda document: document.sha256)
    order.shuffle(shuffled)
    return [token for document in shuffled for token in [*plain_tokens(tokenizer, document.text), *separator]]


def _ask_for_less(setting: str, most: int) -> str:
    """The remedy for text that runs out."""
    return f"Set {setting} to at most {most}, or name a larger dataset." if most else "Name a larger dataset."


def _cut(tokens: list[int], length: int) -> list[list[int]]:
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


def _in_turn(streams: list[list[list[int]]]) -> list[list[list[int]]]:
    """The first of every stream, then the second of every stream, and so on."""
    longest = max(map(len, streams), default=0)
    return [[stream[turn] for stream in streams if turn < len(stream)] for turn in range(longest)]
