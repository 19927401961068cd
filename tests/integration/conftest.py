"""Fixtures of the integration tests."""

from collections.abc import Iterator

import pytest

from tests.integration.crew import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()
