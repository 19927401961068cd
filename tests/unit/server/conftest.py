"""Frontends without a network."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.server.frontend_app import MAX_BODY_BYTES, RunningFrontend, running_frontend


@pytest.fixture
async def frontend() -> AsyncIterator[RunningFrontend]:
    """A frontend of the color model, with limits that requests of tests exceed quickly."""
    async with running_frontend(max_body_bytes=MAX_BODY_BYTES, max_image_pixels=1_000_000) as running:
        yield running
