"""What all tests share: one thread for tensors, patience for Hypothesis, tiny models made once a session."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported, here and in the processes that tests start: the machine has other work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# CI tries the same examples every time; a laptop looks for new ones.
settings.register_profile("kvalign", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvalign")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model by the name of its family; tests must not write to it."""
    root = tmp_path_factory.mktemp("tiny_models")

    @cache
    def folder(family: str) -> Path:
        from tiny_models import save

        return save(family, root / family)

    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """A tiny model by the name of its family, in float32; tests must not change it."""

    @cache
    def model(family: str) -> Any:
        from kvalign.capture import load_model

        return load_model(tiny_folder(family))

    return model
