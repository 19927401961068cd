"""Models of the user's own, exported and served in three stages; workers are killed under load."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import torch

from multiworld_client import Client
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService
from tests.bundles import Text, text_bundle
from tests.waiting import wait_for_more

PATIENT: dict[str, Any] = {"heartbeat_timeout_s": 10, "recovery_grace_s": 60, "timeout_s": 100}
"""For a busy machine: only killed workers are lost, and requests wait for their replacement."""
_HANDLER = """
import json
import numpy as np

class Handler:
    def decode(self, body, content_type):
        words = body.decode().split()
        if len(words) < 2:
            raise ValueError("expected at least two words")
        ids = np.array([[len(word) for word in words]])
        return {"ids": ids, "mask": ids > 3}

    def encode(self, outputs):
        return json.dumps({"long words": int(outputs["count"][0])}).encode(), "application/json"
"""


def test_killed_workers_cost_no_request_of_a_transformer_with_variable_lengths(tmp_path: Path) -> None:
    text_bundle(tmp_path / "text")
    (tmp_path / "words.py").write_text(_HANDLER)
    handler = f"{tmp_path / 'words.py'}:Handler"
    with (
        LocalService(
            model=tmp_path / "text", stages=3, replicas=2, max_batch_size=8, handler=handler, **PATIENT
        ) as service,
        Client(service.url, timeout_s=120) as client,
    ):
        answer = httpx.post(f"{service.url}/predict", content="a transformer answers", timeout=60)
        assert (answer.status_code, answer.json()) == (200, {"long words": 2})
        refused = httpx.post(f"{service.url}/predict", content="one", timeout=60)
        assert (refused.status_code, refused.json()["error"]) == (400, "expected at least two words")
        unknown = httpx.post(f"{service.url}/predict", content=f"a {'x' * 60}", timeout=60)
        assert (unknown.status_code, unknown.json()["reason"]) == (400, "invalid_input")
        assert "index out of range" in unknown.json()["error"]
        assert client.predict_body(b"a transformer answers", content_type="text/plain") == b'{"long words": 2}'
        for rows, length in ((1, 2), (3, 32)):
            ids = torch.randint(0, 50, (rows, length))
            with torch.inference_mode():
                expected = Text().eval()(ids, ids > 10)
            found = client.infer({"ids": ids, "mask": ids > 10})
            torch.testing.assert_close(torch.from_numpy(found["vector"]), expected["vector"], atol=1e-4, rtol=1e-5)
            assert torch.from_numpy(found["count"]).equal(expected["count"])

        with run_load(service.url, served_requests(service.url, rows=2), rate_hz=20) as load:
            for stage in range(3):
                os.kill(service.status()["stages"][stage]["replicas"][0]["pid"], signal.SIGKILL)
                wait_for_more(load.samples, 10)
        assert not load.failed, load.failed[:3]
