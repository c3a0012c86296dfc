"""kvalign: KV caches of language models, many times smaller, with proof of how good the result is.

    model, tokenizer, codec = kvalign.load("owner/name-kvalign")
    blob = codec.encode(cache, input_ids=ids)
    cache = codec.decode(blob)

Importing kvalign is quick: torch and transformers are loaded with the first of these names that is used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvalign.codec import Codec
    from kvalign.convert import convert
    from kvalign.load import load

__all__ = ["Codec", "convert", "load"]

_HOMES = {"Codec": "kvalign.codec", "convert": "kvalign.convert", "load": "kvalign.load"}


class _Package(ModuleType):
    """`convert` and `load` stay the functions, though importing the modules of the same names would replace them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'kvalign' has no attribute '{name}'")


sys.modules[__name__].__class__ = _Package
