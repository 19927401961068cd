"""The HTTP API of a pipeline whose last stage yields: events and bodies, errors before and after the first chunk, and lost workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from multiworld_serving.common.service.errors import SessionLostError, StageError
from multiworld_serving.common.service.predictor import Prediction, ServedModel
from multiworld_serving.models.stages.objects import OBJECT_ROWS, StreamStep
from multiworld_serving.models.stages.stage import PythonStage
from tests.unit.server.frontend_app import ColourPredictor, RunningFrontend, running_frontend
from tests.unit.stages.pipelines import load
from tests.waiting import until

PIPELINE = """
    import torch

    class Tell(Stage):
        def stream(self, request):
            if request.text == "endless":
                yield from iter(lambda: "again", None)
            for chunk in self.chunks((request.inputs.get("t") or request.body).decode()):
                if chunk == "raise":
                    raise RuntimeError("a secret")
                if chunk == "refuse":
                    raise InvalidInput("not this")
                yield chunk

        def chunks(self, text):
            return {
                "text": ["a", "b\\nc", ""], "bytes": [b"\\xff", b"x"], "json": [{"n": 1}, [2], "three"], "none": [],
                "tensor": [torch.ones(2)], "head": [Response("<p>", "text/html", 201, {"x-own": "1"}), "text"],
                "raise": ["raise"], "later": ["a", "raise"], "refuse": ["refuse"], "refuse later": ["a", "refuse"],
                "bad": ["a", object()], "bad json": ["a", torch.ones(1, dtype=torch.complex64)],
                "long": ["x" * 1000] * 9, "many": [str(each) for each in range(20)],
            }[text]

    class TellOn(Tell):
        def resume(self, request, sent):
            chunks = self.chunks(request.text)
            assert sent == chunks[: len(sent)], sent
            return chunks[len(sent) :]

    pipeline = [Tell]
    resuming = [TellOn]
