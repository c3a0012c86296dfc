"""kvalign: KV caches of language models, many times smaller, with proof of how good the result is.

    model, tokenizer, codec = kvalign.load("owner/name-kvalign")
    blob = codec.encode(cache)
    cache = codec.decode(blob, model)

Importing kvalign is quick: torch and transformers are loaded with the first of these names that is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvalign.codec import Codec
    from kvalign.convert import convert
    from kvalign.load import load

__all__ = ["Codec", "convert", "load"]

_HOMES = {"Codec": "kvalign.codec", "convert": "kvalign.convert", "load": "kvalign.load"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvalign' has no attribute '{name}'")
