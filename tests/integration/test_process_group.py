"""The operations of `WorldProcessGroup` and the ends of its groups. All members are in one process; test_examples.py kills processes."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Work
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from multiworld import BrokenWorldException, Cause, JoinError
from multiworld.process_group import GroupBrokenError, WorldProcessGroup

Started = tuple[Work, list[Tensor], Iterable[Tensor]]
"""An operation, the tensors that it writes, and their expected values."""


def form(size: int, **settings: Any) -> list[WorldProcessGroup]:
    store, settings = HashStore(), {"heartbeat_timeout_s": 60.0, **settings}
    with ThreadPoolExecutor(size) as members:
        return list(members.map(lambda rank: WorldProcessGroup.from_store(store, rank, size, **settings), range(size)))


@pytest.fixture(scope="module")
def groups() -> Iterator[list[WorldProcessGroup]]:
    groups = form(3)
    yield groups
    for group in groups:
        group.close()


def zeros(*shape: int) -> list[Tensor]:
    return list(torch.zeros(shape))


def parts(tensor: Tensor) -> list[Tensor]:
    return list(torch.split(tensor, 1))


def sums(rows: Tensor, rank: int) -> list[Tensor]:
    return [rows.sum(0)[rank : rank + 1]]


MAX, ROOT = dist.AllreduceOptions(), dist.ReduceOptions()
MAX.reduceOp = dist.ReduceOp.MAX
ROOT.rootRank = 1
# The arguments are the group, its rank, its row, and the rows of all ranks.
OPERATIONS: dict[str, Callable[[WorldProcessGroup, int, Tensor, Tensor], Started]] = {
    "allreduce": lambda g, _, own, rows: (g.allreduce([own]), [own], [rows.sum(0)]),
    "maximum": lambda g, _, own, rows: (g.allreduce_coalesced([own[:1], own[1:]], MAX), [own], [rows.amax(0)]),
    "reduce": lambda g, rank, own, rows: (g.reduce([own], ROOT), [own][: rank == 1], [rows.sum(0)][: rank == 1]),
    "broadcast": lambda g, _, own, rows: (g.broadcast([own], ROOT), [own], [rows[1]]),
    "allgather": lambda g, _, own, rows: (g.allgather([to := zeros(3, 3)], [own]), to, list(rows)),
    "allgather base": lambda g, _, own, rows: (g._allgather_base(to := torch.zeros(9), own), [to], [rows.flatten()]),
    "reduce_scatter": lambda g, rank, own, rows: (g.reduce_scatter(to := zeros(1, 1), [parts(own)]), to, sums(rows, rank)),
    "reduce_scatter base": lambda g, rank, own, rows: (g._reduce_scatter_base((to := zeros(1, 1))[0], own), to, sums(rows, rank)),
    "gather": lambda g, rank, own, rows: (g.gather([to] if (to := zeros(3 * (rank == 1), 3)) else [], [own], ROOT), to, rows[: len(to)]),
    "scatter": lambda g, rank, own, rows: (g.scatter(to := zeros(1, 3), [list(rows)][: rank == 1], ROOT), to, [rows[rank]]),
    "alltoall": lambda g, rank, own, rows: (g.alltoall(to := zeros(3, 1), parts(own)), to, parts(rows[:, rank])),
    "alltoall base": lambda g, rank, own, rows: (g.alltoall_base((to := zeros(1, 3))[0], own, [], []), to, [rows[:, rank]]),
    "barrier": lambda g, *_: (g.barrier(), [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_writes_its_result_at_all_members(groups: list[WorldProcessGroup], name: str) -> None:
    rows = torch.arange(9.0).view(3, 3) ** 2
    started = [OPERATIONS[name](group, group.rank(), rows[group.rank()].clone(), rows) for group in groups]
    for work, outputs, expected in started:
        assert work.get_future().wait() is not None
        assert work.is_success()
        torch.testing.assert_close(outputs, list(expected), rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"barrier"}))
def test_operation_raises_the_version_of_its_outputs(groups: list[WorldProcessGroup], name: str) -> None:
    rows = torch.ones(3, 3)
    started = [OPERATIONS[name](group, group.rank(), rows[group.rank()].clone(), rows) for group in groups]
    for work, outputs, _ in started:
        assert work.wait()
        assert all(output._version for output in outputs)


def test_callback_of_a_future_may_wait_for_another_operation(groups: list[WorldProcessGroup]) -> None:
    def start(group: WorldProcessGroup) -> Future[bool]:
        return group.allreduce([torch.ones(2)]).get_future().then(lambda _: group.barrier().wait())

    assert [future.wait() for future in [start(group) for group in groups]] == [True] * 3


def test_wait_that_expires_leaves_the_operation_pending(groups: list[WorldProcessGroup]) -> None:
    receive = groups[0].recv([got := torch.zeros(2)], 1, 7)
    with pytest.raises(dist.DistBackendError, match=r"not complete after 0\.001 s; wait again"):
        receive.wait(timedelta(milliseconds=1))
    groups[1].send([torch.ones(2)], 0, 7)
    assert receive.wait()
    assert got.tolist() == [1.0, 1.0]


def pass_one(groups: list[WorldProcessGroup]) -> None:
    """Send from 1 to 0, so that a thread has read each of their connections itself."""
    with ThreadPoolExecutor(2) as threads:
        received = threads.submit(lambda: groups[0].recv([torch.zeros(1)], 1).wait())
        threads.submit(lambda: groups[1].send([torch.ones(1)], 0).wait()).result()
        assert received.result()


def test_threads_that_wait_on_one_connection_get_their_own_messages(groups: list[WorldProcessGroup]) -> None:
    got = torch.zeros(8, 2)
    with ThreadPoolExecutor(8) as threads:
        waits = [
            threads.submit(groups[0].recv([got[:, 0][tag : tag + 1] if tag % 2 else got[tag, :1]], 1, tag).wait)
            for tag in range(8)
        ]
        for tag in reversed(range(8)):
            groups[1].send([torch.full((1,), 1.0 + tag)], 0, tag).wait()
        assert all(wait.result() for wait in waits)
    assert got[:, 0].tolist() == [1.0 + tag for tag in range(8)]


def test_wait_ends_when_another_thread_completes_the_receive(groups: list[WorldProcessGroup]) -> None:
    columns = torch.zeros(3, 2)  # not contiguous: a thread of the world copies the received column
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(groups[0].recv([columns[:, 1]], 1, 5).wait)
        groups[1].send([torch.ones(3)], 0, 5).wait()
        assert wait.result()
    assert columns.sum() == 3


def test_operation_that_no_thread_waits_for_completes(groups: list[WorldProcessGroup]) -> None:
    pass_one(groups)
    sent = groups[0].send([torch.ones(1)], 1, 9)
    assert not sent.is_completed()
    groups[1].recv([got := torch.zeros(1)], 0, 9).wait()
    received = groups[0].recv([got], 1, 9)
    groups[1].send([torch.full((1,), 3.0)], 0, 9)
    assert received.get_future().wait() is not None
    assert (sent.get_future().wait(), got.item()) == ([], 3.0)


def test_list_of_several_tensors_is_refused(groups: list[WorldProcessGroup]) -> None:
    with pytest.raises(ValueError, match="expected a list of one tensor, got 2"):
        groups[0].send(zeros(2, 1), 1)


Strike = Callable[[WorldProcessGroup], object]
ENDS: dict[str, tuple[Cause, Strike]] = {
    "leaves": (Cause.LEFT, WorldProcessGroup.close),
    "aborts": (Cause.ABORTED, WorldProcessGroup.abort),
    "drops its group": (Cause.LEFT, lambda group: None),
    "loses its thread": (
        Cause.LOCAL,
        lambda group: group._progress._loop.call_soon_threadsafe(group._progress._loop.stop),
    ),
}


@pytest.mark.parametrize(("cause", "strike"), ENDS.values(), ids=ENDS)
def test_pending_and_later_operations_fail_when_a_member(cause: Cause, strike: Strike) -> None:
    groups = form(3)
    works = [groups[0].allreduce([torch.ones(2)]), groups[1].recv([torch.ones(2)], 0)]
    future = works[0].get_future()
    pass_one(groups)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(groups[1].recv([torch.ones(2)], 0, 1).wait)
        strike(groups.pop())
        assert isinstance(waiting.exception(), GroupBrokenError)
    for work in (*works, groups[0].barrier()):
        with pytest.raises(GroupBrokenError, match="form a new group") as caught:
            work.wait()
        assert isinstance(caught.value.__cause__, BrokenWorldException)
    with pytest.raises(RuntimeError, match="GroupBrokenError: group broken: rank 2"):
        future.wait()
    assert [group.failure and (group.failure.cause, group.failure.rank) for group in groups] == [(cause, 2)] * 2
    for group in groups:
        group.close()


def test_group_breaks_when_an_operation_exceeds_the_limit_of_the_group() -> None:
    first, second = form(2, operation_timeout_s=0.001)
    with first, second:
        with pytest.raises(GroupBrokenError):
            first.recv([torch.zeros(1)], 1).wait()
        assert getattr(first.failure, "cause", None) is Cause.TIMEOUT


def test_join_fails_when_rank_0_does_not_come() -> None:
    with pytest.raises(JoinError, match="rank 0 has not published its address"):
        WorldProcessGroup.from_store(HashStore(), 1, 2, timeout_s=0.001)


def test_backend_of_torch_forms_a_world_for_the_default_group() -> None:
    dist.init_process_group("multiworld", store=HashStore(), rank=0, world_size=1, pg_options={"bind_host": ""})
    try:
        mesh = init_device_mesh("cpu", (1,))
        assert isinstance(mesh.get_group(), WorldProcessGroup)
        model = DistributedDataParallel(torch.nn.Linear(2, 2), device_mesh=mesh)
        model(torch.ones(1, 2)).sum().backward()
        gathered: list[object] = [None]
        dist.all_gather_object(gathered, "from rank 0")
        assert gathered == ["from rank 0"]
    finally:
        dist.destroy_process_group()


def test_coalesced_operation_is_refused_when_two_of_its_tensors_share_memory(groups: list[WorldProcessGroup]) -> None:
    tensor = torch.ones(4)
    for pair in ([tensor, tensor], [tensor[:3], tensor[2:]]):
        with pytest.raises(ValueError, match="same memory"):
            groups[0].allreduce_coalesced(pair)
