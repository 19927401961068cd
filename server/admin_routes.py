"""What operators can have done: verbs that change the service, on the operators' port and never on that of inference."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.maintenance import MaintenanceError
from server.rolling_restart import RestartFailedError, RestartStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdminRoutes:
    """
    Attributes:
        restart_workers: starts a rolling restart.
        token: to be given as `Authorization: Bearer …`. Empty: none is needed, and only this machine is let in.
    """

    restart_workers: Callable[[], AsyncGenerator[RestartStep, None]]
    token: bytes

    def routes(self) -> list[Route]:
        """For the operators' application."""
        return [Route("/admin/rolling-restart", self.rolling_restart, methods=["POST"])]

    async def rolling_restart(self, request: Request) -> Response:
        """Restart every worker in turn. The answer has one JSON object a line, as it happens; the last one says how it ended.

        Who hangs up stops it after the worker at hand.
        """
        # A page in somebody's browser can send a form to this machine, but not JSON without asking first.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return JSONResponse({"error": "send it with Content-Type: application/json"}, 415)
        if refusal := self.refusal(request):
            return refusal
        return StreamingResponse(_lines(self.restart_workers()), media_type="application/x-ndjson")

    def refusal(self, request: Request) -> Response | None:
        """Why this client may not use operators' verbs; None when it may."""
        if self.token:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token):
                return JSONResponse(
                    {"error": "send the join token as `Authorization: Bearer TOKEN`"},
                    401,
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif not _is_this_machine(request):
            error = "without a join token of its own (--token-file), the service takes this from its own machine only"
            return JSONResponse({"error": error}, 403)
        return None


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


def _is_this_machine(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
