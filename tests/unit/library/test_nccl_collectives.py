"""How the collectives of an NCCL group are posted, completed and failed. A Gloo group stands in for NCCL, which needs GPUs."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Queue

import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroup
from torch.distributed import ProcessGroupGloo

from multiworld.collectives import nccl
from multiworld.collectives.nccl import NcclCollectives
from multiworld.execution.store import ControlStore
from multiworld.ops.operation import Collective

PATIENCE_S = 60.0


@pytest.fixture
def groups() -> Iterator[list[ProcessGroup]]:
    """The groups of the two ranks of one world."""
    store = HashStore()

    def group(rank: int) -> ProcessGroup:
        made = ProcessGroup(store, rank, 2)
        backend = ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE_S))
        made._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        return made

    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(group, range(2)))


class Rank:
    """The operations of one rank, with their outcomes in the order of completion."""

    def __init__(self, group: ProcessGroup, error: Exception | None = None) -> None:
        self.outcomes: Queue[tuple[Collective, Exception | None]] = Queue()
        self._error = error
        self.collectives = NcclCollectives(
            "w",
            ControlStore(lambda _key, _value: None),
            lambda: group,
            self._check,
            lambda done: self.outcomes.put((done, None)),
            lambda failed, reason: self.outcomes.put((failed[0], reason)),
        )
        self.collectives.connect().result(PATIENCE_S)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def all_reduce(self, tensor: torch.Tensor) -> Collective:
        operation = Collective(
            signature="all_reduce()",
            algorithm=lambda: pytest.fail("the connections of the world are used"),
            post=lambda group: group.allreduce([tensor]),
            tensors=(tensor,),
        )
        self.collectives.post(operation)
        return operation


def test_operations_are_posted_in_order_and_complete_on_two_threads(groups: list[ProcessGroup]) -> None:
    ranks, before = [Rank(group) for group in groups], threading.active_count()
    tensors = [[torch.full((3,), float(step + rank)) for step in range(50)] for rank in range(2)]
    posted = [[rank.all_reduce(each) for each in own] for rank, own in zip(ranks, tensors, strict=True)]
    assert threading.active_count() - before <= 2 * 2
    for rank, own, operations in zip(ranks, tensors, posted, strict=True):
        outcomes = {id(done): error for done, error in (rank.outcomes.get(timeout=PATIENCE_S) for _ in own)}
        assert outcomes == {id(each): None for each in operations}
        assert [each.tolist() for each in own] == [[2.0 * step + 1] * 3 for step in range(50)]
        assert rank.collectives.abort(RuntimeError("ended"), PATIENCE_S)


def test_operation_fails_with_the_error_of_the_world_when_that_has_ended(groups: list[ProcessGroup]) -> None:
    ended = RuntimeError("ended")
    rank = Rank(groups[0], ended)
    operation = rank.all_reduce(torch.ones(1))
    assert rank.outcomes.get(timeout=PATIENCE_S) == (operation, ended)


def test_tensors_are_kept_when_an_aborted_operation_never_completes(
    groups: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_unfinished", [])
    rank, tensor = Rank(groups[0]), torch.ones(4)
    alive = weakref.ref(tensor)
    rank.all_reduce(tensor)  # the other rank never takes part
    del tensor
    posted, until_s = rank.collectives._posted, time.monotonic() + PATIENCE_S
    while not posted and time.monotonic() < until_s:
        time.sleep(0.001)
    assert not rank.collectives.abort(RuntimeError("ended"), 0.05)
    del rank, posted
    gc.collect()
    assert alive() is not None
    assert len(nccl._unfinished) == 1
    other = Rank(groups[1])
    other.all_reduce(torch.ones(4))  # so that the groups can be freed
    assert other.outcomes.get(timeout=PATIENCE_S)[1] is None
