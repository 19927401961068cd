"""The display of `multiworld status --watch` for the messages of GET /events."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from multiworld_serving.cli.main import main
from multiworld_serving.cli.verbs.status import StatusView, messages

REPLICA = {
    "slot": 0,
    "state": "broken",
    "worker": "local-0",
    "device": "cpu",
    "world": "s0.r0",
    "generation": 3,
    "in_flight": 0,
    "batches_done": 7,
    "last_failure": None,
}
STATUS: dict[str, Any] = {
    "model": "m",
    "version": "v",
    "ready": True,
    "draining": False,
    "state": "degraded",
    "reasons": ["stage 0 has 1 of 2 replicas"],
    "uptime_s": 62.0,
    "queue_depth": 0,
    "requests_in_flight": 2,
    "stages": [{"index": 0, "replicas": [REPLICA]}],
    "spares": [],
    "leaders": [],
    "frontends": [],
    "edges": [],
}


def event(event_id: int, **more: Any) -> dict[str, Any]:
    happened = {"at_unix_s": 0.0, "what": "broken", "stage": 0, "replica": 0, "worker": "local-0", "generation": 3}
    return {"id": event_id, **happened, "detail": "exit: it ended the connection", **more}


def text(picture: StatusView) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(picture.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_messages_are_parsed_from_lines() -> None:
    lines = [
        "retry: 2000",
        "",
        "event: status",
        'data: {"a": 1}',
        "",
        ": still here",
        "",
        "event: event",
        "id: 4",
        "data: []",
        "",
    ]
    assert list(messages(lines)) == [("status", {"a": 1}), ("event", [])]


def test_display_shows_replicas_throughput_and_events() -> None:
    picture = StatusView(STATUS)
    picture.apply("points", [{"answered": 5.0, "failed": 0, "p50_ms": 12.3, "p99_ms": 40.0, "slowest_ms": 3400.0}])
    picture.apply("event", event(1))
    picture.apply("event", event(2, what="rejoined", generation=4, detail=""))
    shown = text(picture)
    assert "m v: degraded (stage 0 has 1 of 2 replicas), up 1 min 2 s" in shown
    assert "s0.r0@3" in shown
    assert "5 answers/s, median 12 ms, p99 40 ms, slowest 3400 ms" in shown
    assert "stage 0 replica 0 broken local-0@3: exit: it ended the connection" in shown
    assert "stage 0 replica 0 rejoined local-0@4" in shown


def test_events_are_shown_once_and_replaced_by_those_of_a_new_leader() -> None:
    picture = StatusView(STATUS)
    for event_id in (5, 6, 6, 5):
        picture.apply("event", event(event_id))
    assert [each["id"] for each in picture.events] == [5, 6]
    picture.apply("event", event(1))
    assert [each["id"] for each in picture.events] == [1]


def test_watch_and_json_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch", "--json"]) == 2
    assert "--watch and --json" in capsys.readouterr().err
