"""Tests with a Docker Engine: `make containers`. They are skipped without the option, because they take minutes and need an image."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.deployment import Deployment
from tests.containers.project import ContainerError, docker

REASON = "needs a Docker Engine, an image and minutes: run `make containers`"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--containers", action="store_true", help="run the tests on the Docker Engine that runs here")
    parser.addoption("--image", help="image to test, instead of one that is built now")


@pytest.fixture(scope="session")
def compose_command() -> None:
    """`docker compose` is installed, with or without an engine."""
    try:
        docker("compose", "version")
    except ContainerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def engine(compose_command: None, pytestconfig: pytest.Config) -> None:
    """A running Docker Engine. A missing engine is a failure if the tests were requested."""
    if not pytestconfig.getoption("--containers", default=False):
        pytest.skip(REASON)
    try:
        docker("info")
    except ContainerError as error:
        pytest.fail(f"--containers was given, and there is no Docker Engine: {error}", pytrace=False)


@pytest.fixture(scope="session")
def deployment(
    engine: None, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """docker-compose.yml, running and ready. Tests that share it leave every replica ready. It is removed completely at the end."""
    folder: Path = tmp_path_factory.mktemp("deployment")
    with Deployment(folder, pytestconfig.getoption("--image")) as running:
        yield running
    assert running.remains() == [], "docker compose down leaves nothing"
