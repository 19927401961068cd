"""Chooses whose job runs next, so that leaders with work get equal shares of the engine's time. Pure: no clock, no thread."""

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Job = TypeVar("Job")


class FairQueue(Generic[Owner, Job]):
    """Jobs of several owners. The jobs of one owner stay in order; between owners, the one that has used the least time is next.

    Idle owners earn no credit: an owner that gets its first job starts with the used time of the owner that was served last. So an
    owner waits for at most one job of each other owner that has used no more than it. Owners with equal times take turns.
    This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with equal weights.
    """

    def __init__(self) -> None:
        self._jobs: dict[Owner, deque[Job]] = {}
        """Owners with jobs; among equal times, the earliest in this order is next."""
        self._used_s: dict[Owner, float] = {}
        self._latest_s = 0.0
        """Used time of the owner that was served last, when it was chosen."""

    def __len__(self) -> int:
        """Number of owners that have jobs."""
        return len(self._jobs)

    def has_jobs(self, owner: Owner) -> bool:
        """Whether jobs of this owner wait."""
        return owner in self._jobs

    def owners(self) -> Iterable[Owner]:
        """Those that have jobs."""
        return self._jobs

    def add(self, owner: Owner, job: Job) -> None:
        """Append a job."""
        if owner not in self._jobs:
            self._jobs[owner] = deque()
            self._used_s[owner] = max(self._used_s.get(owner, 0.0), self._latest_s)
        self._jobs[owner].append(job)

    def take(self) -> tuple[Owner, Job]:
        """Remove the next job. Returns its owner and the job. Raises ValueError if there is none."""
        owner = min(self._jobs, key=self._used_s.__getitem__)
        jobs = self._jobs.pop(owner)
        job = jobs.popleft()
        if jobs:
            self._jobs[owner] = jobs
        self._latest_s = self._used_s[owner]
        return owner, job

    def charge(self, owner: Owner, seconds: float) -> None:
        """Add the time that a job of this owner has taken. Does nothing for an owner that was removed."""
        if owner in self._used_s:
            self._used_s[owner] += seconds

    def remove(self, owner: Owner) -> None:
        """Discard the jobs of this owner and its used time."""
        self._jobs.pop(owner, None)
        self._used_s.pop(owner, None)