"""
EVENTS = {"accept": "application/json, text/event-stream"}


class Workers:
    """A worker that computes the stage. A test can make it fail."""

    def __init__(self, folder: Path, attribute: str, name: str) -> None:
        self.pipeline = load(folder, PIPELINE, f"{name}.py").source._replace(attribute=attribute).load()
        self.steps: list[StreamStep] = []
        self.lost_before: dict[int, Exception | None] = {}
        """By the number of the step: what the leader says, or None for a worker that has started again."""
        self.start()

    def start(self) -> None:
        (kind,) = self.pipeline.elements
        assert isinstance(kind, type)
        self.stage = PythonStage(kind, "cpu", 8, is_first=True)

    def predict(self, rows: Tensor) -> Prediction:
        step, *_ = OBJECT_ROWS.decoded(rows)
        number = len(self.steps)
        self.steps.append(step)
        if number in self.lost_before:
            self.start()
            if (lost := self.lost_before.pop(number)) is not None:
                raise lost
        output = self.stage.compute(rows)
        return Prediction(output, "tell", "v1", 0, 0, 0, 1, ("w0", "w1"), route=("first", "last"))


class Predictor(ColourPredictor):
    routes: list[tuple[str, ...]]

    async def predict(self, rows: Tensor, **given: Any) -> Prediction:
        self.routes = [*getattr(self, "routes", []), given.get("route", ())]
        return await super().predict(rows, **given)


@pytest.fixture
def workers(tmp_path: Path, request: pytest.FixtureRequest) -> Workers:
    return Workers(tmp_path, getattr(request, "param", "pipeline"), f"streams{abs(hash(request.node.nodeid)) % 10**9}")


@pytest.fixture
async def frontend(workers: Workers) -> AsyncIterator[RunningFrontend]:
    model = ServedModel("tell", "v1", (), (), pipeline=workers.pipeline.describe())
    async with running_frontend(Predictor(answer=workers.predict, serves=model), model, timeout_s=600) as frontend:
        yield frontend


async def post(frontend: RunningFrontend, text: str, *, events: bool = False) -> httpx.Response:
    return await frontend.client.post("/predict/tell", content=text, headers=EVENTS if events else {})


def events_of(response: httpx.Response) -> list[tuple[str, str]]:
    """The name and the data of each server-sent event."""
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        fields = [line.partition(": ")[::2] for line in event.split("\n")]
        name = "".join(value for field, value in fields if field == "event")
        found.append((name, "\n".join(value for field, value in fields if field == "data")))
    return found


@pytest.mark.parametrize(
    ("text", "status", "content_type", "body"),
    [
        ("text", 200, "text/plain; charset=utf-8", b"ab\nc"),
        ("bytes", 200, "application/octet-stream", b"\xffx"),
        ("json", 200, "application/x-ndjson", b'{"n":1}\n[2]\nthree'),
        ("tensor", 200, "application/x-ndjson", b"[1.0,1.0]\n"),
        ("none", 200, "application/octet-stream", b""),
        ("head", 201, "text/html; charset=utf-8", b"<p>text"),
    ],
)
async def test_chunks_are_the_body(
    text: str, status: int, content_type: str, body: bytes, frontend: RunningFrontend, workers: Workers
) -> None:
    response = await post(frontend, text)
    assert (response.status_code, response.headers["content-type"], response.content) == (status, content_type, body)
    assert "content-length" not in response.headers
    assert (response.headers["x-path"], response.headers["x-model-version"]) == ("w0,w1", "v1")
    await until(lambda: workers.steps[-1].action == "close")
    assert [each.position for each in workers.steps[:-1]] == list(range(len(workers.steps) - 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text", [("", "a"), ("", "b\nc"), ("", "")]),
        ("json", [("", '{"n":1}'), ("", "[2]"), ("", "three")]),
        ("head", [("", "<p>"), ("", "text")]),
    ],
)
async def test_chunks_are_events_if_the_client_accepts_them(
    text: str, expected: list[tuple[str, str]], frontend: RunningFrontend
) -> None:
    response = await post(frontend, text, events=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events_of(response) == expected


async def test_steps_go_to_the_replica_of_the_last_stage_which_is_told_the_end(frontend: RunningFrontend) -> None:
    await post(frontend, "text")
    predictor = frontend.predictor
    assert isinstance(predictor, Predictor)
    await until(lambda: len(predictor.routes) == 5)
    assert predictor.routes == [(), *[("last",)] * 4]


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize(
    ("text", "status", "reason"), [("raise", 500, "stage_error"), ("refuse", 400, "invalid_input")]
)
async def test_an_error_before_the_first_chunk_has_a_status(
    text: str, status: int, reason: str, events: bool, frontend: RunningFrontend, workers: Workers
) -> None:
    if text == "raise":  # the leader has sent it to several workers
        workers.lost_before[0] = StageError("the stage raised")
    response = await post(frontend, text, events=events)
    assert (response.status_code, response.json()["reason"]) == (status, reason)


@pytest.mark.parametrize(
    ("text", "reason", "says"),
    [
        ("later", "stage_error", "the stage Tell raised RuntimeError"),
        ("refuse later", "invalid_input", "not this"),
        ("bad", "stage_error", "the stage Tell raised ObjectError"),
        ("bad json", "stage_error", "a chunk cannot be sent"),
    ],
)
async def test_a_later_error_ends_events_with_an_event_and_a_body_without_its_end(
    text: str, reason: str, says: str, frontend: RunningFrontend
) -> None:
    response = await post(frontend, text, events=True)
    (first, (name, data)) = events_of(response)
    error = json.loads(data)
    assert (first, name, error["reason"]) == (("", "a"), "error", reason)
    assert says in error["error"]
    assert "secret" not in data
    assert error["request_id"] == response.headers["x-request-id"]
    sent = await body_messages(frontend, text)
    assert [each["body"] for each in sent] == [b"a"]
    assert sent[-1]["more_body"]


async def body_messages(frontend: RunningFrontend, text: str) -> list[Any]:
    """What the application sends for the body of a response. The HTTP server closes the connection if the last one announces more."""
    scope = {"type": "http", "method": "POST", "path": "/predict/tell", "headers": [], "query_string": b""}
    received = [{"type": "http.request", "body": text.encode(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await frontend.app(scope, receive, send)
    return [each for each in sent if each["type"] == "http.response.body"]


async def test_bytes_that_are_no_text_are_no_event(frontend: RunningFrontend, workers: Workers) -> None:
    response = await post(frontend, "bytes", events=True)
    assert (response.status_code, response.json()["reason"]) == (500, "stage_error")
    assert "utf-8" in response.json()["error"]
    await until(lambda: workers.steps[-1].action == "close")


LOSSES = [SessionLostError("a replica that kept the session is gone"), None]
"""Of the leader, if the worker is gone; None: the worker does not have the stream."""


@pytest.mark.parametrize("lost", LOSSES)
async def test_a_worker_that_is_lost_after_a_chunk_ends_the_stream_with_an_error(
    lost: Exception | None, frontend: RunningFrontend, workers: Workers
) -> None:
    workers.lost_before[2] = lost
    response = await post(frontend, "many", events=True)
    *chunks, (name, data) = events_of(response)
    assert [data for _, data in chunks] == ["0", "1"]
    assert (name, json.loads(data)["reason"]) == ("error", "session_lost")


@pytest.mark.parametrize("lost", LOSSES)
@pytest.mark.parametrize("workers", ["resuming"], indirect=True)
async def test_a_stage_that_can_resume_continues_elsewhere_without_a_chunk_lost_or_doubled(
    lost: Exception | None, frontend: RunningFrontend, workers: Workers
) -> None:
    workers.lost_before |= {2: lost, 3: lost, 9: lost} if lost is None else {2: lost, 9: lost}
    assert (await post(frontend, "many")).text == "".join(map(str, range(20)))
    assert not workers.lost_before
    assert {len(each.sent) for each in workers.steps if each.action == "open"} > {0, 2}


@pytest.mark.parametrize("workers", ["resuming"], indirect=True)
async def test_the_memory_for_chunks_that_a_stage_may_need_again_is_limited(workers: Workers) -> None:
    model = ServedModel("tell", "v1", (), (), pipeline=workers.pipeline.describe())
    predictor = Predictor(answer=workers.predict, serves=model)
    async with running_frontend(predictor, model, max_body_bytes=4000, max_held_bytes=4000) as frontend:
        assert frontend.app._groups is not None
        (group,) = frontend.app._groups
        gate = group.described().gate
        gate.held_bytes = 1  # of another request
        *chunks, (_, data) = events_of(await post(frontend, "long", events=True))
        assert (len(chunks), json.loads(data)["reason"]) == (3, "overloaded")
        assert gate.held_bytes == 1


@pytest.mark.parametrize("waits", [False, True])
async def test_a_client_that_disconnects_ends_the_stream_at_its_worker(
    waits: bool, frontend: RunningFrontend, workers: Workers
) -> None:
    predictor = frontend.predictor
    predictor.proceed = proceed = asyncio.Event()
    proceed.set()
    received = [{"type": "http.request", "body": b"endless", "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Any:
        if received:
            return received.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)  # as a network does
        if message.get("body"):
            gone.set()
            if waits:  # the second step does
                proceed.clear()

    scope = {"type": "http", "method": "POST", "path": "/predict/tell", "headers": [], "query_string": b""}
    async with asyncio.timeout(60):
        await frontend.app(scope, receive, send)
    proceed.set()
    await until(lambda: workers.steps[-1].action == "close")
    assert not workers.stage._stage._open
    assert predictor.cancelled == waits


async def test_requests_of_the_open_inference_protocol_get_the_whole_response(
    frontend: RunningFrontend, workers: Workers
) -> None:
    inputs = [{"name": "t", "datatype": "BYTES", "shape": [2], "data": ["text", "text"]}]
    response = await frontend.client.post("/v2/models/tell/infer", json={"inputs": inputs})
    (output,) = response.json()["outputs"]
    assert output["data"] == ["ab\nc", "ab\nc"]
