"""Admin endpoints that change the service, on the admin port only."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from multiworld_serving.server.administration import OperationInProgressError, RestartFailedError, RestartStep
from multiworld_serving.server.errors import MediaTypeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdminRoutes:
    """The routes of the admin endpoints. `RequestMiddleware` authorizes requests before they arrive here.

    Attributes:
        restart_workers: starts a rolling restart.
    """

    restart_workers: Callable[[], AsyncGenerator[RestartStep, None]]

    def routes(self) -> list[Route]:
        """The routes, for the application of the admin port."""
        return [Route("/admin/rolling-restart", self.rolling_restart, methods=["POST"])]

    async def rolling_restart(self, request: Request) -> Response:
        """Restart every worker in turn. The response is one JSON object per line, sent as it happens; the last is the outcome.

        If the client disconnects, the restart stops after the current worker.
        """
        # CSRF: another site's page in a browser can post a form to this machine, but not JSON without a CORS preflight.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise MediaTypeError(
                "the content type is not application/json; send Content-Type: application/json and the body {}"
            )
        return StreamingResponse(_lines(self.restart_workers()), media_type="application/x-ndjson")


async def _lines(steps: AsyncGenerator[RestartStep, None]) -> AsyncGenerator[str, None]:
    done = 0
    try:
        async with aclosing(steps) as running:
            async for step in running:
                logger.info("rolling restart: %s", step)
                done += step.state == "restarted"
                yield json.dumps(asdict(step)) + "\n"
    except (OperationInProgressError, RestartFailedError) as error:
        logger.warning("rolling restart: %s", error)
        yield json.dumps({"state": "failed", "restarted": done, "error": str(error)}) + "\n"
    else:
        yield json.dumps({"state": "done", "restarted": done}) + "\n"
