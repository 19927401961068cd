"""The stages that this process has loaded: each once, whichever leaders assigned it."""

import asyncio
from dataclasses import dataclass
from weakref import WeakValueDictionary

from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.models.optimize.optimizing import OptimizedStage
from multiworld_serving.models.optimize.tuning import NO_TUNING, Tuning
from multiworld_serving.models.weights.tensor_file import TensorFile
from multiworld_serving.workers.compute.cores import BatchThreads


@dataclass(frozen=True)
class StageTask:
    """A stage that is to be loaded."""

    spec: BundleStageSpec
    weights: TensorFile
    max_batch_size: int
    tuning: Tuning = NO_TUNING


@dataclass(eq=False)
class LoadedStage:
    """A stage in memory. Sessions that serve it hold references; it is freed with the last one.

    Attributes:
        optimized: the module that computes it.
        threads: how to compute its batches.
    """

    spec: BundleStageSpec
    optimized: OptimizedStage
    threads: BatchThreads


class StageStore:
    """Finds stages by digest (see `StageAssignment.digest`). Holds no references: sessions do. Used on the event loop only."""

    def __init__(self) -> None:
        self._stages: WeakValueDictionary[str, LoadedStage] = WeakValueDictionary()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        """Number of stages in memory."""
        return len(self._stages)

    def find(self, digest: str) -> LoadedStage | None:
        """The stage with this digest, if it is loaded."""
        return self._stages.get(digest)

    def add(self, digest: str, stage: LoadedStage) -> None:
        """Let other sessions find this stage."""
        self._stages[digest] = stage

    def turn(self, digest: str) -> asyncio.Lock:
        """Held by the session that loads this stage. Others wait for it, and then find the stage, or load it if the session failed."""
        return self._turns.setdefault(digest, asyncio.Lock())
