"""The whole service with data edges: no tensor passes a leader, and everything is relayed where nobody can be reached."""

from __future__ import annotations

import httpx

from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.local_service import LocalService
from tests.services import small_service


def classes(service: LocalService) -> list[list[int]]:
    found = []
    for body, content_type in photos(6):
        response = httpx.post(
            f"{service.url}/predict", content=body, headers={"content-type": content_type}, timeout=60
        )
        assert response.status_code == 200, response.text
        found.append([each["class_id"] for each in response.json()["predictions"]])
    return found


def test_no_tensor_passes_a_leader_unless_nobody_can_be_reached() -> None:
    with small_service(stages=2) as service:
        expected = classes(service)
        assert service.metric("multiworld_relayed_bytes_total") == 0
        assert service.metric("multiworld_edge_fetches_total", outcome="fetched") == 6
        # The frontend reads the last worker, and the first worker reads the frontend.
        assert service.metric("multiworld_edges_open", direction="received") == 1
        assert service.metric("multiworld_edges_open", direction="sent") == 1
        assert service.metric("multiworld_edge_bytes_total", direction="received", transport="shared_memory") > 0
        assert service.metric("multiworld_edge_bytes_total", direction="received", transport="tcp") == 0
    with small_service(stages=2, advertise_edge="127.0.0.1:1") as service:
        assert classes(service) == expected
        assert service.metric("multiworld_relayed_bytes_total") > 0
        assert service.metric("multiworld_requests_resubmitted_total", reason="relay") >= 1
