"""A codec on made-up caches, fitted once for all tests of this folder."""

import pytest
import torch
from synthetic import CacheSource, fitted

from kvalign.artifact import Artifact
from kvalign.codec import Codec

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def source() -> CacheSource:
    return CacheSource()


@pytest.fixture(scope="session")
def artifact(source: CacheSource) -> Artifact:
    return fitted(source)


@pytest.fixture(scope="session")
def codec(artifact: Artifact) -> Codec:
    return artifact.codec()
