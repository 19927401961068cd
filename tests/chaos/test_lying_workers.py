"""A worker sends false results beside a healthy worker: every answer is correct, and no request fails."""

import contextlib
from collections.abc import Iterator

import pytest

from multiworld_serving.testing.load.clients import ReferenceRequest, count_indistinguishable, record_reference_answers
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import TOKEN, assert_nothing_lost, external_worker, run_load
from tests.chaos.lies import LIES
from tests.services import service_for_workers

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0
PATIENCE_S = 30.0
"""A slow machine must not break the healthy worker."""
SAMPLE = ("size-zero", "huge", "dtype-of-the-same-size", "fewer-columns")
"""A sample of the lies; tests/integration/test_links.py tests each."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lie" in metafunc.fixturenames:
        metafunc.parametrize("lie", LIES if metafunc.config.getoption("--full", default=False) else SAMPLE)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    """One stage, whose results are the answers, with one healthy worker and one free slot."""
    token_file = tmp_path_factory.mktemp("access") / "token"
    token_file.write_text(TOKEN)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(
            service_for_workers(
                token_file,
                replicas=2,
                heartbeat_timeout_s=PATIENCE_S,
                hang_timeout_s=PATIENCE_S,
                edges="relay",  # the results that go through the leader; tests/unit/edges has lies on edges
            )
        )
        patience = ("--heartbeat-timeout-s", str(PATIENCE_S), "--edges", "relay")
        stack.enter_context(external_worker(running.join_address, name="sound", options=patience))
        running.wait_for(lambda line: line["worker"] == "sound" and "->ready" in line.message, WAIT_S)
        yield running


@pytest.fixture(scope="module")
def questions(service: LocalService) -> list[ReferenceRequest]:
    asked = record_reference_answers(service.url, photos(4))
    assert not count_indistinguishable(asked)
    return asked


def test_every_answer_is_correct_when_a_worker_lies(
    service: LocalService, questions: list[ReferenceRequest], lie: str
) -> None:
    name, seen = f"liar-{lie}", len(service.lines)
    with (
        run_load(service, questions=questions) as load,
        external_worker(service.join_address, name=name, fault=lie),
    ):
        service.wait_for(lambda line: line["worker"] == name and "->ready" in line.message, WAIT_S, after=seen)
        ended = service.wait_for(lambda line: line["worker"] == name and "->broken" in line.message, WAIT_S, after=seen)
        assert ended["cause"] == "error"
    assert_nothing_lost(service, load)
