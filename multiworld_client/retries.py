"""Decides whether, when and at which URL to retry, for both clients. Reads the clock; no other I/O."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from multiworld_client.errors import ClientError, DeadlineError, RefusedError, UnreachableError, error_class

_RETRYABLE = (408, 429, 502, 503)
"""Statuses that may be temporary. 504 is not among them: the deadline of the request is also ours."""

_MAX_CONNECT_S = 3.0
"""Limit of connecting to one of several URLs: a host without power does not refuse connections."""


@dataclass(frozen=True)
class Retries:
    """Limits and pauses of retries. Inference has no side effects, so a retry is safe.

    Attributes:
        max_tries: number of tries at all URLs together, including the first.
        first_pause_s: pause before the next try at the same URL, after all URLs failed once. It doubles with each round up to
            `max_pause_s`, with random jitter of up to half. A `Retry-After` of the service replaces it.
    """

    max_tries: int = 10
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0

    def pause_s(self, rounds: int) -> float:
        """Pause in seconds after this number of rounds in which all URLs failed."""
        limit_s = min(self.max_pause_s, self.first_pause_s * 2.0 ** min(rounds - 1, 30))
        return limit_s * random.uniform(0.5, 1.0)


class Servers:
    """The URLs of one service, in the order of preference; thread-safe.

    Calls start with the current URL, so that connections are reused. It changes only if a try at it fails.

    Args:
        timeout_s, retries: of calls that do not say otherwise.

    Raises:
        ValueError: there is no URL, or an invalid one.
    """

    def __init__(self, url: str | Sequence[str], timeout_s: float, retries: Retries | None) -> None:
        urls = [url] if isinstance(url, str) else url
        self.urls = tuple(dict.fromkeys(_checked_url(each) for each in urls))
        if not self.urls:
            raise ValueError("no URL: expected at least one, such as http://127.0.0.1:8000")
        self.timeout_s = timeout_s
        self.retries = retries or Retries()
        self._current = 0

    def __str__(self) -> str:
        return ", ".join(self.urls)

    def in_order(self) -> tuple[str, ...]:
        """All URLs, beginning with the current one."""
        current = self._current
        return self.urls[current:] + self.urls[:current]

    def on_failure(self, url: str) -> None:
        """Make the next URL the current one, unless a concurrent call has done so already."""
        if self.urls[self._current] == url:
            self._current = (self.urls.index(url) + 1) % len(self.urls)


class RemainingTime(dict[str, float]):
    """Timeouts of a request for httpx: each step (connect, write, read) gets the time that remains until the deadline.

    Args:
        others: whether there are other URLs, for which connecting must leave time.
    """

    def __init__(self, deadline_s: float, *, others: bool = False) -> None:
        super().__init__()
        self._deadline_s = deadline_s
        self._others = others

    @property
    def seconds(self) -> float:
        """Seconds until the deadline; negative afterwards."""
        return self._deadline_s - time.monotonic()

    def get(self, step: str, default: object = None) -> float:
        """Timeout of this step. At least 1 ms, so that it is never zero or negative."""
        limit_s = self.seconds
        if step == "connect" and self._others:
            limit_s = min(limit_s / 2, _MAX_CONNECT_S)
        return max(limit_s, 0.001)


class Call:
    """State of one call of the client, over all of its tries.

    Args:
        timeout_s: limit for all tries and pauses together; None uses that of the servers.

    Attributes:
        url: the URL of the current try.
    """

    def __init__(self, servers: Servers, timeout_s: float | None) -> None:
        self.tries = 0
        self.url = servers.in_order()[0]
        self._servers = servers
        self._not_before_s = dict.fromkeys(servers.urls, 0.0)
        self._timeout_s = servers.timeout_s if timeout_s is None else timeout_s
        self._deadline_s = time.monotonic() + self._timeout_s
        self._last_error: ClientError | None = None

    def begin_try(self) -> RemainingTime:
        """Count a try and return its remaining time. Raises DeadlineError after the deadline."""
        remaining = RemainingTime(self._deadline_s, others=len(self._servers.urls) > 1)
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
            self._servers.on_failure(self.url)  # it may be blocked: the next call begins elsewhere
            raise self._deadline_error() from error
        return self._pause_or_raise(UnreachableError(f"{self.url}: {error or type(error).__name__}"))

    def on_refusal(self, response: httpx.Response) -> float:
        """Handle an answer other than 2xx. Returns the pause before the next try, in seconds.

        Raises:
            RefusedError: the error is permanent, or there is no time, or no try, left.
            DeadlineError: the service reported that the deadline has passed.
        """
        rejection = _refused_error(response)
        if response.status_code == 504:
            raise DeadlineError(f"{self.url}: {rejection.detail}") from rejection
        if response.status_code not in _RETRYABLE:
            raise rejection
        return self._pause_or_raise(rejection, rejection.retry_after_s)

    def _pause_or_raise(self, error: ClientError, retry_after_s: float | None = None) -> float:
        """Choose the URL of the next try and return the pause before it: none if a URL has not failed yet in this call.

        Raises the error if no further try is possible: it says more than a DeadlineError.
        """
        now_s = time.monotonic()
        rounds = math.ceil(self.tries / len(self._servers.urls))
        pause_s = self._servers.retries.pause_s(rounds) if retry_after_s is None else retry_after_s
        self._not_before_s[self.url] = now_s + pause_s
        self._servers.on_failure(self.url)
        self._last_error = error
        self.url = min(self._servers.in_order(), key=lambda url: max(now_s, self._not_before_s[url]))
        next_s = max(now_s, self._not_before_s[self.url])
        if self.tries >= self._servers.retries.max_tries or next_s >= self._deadline_s:
            raise error
        return next_s - now_s

    def _deadline_error(self) -> DeadlineError:
        last = f"; last error: {self._last_error}" if self._last_error else ""
        return DeadlineError(f"{self._servers}: no answer within {self._timeout_s:g} s{last}")


def _checked_url(url: str) -> str:
    """The URL without a slash at its end. Raises ValueError if it is invalid."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{url!r} is not a URL: {error}; expected one such as http://127.0.0.1:8000") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ValueError(f"{url!r} is not an HTTP URL; expected one such as http://127.0.0.1:8000")
    return url.rstrip("/")


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
