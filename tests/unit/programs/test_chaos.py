"""What a campaign of faults observes, and how it continues after an interruption."""

import json
from http import HTTPStatus
from pathlib import Path

import pytest

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.testing.chaos.injection import Injection
from multiworld_serving.testing.chaos.journal import Journal
from multiworld_serving.testing.chaos.observer import Observer
from multiworld_serving.testing.load.clients import Sample
from tests.http_server import QuietHandler, serving


def test_campaign_continues_where_the_file_ends(tmp_path: Path) -> None:
    path, seed = tmp_path / "soak.json.part", 7
    first, second = (Injection("kill", (f"s0.r{number}",), 1.0, 2.0) for number in (0, 1))
    earlier = Journal(path, seed)
    earlier.append(60.0, first, [Sample(1.5, 0.2, 200)])
    with path.open("ab") as file:
        file.write(b'{"seed":7,"elapsed_s":6')  # the driver was killed while it wrote
    continued = Journal(path, seed)
    assert [(entry.injection, entry.samples) for entry in continued.entries] == [(first, [Sample(1.5, 0.2, 200)])]
    assert continued.elapsed_s == 60.0
    continued.append(90.0, second, [])
    assert [entry.injection for entry in Journal(path, seed).entries] == [first, second]
    with pytest.raises(UserError, match="--seed"):
        Journal(path, seed + 1)
    continued.remove()
    assert Journal(path, seed + 1).elapsed_s == 0.0


def test_replicas_are_as_before_while_no_leader_is_connected() -> None:
    replica = {"slot": 0, "state": "ready", "generation": 1, "worker": "a", "last_failure": None}

    class Frontend(QuietHandler):
        leader, replicas = "ready", [replica]

        def do_GET(self) -> None:
            leaders = [{"address": "127.0.0.1:1", "state": self.leader, "pid": 1, "uptime_s": 1.0}]
            stages = [{"index": 0, "replicas": self.replicas}]
            self.answer(HTTPStatus.OK, json.dumps({"uptime_s": 1.0, "leaders": leaders, "stages": stages}).encode())

    with serving(Frontend) as url, Observer(url) as observer:
        before = observer.wait(lambda now: now.complete, 60.0, "complete")
        Frontend.leader, Frontend.replicas = "unreachable", []
        after = observer.wait(lambda now: not now.leaders_ready, 60.0, "without a leader")
        assert after.replicas == before.replicas
        assert not after.complete
