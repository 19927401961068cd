"""Why a request is refused.

    RequestRejected                  reason, detail, retry_after_s
    ├── OverloadedError             overloaded       retry after `retry_after_s`
    ├── DeadlineError               deadline         retry with a longer deadline
    ├── NoReplicaError              no_replica       retry: a stage had no replica for long
    ├── NotReadyError               not_ready        retry: the pipeline has not been ready yet
    ├── DrainingError               draining         retry elsewhere: this leader is stopping
    ├── PoisonError                 poison           do not retry: this request broke every world it was sent to
    ├── SessionLostError            session_lost     begin a new session: the replicas that kept it are gone
    ├── StageError                  stage_error      a stage raised an exception on this request
    ├── WithdrawnError              cancelled        the client went away
    └── InvalidRequestError         invalid_request  do not retry without a change of the request
        ├── InvalidParameterError   invalid_parameter
        ├── InvalidBodyError        invalid_body
        ├── BodyTooLargeError       body_too_large
        ├── BodyTimeoutError        body_timeout
        ├── MediaTypeError          unsupported_media_type
        ├── InferenceRequestError   invalid_inference_request
        ├── UnknownModelError       unknown_model
        ├── NoModelNamedError       no_model_named
        ├── WrongPathError          wrong_path
        ├── InvalidInputError       invalid_input
        ├── UnauthenticatedError    unauthenticated
        ├── ForbiddenError          forbidden
        └── ImageError              invalid_image
            └── ImageTooLargeError  image_too_large

This is the only place that gives a reason its HTTP status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from multiworld_serving.common.service.predictor import Trace


class RequestRejected(Exception):  # noqa: N818 (an outcome of a request, not a fault of ours: the name the contract gives)
    """A request that ends without an answer.

    Args:
        detail: one sentence for people: what was wrong, what was expected, what to do.
        retry_after_s: seconds after which the same request may succeed; None = that of the class.

    Attributes:
        reason: machine-readable: a label in the metrics and a field of the response. Each class has its own.
        status: of the HTTP response.
        retry_after_s: None = not known, or never.
        trace: of a traced request, as in `Prediction`.
    """

    reason: ClassVar[str] = "refused"
    status: ClassVar[int] = 503
    retry_after_s: float | None = None
    trace: Trace | None = None

    def __init_subclass__(cls, *, reason: str, status: int, retry_after_s: float | None = None) -> None:
        cls.reason, cls.status = reason, status
        cls.retry_after_s = cls.retry_after_s if retry_after_s is None else retry_after_s

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    @classmethod
    def for_reason(cls, reason: str, detail: str, *, retry_after_s: float | None = None) -> RequestRejected:
        """The exception for a `reason` of the scheduler.

        Raises:
            KeyError: no class has that reason, which is a bug of the caller.
        """
        return _leaves()[reason](detail, retry_after_s=retry_after_s)


class OverloadedError(RequestRejected, reason="overloaded", status=429, retry_after_s=1.0):
    """A bounded queue is full."""


class DeadlineError(RequestRejected, reason="deadline", status=504):
    """The request's deadline passed before it was answered."""


class NoReplicaError(RequestRejected, reason="no_replica", status=503, retry_after_s=1.0):
    """A stage had no replica for longer than `recovery_grace_s`."""


class NotReadyError(RequestRejected, reason="not_ready", status=503, retry_after_s=1.0):
    """The pipeline has not been complete yet."""


class DrainingError(RequestRejected, reason="draining", status=503, retry_after_s=1.0):
    """The leader is stopping and takes no new requests."""


class PoisonError(RequestRejected, reason="poison", status=500):
    """The request, alone in its batch, broke `max_attempts` worlds."""


class SessionLostError(RequestRejected, reason="session_lost", status=503, retry_after_s=0.0):
    """The replicas that kept the session of the request are gone, or it may be incomplete."""


class StageError(RequestRejected, reason="stage_error", status=500):
    """A stage raised an exception on this request, or returned an invalid output."""


class WithdrawnError(RequestRejected, reason="cancelled", status=499):
    """The client disconnected or cancelled the request."""


class InvalidRequestError(RequestRejected, reason="invalid_request", status=422):
    """The request is invalid: the same request will always be refused."""


class InvalidParameterError(InvalidRequestError, reason="invalid_parameter", status=422):
    """A query parameter or a header has a value that is not allowed."""


class InvalidBodyError(InvalidRequestError, reason="invalid_body", status=422):
    """The body is empty, or does not match its content type."""


class BodyTooLargeError(InvalidRequestError, reason="body_too_large", status=413):
    """The body is longer than `max_body_bytes`."""


class BodyTimeoutError(InvalidRequestError, reason="body_timeout", status=408):
    """The client did not send the whole body before the deadline."""


class MediaTypeError(InvalidRequestError, reason="unsupported_media_type", status=415):
    """The body's content type or content encoding is not supported."""


class InferenceRequestError(InvalidRequestError, reason="invalid_inference_request", status=400):
    """An Open Inference Protocol request does not match the model's inputs or outputs."""


class UnknownModelError(InvalidRequestError, reason="unknown_model", status=404):
    """The model or this version of it does not exist."""


class NoModelNamedError(InvalidRequestError, reason="no_model_named", status=400):
    """The path names no model, and several could be meant."""


class WrongPathError(InvalidRequestError, reason="wrong_path", status=404):
    """This path does not serve this model."""


class InvalidInputError(InvalidRequestError, reason="invalid_input", status=400):
    """A stage in Python does not accept the input, or the model does not take what it contains, such as an index out of range."""


class UnauthenticatedError(InvalidRequestError, reason="unauthenticated", status=401):
    """An API key is required, and it is missing or unknown."""


class ForbiddenError(InvalidRequestError, reason="forbidden", status=403):
    """The API key does not have the required permission."""


class ImageError(InvalidRequestError, reason="invalid_image", status=422):
    """The bytes are not a usable image: unknown format, damaged, or too small."""


class ImageTooLargeError(ImageError, reason="image_too_large", status=413):
    """The image has too many pixels."""


def _leaves(root: type[RequestRejected] = RequestRejected) -> dict[str, type[RequestRejected]]:
    found = {root.reason: root}
    for leaf in root.__subclasses__():
        found |= _leaves(leaf)
    return found


STATUS_OF_REASON: Final = {
    **{reason: leaf.status for reason, leaf in _leaves().items()},
    "internal": 500,
}
"""The HTTP status of every reason of an inference request, and of an unexpected exception. `administration` adds other reasons."""
