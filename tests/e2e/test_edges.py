"""The whole service with data edges: no tensor passes a leader, and everything is relayed where nobody can be reached."""

from __future__ import annotations

from typing import Any

import httpx

from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.local_service import LocalService
from tests.services import small_service
from tests.waiting import wait_until


def classes(service: LocalService) -> list[list[int]]:
    found = []
    for body, content_type in photos(6):
        response = httpx.post(
            f"{service.url}/predict", content=body, headers={"content-type": content_type}, timeout=60
        )
        assert response.status_code == 200, response.text
        found.append([each["class_id"] for each in response.json()["predictions"]])
    return found


def edges_of(service: LocalService, least: int) -> list[dict[str, Any]]:
    """The edges in the status, as soon as there are this many: processes report them once a second."""
    found: list[dict[str, Any]] = []

    def reported() -> bool:
        found[:] = service.status()["edges"]
        return len(found) >= least

    wait_until(reported)
    return found


def test_no_tensor_passes_a_leader_unless_nobody_can_be_reached() -> None:
    with small_service(stages=2) as service:
        expected = classes(service)
        assert service.metric("multiworld_relayed_bytes_total") == 0
        assert service.metric("multiworld_edge_fetches_total", outcome="fetched") == 6
        replicas = [replica for stage in service.status()["stages"] for replica in stage["replicas"]]
        assert {replica["transport"] for replica in replicas} == {"edges"}
        # A frontend reads one worker, which reads the other, which reads the frontend.
        edges = {(each["consumer"], each["producer"]): each for each in edges_of(service, 3)}
        first, last = (replica["worker"] for replica in replicas)
        [frontend] = [each["name"] for each in service.status()["frontends"]]
        assert edges.keys() == {(first, frontend), (last, first), (frontend, last)}
        assert {each["transport"] for each in edges.values()} == {"shared_memory"}
        assert all(each["received_bytes"] > 0 and each["fetch_s"] > 0 for each in edges.values())
    with small_service(stages=2, advertise_edge="127.0.0.1:1") as service:
        assert classes(service) == expected
        assert service.metric("multiworld_relayed_bytes_total") > 0
        assert service.metric("multiworld_requests_resubmitted_total", reason="relay") >= 1
        assert {each["transport"] for each in edges_of(service, 1)} == {"relay"}
