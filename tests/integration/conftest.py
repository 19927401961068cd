"""Fixtures for the integration tests."""

from collections.abc import Iterator

import pytest

from tests.integration.crew import Crew


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Module-scoped, because other tests count threads and ports."""
    crew = Crew()
    yield crew
    crew.close()
