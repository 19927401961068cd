"""A request at the leader as a future."""

from __future__ import annotations

import asyncio
from typing import Any

from multiworld_serving.server.pipeline.driver import SchedulerDriver
from multiworld_serving.server.pipeline.inputs import RequestInput
from multiworld_serving.server.pipeline.requests import Outcome, PendingRequest
from multiworld_serving.server.predictor import Prediction


def begin(
    driver: SchedulerDriver, inputs: RequestInput, rows: int, *, deadline_s: float, request_id: str, **fields: Any
) -> asyncio.Future[Prediction]:
    """Begin a request. Cancelling the future cancels the request."""
    future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()

    def set_outcome(outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    pending = PendingRequest(set_outcome, inputs, request_id, deadline_s, **fields)
    future.add_done_callback(lambda done: driver.requests.cancel(pending) if done.cancelled() else None)
    driver.requests.begin(pending, rows)
    return future
