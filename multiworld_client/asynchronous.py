"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx

from multiworld_client.codec import (
    REPOSITORY_INDEX,
    PreparedRequest,
    body_request,
    inference_request,
    model_name,
    predictions,
)
from multiworld_client.inputs import FileInput, TensorInput, encode_batch, encode_image
from multiworld_client.results import Prediction
from multiworld_client.retries import Call, Retries, Servers
from multiworld_client.tensors import infer_request, outputs


class AsyncClient:
    """Asyncio client of one service, for any number of tasks of one event loop.

    Use it as `async with AsyncClient(url) as client`, or call `aclose`.

    Args:
        url, api_key, timeout_s, retries, verify: as for `Client`.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: Retries | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(headers=headers, verify=verify)
        self._servers = Servers(url, timeout_s, retries)
        self._model: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def predict(
        self,
        image: object,
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Prediction:
        """As `Client.predict`. Files are read in a thread. Cancelling closes the connection, which cancels the request in the service."""
        call = Call(self._servers, timeout_s)
        encoded = await asyncio.to_thread(encode_image, image)
        return (await self._classify(call, encoded, top_k, request_id))[0]

    async def predict_batch(
        self,
        images: object,
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> list[Prediction]:
        """As `Client.predict_batch`. Files are read in a thread."""
        call = Call(self._servers, timeout_s)
        encoded = await asyncio.to_thread(encode_batch, images)
        return await self._classify(call, encoded, top_k, request_id)

    async def infer(
        self, inputs: Mapping[str, object], *, timeout_s: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        """As `Client.infer`."""
        call = Call(self._servers, timeout_s)
        request = infer_request(inputs, await self._model_name(call), request_id)
        return outputs(await self._send(call, request))

    async def predict_body(
        self,
        body: bytes,
        *,
        content_type: str = "application/octet-stream",
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> bytes:
        """As `Client.predict_body`."""
        return (await self._send(Call(self._servers, timeout_s), body_request(body, content_type, request_id))).content

    async def is_ready(self) -> bool:
        """Whether the service is ready (`/readyz` at any of the URLs), without retries. Each URL gets an equal part of the timeout."""
        for url, limit_s in self._servers.ready_checks():
            with contextlib.suppress(httpx.TransportError):
                if (await self._http.get(url, timeout=limit_s)).is_success:
                    return True
        return False

    async def _classify(
        self, call: Call, encoded: FileInput | TensorInput, top_k: int | None, request_id: str | None
    ) -> list[Prediction]:
        model = await self._model_name(call) if isinstance(encoded, TensorInput) else ""
        request = inference_request(encoded, model, top_k, request_id)
        return predictions(await self._send(call, request), call.tries)

    async def _model_name(self, call: Call) -> str:
        """The model's name, which only tensor inputs need; requested once."""
        if self._model is None:
            self._model = model_name(await self._send(call, REPOSITORY_INDEX))
            call.tries = 0
        return self._model

    async def _send(self, call: Call, request: PreparedRequest) -> httpx.Response:
        while True:
            remaining = call.begin_try()
            try:
                response = await self._http.send(request.build(self._http, call.url, remaining))
                if response.is_success:
                    return response
                pause_s = call.on_refusal(response)
            except httpx.TransportError as error:
                pause_s = call.on_connection_error(error)
            await asyncio.sleep(pause_s)
