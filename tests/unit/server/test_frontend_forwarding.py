"""Responses of a frontend when the leader, which handles the request, fails or is gone."""

import httpx
import pytest

from multiworld_serving.server.frontends.asgi_proxy import AsgiProxy
from multiworld_serving.server.frontends.frames import Frame, FrameConnection, FrameKind


class Leader(FrameConnection):
    """Ends each request as the test specifies."""

    def __init__(self, *, gone: bool) -> None:
        super().__init__(lambda _: None, lambda: None)
        self.forwarding = AsgiProxy(self._inference, self)
        self._gone = gone

    async def _inference(self, *_: object) -> None:
        raise AssertionError

    def send(self, kind: FrameKind, number: int = 0, *_: object, **__: object) -> None:
        if kind is not FrameKind.REQUEST:
            return
        if self._gone:
            self.forwarding.on_lost()
        else:
            self.forwarding.on_frame(Frame(FrameKind.END, number, {"failed": True}, memoryview(b"")))


@pytest.mark.parametrize(("gone", "status", "reason"), [(True, 503, "draining"), (False, 500, "internal")])
async def test_error_has_the_common_format_when_the_leader_fails(gone: bool, status: int, reason: str) -> None:
    transport = httpx.ASGITransport(Leader(gone=gone).forwarding)
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        for _ in range(2):
            response = await client.get("/status", headers={"X-Request-Id": "mine"})
            assert response.status_code == status
            assert (response.json()["reason"], response.json()["request_id"]) == (reason, "mine")
            assert response.headers["X-Request-Id"] == "mine"
