"""A service with compiled stages serves before compilation ends, gives the same answers, and reuses the code for a restarted worker."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from multiworld_serving.models.optimize.compiling import compile_unavailable_reason
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.bundles import classifier_bundle

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(compile_unavailable_reason()), reason="there is no C++ compiler here"),
]


def top(service: LocalService) -> dict[str, float]:
    answer = httpx.post(f"{service.url}/predict", files={"image": photo()}, timeout=60).raise_for_status().json()
    return {each["label"]: each["probability"] for each in answer["predictions"]}


def test_service_compiles_while_serving_and_reuses_the_code_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    classifier_bundle(tmp_path / "bundle")  # small: compiling a ResNet-18 takes a minute
    # One thread: on a busy machine, times of two threads say nothing about such a small model.
    with LocalService(
        model=str(tmp_path / "bundle"), stages=1, replicas=1, max_batch_size=1, threads=1, optimize="compile"
    ) as service:
        first = service.wait_for(lambda line: "execution_mode=" in line.message, 60)
        assert "compiled" not in first.message
        before = top(service)  # already serving
        service.wait_for(lambda line: "execution_mode=compiled/float32" in line.message, 400)
        assert top(service) == pytest.approx(before, rel=1e-3)
        seen = len(service.lines)
        (pid,) = service.worker_pids().values()
        os.kill(pid, signal.SIGKILL)
        back = service.wait_for(lambda line: "execution_mode=" in line.message, 120, after=seen)
        assert "execution_mode=compiled/float32" in back.message
        service.wait_until_complete(60)
        assert top(service) == pytest.approx(before, rel=1e-3)
        assert service.stop() == 0
