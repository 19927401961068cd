"""Decides whether and when to retry, for both clients. Reads the clock; no other I/O."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import httpx

from multiworld_client.errors import ClientError, DeadlineError, RefusedError, UnreachableError, error_class

_RETRYABLE = (408, 429, 502, 503)
"""Statuses that may be temporary. 504 is not among them: the deadline of the request is also ours."""


@dataclass(frozen=True)
class Retries:
    """Limits and pauses of retries. Inference has no side effects, so a retry is safe.

    Attributes:
        max_tries: number of tries, including the first.
        first_pause_s: pause after the first failure. It doubles with each failure up to `max_pause_s`, with random jitter of up to half.
            A `Retry-After` of the service replaces it.
    """

    max_tries: int = 10
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0

    def pause_s(self, failures: int) -> float:
        """Pause in seconds after this number of consecutive failures."""
        limit_s = min(self.max_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30))
        return limit_s * random.uniform(0.5, 1.0)


class RemainingTime(dict[str, float]):
    """Timeouts of a request for httpx: each step (connect, write, read) gets the time that remains until the deadline."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__()
        self._deadline_s = deadline_s

    @property
    def seconds(self) -> float:
        """Seconds until the deadline; negative afterwards."""
        return self._deadline_s - time.monotonic()

    def get(self, step: str, default: object = None) -> float:
        """Timeout of this step. At least 1 ms, so that it is never zero or negative."""
        return max(self.seconds, 0.001)


class Call:
    """State of one call of the client, over all of its tries.

    Args:
        timeout_s: limit for all tries and pauses together.
    """

    def __init__(self, url: str, timeout_s: float, retries: Retries) -> None:
        self.tries = 0
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._deadline_s = time.monotonic() + timeout_s
        self._last_error: ClientError | None = None

    def begin_try(self) -> RemainingTime:
        """Count a try and return its remaining time. Raises DeadlineError after the deadline."""
        remaining = RemainingTime(self._deadline_s)
        if remaining.seconds <= 0:
            raise self._deadline_error()
        self.tries += 1
        return remaining

    def on_connection_error(self, error: httpx.TransportError) -> float:
        """Handle a connection that failed or was lost. Returns the pause before the next try, in seconds.

        Raises:
            DeadlineError, UnreachableError: there is no time, or no try, left.
        """
        if isinstance(error, httpx.TimeoutException) and time.monotonic() >= self._deadline_s:
            raise self._deadline_error() from error
        self._last_error = UnreachableError(f"{self._url}: {error or type(error).__name__}")
        return self._pause_or_raise(self._retries.pause_s(self.tries))

    def on_response(self, response: httpx.Response) -> float | None:
        """Handle an answer. Returns None if it is successful, else the pause before the next try, in seconds.

        Raises:
            RefusedError: the error is permanent, or there is no time, or no try, left.
            DeadlineError: the service reported that the deadline has passed.
        """
        if response.is_success:
            return None
        rejection = _refused_error(response)
        if response.status_code == 504:
            raise DeadlineError(f"{self._url}: {rejection.detail}") from rejection
        if response.status_code not in _RETRYABLE:
            raise rejection
        self._last_error = rejection
        return self._pause_or_raise(
            rejection.retry_after_s if rejection.retry_after_s is not None else self._retries.pause_s(self.tries)
        )

    def _pause_or_raise(self, pause_s: float) -> float:
        """Return the pause, or raise the last error if no further try is possible: it says more than a DeadlineError."""
        assert self._last_error is not None
        if self.tries >= self._retries.max_tries or time.monotonic() + pause_s >= self._deadline_s:
            raise self._last_error
        return pause_s

    def _deadline_error(self) -> DeadlineError:
        last = f"; last error: {self._last_error}" if self._last_error else ""
        return DeadlineError(f"{self._url}: no answer within {self._timeout_s:g} s{last}")


def _refused_error(response: httpx.Response) -> RefusedError:
    """The exception for an answer other than 2xx."""
    try:
        body = response.json()
        detail, reason = str(body["error"]), str(body.get("reason", "refused"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        detail, reason = response.reason_phrase or "no reason given", "refused"
    request_id = response.headers.get("x-request-id")
    return error_class(response.status_code)(
        response.status_code, reason, detail, request_id, _parse_seconds(response.headers.get("retry-after"))
    )


def _parse_seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:  # an HTTP date, which the service does not send
        return None
