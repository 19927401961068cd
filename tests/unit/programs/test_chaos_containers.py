"""Parsing of `docker inspect`."""

import os
from typing import Any

import pytest

from multiworld_serving.testing.chaos.campaign import unavailable_reason
from multiworld_serving.testing.chaos.faults import CONTAINER_FAULTS
from multiworld_serving.testing.chaos.observer import Snapshot
from multiworld_serving.testing.chaos.system.containers import (
    Container,
    ContainerError,
    _container,
    docker,
)
from multiworld_serving.testing.chaos.system.system_under_test import RunningService

ID = "0123456789abcdef" * 4


def inspected(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "Id": ID,
        "Image": "sha256:1",
        "Name": "/shop-worker-1",
        "State": {"Pid": 4711},
        "Config": {"Cmd": ["worker"], "Hostname": ID[:12], "Labels": {"com.docker.compose.service": "worker"}},
        "HostConfig": {"Memory": 1 << 30, "PortBindings": {}},
        "NetworkSettings": {
            "Networks": {"shop_worlds": {"Aliases": ["shop-worker-1", "worker", ID[:12]], "IPAddress": "172.18.0.3"}},
            "Ports": {},
        },
    }
    return found | changes


def test_container_is_parsed_from_docker_inspect() -> None:
    assert _container(inspected()) == Container(
        id=ID,
        image="sha256:1",
        name="shop-worker-1",
        service="worker",
        program="worker",
        hostname=ID[:12],
        pid=4711,
        memory_bytes=1 << 30,
        networks={"shop_worlds": ("shop-worker-1", "worker")},
        addresses={"shop_worlds": "172.18.0.3"},
        http="",
    )


@pytest.mark.parametrize(
    ("host", "reached"), [("127.0.0.1", "127.0.0.1:80"), ("0.0.0.0", "127.0.0.1:80"), ("10.1.2.3", "10.1.2.3:80")]
)
def test_frontend_address_is_its_published_port_even_when_stopped(host: str, reached: str) -> None:
    ports = {"8000/tcp": [{"HostIp": host, "HostPort": "80"}], "8001/tcp": None}
    running = inspected(NetworkSettings={"Networks": {}, "Ports": ports})
    stopped = inspected(NetworkSettings={"Networks": {}, "Ports": {}}, HostConfig={"Memory": 0, "PortBindings": ports})
    assert _container(running).http == _container(stopped).http == reached


def test_failed_command_includes_dockers_message(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho some warning >&2\necho 'no such container: x' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ContainerError, match="docker kill x: no such container: x"):
        docker("kill", "x")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ContainerError, match="docker kill x"):
        docker("kill", "x")


def test_container_faults_are_left_out_when_the_service_runs_in_none() -> None:
    killed = next(fault for fault in CONTAINER_FAULTS if fault.name == "leader-kill")
    assert unavailable_reason(killed, RunningService("http://x"), Snapshot(0.0, {}))
