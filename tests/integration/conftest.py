"""Fixtures of the integration tests."""

from collections.abc import Iterator

import pytest

from tests.integration.crew import Crew


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Gone with the module: other tests count threads and ports."""
    crew = Crew()
    yield crew
    crew.close()
