"""The log fields of the leader document a frozen worker's whole history, and the terminal shows it as well."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.testing.local_service import LocalService, LogLine
from tests.chaos.clients import run_load
from tests.chaos.injections import HEARTBEAT_TIMEOUT_S, make_fault

pytestmark = pytest.mark.timeout(300)


def index(lines: list[LogLine], after: int, **fields: object) -> int:
    """Index of the first line with these fields after another index."""
    for at in range(after + 1, len(lines)):
        if all(re.fullmatch(str(value), str(lines[at][name])) for name, value in fields.items()):
            return at
    raise AssertionError(f"no line with {fields} after {lines[after].message!r}")


def test_log_and_terminal_show_the_history_of_a_frozen_worker(tmp_path: Path) -> None:
    seen = tmp_path / "watch.txt"
    settings: dict[str, Any] = {"image_size": 32, "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S}
    with LocalService(model="resnet18", weights="random:0", stages=2, replicas=2, **settings) as service:
        command = [sys.executable, "-m", "multiworld_serving.cli.main", "status", "--watch", "--url", service.url]
        with seen.open("w") as output:
            watch = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                with run_load(service):
                    fault = make_fault(service, "freeze", (1, 0))
                    service.wait_until_complete(90)
                wait_for_a_tick = threading.Event()
                wait_for_a_tick.wait(3)  # the terminal is updated within a second
                assert watch.poll() is None
                watch.send_signal(signal.SIGINT)
                assert watch.wait(30) == 130
            finally:
                watch.kill()
                watch.wait()
        lines = service.lines
    assert fault.causes == ("hang",)
    world = {"world": r"s1\.r0"}
    started = index(lines, -1, **world, generation="1", stage="1", replica="0")
    worker = str(lines[started]["worker"])
    assert lines[started]["pid"]
    assert lines[started]["device"] == "cpu"
    ready = index(lines, started, **world, worker=worker, message=".*checking->ready.*")
    broken = index(lines, ready, **world, generation="1", worker=worker, cause="hang", level="warning")
    assert float(lines[broken]["after_s"]) > 0
    back = index(lines, broken, **world, generation="2", message=".*joining.*")
    index(
        lines, back, **world, generation="[2-9]", message=".*checking->ready.*"
    )  # a busy machine may need two attempts
    for line in lines[broken:]:
        if "rerouted" in line.message and line["stage"] == "1":
            assert line["world"] == "s1.r1"
            assert line["batch"] is not None
    shown = seen.read_text()
    assert "broken" in shown
    assert "stage 1 replica 0" in shown
    assert "rejoined and serves" in shown
