"""Fixtures of the end-to-end tests: one set of services for all of them, and tiny models on its Hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devhub_fixture import hub_client, running_devhub
from e2e_models import MODELS, write_model
from e2e_services import ADA, ADA_READS, BEN, Services, running_services

__all__ = ["hub_client"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the sound models, by name."""
    torch.set_num_threads(1)  # the conversions run beside the tests
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(name, folder / name) for name in MODELS}


@pytest.fixture(scope="session")
def all_services(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Services]:
    """ada has two tokens, one that may only read, and the sound models as public repos; ben is somebody else."""
    folder = tmp_path_factory.mktemp("services")
    with running_devhub(folder / "hub", "--faults") as hub:
        # Users are added behind its back, so that no token is on a command line.
        hub.storage.add_user("ada", ADA)
        hub.storage.add_user("ada", ADA_READS, role="read")
        hub.storage.add_user("ben", BEN)
        with running_services(folder, hub) as services:
            for name, model in models.items():
                services.put_model(f"ada/{name}", model)
            yield services


@pytest.fixture
def services(resting_services: Services) -> Services:
    """With a worker at work."""
    resting_services.running_worker()
    return resting_services


@pytest.fixture
def resting_services(all_services: Services, hub_client: None) -> Iterator[Services]:
    """Without the faults that an earlier test asked the Hub for, and perhaps without a worker."""
    all_services.hub.clear_faults()
    yield all_services
    all_services.hub.clear_faults()
