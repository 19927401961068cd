"""The clients: `AsyncClient` for asyncio, and the blocking `Client`. Both make the same calls and differ in how they send and wait."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import httpx

from multiworld_client.codec import (
    MODELS,
    PreparedRequest,
    body_request,
    file_request,
    infer_request,
    input_and_output,
    metadata_request,
    only_model,
    outputs,
    pixels_request,
    predictions,
)
from multiworld_client.inputs import TensorInput, encode_batch, encode_image
from multiworld_client.results import Prediction
from multiworld_client.retries import Call, Retries, Servers

P = ParamSpec("P")
T = TypeVar("T")
WITHOUT_PROXY = dict.fromkeys(("all://127.0.0.1", "all://[::1]", "all://localhost"))
"""For httpx: connections to this machine use no proxy, also if `http_proxy` is set."""


class _Client:
    """What both clients share. A subclass says how to send a request, wait, and read files."""

    _connect: type[httpx.Client | httpx.AsyncClient]
    _http: httpx.Client | httpx.AsyncClient

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
        self._http = self._connect(headers=headers, verify=verify, mounts=WITHOUT_PROXY)
        self._servers = Servers(url, timeout_s, retries)
        self._found: dict[str, Any] = {}

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        """Send a request once. Raises httpx.TransportError."""
        raise NotImplementedError

    async def _pause(self, pause_s: float) -> None:
        raise NotImplementedError

    async def _encoded(self, encode: Callable[[object], T], images: object) -> T:
        """What `encode` returns; it may read files."""
        raise NotImplementedError

    async def _classify(
        self, call: Call, encoded: bytes | TensorInput, model: str | None, top_k: int | None, request_id: str | None
    ) -> list[Prediction]:
        if isinstance(encoded, bytes):
            request = file_request(encoded, model, top_k, request_id)
        else:
            model = model or await self._find(call, MODELS, only_model)
            names = await self._find(call, metadata_request(model), input_and_output)
            request = pixels_request(encoded, model, names, top_k, request_id)
        return predictions(await self._send(call, request), call.tries)

    async def _find(self, call: Call, request: PreparedRequest, parse: Callable[[httpx.Response], object]) -> Any:
        """What `parse` returns for the answer to this request, which is sent once and has tries of its own."""
        if request.path not in self._found:
            self._found[request.path] = parse(await self._send(call, request))
            call.tries = 0
        return self._found[request.path]

    async def _send(self, call: Call, request: PreparedRequest) -> httpx.Response:
        while True:
            remaining = call.begin_try()
            try:
                response = await self._exchange(request.build(self._http, call.url, remaining))
                if response.is_success:
                    return response
                pause_s = call.on_refusal(response)
            except httpx.TransportError as error:
                pause_s = call.on_connection_error(error)
            await self._pause(pause_s)


class AsyncClient(_Client):
    """Asyncio client of one service, for any number of tasks of one event loop. Files are read in a thread.

    Use it as `async with AsyncClient(url) as client`, or call `aclose`.

    Args:
        url, api_key, timeout_s, retries, verify: as for `Client`.
    """

    _connect = httpx.AsyncClient
    _http: httpx.AsyncClient

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
        model: str | None = None,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Prediction:
        """Classify one image. Cancelling closes the connection, which cancels the request in the service.

        Args:
            image: path of a JPEG, PNG or WebP file, its content as bytes, a Pillow image, or pixels as a numpy array or torch tensor
                [3, S, S], RGB, uint8 in 0..255 or float32 in 0..1, where S is the model's image size.
            model: name of the model; None = the only one.
            top_k: number of classes; None uses the service's default.
            timeout_s: limit in seconds, including retries; None uses the client's.
            request_id: identifies the request in the service's log, 1 to 128 printable characters; None generates one.
        Raises:
            ClientError: a subclass, see `multiworld_client.errors`.
        """
        call = Call(self._servers, timeout_s)
        return (await self._classify(call, await self._encoded(encode_image, image), model, top_k, request_id))[0]

    async def predict_batch(
        self,
        images: object,
        *,
        model: str | None = None,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> list[Prediction]:
        """Classify several images in one request: all by one version of the model, or the request fails.

        Args:
            images: an array or tensor [N, 3, S, S], or a list of paths, contents of files and Pillow images.
            Other arguments and errors are as for `predict`.
        """
        call = Call(self._servers, timeout_s)
        return await self._classify(call, await self._encoded(encode_batch, images), model, top_k, request_id)

    async def infer(
        self,
        inputs: Mapping[str, object],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Compute a batch of samples of any model; all by one version, or the request fails.

        Args:
            inputs: the inputs of the model by name, as numpy arrays or torch tensors with the batch dimension first. Their types and
                shapes are those of GET /v2/models/NAME.
            model, timeout_s, request_id: as for `predict`.
        Returns:
            The outputs by name, as numpy arrays; bfloat16 becomes float32.
        Raises:
            ClientError: a subclass, see `multiworld_client.errors`.
        """
        call = Call(self._servers, timeout_s)
        request = infer_request(inputs, model or await self._find(call, MODELS, only_model), request_id)
        return outputs(await self._send(call, request))

    async def predict_body(
        self,
        body: bytes,
        *,
        model: str | None = None,
        content_type: str = "application/octet-stream",
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> bytes:
        """Send a body to the handler of the service and return the body of its response.

        Args:
            body, content_type: as the handler's `decode` takes them.
            model, timeout_s, request_id: as for `predict`.
        Raises:
            ClientError: a subclass, see `multiworld_client.errors`.
        """
        request = body_request(body, model, content_type, request_id)
        return (await self._send(Call(self._servers, timeout_s), request)).content

    async def is_ready(self) -> bool:
        """Whether a model is ready (`/readyz` at any of the URLs), without retries. Each URL gets an equal part of the timeout."""
        limit_s = self._servers.timeout_s / len(self._servers.urls)
        for url in self._servers.in_order():
            request = self._http.build_request("GET", f"{url}/readyz", timeout=limit_s)
            with contextlib.suppress(httpx.TransportError):
                if (await self._exchange(request)).is_success:
                    return True
        return False

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        return await self._http.send(request)

    async def _pause(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

    async def _encoded(self, encode: Callable[[object], T], images: object) -> T:
        return await asyncio.to_thread(encode, images)


def _blocking(call: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """A method of `AsyncClient` for `Client`, which never waits for an event loop: the coroutine ends in its first step."""

    @functools.wraps(call)
    def blocking(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            call(self, *args, **kwargs).send(None)
        except StopIteration as end:
            return cast(T, end.value)
        raise AssertionError("the coroutine waits")

    return blocking


class Client(_Client):
    """Synchronous client of one service; thread-safe. Use it as `with Client(url) as client`, or call `close`.

    Args:
        url: the service's HTTP API, such as "http://127.0.0.1:8000", or a sequence of URLs, one per frontend or proxy. Calls use the
            first until it fails, then the next; a URL that failed is used again when the others fail.
        api_key: if the service requires one.
        timeout_s: limit of one call in seconds, including retries and pauses; each call may override it.
        retries: limits and pauses of retries; None uses the defaults.
        verify: TLS verification as in httpx: True, False (accepts any certificate), or an SSLContext with CAs and a client certificate.
    """

    _connect = httpx.Client
    _http: httpx.Client

    predict = _blocking(AsyncClient.predict)
    predict_batch = _blocking(AsyncClient.predict_batch)
    infer = _blocking(AsyncClient.infer)
    predict_body = _blocking(AsyncClient.predict_body)
    is_ready = _blocking(AsyncClient.is_ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        return self._http.send(request)

    async def _pause(self, pause_s: float) -> None:
        time.sleep(pause_s)  # noqa: ASYNC251 - no event loop runs it

    async def _encoded(self, encode: Callable[[object], T], images: object) -> T:
        return encode(images)
