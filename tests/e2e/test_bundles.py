"""Models of the user's own, exported and served in three stages; workers are killed under load."""

import os
import signal
from pathlib import Path

import pytest
import torch

from multiworld_client import Client, InvalidRequestError
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService
from tests.bundles import Text, text_bundle
from tests.waiting import wait_for_more


def test_killed_workers_cost_no_request_of_a_transformer_with_variable_lengths(tmp_path: Path) -> None:
    text_bundle(tmp_path / "text")
    with (
        LocalService(  # patient: only killed workers are lost, and requests wait for their replacement
            model=tmp_path / "text", stages=3, replicas=2, heartbeat_timeout_s=10, recovery_grace_s=60, timeout_s=100
        ) as service,
        Client(service.url, timeout_s=120) as client,
    ):
        with pytest.raises(InvalidRequestError, match="index out of range"):
            client.infer(
                {"ids": torch.full((1, 2), 60), "mask": torch.ones(1, 2, dtype=torch.bool)}, request_id="invalid"
            )
        # The id is in the lines of the frontend, the leader and the worker.
        assert service.wait_for(lambda line: line.message == "request", 60)["request_id"] == "invalid"
        told = [line["logger"] for line in service.lines if line["request_id"] == "invalid"]
        for program in ("server.frontend", "server.leader", "workers.session"):
            assert any(program in logger for logger in told), (program, told)
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
