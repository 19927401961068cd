"""The Compose files as `docker compose config` interprets them; no engine is needed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.common.config.settings import Settings, public_fields
from multiworld_serving.common.config.sources import OTHER_VARIABLES, variable
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings
from multiworld_serving.common.settings.worker import WorkerSettings
from tests.containers.project import docker

pytestmark = pytest.mark.usefixtures("compose_command")

ROOT = Path(__file__).parents[2]
PROGRAMS = ("frontend", "leader-a", "leader-b", "worker")
PROFILES = ("--profile", "alertmanager", "--profile", "grafana")
FIXED = {
    "leaders_file",
    "host",
    "http_port",
    "join_host",
    "join_port",
    "admin_host",
    "admin_port",
    "metrics_host",
    "metrics_port",
    "token",
    "token_file",
    "name",
}
"""Settings that the Compose file sets, because its networks and ports depend on them, or that differ per container."""
OF_ONE_LEADER = {"name", "advertise_host"}


def config(*files: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The merged configuration of these files; docker-compose.yml by default."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIWORLD_", "COMPOSE_"))}
    given = [part for file in files or (ROOT / "docker-compose.yml",) for part in ("--file", str(file))]
    command = ("compose", "--project-directory", str(ROOT), "--env-file", os.devnull, *given, *PROFILES)
    text = docker(*command, "config", "--format", "json", environment=own | (environment or {}))
    found: dict[str, Any] = json.loads(text)
    return found


def test_every_service_is_restricted_and_restarted() -> None:
    services = config()["services"]
    assert services.keys() == {*PROGRAMS, "token", "prometheus", "alertmanager", "grafana"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["mem_limit"]) > 0, name
        assert service["pids_limit"] > 0, name
        assert service["restart"] == ("no" if name == "token" else "unless-stopped"), name
        assert "healthcheck" in service, name


def shared_folder(service: dict[str, Any]) -> str:
    """The folder of the Unix sockets in a container. Raises AssertionError unless the container can make sockets in the shared volume."""
    (volume,) = (each for each in service["volumes"] if each["source"] == "sockets")
    assert not volume.get("read_only")
    assert volume["target"] == service["environment"]["MULTIWORLD_RUNTIME_DIR"]
    return str(volume["target"])


def test_programs_share_a_private_folder_for_their_unix_sockets() -> None:
    found = config()
    assert len({shared_folder(found["services"][name]) for name in PROGRAMS}) == 1
    options = found["volumes"]["sockets"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert {"uid=10001", "mode=0700"} <= {*options["o"].split(",")}


def test_join_ports_and_worlds_use_an_internal_network() -> None:
    found = config()
    assert found["networks"]["worlds"]["internal"] is True
    services = found["services"]
    assert set(services["worker"]["networks"]) == {"worlds"}
    published = {name: [port["target"] for port in service.get("ports", ())] for name, service in services.items()}
    published = {name: targets for name, targets in published.items() if targets}
    assert published == {"frontend": [8000], "prometheus": [9090], "alertmanager": [9093], "grafana": [3000]}
    everywhere = [port["host_ip"] for service in services.values() for port in service.get("ports", ())]
    assert set(everywhere) == {"127.0.0.1"}, "no other address without an explicit setting"


def test_token_is_in_a_file_and_not_in_the_environment() -> None:
    services = config(environment={"MULTIWORLD_TOKEN": "open-sesame"})["services"]
    assert "open-sesame" not in json.dumps(services)
    for name in PROGRAMS:
        assert services[name]["environment"]["MULTIWORLD_TOKEN_FILE"] == "/run/multiworld/token"
        (volume,) = (each for each in services[name]["volumes"] if each["target"] == "/run/multiworld")
        assert volume["read_only"] is True
    mine = config(environment={"TOKEN_FOLDER": "./secrets"})["services"]["leader-a"]["volumes"]
    assert any(volume["type"] == "bind" and volume["source"].endswith("/secrets") for volume in mine)


@pytest.mark.parametrize(
    ("service", "program", "others"),
    [
        ("leader-a", LeaderSettings, OF_ONE_LEADER),
        ("leader-b", LeaderSettings, OF_ONE_LEADER),
        ("frontend", FrontendSettings, set[str]()),
        ("worker", WorkerSettings, set[str]()),
    ],
)
def test_every_given_setting_is_passed_on(service: str, program: type[Settings], others: set[str]) -> None:
    names = public_fields(program)
    wanted = {variable(name) for name in names if name not in FIXED | others}
    given = {name: f"given-{number}" for number, name in enumerate(sorted(wanted))}
    environment = config(environment=given)["services"][service]["environment"]
    assert {name: environment.get(name) for name in wanted} == given
    known = {variable(name) for name in (*public_fields(program), *OTHER_VARIABLES)}
    assert environment.keys() <= known, "no setting that the program does not have"


def test_frontend_and_workers_connect_to_all_leaders_which_prometheus_scrapes() -> None:
    services = config()["services"]
    leaders = sorted(name for name in services if name.startswith("leader-"))
    for name in leaders:
        assert services[name]["command"][:3] == ["leader", "--name", name]
    scraped = (ROOT / "deploy" / "prometheus" / "prometheus.compose.yml").read_text()
    assert "targets: [" + ", ".join(f'"{name}:8002"' for name in leaders) + "]" in scraped
    for name in ("frontend", "worker"):
        assert services[name]["environment"]["MULTIWORLD_LEADER"] == ",".join(
            f"{leader}.worlds:8001" for leader in leaders
        )
    for name in leaders:
        assert services[name]["networks"]["worlds"]["aliases"] == [f"{name}.worlds"], "not its address in `front`"


def test_several_frontends_share_a_range_of_published_ports() -> None:
    (port,) = config(environment={"API_PORT": "8000-8001"})["services"]["frontend"]["ports"]
    assert (port["published"], port["target"]) == ("8000-8001", 8000)


def test_haproxy_overlay_publishes_the_port_in_place_of_the_frontends() -> None:
    services = config(ROOT / "docker-compose.yml", ROOT / "docker-compose.haproxy.yml")["services"]
    assert not services["frontend"].get("ports")
    (port,) = services["proxy"]["ports"]
    assert (port["published"], port["target"], port["host_ip"]) == ("8000", 8000, "127.0.0.1")
    assert services["proxy"]["read_only"] is True
    assert services["proxy"]["stop_signal"] == "SIGUSR1"


def test_gpu_overlay_has_one_worker_per_gpu() -> None:
    gpus = 4
    chosen = {f"GPU_{gpu}": f"GPU-{gpu}-of-mine" for gpu in range(gpus)}
    services = config(ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml", environment=chosen)["services"]
    workers = {name: service for name, service in services.items() if name.startswith("worker-gpu-")}
    assert len(workers) == gpus
    for gpu in range(gpus):
        worker = workers[f"worker-gpu-{gpu}"]
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["device_ids"]) == ("nvidia", [f"GPU-{gpu}-of-mine"])
        assert worker["environment"]["MULTIWORLD_DEVICE"] == "cuda:0"
        assert worker["command"] == ["worker"]
        assert worker["ulimits"]["memlock"] == -1
        assert worker["networks"]["worlds"]["aliases"] == ["worker"]
        assert worker["read_only"] is True
        assert not [name for name in worker["environment"] if name.startswith("NCCL")], "the service does not use NCCL"
        assert shared_folder(worker) == shared_folder(services["leader-a"]), "tensors go through shared memory"
    assert services["worker"]["deploy"]["replicas"] == 0
    for name in ("leader-a", "leader-b"):
        leader = services[name]["environment"]
        assert int(leader["MULTIWORLD_STAGES"]) * int(leader["MULTIWORLD_REPLICAS"]) == gpus
