"""What operators can have done: verbs that change the service, on the operators' port and never on that of inference."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from server.errors import MediaTypeError
from server.maintenance import MaintenanceError
from server.rolling_restart import RestartFailedError, RestartStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdminRoutes:
    """What answers the verbs; who may ask is checked before (server/access.py).

    Attributes:
        restart_workers: starts a rolling restart.
    """

    restart_workers: Callable[[], AsyncGenerator[RestartStep, None]]

    def routes(self) -> list[Route]:
        """For the operators' application."""
        return [Route("/admin/rolling-restart", self.rolling_restart, methods=["POST"])]

    async def rolling_restart(self, request: Request) -> Response:
        """Restart every worker in turn. The answer has one JSON object a line, as it happens; the last one says how it ended.

        Who hangs up stops it after the worker at hand.
        """
        # A page in somebody's browser can send a form to this machine, but not JSON without asking first.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise MediaTypeError("an admin verb is sent with Content-Type: application/json; send it, with the body {}")
        return StreamingResponse(_lines(self.restart_workers()), media_type="application/x-ndjson")


async def _lines(steps: AsyncGenerator[RestartStep, None]) -> AsyncGenerator[str, None]:
    done = 0
    try:
        async with aclosing(steps) as running:
            async for step in running:
                logger.info("rolling restart: %s", step)
                done += step.state == "restarted"
                yield json.dumps(asdict(step)) + "\n"
    except (MaintenanceError, RestartFailedError) as error:
        logger.warning("rolling restart: %s", error)
        yield json.dumps({"state": "failed", "restarted": done, "error": str(error)}) + "\n"
    else:
        yield json.dumps({"state": "done", "restarted": done}) + "\n"
