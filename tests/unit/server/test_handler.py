"""Handlers: the user's code between the body of /predict and the model."""

import asyncio
import errno
import json
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.service.errors import HandlerError, OverloadedError
from multiworld_serving.server.frontend.api.handler import handler_processes, program
from multiworld_serving.server.frontend.api.handler.handler_processes import HandlerProcesses
from tests.documents import ROOT
from tests.unit.server.frontend_app import running_frontend
from tests.unit.server.text_model import INFER, TEXT, tensors, text_predictor
from tests.waiting import until

GUIDE = (ROOT / "docs/models.md").read_text()
FAULTY = """
import os
import time
import numpy as np

class Handler:
    def decode(self, body, content_type):
        match body:
            case b"raise":
                raise KeyError("no such word")
            case b"exit":
                os._exit(3)
            case b"quit":
                raise SystemExit
            case b"slow":
                time.sleep(0.5)
            case b"pid":
                raise ValueError(os.getpid())
            case b"hang":
                while True:
                    time.sleep(1)
            case b"names":
                return {"ids": np.zeros((1, 3), np.int64)}
            case b"dtype":
                return {"ids": np.zeros((1, 3), np.int32), "mask": np.ones((1, 3), bool)}
            case b"objects":
                return {"ids": np.array([["a", "b"]]), "mask": np.ones((1, 2), bool)}
            case b"list":
                return [1]
            case b"long":
                return {"ids": np.zeros((1, 7), np.int64), "mask": np.ones((1, 7), bool)}
            case b"none":
                return {"ids": np.zeros((0, 3), np.int64), "mask": np.ones((0, 3), bool)}
        print("decoded")
        return {"ids": [[1, 2]], "mask": [[True, True]]}

    def encode(self, outputs):
        return outputs["halves"].dtype.name.encode(), "text/plain"
"""


@asynccontextmanager
async def serving(file: Path, timeout_s: float = 60.0) -> AsyncIterator[httpx.AsyncClient]:
    """A frontend of the text model with this handler."""
    with HandlerProcesses(f"{file}:Handler", timeout_s) as handler:
        async with running_frontend(text_predictor(), TEXT, handler=handler) as frontend:
            yield frontend.client


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    return file


async def test_tokenizer_of_the_guide_answers_texts(tmp_path: Path) -> None:
    (code,) = re.findall(r"```py\n(.*?)```", GUIDE, re.DOTALL)
    file = tmp_path / "tokenizer.py"
    file.write_text(code)
    async with serving(file) as client:
        answer = await client.post("/predict", content=b"A network serves text!")
        unknown = await client.post("/predict", content=b"a cat")
        refused = await client.post("/predict", content=b"one two three four five six seven")
        other = await client.post("/predict", content=b"\xff\xff")
    assert (answer.json(), answer.headers["Content-Type"]) == ({"sum": 10.0}, "application/json")
    assert answer.headers["X-Model-Version"] == "v1"
    assert unknown.json() == {"sum": 6.0}
    assert (refused.status_code, refused.json()["reason"]) == (400, "invalid_input")
    assert refused.json()["error"] == "the text has 7 words; expected 2 to 6"
    assert other.status_code == 400, "a UnicodeDecodeError is a ValueError"


async def test_failing_handler_is_an_error_of_one_request_only(faulty: Path, caplog: pytest.LogCaptureFixture) -> None:
    says = {
        b"raise": "KeyError: 'no such word'",
        b"exit": "has ended",
        b"quit": "SystemExit",
        b"names": "decode returned the inputs ['ids']; the model takes ['ids', 'mask']",
        b"dtype": "'ids' as torch.int32",
        b"objects": "expected numbers or booleans",
        b"list": "expected a dict of arrays",
    }
    async with serving(faulty) as client:
        for body, logged in says.items():
            with caplog.at_level(logging.ERROR):
                answer = await client.post("/predict", content=body, headers={"X-Request-Id": "mine"})
            assert (answer.status_code, answer.json()["reason"]) == (500, "handler_failed"), body
            assert "request id" in answer.json()["error"]
            assert "request_id=mine" in caplog.text
            assert logged in caplog.text
            caplog.clear()
        for body in (b"long", b"none"):
            answer = await client.post("/predict", content=body)
            assert (answer.status_code, answer.json()["reason"]) == (400, "invalid_input"), body
        good = await client.post("/predict", content=b"good")
    assert (good.status_code, good.text) == (200, "float32"), "bfloat16 outputs are float32 for numpy"


