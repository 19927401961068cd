"""Hostile inputs against a running service: each gets its documented answer, and concurrent requests are not affected."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hostile.connections import hostile_connections
from benchmarks.hostile.requests import HOSTILE_REQUESTS
from benchmarks.hostile_inputs import SETTINGS, run
from multiworld_serving.testing.local_service import LocalService

pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hostile-inputs.md"


@pytest.fixture
def service() -> Iterator[LocalService]:
    # Concurrent requests have as long as a client that sends one byte at a time; a slow machine needs it.
    with LocalService(max_connections=100, **SETTINGS | {"timeout_s": 20.0}) as running:
        yield running
        assert running.stop() == 0


def test_hostile_inputs_get_their_answers_and_do_not_affect_other_requests(service: LocalService) -> None:
    rows = run(service, idle=300, slow=20)
    assert not [f"{row.name}: {row.got}, not {row.expected}" for row in rows if not row.right]
    assert sum(row.neighbours for row in rows) > len(rows)
    assert not [line.message for line in service.lines if "Traceback" in str(line.fields)]
    text = service.metric("multiworld_http_connections_closed_total", reason="evicted")
    assert text >= 100


def test_every_hostile_input_is_documented_with_its_answer() -> None:
    written = {
        (re.sub(r"^[\d,]+ (?=[a-z])", "", cells[0]), cells[1])
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] != "input"
    }
    asked = {(request.name, request.answer) for request in HOSTILE_REQUESTS}
    asked |= {(hostile.name, hostile.answer) for hostile in hostile_connections(idle=1, slow=1)}
    assert {(re.sub(r"^[\d,]+ (?=[a-z])", "", name), answer) for name, answer in asked} == written
