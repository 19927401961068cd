"""Retries of the Python client, against a server with scripted answers."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from multiworld_client import (
    AccessDeniedError,
    AsyncClient,
    Client,
    ClientError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    Prediction,
    ProtocolError,
    RefusedError,
    Retries,
    ServerFailedError,
    UnavailableError,
    UnreachableError,
)
from multiworld_client.retries import RemainingTime
from tests.http_server import QuietHandler, serving

JPEG = b"\xff\xd8\xff"
FAST_RETRIES = Retries(max_tries=4, first_pause_s=0.01, max_pause_s=0.02)
ANSWER = {"predictions": [{"label": "cat", "class_id": 3, "probability": 0.5}], "model": "m", "version": "v"}
GOOD = (200, {"X-Model-Version": "a%20b", "X-Path": "s0.r1,s1.r0", "X-Attempts": "2"}, json.dumps(ANSWER))


def rejection(status: int, reason: str, retry_after_s: int | None = None) -> tuple[int, dict[str, str], str]:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return status, headers, json.dumps({"error": "no", "reason": reason})


@dataclass
class Script:
    """Answers in order; the last one is repeated. None closes the connection."""

    answers: list[tuple[int, dict[str, str], str] | None] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    readiness: int = 200
    url: str = ""


@contextlib.contextmanager
def served() -> Iterator[Script]:
    """A server with its script."""
    made = Script()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(made.readiness)

        def do_POST(self) -> None:
            made.connections.add(self.client_address)
            self.rfile.read(int(self.headers["content-length"]))
            made.requests.append(dict(self.headers))
            made.at_s.append(time.monotonic())
            answer = made.answers.pop(0) if len(made.answers) > 1 else made.answers[0]
            if answer is None:
                self.close_connection = True
                return
            status, headers, body = answer
            self.send_response(status)
            usual = {"X-Request-Id": self.headers["X-Request-Id"], "Content-Length": str(len(body))}
            for name, text in {**usual, **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body.encode())
            if headers.get("Connection") == "close":
                self.close_connection = True

    with serving(Handler) as made.url:
        yield made


@pytest.fixture
def script() -> Iterator[Script]:
    with served() as made:
        yield made


@pytest.fixture
def other() -> Iterator[Script]:
    with served() as made:
        yield made


Predict = Callable[..., Any]


async def predict_sync(*scripts: Script, **options: Any) -> Prediction:
    with Client([script.url for script in scripts], **{"retries": FAST_RETRIES, **options}) as client:
        return client.predict(JPEG, request_id="mine")


async def predict_async(*scripts: Script, **options: Any) -> Prediction:
    async with AsyncClient([script.url for script in scripts], **{"retries": FAST_RETRIES, **options}) as client:
        return await client.predict(JPEG, request_id="mine")


both = pytest.mark.parametrize("predict", [predict_sync, predict_async])


@both
async def test_request_is_retried_when_the_error_is_temporary(script: Script, predict: Predict) -> None:
    script.answers = [rejection(429, "overloaded"), None, rejection(503, "not_ready"), GOOD]
    prediction = await predict(script)
    assert (prediction.label, prediction.probability, prediction.tries) == ("cat", 0.5, 4)
    assert (prediction.version, prediction.path, prediction.attempts) == ("a b", ("s0.r1", "s1.r0"), 2)
    assert {request["X-Request-Id"] for request in script.requests} == {"mine"}
    left = [float(request["X-Request-Timeout-S"]) for request in script.requests]
    assert left == sorted(left, reverse=True)
    assert left[0] <= 30


@both
async def test_retry_waits_as_long_as_retry_after_says(script: Script, predict: Predict) -> None:
    script.answers = [rejection(503, "not_ready", retry_after_s=1), GOOD]
    assert (await predict(script)).tries == 2
    assert script.at_s[1] - script.at_s[0] >= 1.0


@both
async def test_error_is_raised_at_once_when_retry_after_exceeds_the_deadline(script: Script, predict: Predict) -> None:
    script.answers = [rejection(429, "overloaded", retry_after_s=3600)]
    began_s = time.monotonic()
    with pytest.raises(OverloadedError) as raised:
        await predict(script, timeout_s=30.0)
    assert raised.value.retry_after_s == 3600
    assert time.monotonic() - began_s < 20
    assert len(script.requests) == 1


@both
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (rejection(400, "invalid_inference_request"), InvalidRequestError),
        (rejection(401, "unauthenticated"), AccessDeniedError),
        (rejection(404, "unknown_model"), InvalidRequestError),
        (rejection(500, "poison"), ServerFailedError),
        (rejection(504, "deadline"), DeadlineError),
        ((200, {}, "hello"), ProtocolError),
        ((200, {}, "[" * 60_000), ProtocolError),
        ((200, {}, json.dumps({**ANSWER, "predictions": 7})), ProtocolError),
        ((302, {"Location": "/elsewhere"}, ""), RefusedError),
        (rejection(503, "draining"), UnavailableError),
        (None, UnreachableError),
    ],
)
async def test_error_is_raised_after_max_tries_when_it_is_temporary_and_at_once_otherwise(
    script: Script, predict: Predict, answer: tuple[int, dict[str, str], str] | None, error: type[ClientError]
) -> None:
    script.answers = [answer]
    with pytest.raises(error):
        await predict(script)
    is_temporary = error in (UnavailableError, UnreachableError)
    assert len(script.requests) == (FAST_RETRIES.max_tries if is_temporary else 1)


@both
async def test_deadline_error_is_raised_when_the_server_stalls(script: Script, predict: Predict) -> None:
    script.answers = [(200, {"Content-Length": "5"}, "")]  # announces a body that never arrives
    with pytest.raises(DeadlineError):
        await predict(script, timeout_s=0.3)


CUT_OFF = (200, {"Content-Length": "500", "Connection": "close"}, json.dumps(ANSWER))
"""The beginning of an answer of a server that dies while it sends it."""


@both
@pytest.mark.parametrize(
    "failure",
    [None, CUT_OFF, rejection(503, "not_ready", 60), rejection(429, "overloaded", 60)],
    ids=["connection lost", "answer cut off", "503", "429"],
)
async def test_request_goes_to_the_next_url_at_once_when_the_first_fails(
    script: Script, other: Script, predict: Predict, failure: tuple[int, dict[str, str], str] | None
) -> None:
    script.answers, other.answers = [failure], [GOOD]
    prediction = await predict(script, other, retries=Retries(first_pause_s=20.0, max_pause_s=20.0))
    assert (prediction.label, prediction.tries) == ("cat", 2)
    assert other.at_s[0] - script.at_s[0] < 10
    assert script.requests[0]["X-Request-Id"] == other.requests[0]["X-Request-Id"]


def test_calls_stay_at_one_url_and_its_connection_until_it_fails(script: Script, other: Script) -> None:
    script.answers = [GOOD, GOOD, None, GOOD]
    other.answers = [GOOD, GOOD, None, GOOD]
    with Client((script.url, other.url), retries=FAST_RETRIES) as client:
        tries = [client.predict(JPEG).tries for _ in range(6)]
    assert tries == [1, 1, 2, 1, 2, 1]
    assert (len(script.requests), len(other.requests)) == (5, 3)
    assert (len(script.connections), len(other.connections)) == (2, 1)


def test_connecting_to_one_of_several_urls_leaves_time_for_the_others() -> None:
    deadline_s = time.monotonic() + 4.0
    assert RemainingTime(deadline_s + 60.0).get("connect") > 30.0
    assert RemainingTime(deadline_s, others=True).get("connect") <= 2.0
    assert RemainingTime(deadline_s + 60.0, others=True).get("connect") <= 3.0
    assert RemainingTime(deadline_s + 60.0, others=True).get("read") > 30.0
