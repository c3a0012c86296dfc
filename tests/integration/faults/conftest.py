"""One topology for each module of fault tests; each test finds it whole."""

from collections.abc import Iterator

import pytest
from topology import Topology, running_topology


@pytest.fixture(scope="module")
def module_topology(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """On the database that the module names as DATABASE, SQLite unless it does; with its SETTINGS."""
    database = getattr(request.module, "DATABASE", "sqlite")
    if database == "postgresql":
        request.getfixturevalue("postgres_program")
    settings = getattr(request.module, "SETTINGS", {})
    with running_topology(tmp_path_factory.mktemp("topology"), database, **settings) as topology:
        yield topology


@pytest.fixture
def topology(module_topology: Topology) -> Topology:
    module_topology.mode("convert")
    module_topology.make_whole()
    return module_topology
