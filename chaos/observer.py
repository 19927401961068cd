"""Watches a service by its status page: which replica serves, which broke and when, and how long a stage had none."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from config import NOTHING, Access

_POLL_S = 0.05

Place = tuple[int, int]
"""Stage and slot."""


class NotRecoveredError(Exception):
    """The service is not what was awaited, within the time that was allowed."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One slot of a stage, as it was at one moment."""

    stage: int
    slot: int
    state: str
    epoch: int
    worker: str | None
    cause: str | None
    """How it failed last."""
    failed_s: float | None
    """When that was, on the leader's clock."""

    @property
    def place(self) -> Place:
        return self.stage, self.slot

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def broken_since(self, before: "Replica") -> bool:
        """Whether the world that served at that earlier moment serves no more."""
        return self.epoch != before.epoch or self.state not in ("ready", "draining")


@dataclass(frozen=True, slots=True)
class Moment:
    """All replicas at one moment."""

    at_s: float
    replicas: dict[Place, Replica]

    @property
    def complete(self) -> bool:
        """Every slot of every stage serves."""
        return all(replica.ready for replica in self.replicas.values())

    @property
    def stages_without(self) -> frozenset[int]:
        """Stages that no replica serves."""
        stages = {stage for stage, _ in self.replicas}
        return frozenset(stages - {replica.stage for replica in self.replicas.values() if replica.ready})


def moment(status: dict[str, Any], at_s: float) -> Moment:
    """What GET /status says."""
    found = {}
    for stage in status["stages"]:
        for replica in stage["replicas"]:
            failure = replica["last_failure"] or {}
            found[stage["index"], replica["slot"]] = Replica(
                stage=stage["index"],
                slot=replica["slot"],
                state=replica["state"],
                epoch=replica["epoch"],
                worker=replica["worker"],
                cause=failure.get("cause"),
                failed_s=failure.get("at_unix_s"),
            )
    return Moment(at_s, found)


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which a stage had no replica, as the leader saw it."""

    stage: int
    since_s: float
    until_s: float


class Observer:
    """Asks for the status again and again in a thread of its own. Use as `with`.

    Attributes:
        moments: every one that differs from the one before.
    """

    def __init__(self, url: str, way_in: Access = NOTHING) -> None:
        self._client = httpx.Client(base_url=url, timeout=30.0, **way_in.options)
        self._metrics = httpx.Client(
            base_url=url, timeout=30.0, **way_in.options
        )  # asked by other threads than the first
        self._news = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-observer", daemon=True)
        self.moments: list[Moment] = []

    def __enter__(self) -> Self:
        self.moments.append(self._look())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()
        self._metrics.close()

    @property
    def now(self) -> Moment:
        with self._news:
            return self.moments[-1]

    def wait(self, wanted: Callable[[Moment], bool], timeout_s: float, what: str) -> Moment:
        """The first moment from now on that is wanted. Raises NotRecoveredError, which says `what` was awaited."""
        with self._news:
            if self._news.wait_for(lambda: wanted(self.moments[-1]), timeout_s):
                return self.moments[-1]
            states = ", ".join(f"s{r.stage}.r{r.slot} {r.state}" for r in self.moments[-1].replicas.values())
        raise NotRecoveredError(f"not {what} within {timeout_s:g} s: {states}")

    def outages(self) -> list[Outage]:
        """All times until now in which a stage had no replica."""
        with self._news:
            return outages([*self.moments, Moment(time.time(), self.moments[-1].replicas)])

    def metric(self, name: str) -> float:
        """The sum of a metric over all its series; 0 when there is none."""
        return metric(self._metrics.get("/metrics").text, name)

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            with contextlib.suppress(httpx.HTTPError):
                found = self._look()
                with self._news:
                    if found.replicas != self.moments[-1].replicas:
                        self.moments.append(found)
                        self._news.notify_all()

    def _look(self) -> Moment:
        return moment(self._client.get("/status").json(), time.time())


def outages(moments: Iterable[Moment]) -> list[Outage]:
    """The times in which a stage had no replica, from consecutive moments; the last one ends what is still open."""
    since: dict[int, float] = {}
    found: list[Outage] = []
    at_s = 0.0
    for each in moments:
        at_s = each.at_s
        for stage in [stage for stage in since if stage not in each.stages_without]:
            found.append(Outage(stage, since.pop(stage), at_s))
        for stage in each.stages_without:
            since.setdefault(stage, at_s)
    return [*found, *(Outage(stage, since_s, at_s) for stage, since_s in since.items())]


def metric(text: str, name: str) -> float:
    """The sum of a metric over all its series, in the text format of Prometheus."""
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)", re.MULTILINE)
    return sum(float(match[1]) for match in pattern.finditer(text))
