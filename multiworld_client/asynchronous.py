"""The client for programs with an event loop."""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType
from typing import Self

import httpx

from multiworld_client.exchange import INDEX, Exchange, exchange_of, model_name, predictions
from multiworld_client.inputs import TensorInput, one, several
from multiworld_client.results import Prediction
from multiworld_client.retries import Call, Retries


class AsyncClient:
    """A client of one service, for any number of tasks of one event loop. Use as `async with AsyncClient(url) as client`, or close it.

    Args:
        url, api_key, timeout_s, retries, verify: as for `Client`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: Retries | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, verify=verify)
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries or Retries()
        self._model: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def predict(
        self,
        image: object,
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Prediction:
        """As `Client.predict`. Files are read on a thread."""
        call = self._call(timeout_s)
        found = await asyncio.to_thread(one, image)
        exchange = exchange_of(found, await self._model_for(call, found), top_k, request_id)
        return predictions(await self._ask(call, exchange), call.tries)[0]

    async def predict_batch(
        self,
        images: object,
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> list[Prediction]:
        """As `Client.predict_batch`. Files are read on a thread."""
        call = self._call(timeout_s)
        found = await asyncio.to_thread(several, images)
        exchange = exchange_of(found, await self._model_for(call, found), top_k, request_id)
        return predictions(await self._ask(call, exchange), call.tries)

    async def is_ready(self) -> bool:
        """Whether the service answers requests now; asked once."""
        try:
            return (await self._http.get("/readyz", timeout=self._timeout_s)).is_success
        except httpx.TransportError:
            return False

    def _call(self, timeout_s: float | None) -> Call:
        return Call(self._url, self._timeout_s if timeout_s is None else timeout_s, self._retries)

    async def _model_for(self, call: Call, image: object) -> str:
        """The model's name, which /v2 wants in its paths and /predict does not."""
        if self._model is None and isinstance(image, TensorInput):
            self._model = model_name(await self._ask(call, INDEX))
            call.tries = 0
        return self._model or ""

    async def _ask(self, call: Call, exchange: Exchange) -> httpx.Response:
        while True:
            left = call.begin_try()
            try:
                response = await self._http.send(exchange.request(self._http, left))
            except httpx.TransportError as error:
                pause_s = call.broke(error)
            else:
                pause = call.answered(response)
                if pause is None:
                    return response
                pause_s = pause
            await asyncio.sleep(pause_s)
