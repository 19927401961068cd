"""Handlers: the user's code between the body of /predict and the model."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from multiworld_serving.common.config import UserError
from multiworld_serving.server.api.app import create_api
from multiworld_serving.server.api.handler.exchange import Kind, pack_arrays, pack_text, unpack_arrays
from multiworld_serving.server.api.handler.processes import HandlerProcesses
from multiworld_serving.server.errors import HandlerError
from multiworld_serving.server.http.limits import RequestLimits
from multiworld_serving.server.observability.metrics import Metrics
from tests.documents import ROOT
from tests.unit.server.text_model import TEXT, TextPredictor

GUIDE = (ROOT / "docs/guides/handlers.md").read_text()
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
        app = create_api(TextPredictor(), TEXT, RequestLimits(), Metrics(), handler=handler).app
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            yield client


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


def test_process_that_does_not_return_is_replaced(faulty: Path) -> None:
    with HandlerProcesses(f"{faulty}:Handler", 60.0) as handler:
        deadline_s = time.monotonic() + 60
        with pytest.raises(HandlerError, match="did not return within"):
            handler.call(Kind.DECODE, pack_text("", b"hang"), deadline_s=time.monotonic() + 0.05)
        again = handler.call(Kind.DECODE, pack_text("", b"good"), deadline_s=deadline_s)
    assert unpack_arrays(again)["ids"].tolist() == [[1, 2]]


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


def test_arrays_round_trip() -> None:
    arrays = {"a": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2], "b": np.array(True), "c": np.zeros((0, 4))}
    found = unpack_arrays(pack_arrays(arrays))
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].tolist()) == (array.dtype, array.tolist())
    for wrong in ("[[1]]", '[["a", "object", [1]]]', '[["a", "int64", [2]]]', '[["a", "int64", [-1]]]'):
        with pytest.raises(ValueError, match=r"not enough|not a valid array|are missing"):
            unpack_arrays(pack_text(wrong, b"12345678"))
