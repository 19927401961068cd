"""How the collectives of an NCCL group are posted, completed and failed. NCCL needs GPUs: a Gloo group stands in for it, or a fake."""

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from queue import Queue
from typing import Any, NoReturn

import pytest
import torch
from torch._C._distributed_c10d import DebugLevel, ErrorType, HashStore, ProcessGroup, Work
from torch.distributed import ProcessGroupGloo

from multiworld import World
from multiworld.collectives import nccl
from multiworld.collectives.nccl import NcclCollectives, connect_nccl_group, make_nccl_group, uses_nccl
from multiworld.execution.failures import ConnectionLostError
from multiworld.execution.store import ControlStore
from multiworld.ops.operation import Collective
from tests.fakes.gpu import GPU
from tests.fakes.nccl import FakeNccl, FakeStream, use_fake_nccl
from tests.integration.members import form, managers
from tests.waiting import until

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


def operation_of(post: Callable[[ProcessGroup], Work], *tensors: torch.Tensor) -> Collective:
    def algorithm() -> NoReturn:
        pytest.fail("the connections of the world are used")

    return Collective(signature="all_reduce()", algorithm=algorithm, post=post, tensors=tensors)


class Rank:
    """The operations of one rank, with their outcomes in the order of completion."""

    def __init__(
        self,
        group: ProcessGroup,
        error: Exception | None = None,
        connect: Callable[[ProcessGroup], None] = lambda _: None,
    ) -> None:
        self.outcomes: Queue[tuple[Collective, Exception | None]] = Queue()
        self._error = error
        self.collectives = NcclCollectives(
            "w",
            ControlStore(lambda _key, _value: None),
            lambda: group,
            connect,
            self._check,
            lambda done: self.outcomes.put((done, None)),
            lambda failed, reason: self.outcomes.put((failed[0], reason)),
        )
        self.connected = self.collectives.connect()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def all_reduce(self, tensor: torch.Tensor, stream: Any = None) -> Collective:
        operation = operation_of(lambda group: group.allreduce([tensor]), tensor)
        operation.stream = stream
        self.collectives.post(operation)
        return operation


def fake_rank() -> tuple[Rank, FakeNccl]:
    """A rank whose group is a fake of NCCL, and connected."""
    rank = Rank(group := FakeNccl())  # type: ignore[arg-type]
    rank.connected.result(PATIENCE_S)
    return rank, group


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


