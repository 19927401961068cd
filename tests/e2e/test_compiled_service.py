"""A service serves before its stages are compiled, and a worker that is killed meanwhile or afterwards serves again at once."""

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.bundles import classifier_bundle

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")


def top(service: LocalService) -> dict[str, float]:
    answer = httpx.post(f"{service.url}/predict", files={"image": photo()}, timeout=60).raise_for_status().json()
    return {each["label"]: each["probability"] for each in answer["predictions"]}


def test_service_compiles_while_it_serves_and_a_restarted_worker_serves_before_it_has_compiled(tmp_path: Path) -> None:
    classifier_bundle(tmp_path / "bundle")  # small: compiling a ResNet-18 takes a minute
    with LocalService(
        model=str(tmp_path / "bundle"),
        stages=1,
        replicas=1,
        max_batch_size=1,
        threads=1,
        optimize="compile",
        heartbeat_timeout_s=10,
    ) as service:
        first = service.wait_for(lambda line: "execution_mode=" in line.message, 120)
        assert "execution_mode=fused/float32" in first.message
        before = top(service)  # already serving
        service.wait_for(lambda line: "execution_mode=compiled/float32" in line.message, 400)
        assert top(service) == pytest.approx(before, rel=1e-3)
        seen = len(service.lines)
        (pid,) = service.worker_pids().values()
        os.kill(pid, signal.SIGKILL)
        back = service.wait_for(lambda line: "execution_mode=" in line.message, 120, after=seen)
        assert "execution_mode=fused/float32" in back.message
        service.wait_until_complete(120)
        assert top(service) == pytest.approx(before, rel=1e-3)
        assert service.stop() == 0
