"""Invalid command lines: exit status 2, and one line that says what to do."""

import logging
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld_serving.server.supervisor.programs import PROGRAM
from tests.bundles import classifier_bundle
from tests.refusals import refusal

RESNET = ["--model", "resnet18", "--weights", "random:0", "--image-size", "32"]
FREE_PORTS = ["--http-port", "0", "--join-port", "0", "--admin-port", "0"]


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--stages", "8", "--replicas", "1"), "can be cut into at most"),
        (("--device", "cuda:99"), "device 'cuda:99' does not exist"),
        (("--tls-cert-file", __file__, "--tls-key-file", __file__), "no certificate"),
    ],
)
def test_serve_ends_with_the_reason_when_a_process_refuses_its_settings(
    tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    classifier_bundle(tmp_path / "one")
    command = ["serve", "--model", str(tmp_path / "one"), *options, *FREE_PORTS]
    done = subprocess.run([*PROGRAM, *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("option", ["--http-port", "--join-port", "--admin-port"])
def test_serve_is_refused_when_a_port_is_busy(capfd: pytest.CaptureFixture[str], option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = [*FREE_PORTS]
        arguments[arguments.index(option) + 1] = port
        *_, line = refusal(capfd, "serve", *RESNET, *arguments)
    assert port in line
    assert f"another {option} " in line
    assert ("--join-host" in line) is (option == "--join-port")


def test_missing_device_is_refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "t")
    assert "cuda:99" in refusal(capfd, "worker", "--device", "cuda:99", "--leader", "127.0.0.1:1")[-1]
