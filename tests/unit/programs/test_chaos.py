"""What a campaign of faults observes and counts as wrong, how it continues after an interruption, and how it starts a service."""

import json
import os
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.testing.chaos.journal import Injection, Journal
from multiworld_serving.testing.chaos.observer import ObservedReplica, Observer
from multiworld_serving.testing.load.clients import Sample
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import start_program
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
    replica = {"slot": 0, "state": "ready", "world": "w", "generation": 1, "worker": "a", "last_failure": None}

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


ARRAY = np.linspace(-1, 1, 8, dtype=np.float32)


@pytest.mark.parametrize(
    ("expected", "answer", "is_right"),
    [
        ({1: 0.5, 2: 0.3, 3: 0.1}, {1: 0.5001, 2: 0.2999, 3: 0.1}, True),
        ({1: 0.5, 2: 0.3, 3: 0.1}, {1: 0.5, 2: 0.3, 4: 0.1}, True),  # classes of nearly equal probability swap ranks
        ({"y": ARRAY}, {"y": ARRAY + 1e-4}, True),
        ({"body": '{"spam": 0.25}'}, {"body": '{"spam": 0.25001}'}, True),
        ({1: 0.5, 2: 0.3, 3: 0.1}, {7: 0.5, 8: 0.3, 9: 0.1}, False),
        ({1: 0.5, 2: 0.3, 3: 0.1}, {}, False),
        ({"y": ARRAY}, {"y": ARRAY[::-1]}, False),
        ({"body": '{"spam": 0.25}'}, {"body": '{"spam": 0.5}'}, False),
        ({"body": '{"spam": 0.25}'}, {"body": '{"ham": 0.25}'}, False),
    ],
)
def test_answer_is_right_when_it_differs_by_rounding(
    expected: dict[Any, Any], answer: dict[Any, Any], is_right: bool
) -> None:
    found = ReferenceRequest(b"", expected=expected).find_mismatch(answer)
    assert found == "" if is_right else found.startswith("wrong answer")


def test_signal_for_the_driver_does_not_reach_the_service() -> None:
    """Ctrl-C goes to the whole process group of a terminal."""
    with start_program(["--version"]) as service:
        assert os.getpgid(service.pid) == service.pid
        service.communicate()


def test_slot_has_broken_if_a_spare_has_taken_it_over() -> None:
    before = ObservedReplica(stage=0, slot=0, state="ready", generation=1, worker="a", cause=None, failed_s=None)
    assert not before.broken_since(before)
    assert replace(before, worker="spare").broken_since(before)
    assert replace(before, world="of a spare").broken_since(before)
