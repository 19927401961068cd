"""Hostile inputs against a running service: each gets its response, and concurrent requests are not affected."""

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService
from tests.e2e.hostile_connections import HOSTILE_CONNECTIONS, ask, attack
from tests.e2e.hostile_requests import BODY_LIMIT, HOSTILE_REQUESTS
from tests.services import small_service

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def service() -> Iterator[LocalService]:
    with small_service(stages=2, max_body_bytes=BODY_LIMIT, timeout_s=10) as running:
        yield running
        assert running.stop() == 0


def test_hostile_inputs_get_their_responses_and_do_not_affect_other_requests(service: LocalService) -> None:
    parts = urlsplit(service.url)
    host, port = str(parts.hostname), int(parts.port or 0)
    wrong = []
    with run_load(service.url, served_requests(service.url, photos(4)), clients=2) as load:
        for request in HOSTILE_REQUESTS:
            if (found := asyncio.run(ask(host, port, request))) != request.answer:
                wrong.append(f"{request.name}: {found}, not {request.answer}")
        for hostile in HOSTILE_CONNECTIONS:
            ends = asyncio.run(attack(host, port, hostile))
            if not ends.keys() <= set(hostile.answer.split(" or ")):
                wrong.append(f"{hostile.name}: {ends}, not {hostile.answer}")
    assert not wrong, "\n".join(wrong)
    assert not [line.message for line in service.lines if "Traceback" in str(line.fields)]
    assert len(load.samples) > len(HOSTILE_REQUESTS)
    assert not load.failed, load.failed[:3]
