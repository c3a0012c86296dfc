"""Which files are stored as large (LFS) and which as small (regular) ones; a pure rule.

The same rule answers the client's preupload question and sorts the files of an imported folder.
"""

import codecs
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Literal

UploadMode = Literal["lfs", "regular"]

# As on the real Hub: a larger file is never kept inside git.
MAX_REGULAR_BYTES = 10 * 1000 * 1000

# Every repo starts with these rules, which its owner may commit over.
# fmt: off
DEFAULT_ATTRIBUTES = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n"
    for pattern in (
        "*.7z", "*.arrow", "*.bin", "*.bz2", "*.ckpt", "*.ftz", "*.gguf", "*.gz", "*.h5", "*.joblib",
        "*.model", "*.msgpack", "*.npy", "*.npz", "*.onnx", "*.ot", "*.parquet", "*.pb", "*.pickle",
        "*.pkl", "*.pt", "*.pth", "*.rar", "*.safetensors", "saved_model/**/*", "*.tar", "*.tflite",
        "*.tgz", "*.wasm", "*.xz", "*.zip", "*.zst", "*tfevents*",
    )
)
# fmt: on


def upload_mode(path: str, size: int, sample: bytes, attributes: str) -> UploadMode:
    """Decide for one file.

    size        bytes
    sample      its first 512 bytes or so
    attributes  the .gitattributes of the repo
    """
    if size == 0:
        return "regular"
    if size > MAX_REGULAR_BYTES or _asks_for_lfs(path, attributes) or not _is_text(sample):
        return "lfs"
    return "regular"


def _asks_for_lfs(path: str, attributes: str) -> bool:
    """Git's rule: the last line that matches wins; a pattern without a slash looks at the name alone."""
    chosen = False
    for line in attributes.splitlines():
        pattern, *settings = line.split() or [""]
        if pattern and not pattern.startswith("#") and _matches(pattern, path):
            if "filter=lfs" in settings:
                chosen = True
            elif "-filter" in settings or "!filter" in settings:
                chosen = False
    return chosen


def _matches(pattern: str, path: str) -> bool:
    if "/" not in pattern:
        return fnmatchcase(PurePosixPath(path).name, pattern)
    return fnmatchcase(path, pattern.lstrip("/")) or fnmatchcase(path, pattern.lstrip("/").replace("/**/", "/"))


def _is_text(sample: bytes) -> bool:
    """Whether it may be UTF-8; a character cut in two at the sample's end is no objection."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return b"\0" not in sample
