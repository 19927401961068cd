"""Errors of the client.

    ClientError
    ├── InputError                  the input is not a valid image, or needs `model=`; nothing was sent
    ├── DeadlineError               no answer by the deadline
    ├── UnreachableError            no connection, or it was lost, in every try
    ├── ProtocolError               the answer is not from a multiworld service
    └── RefusedError                status, reason, detail, request_id, retry_after_s
        ├── AccessDeniedError       401, 403: the client needs an API key, or another one
        ├── InvalidRequestError     other 4xx: the same request would fail again
        ├── OverloadedError         429 in the last try
        ├── UnavailableError        503 in the last try: not ready, or stopping
        └── ServerFailedError       500: the model or the server failed on this request

They are raised after all retries. All can be pickled.
"""

from __future__ import annotations


class ClientError(Exception):
    """Base class of all errors of the client."""


class InputError(ClientError, ValueError):
    """The input is not a valid image, or must name one of several models. Nothing was sent."""


class DeadlineError(ClientError, TimeoutError):
    """No answer by the deadline, which covers all tries."""


class UnreachableError(ClientError, ConnectionError):
    """The connection could not be made, or was lost."""


class ProtocolError(ClientError):
    """The answer is not from a multiworld service."""


class RefusedError(ClientError):
    """The service answered with an error.

    Attributes:
        status: HTTP status.
        reason: one word for programs, such as "overloaded" or "invalid_image".
        detail: what was wrong, what was expected, what to do.
        request_id: identifies the request in the service's log; None if the answer had none.
        retry_after_s: seconds to wait before another try; None if the service did not say.
    """

    def __init__(
        self, status: int, reason: str, detail: str, request_id: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, reason, detail, request_id, retry_after_s)
        self.status = status
        self.reason = reason
        self.detail = detail
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.detail} (HTTP {self.status}, {self.reason}, request {self.request_id})"


class AccessDeniedError(RefusedError):
    """The service requires an API key, or this key does not permit the request."""


class InvalidRequestError(RefusedError):
    """The request is invalid; sending it again cannot succeed."""


class OverloadedError(RefusedError):
    """The load exceeds the capacity of the service."""


class UnavailableError(RefusedError):
    """The service is starting or stopping, or a stage has no worker."""


class ServerFailedError(RefusedError):
    """The model or the server failed on this request."""


def error_class(status: int) -> type[RefusedError]:
    """The exception class for an HTTP status other than 2xx."""
    exact = {401: AccessDeniedError, 403: AccessDeniedError, 429: OverloadedError, 503: UnavailableError}
    if status in exact:
        return exact[status]
    return InvalidRequestError if 400 <= status < 500 else ServerFailedError
