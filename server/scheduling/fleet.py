"""All links: which version is current, which stage is empty and since when, which link is silent."""

from __future__ import annotations

from server.scheduling.batches import Copy
from server.scheduling.events import LinkId
from server.scheduling.pools import Link, Pipeline, Pool
from server.scheduling.priority_map import PriorityMap


class Fleet:
    """Keeps account of the links; decides nothing about batches.

    The current version is the newest (by when it was first seen) that has a replica of every stage. A version without
    links is forgotten as soon as another one is current.
    """

    def __init__(self, *, num_stages: int, window: int, recovery_grace_s: float, hang_timeout_s: float) -> None:
        self._num_stages = num_stages
        self._window = window
        self._recovery_grace_s = recovery_grace_s
        self._hang_timeout_s = hang_timeout_s
        self.links: dict[LinkId, Link] = {}
        self.pipelines: dict[str, Pipeline] = {}
        """By version, oldest first."""
        self.current: Pipeline | None = None
        self.was_complete = False
        self.hangs: PriorityMap[Link, float] = PriorityMap()
        """Links with something in flight, by when their silence is a hang."""
        self.graces: PriorityMap[Pool, float] = PriorityMap()
        """Empty pools, by when their grace ends."""

    @property
    def entry(self) -> Pool | None:
        """Where new batches go."""
        return self.current.pools[0] if self.current else None

    @property
    def lost(self) -> bool:
        """No version is complete, nor has one that could still become so within the grace."""
        return self.current is None and all(pipeline.expired for pipeline in self.pipelines.values())

    def join(self, link_id: LinkId, stage: int, version: str, now_s: float) -> Link:
        """A replica is ready."""
        pool = self._pipeline(version, now_s).pools[stage]
        link = Link(link_id, pool)
        self.links[link_id] = link
        pool.pipeline.num_links += 1
        pool.open[link_id] = link
        pool.rank(link)
        pool.expired = False
        self.graces.discard(pool)
        self._choose_version()
        return link

    def close(self, link: Link, now_s: float) -> None:
        """The link takes no new batch; what is in flight there goes on."""
        pool = link.pool
        if link.id not in pool.open:
            return
        pool.close(link)
        if not pool.open:
            self.graces.set(pool, now_s + self._recovery_grace_s)
        self._choose_version()

    def remove(self, link: Link, now_s: float) -> None:
        """The link is gone, and what was in flight there with it."""
        self.close(link, now_s)
        self.hangs.discard(link)
        del self.links[link.id]
        link.pool.pipeline.num_links -= 1

    def sent(self, copy: Copy) -> None:
        """A batch went out: the link owes an answer."""
        copy.link.pool.add_copy(copy)
        if len(copy.link.copies) == 1:
            self.hangs.set(copy.link, copy.sent_s + self._hang_timeout_s)

    def landed(self, copy: Copy, now_s: float) -> float:
        """The link answered. Returns how long it worked on this, in seconds: since it was sent or, if that was later,
        since the link's previous answer."""
        link = copy.link
        link.pool.remove_copy(copy)
        worked_s = now_s - max(copy.sent_s, link.answered_s)
        link.answered_s = now_s
        if link.copies:
            self.hangs.set(link, now_s + self._hang_timeout_s)
        else:
            self.hangs.discard(link)
        return worked_s

    def forget_versions(self) -> None:
        """Drop the versions without links, if another one is current. Nothing may wait in their pools."""
        if self.current is None:
            return
        for pipeline in [each for each in self.pipelines.values() if not each.num_links]:
            del self.pipelines[pipeline.version]
            for pool in pipeline.pools:
                self.graces.discard(pool)

    def _pipeline(self, version: str, now_s: float) -> Pipeline:
        pipeline = self.pipelines.get(version)
        if pipeline is None:
            pipeline = self.pipelines[version] = Pipeline(version, self._num_stages, self._window)
            for pool in pipeline.pools:
                self.graces.set(pool, now_s + self._recovery_grace_s)
        return pipeline

    def _choose_version(self) -> None:
        self.current = next((each for each in reversed(self.pipelines.values()) if each.complete), None)
        self.was_complete = self.was_complete or self.current is not None
