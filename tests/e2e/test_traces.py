"""Traces of a whole service as a collector receives them by OTLP over HTTP: a span of each request in the client's trace. And its edges."""

import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.http_server import QuietHandler, serving
from tests.services import small_service
from tests.waiting import wait_until

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """Receives spans and stores them."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    services: dict[bytes, str] = field(default_factory=dict)
    """By span id."""
    responsive: threading.Event = field(default_factory=threading.Event)

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            facts = {pair.key: pair.value.string_value for pair in group.resource.attributes}
            for scope in group.scope_spans:
                self.services |= {span.span_id: facts["service.name"] for span in scope.spans}
                self.spans += scope.spans

    def trace(self, trace_id: str) -> list[Any]:
        """The spans of a trace, once that of the request has arrived."""

        def found() -> list[Any]:
            return [span for span in list(self.spans) if span.trace_id.hex() == trace_id]

        wait_until(lambda: "POST /predict" in [span.name for span in found()])
        return found()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.take(body)
            made.responsive.wait()
            self.answer(200)

    made.responsive.set()
    with serving(Handler) as url:
        made.url = f"{url}/v1/traces"
        yield made
        made.responsive.set()


@pytest.fixture(scope="module", autouse=True)
def spans_sent_often() -> Iterator[None]:
    """OpenTelemetry's default interval of 5 s would dominate the duration of these tests."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield


@pytest.fixture(scope="module")
def service(collector: Collector) -> Iterator[LocalService]:
    with small_service(stages=2, otlp_endpoint=collector.url, trace_ratio=0) as running:
        yield running


def ask(service: LocalService, traceparent: str | None) -> httpx.Response:
    headers = [(b"content-type", b"image/jpeg")]
    if traceparent is not None:
        headers.append((b"traceparent", traceparent.encode("latin-1")))
    return httpx.post(f"{service.url}/predict", content=photo(), headers=headers, timeout=60)


def test_no_tensor_passes_a_leader(service: LocalService) -> None:
    """Here, because this service has two stages, and no test injects faults into it. Relaying: see tests/chaos/test_faults.py."""
    fetched = service.metric("multiworld_edge_fetches_total", outcome="fetched")
    for _ in range(6):
        assert ask(service, None).status_code == 200
    assert service.metric("multiworld_relayed_bytes_total") == 0
    assert service.metric("multiworld_edge_fetches_total", outcome="fetched") == fetched + 6
    # The frontend reads the last worker, and the first worker reads the frontend.
    assert service.metric("multiworld_edges_open", direction="received") == 1
    assert service.metric("multiworld_edges_open", direction="sent") == 1
    assert service.metric("multiworld_edge_bytes_total", direction="received", transport="shared_memory") > 0
    assert service.metric("multiworld_edge_bytes_total", direction="received", transport="tcp") == 0


def new_trace() -> tuple[str, str, str]:
    """A trace, a client's span in it, and the header that propagates it."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


def facts(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def test_client_trace_has_a_span_of_the_request_with_its_attributes(
    service: LocalService, collector: Collector
) -> None:
    trace_id, client_span, traceparent = new_trace()
    before_ns = time.time_ns()
    answer = ask(service, traceparent)
    assert answer.status_code == 200
    (request,) = collector.trace(trace_id)
    assert collector.services[request.span_id] == "multiworld-frontend"
    assert request.parent_span_id.hex() == client_span
    said, took_s = facts(request), (request.end_time_unix_nano - request.start_time_unix_nano) / 1e9
    assert said["http.response.status_code"] == 200
    assert said["multiworld.request_id"] == answer.headers["x-request-id"]
    assert (said["multiworld.model"], said["multiworld.version"]) == (answer.json()["model"], "random:0")
    assert said["multiworld.path"] == answer.headers["x-path"]
    assert said["multiworld.attempts"] == 1
    phases = [said[f"multiworld.{phase}_s"] for phase in ("decode", "queue", "compute", "transfer")]
    assert all(seconds >= 0 for seconds in phases)
    assert 0 < sum(phases) <= took_s
    assert before_ns <= request.start_time_unix_nano <= time.time_ns()


def test_unsampled_requests_are_not_traced(service: LocalService, collector: Collector) -> None:
    before = {span.trace_id for span in collector.spans}
    unsampled = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
    for traceparent in (None, unsampled, "00-0-0-01", "x" * 5000, f"00-{'0' * 32}-{'0' * 16}-01", "00-\xff-01"):
        assert ask(service, traceparent).status_code == 200
    trace_id, _, traceparent = new_trace()
    ask(service, traceparent)
    collector.trace(trace_id)
    assert {span.trace_id for span in collector.spans} - before == {bytes.fromhex(trace_id)}


def test_unresponsive_collector_delays_neither_answers_nor_shutdown(
    service: LocalService, collector: Collector
) -> None:
    """The last test of this file, because it stops the service."""
    collector.responsive.clear()
    trace_id, _, traceparent = new_trace()
    assert ask(service, traceparent).status_code == 200
    collector.trace(trace_id)  # the collector has got it and does not respond
    for _ in range(5):
        assert ask(service, new_trace()[2]).status_code == 200
    assert service.stop() == 0
