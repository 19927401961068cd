"""Why a request gets no answer.

    RequestRefused                  reason, detail, retry_after_s
    ├── OverloadedError             overloaded       try again after `retry_after_s`
    ├── DeadlineError               deadline         try again, with more time
    ├── NoReplicaError              no_replica       try again: a stage lost its last replica for longer than the grace
    ├── NotReadyError               not_ready        try again: the pipeline has not been ready yet
    ├── DrainingError               draining         try again elsewhere: this leader is going away
    ├── PoisonError                 poison           do not try again: this request broke every world it was sent to
    ├── StageError                  stage_error      a stage raised an exception on this request
    ├── WithdrawnError              cancelled        nobody waits for the answer any more
    └── InvalidRequestError         invalid_request  the same bytes get the same refusal: send something else
        ├── InvalidParameterError   invalid_parameter
        ├── InvalidBodyError        invalid_body
        ├── BodyTooLargeError       body_too_large
        ├── BodyTimeoutError        body_timeout
        ├── MediaTypeError          unsupported_media_type
        ├── InferenceRequestError   invalid_inference_request
        ├── UnknownModelError       unknown_model
        ├── UnauthenticatedError    unauthenticated
        ├── ForbiddenError          forbidden
        └── ImageError              invalid_image
            └── ImageTooLargeError  image_too_large

`server.http_errors` is the one place that turns a reason into an HTTP status.
"""

from __future__ import annotations

from typing import ClassVar


class RequestRefused(Exception):  # noqa: N818 (an outcome of a request, not a fault of ours: the name the contract gives)
    """A request that ends without an answer. Survives pickling.

    Args:
        detail: one sentence for people: what was wrong, what was expected, what to do.
        retry_after_s: seconds after which the same request may succeed; None = not known, or never.
    """

    reason: ClassVar[str] = "refused"
    """One word for machines: a label in the metrics, a field of the answer. One class, one reason."""

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (type(self), self.detail, self.retry_after_s))

    @classmethod
    def for_reason(cls, reason: str, detail: str, *, retry_after_s: float | None = None) -> RequestRefused:
        """The leaf whose reason is `reason`: how the scheduler's decisions become exceptions.

        Raises:
            KeyError: no class has that reason, which is a bug of the caller.
        """
        return _leaves()[reason](detail, retry_after_s=retry_after_s)


class OverloadedError(RequestRefused):
    """A bounded queue is full."""

    reason = "overloaded"


class DeadlineError(RequestRefused):
    """The request's deadline passed before its answer was there."""

    reason = "deadline"


class NoReplicaError(RequestRefused):
    """A stage had no replica for longer than `recovery_grace_s`."""

    reason = "no_replica"


class NotReadyError(RequestRefused):
    """The pipeline has not been complete yet."""

    reason = "not_ready"


class DrainingError(RequestRefused):
    """The leader is stopping and takes no new requests."""

    reason = "draining"


class PoisonError(RequestRefused):
    """The request, alone in its batch, broke `max_attempts` worlds."""

    reason = "poison"


class StageError(RequestRefused):
    """A stage raised an exception on this request, or gave something that is no answer."""

    reason = "stage_error"


class WithdrawnError(RequestRefused):
    """The client went away, or withdrew the request."""

    reason = "cancelled"


class InvalidRequestError(RequestRefused):
    """What the client sent cannot be served, now or later."""

    reason = "invalid_request"


class InvalidParameterError(InvalidRequestError):
    """A query parameter or a header has a value that is not allowed."""

    reason = "invalid_parameter"


class InvalidBodyError(InvalidRequestError):
    """The body is empty, or is not the form that its content type promises."""

    reason = "invalid_body"


class BodyTooLargeError(InvalidRequestError):
    """The body is longer than `max_body_bytes`."""

    reason = "body_too_large"


class BodyTimeoutError(InvalidRequestError):
    """The client did not send its whole body within the request's time."""

    reason = "body_timeout"


class MediaTypeError(InvalidRequestError):
    """The body's content type or encoding is none of those that are served."""

    reason = "unsupported_media_type"


class InferenceRequestError(InvalidRequestError):
    """What an inference request of the Open Inference Protocol says is no request for this model."""

    reason = "invalid_inference_request"


class UnknownModelError(InvalidRequestError):
    """There is no such model, or not in that version."""

    reason = "unknown_model"


class UnauthenticatedError(InvalidRequestError):
    """A key is needed, and there is none, or one that nobody was given."""

    reason = "unauthenticated"


class ForbiddenError(InvalidRequestError):
    """Whoever this is may not do this."""

    reason = "forbidden"


class ImageError(InvalidRequestError):
    """The bytes are no image that can be used: not one at all, damaged, or too small."""

    reason = "invalid_image"


class ImageTooLargeError(ImageError):
    """The image has more pixels than `max_image_pixels`."""

    reason = "image_too_large"


def _leaves(root: type[RequestRefused] = RequestRefused) -> dict[str, type[RequestRefused]]:
    found = {root.reason: root}
    for leaf in root.__subclasses__():
        found |= _leaves(leaf)
    return found


def _restore(kind: type[RequestRefused], detail: str, retry_after_s: float | None) -> RequestRefused:
    return kind(detail, retry_after_s=retry_after_s)
