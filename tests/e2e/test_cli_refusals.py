"""Invalid command lines: exit status 2, and one line that says what to do."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.local_service import LocalService
from tests.bundles import classifier_bundle

RESNET = ["--model", "resnet18", "--weights", "random:0"]
FREE_PORTS = ["--http-port", "0", "--join-port", "0", "--metrics-port", "0"]


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level = handlers, level


def rejection(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error line for these arguments."""
    assert main(arguments) == 2
    return error_line(capfd.readouterr().err)


def program(*arguments: str, token: str = "t") -> "subprocess.CompletedProcess[str]":
    """`multiworld` with these arguments, run as a separate process that refuses them."""
    command = [sys.executable, "-m", "multiworld_serving.cli.main", *arguments]
    environment = {**os.environ, "MULTIWORLD_TOKEN": token}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    return done


def error_line(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("multiworld: error:")]
    return line


def test_serve_starts_no_process_when_the_bundle_has_fewer_stages(tmp_path: Path) -> None:
    classifier_bundle(tmp_path / "one")
    done = program("serve", "--model", str(tmp_path / "one"), "--stages", "64", *FREE_PORTS)
    assert "can be cut into at most" in done.stderr.splitlines()[-1]
    assert "pid=" not in done.stderr


@pytest.mark.parametrize("option", ["--http-port", "--join-port", "--metrics-port"])
def test_serve_is_refused_when_a_port_is_busy(capfd: pytest.CaptureFixture[str], option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = [*FREE_PORTS]
        arguments[arguments.index(option) + 1] = port
        line = rejection(capfd, "serve", *RESNET, *arguments)
    assert port in line
    assert option in line


@pytest.mark.parametrize("verb", ["serve", "worker"])
def test_missing_device_is_refused(
    capfd: pytest.CaptureFixture[str], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "t")
    arguments = {
        "serve": [*RESNET, *FREE_PORTS],
        "worker": ["--leader", "127.0.0.1:1"],
    }[verb]
    assert "cuda:99" in rejection(capfd, verb, "--device", "cuda:99", *arguments)


def test_worker_exits_with_2_when_its_token_is_wrong(service: LocalService) -> None:
    done = program("worker", "--leader", service.join_address.split(",")[0], token="wrong")
    assert "token" in error_line(done.stderr)
