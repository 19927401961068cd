"""The synchronous client."""

from __future__ import annotations

import contextlib
import ssl
import time
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


class Client:
    """Synchronous client of one service; thread-safe. Use it as `with Client(url) as client`, or call `close`.

    Args:
        url: the service's HTTP API, such as "http://127.0.0.1:8000", or a sequence of URLs, one per frontend or proxy. Calls use the
            first until it fails, then the next; a URL that failed is used again when the others fail.
        api_key: if the service requires one.
        timeout_s: limit of one call in seconds, including retries and pauses; each call may override it.
        retries: limits and pauses of retries; None uses the defaults.
        verify: TLS verification as in httpx: True, False (accepts any certificate), or an SSLContext with CAs and a client certificate.
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
        self._http = httpx.Client(headers=headers, verify=verify)
        self._servers = Servers(url, timeout_s, retries)
        self._model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def predict(
        self,
        image: object,
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Prediction:
        """Classify one image.

        Args:
            image: path of a JPEG, PNG or WebP file, its content as bytes, a Pillow image, or pixels as a numpy array or torch tensor
                [3, S, S], RGB, uint8 in 0..255 or float32 in 0..1, where S is the model's image size.
            top_k: number of classes; None uses the service's default.
            timeout_s: limit in seconds, including retries; None uses the client's.
            request_id: identifies the request in the service's log, 1 to 128 printable characters; None generates one.
        Raises:
            ClientError: a subclass, see `multiworld_client.errors`.
        """
        call = Call(self._servers, timeout_s)
        encoded = encode_image(image)
        return self._classify(call, encoded, top_k, request_id)[0]

    def predict_batch(
        self,
        images: object,
        *,
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
        encoded = encode_batch(images)
        return self._classify(call, encoded, top_k, request_id)

    def infer(
        self, inputs: Mapping[str, object], *, timeout_s: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        """Compute a batch of samples of any model; all by one version, or the request fails.

        Args:
            inputs: the inputs of the model by name, as numpy arrays or torch tensors with the batch dimension first. Their types and
                shapes are those of GET /v2/models/NAME.
            timeout_s, request_id: as for `predict`.
        Returns:
            The outputs by name, as numpy arrays; bfloat16 becomes float32.
        Raises:
            ClientError: a subclass, see `multiworld_client.errors`.
        """
        call = Call(self._servers, timeout_s)
        request = infer_request(inputs, self._model_name(call), request_id)
        return outputs(self._send(call, request))

    def predict_body(
        self,
        body: bytes,
        *,
        content_type: str = "application/octet-stream",
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> bytes:
        """Send a body to the handler of the service and return the body of its response.

        Args:
            body, content_type: as the handler's `decode` takes them.
            timeout_s, request_id: as for `predict`.
        Raises:
            ClientError: a subclass, see `multiworld_client.errors`.
        """
        return self._send(Call(self._servers, timeout_s), body_request(body, content_type, request_id)).content

    def is_ready(self) -> bool:
        """Whether the service is ready (`/readyz` at any of the URLs), without retries. Each URL gets an equal part of the timeout."""
        for url, limit_s in self._servers.ready_checks():
            with contextlib.suppress(httpx.TransportError):
                if self._http.get(url, timeout=limit_s).is_success:
                    return True
        return False

    def _classify(
        self, call: Call, encoded: FileInput | TensorInput, top_k: int | None, request_id: str | None
    ) -> list[Prediction]:
        model = self._model_name(call) if isinstance(encoded, TensorInput) else ""
        request = inference_request(encoded, model, top_k, request_id)
        return predictions(self._send(call, request), call.tries)

    def _model_name(self, call: Call) -> str:
        """The model's name, which only tensor inputs need; requested once."""
        if self._model is None:
            self._model = model_name(self._send(call, REPOSITORY_INDEX))
            call.tries = 0
        return self._model

    def _send(self, call: Call, request: PreparedRequest) -> httpx.Response:
        while True:
            remaining = call.begin_try()
            try:
                response = self._http.send(request.build(self._http, call.url, remaining))
                if response.is_success:
                    return response
                pause_s = call.on_refusal(response)
            except httpx.TransportError as error:
                pause_s = call.on_connection_error(error)
            time.sleep(pause_s)