class FailedWork:
    """An operation for which CUDA reports an error."""

    def is_completed(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_operation_fails_alone_when_cuda_cannot_tell_whether_it_has_completed(
    groups: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_unfinished", [])
    ranks = [Rank(group) for group in groups]
    failed = operation_of(lambda _: FailedWork())  # type: ignore[arg-type,return-value]
    ranks[0].collectives.post(failed)
    operation, error = ranks[0].outcomes.get(timeout=PATIENCE_S)
    assert operation is failed
    assert "illegal memory access" in str(error)
    later = [rank.all_reduce(torch.ones(1)) for rank in ranks]
    assert [rank.outcomes.get(timeout=PATIENCE_S) for rank in ranks] == [(each, None) for each in later]
    assert all(rank.collectives.abort(RuntimeError("ended"), PATIENCE_S) for rank in ranks)


@pytest.mark.parametrize("threads", [True, False])
def test_abort_without_a_time_limit_to_wait_does_not_block(threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the control loop."""
    monkeypatch.setattr(nccl, "NCCL_ABORT_S", threading.TIMEOUT_MAX)  # blocks the test if it is used
    rank, group = fake_rank()
    group.abort_ends.clear()
    kept: list[object] = []
    if not threads:

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr("_thread.start_new_thread", refuse)
        monkeypatch.setattr(nccl, "_not_aborted", kept)
    rank.collectives.abort(RuntimeError("ended"), 0.0)
    group.abort_ends.set()
    assert threads or kept == [group]


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


async def test_collectives_of_one_world_start_on_two_event_loops(groups: list[ProcessGroup]) -> None:
    async with managers(2, verify_collectives=True) as pair:
        await form("w", pair[0].listen(), *pair)
        worlds = [manager.world("w") for manager in pair]
        for world, group in zip(worlds, groups, strict=True):
            failed, store = world._operations.fail, ControlStore(lambda _key, _value: None)
            world.nccl = NcclCollectives(
                "w",
                store,
                partial(lambda each: each, group),
                lambda _: None,
                world._operations.check,
                world._operations.on_transferred,
                failed,
            )
            await asyncio.wrap_future(world.nccl.connect())

        async def reduce(world: World) -> float:
            tensor = torch.ones(1)
            await world.start(operation_of(lambda group: group.allreduce([tensor]), tensor)).finish()
            return tensor.item()

        here = asyncio.create_task(reduce(worlds[0]))
        await until(lambda: len(worlds[0]._operations._pending) == 1)
        there = asyncio.create_task(asyncio.to_thread(asyncio.run, reduce(worlds[0])))
        await until(lambda: len(worlds[0]._operations._pending) == 2)
        sums = await asyncio.gather(here, there, reduce(worlds[1]), reduce(worlds[1]))
        assert list(sums) == [2.0] * 4


# -- failures of NCCL, with a fake of it ------------------------------------------------------------------------------------


def test_no_value_of_the_environment_lets_an_error_of_nccl_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_nccl(monkeypatch)
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7"}
    group: Any = make_nccl_group(HashStore(), 0, 1)
    assert group.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert group.environment["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert group.environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    assert group.environment["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert group.environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7", "a default"


def test_detail_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nccl, "get_debug_level", lambda: DebugLevel.INFO)
    assert uses_nccl("nccl")
    monkeypatch.setattr(nccl, "get_debug_level", lambda: DebugLevel.DETAIL)
    with pytest.raises(ValueError, match=r"TORCH_DISTRIBUTED_DEBUG=DETAIL: .*; set it to OFF or INFO"):
        uses_nccl("nccl")
    assert not uses_nccl("multiworld")


def test_group_is_aborted_when_the_world_ends_while_nccl_connects() -> None:
    """If a member dies while NCCL connects, the other members fail before the timeout of NCCL."""
    rank = Rank(group := FakeNccl(), connect=partial(connect_nccl_group, GPU, lambda: None))  # type: ignore[arg-type]
    assert group.connecting.wait(PATIENCE_S)
    assert rank.collectives.abort(RuntimeError("a member died"), PATIENCE_S), "a thread is left"
    assert group.aborting.is_set()
    with pytest.raises(ConnectionLostError, match="was aborted"):
        rank.connected.result(PATIENCE_S)


def test_group_does_not_connect_when_the_world_has_ended_before() -> None:
    def check() -> NoReturn:
        raise RuntimeError("the world has ended")

    rank = Rank(group := FakeNccl(), connect=partial(connect_nccl_group, GPU, check))  # type: ignore[arg-type]
    with pytest.raises(ConnectionLostError, match="has ended"):
        rank.connected.result(PATIENCE_S)
    assert not group.connecting.is_set()
    assert group.aborting.is_set()


def test_abort_has_a_timeout_of_its_own_and_its_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    group = FakeNccl()
    group.abort_error = RuntimeError("Future for ProcessGroup abort timed out after 5000 ms")
    nccl.abort_nccl_group(group, PATIENCE_S)  # type: ignore[arg-type]
    assert group.timeouts == [nccl.NCCL_ABORT_S]
    assert "NCCL could not abort: RuntimeError: Future for ProcessGroup abort timed out" in caplog.text


def test_operation_ends_with_its_event_without_a_call_that_holds_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_fake_nccl(monkeypatch)
    rank, group = fake_rank()
    operation = rank.all_reduce(torch.ones(1), FakeStream())
    work = group.works.get(timeout=PATIENCE_S)
    assert work.queried.wait(PATIENCE_S)
    assert rank.outcomes.empty()
    work.done.set()
    assert rank.outcomes.get(timeout=PATIENCE_S) == (operation, None)
    assert rank.collectives.abort(RuntimeError("ended"), PATIENCE_S)


def test_operation_that_the_watchdog_has_aborted_fails_although_it_looks_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_fake_nccl(monkeypatch)
    rank, group = fake_rank()
    operation = rank.all_reduce(torch.ones(1), FakeStream())
    group.error = ErrorType.COMM_ERROR
    group.works.get(timeout=PATIENCE_S).done.set()
    failed, error = rank.outcomes.get(timeout=PATIENCE_S)
    assert failed is operation
    assert isinstance(error, ConnectionLostError)
    assert "NCCL reports COMM_ERROR" in str(error)
    assert rank.collectives.abort(RuntimeError("ended"), PATIENCE_S)
