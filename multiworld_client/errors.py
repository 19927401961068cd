"""What can go wrong, as seen by a client.

    ClientError
    ├── InputError                  what was given is no picture that can be sent; nothing was sent
    ├── DeadlineError               no answer within the time that was given
    ├── UnreachableError            no connection, or it broke, for as long as it was tried
    ├── ProtocolError               something answers, and it is no multiworld service
    └── RefusedError                status, reason, detail, request_id, retry_after_s
        ├── AccessDeniedError       401, 403: give the client a key
        ├── InvalidRequestError     other 4xx: the same request gets the same refusal
        ├── OverloadedError         429: too much load, for as long as it was tried
        ├── UnavailableError        503: not ready, or stopping, for as long as it was tried
        └── ServerFailedError       500: the model, or the server, failed on this request

Retries are over when one of these is raised. All survive pickling.
"""

from __future__ import annotations


class ClientError(Exception):
    """Everything below; catch this one at the edge."""


class InputError(ClientError, ValueError):
    """What was given is no picture that can be sent."""


class DeadlineError(ClientError, TimeoutError):
    """There was no answer within the time that was given, all tries together."""


class UnreachableError(ClientError, ConnectionError):
    """No connection was made, or it broke."""


class ProtocolError(ClientError):
    """Something answers that is no multiworld service."""


class RefusedError(ClientError):
    """The service has answered, and not with a prediction.

    Attributes:
        status: of HTTP.
        reason: one word for machines, such as "overloaded" or "invalid_image".
        detail: what was wrong, what was expected, what to do.
        request_id: finds the request in the service's log; None when the answer had none.
        retry_after_s: when it is worth trying again; None when that is not known, or never.
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
    """The service wants a key, or another one."""


class InvalidRequestError(RefusedError):
    """What was sent cannot be served, now or later."""


class OverloadedError(RefusedError):
    """The service has more to do than it can."""


class UnavailableError(RefusedError):
    """The service is starting or stopping, or a stage of its model has no worker."""


class ServerFailedError(RefusedError):
    """The model, or the server, failed on this request."""


def refused(status: int) -> type[RefusedError]:
    """The error for this status, which is none of success."""
    exact = {401: AccessDeniedError, 403: AccessDeniedError, 429: OverloadedError, 503: UnavailableError}
    if status in exact:
        return exact[status]
    return InvalidRequestError if 400 <= status < 500 else ServerFailedError
