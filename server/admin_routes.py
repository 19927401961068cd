"""What operators can have done: verbs that change the service, on the operators' port and never on that of inference."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.rolling_restart import RestartFailedError, RestartRefusedError, RestartStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdminRoutes:
    """
    Attributes:
        restart_workers: starts a rolling restart.
        tokens: one of them is to be given as `Authorization: Bearer …`. None at all: then only this machine is let in.
    """

    restart_workers: Callable[[], AsyncGenerator[RestartStep, None]]
    tokens: Callable[[], Sequence[bytes]]

    def routes(self) -> list[Route]:
        """For the operators' application."""
        return [Route("/admin/rolling-restart", self.rolling_restart, methods=["POST"])]

    async def rolling_restart(self, request: Request) -> Response:
        """Restart every worker in turn. The answer has one JSON object a line, as it happens; the last one says how it ended.

        Who hangs up stops it after the worker at hand.
        """
        if refusal := self._refusal(request):
            return refusal
        return StreamingResponse(_lines(self.restart_workers()), media_type="application/x-ndjson")

    def _refusal(self, request: Request) -> Response | None:
        # A page in somebody's browser can send a form to this machine, but not JSON without asking first.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return JSONResponse({"error": "send it with Content-Type: application/json"}, 415)
        if tokens := self.tokens():
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            known = [token for token in tokens if hmac.compare_digest(given.strip().encode(), token)]
            if scheme.lower() != "bearer" or not known:
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
    except (RestartRefusedError, RestartFailedError) as error:
        logger.warning("rolling restart: %s", error)
        yield json.dumps({"state": "failed", "restarted": done, "error": str(error)}) + "\n"
    else:
        yield json.dumps({"state": "done", "restarted": done}) + "\n"


def _is_this_machine(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
