"""The client for programs without an event loop."""

from __future__ import annotations

import ssl
import time
from types import TracebackType
from typing import Self

import httpx

from multiworld_client.exchange import INDEX, Exchange, exchange_of, model_name, predictions
from multiworld_client.inputs import TensorInput, one, several
from multiworld_client.results import Prediction
from multiworld_client.retries import Call, Retries


class Client:
    """A client of one service; may be shared by threads. Use as `with Client(url) as client`, or close it.

    Args:
        url: of the service's HTTP API, such as "http://127.0.0.1:8000".
        api_key: where the service wants one.
        timeout_s: for each thing that is asked, all tries and pauses together; a call may say otherwise.
        retries: how often and how fast is asked again.
        verify: of TLS, as httpx takes it: False believes any certificate, a context may have authorities and a certificate of our own.
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
        self._http = httpx.Client(base_url=url, headers=headers, verify=verify)
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries or Retries()
        self._model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def predict(
        self,
        image: object,
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Prediction:
        """What is in one picture.

        Args:
            image: path of a JPEG, PNG or WebP file, its content as bytes, a Pillow image; or pixels as a numpy array or a torch tensor
                [3, S, S], uint8 in 0..255 or float32 in 0..1, RGB, of the size S that the model takes.
            top_k: how many classes; None leaves it to the service.
            timeout_s: seconds until it is given up, all tries together; None takes that of the client.
            request_id: stands in the service's log; None makes one up.
        Raises:
            ClientError: one of its leaves, see `multiworld_client.errors`.
        """
        call = self._call(timeout_s)
        found = one(image)
        exchange = exchange_of(found, self._model_for(call, found), top_k, request_id)
        return predictions(self._ask(call, exchange), call.tries)[0]

    def predict_batch(
        self,
        images: object,
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> list[Prediction]:
        """What is in several pictures that are answered together, by one version of the model, or not at all.

        Args:
            images: an array or tensor [N, 3, S, S], or a list of paths, contents of files and Pillow images.
        Otherwise as `predict`.
        """
        call = self._call(timeout_s)
        found = several(images)
        exchange = exchange_of(found, self._model_for(call, found), top_k, request_id)
        return predictions(self._ask(call, exchange), call.tries)

    def is_ready(self) -> bool:
        """Whether the service answers requests now; asked once."""
        try:
            return self._http.get("/readyz", timeout=self._timeout_s).is_success
        except httpx.TransportError:
            return False

    def _call(self, timeout_s: float | None) -> Call:
        return Call(self._url, self._timeout_s if timeout_s is None else timeout_s, self._retries)

    def _model_for(self, call: Call, image: object) -> str:
        """The model's name, which /v2 wants in its paths and /predict does not."""
        if self._model is None and isinstance(image, TensorInput):
            self._model = model_name(self._ask(call, INDEX))
            call.tries = 0
        return self._model or ""

    def _ask(self, call: Call, exchange: Exchange) -> httpx.Response:
        while True:
            left = call.begin_try()
            try:
                response = self._http.send(exchange.request(self._http, left))
            except httpx.TransportError as error:
                pause_s = call.broke(error)
            else:
                pause = call.answered(response)
                if pause is None:
                    return response
                pause_s = pause
            time.sleep(pause_s)
