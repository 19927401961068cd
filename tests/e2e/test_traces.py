"""Traces of a whole service as a collector receives them by OTLP over HTTP: the spans of a request in the client's trace. And its edges."""

import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.http_server import QuietHandler, serving
from tests.services import says, small_service
from tests.waiting import wait_until

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status


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
                assert all((len(span.trace_id), len(span.span_id)) == (16, 8) for span in scope.spans)
                self.services |= {span.span_id: facts["service.name"] for span in scope.spans}
                self.spans += scope.spans

    def trace(self, trace_id: str) -> list[Any]:
        """The spans of a trace, once that of the request has arrived, which is the last one."""

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
            if (self.path, self.headers["content-type"]) != ("/v1/traces", "application/x-protobuf"):
                self.answer(404)
                return
            made.take(body)
            made.responsive.wait()
            self.answer(200, ExportTraceServiceResponse().SerializeToString())

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


def ask(service: LocalService, traceparent: str | None, *more: tuple[bytes, bytes]) -> httpx.Response:
    headers = [(b"content-type", b"image/jpeg"), *more]
    if traceparent is not None:
        headers.append((b"traceparent", traceparent.encode("latin-1")))
    return httpx.post(f"{service.url}/predict", content=photo(), headers=headers, timeout=120)


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
    (request,) = [span for span in collector.trace(trace_id) if span.name == "POST /predict"]
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


def tree(spans: list[Any], parent: Any) -> list[Any]:
    """[name, children] of the spans below a span, by their beginning. Each lies within its parent."""
    below = sorted((span for span in spans if span.parent_span_id == parent.span_id), key=by_time)
    for span in below:
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano, span.name
        assert span.end_time_unix_nano <= parent.end_time_unix_nano, span.name
    return [[span.name, tree(spans, span)] if tree(spans, span) else span.name for span in below]


def by_time(span: Any) -> tuple[int, int]:
    return span.start_time_unix_nano, span.end_time_unix_nano


def test_trace_has_spans_of_queue_batch_and_each_stage_with_its_worker(
    service: LocalService, collector: Collector
) -> None:
    trace_id, client_span, traceparent = new_trace()
    assert ask(service, traceparent).status_code == 200
    spans = collector.trace(trace_id)
    (request,) = [span for span in spans if span.parent_span_id.hex() == client_span]
    stages = ["stage 0", "stage 1"]
    assert tree(spans, request) == ["queue", ["batch", stages]]
    for span in (span for span in spans if span.name in stages):
        stage, said = service.status()["stages"][int(span.name[-1])], facts(span)
        at = stage["replicas"][0]
        assert said["multiworld.stage_name"] == stage["blocks"][0]
        assert (said["multiworld.worker"], said["multiworld.kind"]) == (at["worker"], "first")
        assert said["multiworld.replica"].startswith(f"{at['world']}#{at['generation']}@")
        assert 0 < said["multiworld.compute_s"] <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_trace_and_log_show_that_a_request_was_rerouted(service: LocalService, collector: Collector) -> None:
    trace_id, _, traceparent = new_trace()
    lost = service.status()["stages"][1]["replicas"][0]
    os.kill(lost["pid"], signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, service, traceparent, (b"x-request-id", b"rerouted"))
        wait_until(lambda: service.status()["stages"][1]["replicas"][0]["in_flight"] == 1)
        os.kill(lost["pid"], signal.SIGKILL)
        assert asked.result().headers["x-attempts"] == "2"
    failed, repeated = sorted((span for span in collector.trace(trace_id) if span.name == "stage 1"), key=by_time)
    assert (facts(failed)["multiworld.worker"], failed.status.code) == (lost["worker"], Status.STATUS_CODE_ERROR)
    assert failed.status.message.startswith("the worker was lost")
    assert (facts(repeated)["multiworld.kind"], repeated.status.code) == ("reroute", Status.STATUS_CODE_UNSET)
    assert failed.end_time_unix_nano <= repeated.start_time_unix_nano
    line = service.wait_for(lambda line: line.message == "request", 60)
    assert (line["request_id"], line["attempts"], line["status"]) == ("rerouted", 2, 200)
    assert says(service, " rerouted to ")["request_id"] == "rerouted"


def test_trace_shows_why_a_request_was_rejected(service: LocalService, collector: Collector) -> None:
    trace_id, _, traceparent = new_trace()
    worker = service.status()["stages"][1]["replicas"][0]
    os.kill(worker["pid"], signal.SIGSTOP)
    refused = ask(service, traceparent, (b"x-request-timeout-s", b"0.5"))
    os.kill(worker["pid"], signal.SIGCONT)
    assert refused.status_code == 504
    spans = {span.name: span for span in collector.trace(trace_id)}
    assert spans["stage 0"].status.code == Status.STATUS_CODE_UNSET
    assert spans["stage 1"].status.message == "no result"
    assert spans["POST /predict"].status.message == "deadline"


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
