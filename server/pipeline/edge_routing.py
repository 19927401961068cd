"""Decides which tensors of a leader's batches go over edges, and which through the leader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from multiworld_serving.common.wire import EdgeState, TraceContext
from multiworld_serving.server.pipeline.batch_tensors import StoredInput, relayed_inputs
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.scheduling.actions import SendBatch
from multiworld_serving.server.snapshots import EdgeSnapshot

_UNCLAIMED_S = 10.0
"""How long a worker keeps the output of the last stage for frontends that do not fetch it."""
_REMEMBER_S = 60.0
_MAX_PAIRS = 10_000
_MAX_SHOWN = 64
"""Unreachable pairs in the status."""


class UnreachablePairs:
    """Remembers for a minute that a consumer could not reach a producer: tensors between the two are relayed meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._until_s: dict[str, dict[str, float]] = {}
        """By producer and consumer."""
        self._clock = clock

    def add(self, holder: str, consumer: str) -> None:
        """The consumer could not reach the producer."""
        now_s = self._clock()
        if sum(map(len, self._until_s.values())) >= _MAX_PAIRS:
            self._until_s.clear()
        self._until_s.setdefault(holder, {})[consumer] = now_s + _REMEMBER_S

    def __contains__(self, pair: tuple[str, str]) -> bool:
        holder, consumer = pair
        return consumer in self._consumers(holder)

    def any(self, holder: str) -> bool:
        """Whether there is a consumer that could not reach this producer."""
        return bool(self._consumers(holder))

    def pairs(self, most: int) -> list[tuple[str, str]]:
        """Consumers and their unreachable producers, at most `most`."""
        found = ((consumer, holder) for holder in list(self._until_s) for consumer in self._consumers(holder))
        return list(islice(found, most))

    def _consumers(self, holder: str) -> dict[str, float]:
        consumers = self._until_s.get(holder)
        if consumers is None:
            return {}
        now_s = self._clock()
        current = {consumer: until_s for consumer, until_s in consumers.items() if until_s > now_s}
        if current:
            self._until_s[holder] = current
        else:
            del self._until_s[holder]
        return current


class EdgeRouting:
    """Knows who cannot reach whom, as far as the leader was told.

    Args:
        num_stages: of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self.workers = UnreachablePairs()
        """Consumers are workers, by name."""
        self.frontends = UnreachablePairs()
        """Consumers are frontends, by name."""
        self._num_stages = num_stages

    def unreachable_holders(self, stored: StoredInput, link: WorkerLink) -> frozenset[str]:
        """The producers of this input from which the worker cannot fetch."""
        if isinstance(stored, Tensor):
            return frozenset()
        if not link.request.edge:
            for holder in stored.holders:
                self.workers.add(holder, link.worker)
            return stored.holders
        return frozenset(each for each in stored.holders if (each, link.worker) in self.workers)

    def send(
        self,
        action: SendBatch,
        link: WorkerLink,
        stored: StoredInput,
        version: int,
        fetchers: Iterable[str | None],
        traced: Sequence[TraceContext],
    ) -> None:
        """Send a batch: its input, or where the worker fetches it, and whether the output is kept.

        Args:
            fetchers: for each request of the batch the frontend that fetches the answer itself; None if the leader needs it.
        """
        keep = self._keeps(action, link, fetchers)
        if isinstance(stored, Tensor) and not (keep and action.stage == 0):
            link.send(action.batch, stored, version, traced)
            return
        inputs = relayed_inputs(stored) if isinstance(stored, Tensor) else stored.inputs()
        expires_s = _UNCLAIMED_S if self._is_last(action) else 0.0
        link.send(action.batch, replace(inputs, keep=keep, expires_s=expires_s), version, traced)

    def snapshot(self, processes: Iterable[tuple[str, str, Sequence[EdgeState]]]) -> tuple[EdgeSnapshot, ...]:
        """The edges between these processes, and the pairs whose tensors are relayed.

        Args:
            processes: of each the name, the address of its edges and the edges that it reported.
        """
        known = tuple(processes)
        names = {address: name for name, address, _ in known}

        def name(holder: str) -> str:
            return names.get(holder, holder.rpartition("/")[0])

        open_edges = (
            EdgeSnapshot(consumer, name(state.holder), state.transport, state.received_bytes, state.fetch_s)
            for consumer, _, states in known
            for state in states
        )
        relayed = (*self.workers.pairs(_MAX_SHOWN), *self.frontends.pairs(_MAX_SHOWN))
        return (*open_edges, *(EdgeSnapshot(consumer, name(holder), "relay") for consumer, holder in relayed))

    def _keeps(self, action: SendBatch, link: WorkerLink, fetchers: Iterable[str | None]) -> bool:
        """Whether the worker should keep the output, because everyone who needs it can fetch it."""
        holder = link.request.edge
        if action.relay or not holder:
            return False
        if not self._is_last(action):
            return not self.workers.any(holder)
        return all(fetcher is not None and (holder, fetcher) not in self.frontends for fetcher in fetchers)

    def _is_last(self, action: SendBatch) -> bool:
        return action.stage + 1 == self._num_stages
