"""An upgrade that fails leaves the former service as it was."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import httpx
import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.services import says, small_service

START_TIMEOUT_S = 2
PROGRAM = f"""
import os, signal
if "SUPERVISOR_STATE" in os.environ:
    os.kill(os.getpid(), signal.SIGSTOP)
from multiworld_serving.cli.main import run
from multiworld_serving.server.supervisor import upgrade
upgrade.START_TIMEOUT_S = {START_TIMEOUT_S}
run()
"""
"""A successor freezes at its start."""


def start_program(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """Start `multiworld` with a short deadline for successors, which freeze."""
    command = [sys.executable, "-P", "-c", PROGRAM, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_service_continues_when_its_successor_freezes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalService, "start_program", staticmethod(start_program))
    headers = {"content-type": "image/jpeg"}
    with small_service() as service:
        for _ in range(2):
            seen = len(service.lines)
            assert main(["upgrade", "--url", service.url]) == 1
            assert f"was not ready within {START_TIMEOUT_S} s and was killed" in capsys.readouterr().err
            successor = int(says(service, "upgrading", seen)["pid"])
            with pytest.raises(ProcessLookupError):
                os.kill(successor, 0)
            answer = httpx.post(f"{service.url}/predict", content=photo(), headers=headers, timeout=60)
            assert answer.status_code == 200
        seen = len(service.lines)
        os.kill(service.pid, signal.SIGUSR2)
        says(service, "upgrading", seen)
        assert service.stop() == 0, "stops during an upgrade"
