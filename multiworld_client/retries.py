"""Whether to ask again, and when: decided here alone, for both clients. No I/O; the clock is read where time has passed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import httpx

from multiworld_client.errors import ClientError, DeadlineError, RefusedError, UnreachableError, refused

_PASSING = (408, 429, 502, 503)
"""What passes by itself. 504 does not: the request's time was over, which is ours as well."""


@dataclass(frozen=True)
class Retries:
    """How often and how fast is asked again. Inference changes nothing, so to ask twice is safe.

    Attributes:
        most: tries at the most, the first one included.
        first_pause_s: after the first failure; doubles with each, up to `longest_pause_s`, and half of it is chance. A service that says
            `Retry-After` is believed instead.
    """

    most: int = 10
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def pause_s(self, failures: int) -> float:
        """After so many failures in a row."""
        longest_s = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30))
        return longest_s * random.uniform(0.5, 1.0)


class TimeLeft(dict[str, float]):
    """The time until a deadline, as httpx's timeouts of a request: each step (to connect, to write, to read) gets what is left then."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__()
        self._deadline_s = deadline_s

    @property
    def seconds(self) -> float:
        """Negative when it has passed."""
        return self._deadline_s - time.monotonic()

    def get(self, step: str, default: object = None) -> float:
        """What is left for this step; hardly anything when there is nothing left, for nothing would mean for ever."""
        return max(self.seconds, 0.001)


class Call:
    """One thing that is asked, until it is answered or given up.

    Args:
        timeout_s: for all tries together, pauses included.
    """

    def __init__(self, url: str, timeout_s: float, retries: Retries) -> None:
        self.tries = 0
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._deadline_s = time.monotonic() + timeout_s
        self._last: ClientError | None = None

    def begin_try(self) -> TimeLeft:
        """What is left for it. Raises DeadlineError when that is nothing."""
        left = TimeLeft(self._deadline_s)
        if left.seconds <= 0:
            raise self._too_late()
        self.tries += 1
        return left

    def broke(self, error: httpx.TransportError) -> float:
        """The connection was not made, or broke. Gives the pause before the next try.

        Raises:
            DeadlineError, UnreachableError: there will be no next try.
        """
        if isinstance(error, httpx.TimeoutException) and time.monotonic() >= self._deadline_s:
            raise self._too_late() from error
        self._last = UnreachableError(f"{self._url}: {error or type(error).__name__}")
        return self._next(self._retries.pause_s(self.tries))

    def answered(self, response: httpx.Response) -> float | None:
        """The service has answered: None when that is the end, else the pause before the next try.

        Raises:
            RefusedError: it is a refusal that stays.
        """
        if response.is_success:
            return None
        refusal = refusal_of(response)
        if response.status_code == 504:
            raise DeadlineError(f"{self._url}: {refusal.detail}") from refusal
        if response.status_code not in _PASSING:
            raise refusal
        self._last = refusal
        return self._next(
            refusal.retry_after_s if refusal.retry_after_s is not None else self._retries.pause_s(self.tries)
        )

    def _next(self, pause_s: float) -> float:
        """Where it makes no sense to wait, the last failure is the outcome: it says more than that time was over."""
        assert self._last is not None
        if self.tries >= self._retries.most or time.monotonic() + pause_s >= self._deadline_s:
            raise self._last
        return pause_s

    def _too_late(self) -> DeadlineError:
        before = f"; before that: {self._last}" if self._last else ""
        return DeadlineError(f"{self._url}: no answer within {self._timeout_s:g} s{before}")


def refusal_of(response: httpx.Response) -> RefusedError:
    """What an answer other than success says."""
    try:
        body = response.json()
        detail, reason = str(body["error"]), str(body.get("reason", "refused"))
    except (ValueError, KeyError, TypeError, AttributeError):
        detail, reason = response.reason_phrase or "no reason given", "refused"
    request_id = response.headers.get("x-request-id")
    return refused(response.status_code)(
        response.status_code, reason, detail, request_id, _seconds(response.headers.get("retry-after"))
    )


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:  # a date, which our service does not send
        return None
