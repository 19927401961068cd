"""Procedures of docs/operations.md in containers, with the commands of the page."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.requests import served_requests
from tests.containers.deployment import CLIENTS, LEADERS, ROOT, Deployment
from tests.containers.project import ContainerError, docker, shell
from tests.e2e.prometheus_server import wait_until_answers
from tests.programs import free_port
from tests.waiting import wait_for_more, wait_until

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
PIPELINE = """
from multiworld_serving import Request, Stage

class Words(Stage):
    def __call__(self, requests: list[Request]):
        return [{{"words": {count}}} for each in requests]

pipeline = [Words]
"""
COUNTS = {"search.py": "len(each.text.split())", "search2.py": "each.text.count(' ') + 1"}
"""Code of two versions that return the same."""


def commands(section: str, containing: str) -> list[str]:
    """The lines of the blocks in a section of the page that contain this text."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    blocks = [block for block in re.findall(r"(?:^ {4,}\S.*\n)+", text, re.MULTILINE) if containing in block]
    return [line.strip() for block in blocks for line in block.splitlines()]


def test_machine_is_taken_out_and_put_back_and_the_log_says_so(deployment: Deployment) -> None:
    deployment.complete()
    host = deployment.containers("worker")[0].hostname
    out, back = commands("Take a machine out, and put it back", "multiworld drain")
    with deployment.load(deployment.requests()) as load:
        assert f"{host} is drained" in deployment.shell(out.replace("b.example", host))
        wait_for_more(load.samples, CLIENTS)
        deployment.shell(back.replace("b.example", host))
        deployment.complete()
    assert not load.failed, load.failed[:3]
    search = commands("Read an incident from the log", "docker compose logs")[-1]
    assert re.search(rf"worker={host}-\d+ \S+->broken .*cause=left", deployment.shell(search))


def token(deployment: Deployment) -> str:
    return deployment.shell("docker compose exec leader-a cat /run/multiworld/token").strip()


def accepted_tokens(deployment: Deployment, leader: str) -> str:
    """The number of tokens that the leader has logged last."""
    logs = deployment.compose("logs", "--no-color", leader)
    return str(re.findall(r"reloaded the join tokens tokens=(\d)", logs)[-1])


@pytest.mark.timeout(1200)  # every worker starts anew, one after another
def test_token_is_changed_without_a_failed_request(deployment: Deployment) -> None:
    old, lines = token(deployment), commands("Change the token", "docker compose")
    frontends = next(number for number, line in enumerate(lines) if line.startswith("docker restart"))
    with deployment.load(deployment.requests()) as load:
        for line in lines[:frontends]:
            deployment.shell(line)
        wait_for_more(load.samples, CLIENTS)
    assert not load.failed, load.failed[:3]
    assert [accepted_tokens(deployment, leader) for leader in LEADERS] == ["2", "2"]
    for line in lines[frontends:]:
        deployment.shell(line)
    wait_until_answers(f"{deployment.url}/readyz")
    wait_until(lambda: [accepted_tokens(deployment, leader) for leader in LEADERS] == ["1", "1"])
    assert old != token(deployment)
    deployment.complete()
    options = "--token-file /tmp/old --leader leader-a.worlds:8001"
    with pytest.raises(ContainerError, match="token"):
        deployment.shell(
            f"docker compose run --rm --no-deps --entrypoint sh worker -c "
            f"'umask 077 && echo {old} > /tmp/old && exec multiworld worker {options}'"
        )


@pytest.fixture
def search(engine: None, pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URL and container of `multiworld serve` with the code of two versions below --weights-dir."""
    for name, count in COUNTS.items():
        (tmp_path / name).write_text(PIPELINE.format(count=count))
        (tmp_path / name).chmod(0o644)
    tmp_path.chmod(0o755)
    port, image = free_port(hold=False), pytestconfig.getoption("--image") or "multiworld-serving:test"
    run = (
        "run",
        "--detach",
        "--rm",
        "--publish",
        f"127.0.0.1:{port}:8000",
        "--volume",
        f"{tmp_path}:/models:ro",
        image,
    )
    options = ("--model", "search=/models/search.py:pipeline", "--weights-dir", "/models", "--heartbeat-timeout-s", "8")
    container = docker(*run, "serve", "--host", "0.0.0.0", *options).strip()
    try:
        wait_until_answers(f"http://127.0.0.1:{port}/readyz")
        yield f"http://127.0.0.1:{port}", container
    finally:
        docker("rm", "--force", container)


def test_code_is_changed_without_a_failed_request(search: tuple[str, str]) -> None:
    url, container = search
    requests = served_requests(url, [(text, "text/plain") for text in (b"one", b"two words", b"three more words")])
    with run_load(url, requests, clients=CLIENTS) as load:
        for line in commands("Change code", "multiworld models"):
            said = shell(line, container)
            wait_for_more(load.samples, 20 * CLIENTS)
            if "--shadow" in line:
                wait_until(
                    lambda: re.search(
                        r"equal=[1-9]\d* different=0 failed=0", shell("multiworld models list", container)
                    )
                )
            print(line, said)
    assert not load.failed, load.failed[:3]
    assert shell("multiworld models list", container).startswith("search@2 READY share=100")
