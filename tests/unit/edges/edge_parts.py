"""Producers and consumers in one process; they share no state."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import SecretStr

from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.common.settings.worker import WorkerSettings

SECRET = "a-secret-of-this-test"


def unused_edges() -> Edges:
    """For a process that keeps no tensor."""
    settings = WorkerSettings(leader="127.0.0.1:1", token=SecretStr(SECRET), edge_min_bytes=1 << 30)
    return Edges("unused", "127.0.0.1", settings, EdgeMetrics(ProgramMetrics()))


@asynccontextmanager
async def edges(name: str = "p", *, secret: str = SECRET, **settings: Any) -> AsyncIterator[Edges]:
    """The edges of a process, with time for a busy machine."""
    given = {"edge_min_bytes": 0, "heartbeat_timeout_s": 10.0} | settings
    chosen = WorkerSettings(leader="127.0.0.1:1", token=SecretStr(secret) if secret else None, **given)
    with pytest.MonkeyPatch.context() as patient:
        for limit in ("edge._FETCH_S", "edges._JOIN_S", "edges._OPEN_S", "edges._TOTAL_S"):
            patient.setattr(f"multiworld_serving.common.edges.{limit}", 60.0)
        async with Edges(name, "127.0.0.1", chosen, EdgeMetrics(ProgramMetrics())) as made:
            yield made
