"""When the Python client asks again: against a server that answers by a script."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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

JPEG = b"\xff\xd8\xff"
SOON = Retries(most=4, first_pause_s=0.01, longest_pause_s=0.02)
ANSWER = {"predictions": [{"label": "cat", "class_id": 3, "probability": 0.5}], "model": "m", "version": "v"}
GOOD = (200, {"X-Model-Version": "a%20b", "X-Path": "s0.r1,s1.r0;s0.r0,s1.r0", "X-Attempts": "2"}, json.dumps(ANSWER))


def refusal(status: int, reason: str, **headers: str) -> tuple[int, dict[str, str], str]:
    return (
        status,
        {name.replace("_", "-"): text for name, text in headers.items()},
        json.dumps({"error": "no", "reason": reason}),
    )


@dataclass
class Script:
    """What is answered, in order; the last one again and again. None hangs up."""

    answers: list[tuple[int, dict[str, str], str] | None] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            made.asked.append(dict(self.headers))
            made.at_s.append(time.monotonic())
            answer = made.answers.pop(0) if len(made.answers) > 1 else made.answers[0]
            if answer is None:
                self.close_connection = True
                self.connection.close()
                return
            status, headers, body = answer
            self.send_response(status)
            usual = {"X-Request-Id": self.headers["X-Request-Id"], "Content-Length": str(len(body))}
            for name, text in {**usual, **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """We hung up ourselves."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield made
        server.shutdown()
        thread.join()


Ask = Callable[..., Any]


async def ask_sync(script: Script, **options: Any) -> Prediction:
    with Client(script.url, **{"retries": SOON, **options}) as client:
        return client.predict(JPEG, request_id="mine")


async def ask_async(script: Script, **options: Any) -> Prediction:
    async with AsyncClient(script.url, **{"retries": SOON, **options}) as client:
        return await client.predict(JPEG, request_id="mine")


both = pytest.mark.parametrize("ask", [ask_sync, ask_async])


@both
async def test_what_passes_by_itself_is_asked_again(script: Script, ask: Ask) -> None:
    script.answers = [refusal(429, "overloaded"), None, refusal(503, "not_ready"), GOOD]
    prediction = await ask(script)
    assert (prediction.label, prediction.probability, prediction.tries) == ("cat", 0.5, 4)
    assert (prediction.version, prediction.path, prediction.attempts) == ("a b", ("s0.r1", "s1.r0"), 2)
    assert {asked["X-Request-Id"] for asked in script.asked} == {"mine"}
    left = [float(asked["X-Request-Timeout-S"]) for asked in script.asked]
    assert left == sorted(left, reverse=True)
    assert left[0] <= 30


@both
async def test_retry_after_is_respected(script: Script, ask: Ask) -> None:
    script.answers = [refusal(503, "not_ready", Retry_After="1"), GOOD]
    assert (await ask(script)).tries == 2
    assert script.at_s[1] - script.at_s[0] >= 1.0


@both
async def test_no_wait_that_leads_beyond_the_deadline(script: Script, ask: Ask) -> None:
    script.answers = [refusal(429, "overloaded", Retry_After="3600")]
    began_s = time.monotonic()
    with pytest.raises(OverloadedError) as raised:
        await ask(script, timeout_s=30.0)
    assert raised.value.retry_after_s == 3600
    assert time.monotonic() - began_s < 20
    assert len(script.asked) == 1


@both
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refusal(400, "invalid_inference_request"), InvalidRequestError),
        (refusal(401, "unauthenticated"), AccessDeniedError),
        (refusal(403, "forbidden"), AccessDeniedError),
        (refusal(404, "unknown_model"), InvalidRequestError),
        (refusal(500, "poison"), ServerFailedError),
        (refusal(504, "deadline"), DeadlineError),
        ((418, {}, "a teapot"), InvalidRequestError),
        ((200, {}, "hello"), ProtocolError),
        ((200, {}, "{}"), ProtocolError),
        ((200, {}, json.dumps({**ANSWER, "predictions": 7})), ProtocolError),
        ((302, {"Location": "/elsewhere"}, ""), RefusedError),
    ],
)
async def test_what_stays_is_raised_at_once(
    script: Script, ask: Ask, answer: tuple[int, dict[str, str], str], error: type[ClientError]
) -> None:
    script.answers = [answer]
    with pytest.raises(error):
        await ask(script)
    assert len(script.asked) == 1


@both
@pytest.mark.parametrize(("answer", "error"), [(refusal(503, "draining"), UnavailableError), (None, UnreachableError)])
async def test_tries_have_an_end(
    script: Script, ask: Ask, answer: tuple[int, dict[str, str], str] | None, error: type[ClientError]
) -> None:
    script.answers = [answer]
    with pytest.raises(error):
        await ask(script)
    assert len(script.asked) == SOON.most


@both
async def test_silence_is_a_deadline_error(script: Script, ask: Ask) -> None:
    script.answers = [(200, {"Content-Length": "5"}, "")]  # promises what never comes
    with pytest.raises(DeadlineError):
        await ask(script, timeout_s=0.3)


@pytest.mark.parametrize("error", [UnavailableError(503, "draining", "no", "id", 2.0), DeadlineError("late")])
def test_errors_survive_pickling(error: ClientError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_pauses_grow_to_a_limit() -> None:
    retries = Retries(first_pause_s=0.1, longest_pause_s=1.0)
    pauses = [retries.pause_s(failures) for failures in range(1, 200)]
    assert 0.05 <= pauses[0] <= 0.1
    assert all(0.5 <= pause <= 1.0 for pause in pauses[5:])