async def test_process_that_does_not_return_is_replaced(faulty: Path) -> None:
    with HandlerProcesses(f"{faulty}:Handler", 0.5, processes=1) as handler:
        with pytest.raises(HandlerError, match="did not return within"):
            await handler.call(program.decode, b"hang", "")
        handler._timeout_s = 60.0
        again = await handler.call(program.decode, b"good", "")
    assert again["ids"].tolist() == [[1, 2]]


async def test_bodies_that_crash_the_handler_do_not_delay_other_requests(faulty: Path) -> None:
    """Four such bodies end all processes; each gets its error immediately, and other routes do not wait."""
    async with serving(faulty) as client:

        async def status(path: str, body: bytes) -> int:
            return (await client.post(path, content=body, timeout=60)).status_code

        await asyncio.gather(*(status("/predict", b"good") for _ in range(4)))  # all processes run
        gate = faulty.with_name("gate")
        loading = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
        await asyncio.to_thread(faulty.write_text, loading + FAULTY)  # new processes load until the gate exists
        crashes = asyncio.gather(*(status("/predict", b"exit") for _ in range(4)))
        await asyncio.sleep(0)
        other = json.dumps({"inputs": tensors([[1, 2]]), "outputs": [{"name": "sums"}]}).encode()
        assert await status(INFER, other) == 200
        assert await crashes == [500] * 4
        good = asyncio.create_task(status("/predict", b"good"))
        assert not (await asyncio.wait({good}, timeout=0.1))[0], "it waits for a new process"
        await asyncio.to_thread(gate.touch)
        assert await good == 200


async def test_calls_are_rejected_when_too_many_wait(faulty: Path) -> None:
    with HandlerProcesses(f"{faulty}:Handler", 60.0, processes=1, max_waiting=1) as handler:
        first, second = (asyncio.create_task(handler.call(program.decode, b"slow", "")) for _ in range(2))
        await until(lambda: handler.waiting == 1)
        with pytest.raises(OverloadedError):
            await handler.call(program.decode, b"good", "")
        await asyncio.gather(first, second)


@pytest.mark.parametrize("fails", ["__init__", "submit"])
async def test_calls_get_an_error_and_none_waits_when_no_process_can_be_used(
    faulty: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def no_process(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with HandlerProcesses(f"{faulty}:Handler", 60.0, processes=1) as handler:
        with pytest.raises(HandlerError):
            await handler.call(program.decode, b"exit", "")
        with monkeypatch.context() as patched:
            patched.setattr(handler_processes._HandlerProcess, fails, no_process)
            for _ in range(2):
                with pytest.raises(HandlerError, match="Resource temporarily unavailable"):
                    async with asyncio.timeout(60):
                        await handler.call(program.decode, b"good", "")
            assert not handler._all, "a process that is not used has ended"
        assert (await handler.call(program.decode, b"good", ""))["ids"].tolist() == [[1, 2]]


async def test_next_call_loads_the_handler_when_loading_failed(faulty: Path) -> None:
    with HandlerProcesses(f"{faulty}:Handler", 60.0, processes=1) as handler:
        await asyncio.to_thread(faulty.write_text, "1 / 0")
        for body, says in ((b"exit", "has ended"), (b"good", "cannot be loaded: ZeroDivisionError")):
            with pytest.raises(HandlerError, match=says):
                await handler.call(program.decode, body, "")
        await asyncio.to_thread(faulty.write_text, FAULTY)
        assert (await handler.call(program.decode, b"good", ""))["ids"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("missing.py:Handler", "there is no file"),
        ("handler.py", "is not FILE.py:CLASS"),
        ("handler.py:Other", "has no class Other"),
        ("handler.py:Handler", "has no method encode"),
        ("broken.py:Handler", "cannot be loaded: ZeroDivisionError: division by zero at line 2"),
    ],
)
def test_handler_that_cannot_be_loaded_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "handler.py").write_text("class Handler:\n    def decode(self, body, content_type): ...\n")
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    with pytest.raises(UserError, match=re.escape(says)), HandlerProcesses(where, 1.0):
        pass
