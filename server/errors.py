"""Why a request is refused.

    RequestRejected                  reason, detail, retry_after_s
    ├── OverloadedError             overloaded       retry after `retry_after_s`
    ├── DeadlineError               deadline         retry with a longer deadline
    ├── NoReplicaError              no_replica       retry: a stage had no replica for long, or the input was lost too often
    ├── NotReadyError               not_ready        retry: the pipeline has not been ready yet
    ├── DrainingError               draining         retry elsewhere: this leader is stopping
    ├── PoisonError                 poison           do not retry: this request broke every world it was sent to
    ├── StageError                  stage_error      a stage raised an exception on this request
    ├── HandlerError                handler_failed   the user's handler failed on this request
    ├── WithdrawnError              cancelled        the client went away
    └── InvalidRequestError         invalid_request  do not retry without a change of the request
        ├── InvalidParameterError   invalid_parameter
        ├── InvalidBodyError        invalid_body
        ├── BodyTooLargeError       body_too_large
        ├── BodyTimeoutError        body_timeout
        ├── MediaTypeError          unsupported_media_type
        ├── InferenceRequestError   invalid_inference_request
        ├── UnknownModelError       unknown_model
        ├── WrongPathError          wrong_path
        ├── HandlerInputError       invalid_input
        ├── UnauthenticatedError    unauthenticated
        ├── ForbiddenError          forbidden
        └── ImageError              invalid_image
            └── ImageTooLargeError  image_too_large

`multiworld_serving.server.http.errors` is the one place that turns a reason into an HTTP status.
"""

from __future__ import annotations

from typing import ClassVar


class InputUnreachableError(Exception):
    """A leader's reply to a frontend: a worker could not fetch the image; send the request again, with the image."""


class RequestRejected(Exception):  # noqa: N818 (an outcome of a request, not a fault of ours: the name the contract gives)
    """A request that ends without an answer.

    Args:
        detail: one sentence for people: what was wrong, what was expected, what to do.
        retry_after_s: seconds after which the same request may succeed; None = not known, or never.
    """

    reason: ClassVar[str] = "refused"
    """Machine-readable: a label in the metrics and a field of the response. Each class has its own reason."""

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s

    @classmethod
    def for_reason(cls, reason: str, detail: str, *, retry_after_s: float | None = None) -> RequestRejected:
        """The exception for a `reason` of the scheduler.

        Raises:
            KeyError: no class has that reason, which is a bug of the caller.
        """
        return _leaves()[reason](detail, retry_after_s=retry_after_s)


class OverloadedError(RequestRejected):
    """A bounded queue is full."""

    reason = "overloaded"


class DeadlineError(RequestRejected):
    """The request's deadline passed before it was answered."""

    reason = "deadline"


class NoReplicaError(RequestRejected):
    """A stage had no replica for longer than `recovery_grace_s`, or the request's input was lost `max_attempts` times."""

    reason = "no_replica"


class NotReadyError(RequestRejected):
    """The pipeline has not been complete yet."""

    reason = "not_ready"


class DrainingError(RequestRejected):
    """The leader is stopping and takes no new requests."""

    reason = "draining"


class PoisonError(RequestRejected):
    """The request, alone in its batch, broke `max_attempts` worlds."""

    reason = "poison"


class StageError(RequestRejected):
    """A stage raised an exception on this request, or returned an invalid output."""

    reason = "stage_error"


class HandlerError(RequestRejected):
    """The handler raised an error, ended, was late, or returned what the model does not take."""

    reason = "handler_failed"


class WithdrawnError(RequestRejected):
    """The client disconnected or cancelled the request."""

    reason = "cancelled"


class InvalidRequestError(RequestRejected):
    """The request is invalid: the same request will always be refused."""

    reason = "invalid_request"


class InvalidParameterError(InvalidRequestError):
    """A query parameter or a header has a value that is not allowed."""

    reason = "invalid_parameter"


class InvalidBodyError(InvalidRequestError):
    """The body is empty, or does not match its content type."""

    reason = "invalid_body"


class BodyTooLargeError(InvalidRequestError):
    """The body is longer than `max_body_bytes`."""

    reason = "body_too_large"


class BodyTimeoutError(InvalidRequestError):
    """The client did not send the whole body before the deadline."""

    reason = "body_timeout"


class MediaTypeError(InvalidRequestError):
    """The body's content type or content encoding is not supported."""

    reason = "unsupported_media_type"


class InferenceRequestError(InvalidRequestError):
    """An Open Inference Protocol request does not match the model's inputs or outputs."""

    reason = "invalid_inference_request"


class UnknownModelError(InvalidRequestError):
    """The model or this version of it does not exist."""

    reason = "unknown_model"


class WrongPathError(InvalidRequestError):
    """This path does not serve this model."""

    reason = "wrong_path"


class HandlerInputError(InvalidRequestError):
    """The handler does not accept the body, or the model does not take what it contains."""

    reason = "invalid_input"


class UnauthenticatedError(InvalidRequestError):
    """An API key is required, and it is missing or unknown."""

    reason = "unauthenticated"


class ForbiddenError(InvalidRequestError):
    """The API key does not have the required permission."""

    reason = "forbidden"


class ImageError(InvalidRequestError):
    """The bytes are not a usable image: unknown format, damaged, or too small."""

    reason = "invalid_image"


class ImageTooLargeError(ImageError):
    """The image has too many pixels."""

    reason = "image_too_large"


def _leaves(root: type[RequestRejected] = RequestRejected) -> dict[str, type[RequestRejected]]:
    found = {root.reason: root}
    for leaf in root.__subclasses__():
        found |= _leaves(leaf)
    return found
