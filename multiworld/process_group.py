# mypy: disable-error-code="override"
"""A process group of torch over a world, for `DistributedDataParallel`, `DeviceMesh` and the functions of `torch.distributed`.

    group = WorldProcessGroup.form("train", rank, size, addr="10.0.0.1", port=29500)
    model = DistributedDataParallel(module, process_group=group)

If a member is lost, every pending and later operation fails, also in the middle of a backward pass. No wait outlives the group, and no
process ends. The group cannot be used any more: the remaining members form a new one and wrap their modules again.

The import registers the backend "multiworld". `init_process_group("multiworld")` and `init_device_mesh` form worlds through torch's store.
If the host of that store is lost, the new group needs another store.

Tensors must be on the CPU. GPU tensors are refused, because that has not run on a GPU. A receive needs a source rank.

Each group has a daemon thread with an event loop that runs the operations. So any thread may wait for them, also those of autograd.
"""

import _thread
import asyncio
import atexit
import contextlib
import inspect
import secrets
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, Work
from torch.distributed import Backend, DistBackendError, ProcessGroup, ReduceOp

from multiworld.collectives import movement, reductions
from multiworld.control.dial import local_host
from multiworld.control.handshake import WRONG_SECRET
from multiworld.errors import BrokenWorldException, Cause, JoinError
from multiworld.execution.threads import DaemonThread
from multiworld.manager import DEFAULT_PORT, WorldManager
from multiworld.ops import p2p
from multiworld.ops.buffers import check_distinct
from multiworld.ops.operation import Operation
from multiworld.world import World

BACKEND = "multiworld"
"""The name of the backend for `init_process_group`."""
_ADDRESS_KEY = "multiworld/address"
"""Secret and address of rank 0 while its group forms. Empty afterwards, because a store has no delete that checks the value."""
_REREAD_S = 0.1
"""Interval at which a member that joins reads the key, which may hold the address of an earlier group."""
_CLOSE_S = 20.0
"""Longer than `WorldManager.aclose` takes."""
_LAST_S = 1.0
"""How long a thread that ends waits until the operations of its worlds, which have ended, have failed."""

T = TypeVar("T")


class GroupBrokenError(DistBackendError):
    """The operation failed because its group has ended. `__cause__` is the error of the world, usually a BrokenWorldException.

    Autograd turns it into a RuntimeError with this text. `WorldProcessGroup.failure` tells it from other errors.
    """


def _never_compiled(cls: type[T]) -> type[T]:
    """Let torch's compiler call the methods of a class. It cannot trace them, because the class is a subclass of a class in C++."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and name != "__init__":
            setattr(cls, name, torch.compiler.disable(method))  # type: ignore[no-untyped-call]
    return cls


class ProgressThread:
    """An event loop on a daemon thread, which serves the worlds of one manager.

    Every future of `run` completes: with an error if the thread ends before, or does not exist because this process was forked. It takes no
    locks, because finalizers may run on any thread, and a forked process would inherit a lock that is held.
    """

    def __init__(self, name: str, manager: WorldManager) -> None:
        self._manager = manager
        self._loop = asyncio.new_event_loop()
        self._unfinished: set[Future[Any]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._thread = DaemonThread(self._serve, name)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when it does not start."""
        self._thread.start()
        _started.add(self)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Coroutines start in the order of these calls."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                outcome = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._unfinished.add(outcome)
                outcome.add_done_callback(self._unfinished.discard)
                if self._loop.is_closed():  # in the meantime
                    _fail(outcome)
                return outcome
        coroutine.close()
        _fail(outcome := Future())
        return outcome

    def stop(self) -> None:
        """Close the worlds, which fails their pending operations, then end the thread. Does not block."""

        async def close() -> None:
            try:
                await self._manager.aclose()
            finally:
                self._loop.stop()

        def begin() -> None:
            if self._stopping is None:
                self._stopping = self._loop.create_task(close())

        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(begin)

    def join(self) -> None:
        """Wait until the thread has ended, at most for 20 s."""
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            for world in self._manager.worlds.values():  # there are none after `stop`
                world.fail(Cause.LOCAL, world.rank, "its progress thread has ended")
            try:
                with contextlib.suppress(RuntimeError):  # `stop` was called just now
                    self._loop.run_until_complete(_report_failures())
            finally:
                self._loop.close()
                for outcome in list(self._unfinished):
                    _fail(outcome)
                self._manager.cleanup()


async def _report_failures() -> None:
    await asyncio.sleep(0)
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks, timeout=_LAST_S)
    await asyncio.sleep(0)  # for the callbacks of the last one


def _fail(outcome: Future[Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # complete
        outcome.set_exception(RuntimeError("the progress thread of the group has ended"))


@_never_compiled
class WorldWork(Work):
    """An operation that runs on the progress thread.

    Args:
        results: the value of `get_future` and `result`: the tensors that the operation writes.
        outcome: completes with the operation.
    """

    def __init__(self, results: Sequence[Any], outcome: Future[None]) -> None:
        super().__init__()
        self._results = list(results)
        self._outcome = outcome

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation is complete. It continues when `timeout` expires, so the caller may wait again. 0 means no limit.

        Raises:
            GroupBrokenError: the group has ended.
            DistBackendError: the timeout expired.
        """
        limit_s = timeout.total_seconds()
        try:
            error = self._outcome.exception(limit_s if limit_s > 0 else None)
        except TimeoutError:
            raise DistBackendError(
                f"the operation is not complete after {limit_s:g} s; wait again, or abort the group"
            ) from None
        if error is not None:
            raise GroupBrokenError(
                f"{error}. This group has ended. Let the remaining members form a new group (WorldProcessGroup.form or from_store), and "
                "wrap the modules again"
            ) from error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future. If the operation fails, it raises RuntimeError with the same text.

        Its callbacks run on a thread of their own, because they may wait for another operation, as those of PowerSGD do.
        """
        source: torch.futures.Future[Any] = torch.futures.Future()

        # `set_exception` of torch would let C++ code take the exception for the value.
        def value(_: object) -> list[Any]:
            self.wait()
            return self._results

        def complete(_: object) -> None:
            try:
                _thread.start_new_thread(source.set_result, (None,))
            except RuntimeError:  # too many threads
                source.set_result(None)

        future = source.then(value)
        self._outcome.add_done_callback(complete)
        return future

    def is_completed(self) -> bool:
        return self._outcome.done()

    def is_success(self) -> bool:
        return self._outcome.done() and self._outcome.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the world; None while the operation is pending and after it has succeeded."""
        return self._outcome.exception() if self._outcome.done() else None

    def result(self) -> list[Any]:
        return self._results

    def synchronize(self) -> None:
        self.wait()


@_never_compiled
class WorldProcessGroup(ProcessGroup):
    """One member of a process group over a world. Make it with `form` or `from_store`.

    The operations have the signatures of `torch.distributed.ProcessGroup`. Arguments that `WorldCommunicator` refuses raise ValueError or
    TypeError. After the end of the group, an operation returns a work that has failed. If it raised an error instead, the reducer of
    DistributedDataParallel could not be used again.

    Close it, use it in a `with` statement, or drop all references: the world is left and pending operations fail. A process that exits
    leaves its groups.

    Attributes:
        world: the world. It ends with the group.
    """

    def __init__(self, world: World, progress: ProgressThread, timeout_s: float | None) -> None:
        super().__init__(world.rank, world.size)  # type: ignore[call-arg] # missing in torch's stubs
        self.world = world
        self._name = world.name
        self._progress = progress
        self._timeout_s = timeout_s
        self._leave = weakref.finalize(self, progress.stop)
        self._leave.atexit = False  # see `_leave_all`

    @classmethod
    def form(
        cls,
        name: str,
        rank: int,
        size: int,
        addr: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        timeout_s: float = 30.0,
        operation_timeout_s: float | None = None,
        **settings: Any,
    ) -> Self:
        """Form a world and return this member's side of it. Blocks until all members are present.

        Args:
            rank, size: this member's rank and the number of members. Rank 0 listens on `addr`:`port`; the others connect.
            timeout_s: seconds that the formation may take.
            operation_timeout_s: seconds after which an operation that is still pending breaks the group. None: only the loss of a member.
            settings: of `WorldManager`, such as `secret`. `heartbeat_timeout_s` is 10 here, because training may keep all threads of Python
                from running for seconds, for example when it imports torch's compiler.
        Raises the errors of `WorldManager.initialize_world`. Everything is freed then.
        """
        return cls._join(_make_manager(**settings), name, rank, size, addr, port, timeout_s, operation_timeout_s)

    @classmethod
    def from_store(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str = "group",
        timeout_s: float = 30.0,
        operation_timeout_s: float | None = None,
        **settings: Any,
    ) -> Self:
        """Like `form`, but rank 0 publishes its address and a new secret in a store that all members reach.

        The address of an earlier group in the store only delays the formation: the members read the store until they reach the current
        rank 0. Groups that form at the same time need a PrefixStore each. Raises JoinError also if rank 0 does not publish its address in
        time.
        """
        if rank:
            return cls._join_published(store, rank, size, name, timeout_s, operation_timeout_s, settings)
        secret, addr = secrets.token_hex(16), _own_address(store)
        manager = _make_manager(secret=secret, **settings)
        port = manager.listen(addr)
        published = f"{secret} {addr} {port}"
        try:
            store.set(_ADDRESS_KEY, published)
            return cls._join(manager, name, rank, size, addr, port, timeout_s, operation_timeout_s)
        except BaseException:
            manager.cleanup()
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # the store is lost, or has no `compare_set`
                store.compare_set(_ADDRESS_KEY, published, "")  # unless the next rank 0 has published its address

    @classmethod
    def _join_published(
        cls,
        store: Store,
        rank: int,
        size: int,
        name: str,
        timeout_s: float,
        limit_s: float | None,
        settings: dict[str, Any],
    ) -> Self:
        """Join at the address in the store. Starts over if another address is published before the group has formed."""
        until_s, published = time.monotonic() + timeout_s, ""

        def is_outdated() -> bool:
            with contextlib.suppress(RuntimeError):  # the store is lost
                return store.get(_ADDRESS_KEY).decode() not in ("", published)
            return False

        while True:
            try:
                published = _read_address(store, published, until_s)
            except (RuntimeError, TimeoutError) as error:
                reason = f"rank 0 has not published its address within {timeout_s:g} s: {error}"
                raise JoinError(name, reason) from error
            secret, addr, port = published.split()
            manager, left_s = _make_manager(secret=secret, **settings), round(max(0.0, until_s - time.monotonic()), 2)
            try:
                return cls._join(manager, name, rank, size, addr, int(port), left_s, limit_s, is_outdated)
            except _OutdatedError:
                pass
            except JoinError as error:
                if WRONG_SECRET not in error.message:  # else another group has the port now
                    raise

    @classmethod
    def _join(
        cls,
        manager: WorldManager,
        name: str,
        rank: int,
        size: int,
        addr: str,
        port: int,
        timeout_s: float,
        limit_s: float | None,
        outdated: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Form the group with a new manager, which is cleaned up after an error. Raises _OutdatedError when `outdated` returns True."""
        progress = ProgressThread(f"multiworld-{name}-progress", manager)
        try:
            progress.start()
            joining = progress.run(manager.initialize_world(name, rank, size, addr=addr, port=port, timeout=timeout_s))
            while not wait([joining], _REREAD_S).done:
                if outdated():
                    raise _OutdatedError
            return cls(joining.result(), progress, limit_s)
        except BaseException:
            progress.stop()
            progress.join()
            manager.cleanup()  # if the thread did not start
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def failure(self) -> BrokenWorldException | None:
        """Why the group broke, with the rank of the lost member; None while it works and after `close`."""
        return self.world.failure

    def close(self) -> None:
        """Leave the world and free everything. Pending operations fail. Idempotent. Blocks for at most 20 s."""
        self._leave()
        self._progress.join()

    def shutdown(self) -> None:
        """Same as `close`; called by `torch.distributed.destroy_process_group`."""
        self.close()

    def abort(self) -> None:
        """Break the group at all members, for example because an operation takes too long. Does not block."""
        self.world.fail(Cause.ABORTED, self.world.rank, "the group was aborted")

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name that torch has registered the group by; by default that of its world."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> Any:
        """Called by `batch_isend_irecv`. This group is its own backend, as are all groups that are written in Python."""
        return self

    # -- operations; see `torch.distributed.ProcessGroup` -----------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = _reduction(opts)
        return self._start(tensors, [reductions.all_reduce(self.world.facts, each, op) for each in tensors], opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        facts, op, root = self.world.facts, _reduction(opts), opts.rootRank
        return self._start(tensors, [reductions.reduce(facts, each, root, op) for each in tensors], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        facts, root = self.world.facts, getattr(opts, "rootRank", 0)
        return self._start(tensors, [movement.broadcast(facts, each, root) for each in tensors], opts)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> Work:
        return self._start_pairs(movement.all_gather, output_tensors, input_tensors, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._start_pairs(movement.all_gather_into_tensor, [output], [input], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._start_pairs(movement.all_gather_into_tensor, outputs, inputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        return self._start_pairs(reductions.reduce_scatter, outputs, inputs, opts, _reduction(opts))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._start_pairs(reductions.reduce_scatter_tensor, outputs, inputs, opts, _reduction(opts))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Work:
        (tensor,), parts = input_tensors, output_tensors[0] if output_tensors else None
        return self._start(output_tensors, [movement.gather(self.world.facts, tensor, parts, opts.rootRank)], opts)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Work:
        (tensor,), parts = output_tensors, input_tensors[0] if input_tensors else None
        return self._start(output_tensors, [movement.scatter(self.world.facts, tensor, parts, opts.rootRank)], opts)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Work:
        return self._start(output_tensors, [movement.all_to_all(self.world.facts, output_tensors, input_tensors)], opts)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        outputs, inputs = self._split(output, output_split_sizes), self._split(input, input_split_sizes)
        return self._start([output], [movement.all_to_all(self.world.facts, outputs, inputs)], opts)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Work:
        return self._start([], [reductions.barrier(self.world.facts)], opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        return self._start([], [p2p.send(self.world.facts, each, dst, tag) for each in tensors])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        return self._start(tensors, [p2p.recv(self.world.facts, each, src, tag) for each in tensors])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        raise NotImplementedError("a world has no receive from any rank; name the source")

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _split(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """The parts for each rank: of equal size if there are no sizes. Raises ValueError if that is not possible."""
        if not sizes and tensor.shape[0] % self.world.size:
            raise ValueError(f"all_to_all: {tensor.shape[0]} rows cannot be divided among {self.world.size} ranks")
        return list(torch.split(tensor, sizes or [tensor.shape[0] // self.world.size] * self.world.size))

    def _start_pairs(
        self,
        operation: Callable[..., Operation],
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        opts: Any,
        *arguments: Any,
    ) -> Work:
        """Start one operation for each pair of output and input."""
        facts = self.world.facts
        pairs = zip(outputs, inputs, strict=True)
        return self._start(outputs, [operation(facts, output, given, *arguments) for output, given in pairs], opts)

    def _start(self, results: Sequence[Any], operations: Sequence[Operation], opts: Any = None) -> Work:
        for operation in operations:
            if any(tensor.device.type != "cpu" for tensor in operation.tensors):
                raise ValueError(f"{operation.name}: WorldProcessGroup moves tensors on the CPU only; copy them there")
        outputs = [tensor for each in results for tensor in ([each] if isinstance(each, Tensor) else each)]
        if len(operations) > 1:  # each operation has checked its own results
            check_distinct(f"{operations[0].name} of several tensors", outputs)
        # As torch's own groups do, so that autograd detects that a saved tensor was overwritten.
        torch.autograd.graph.increment_version(outputs)
        limit_s = getattr(opts, "timeout", timedelta(0)).total_seconds()
        timeout_s = limit_s if limit_s > 0 else self._timeout_s
        return WorldWork(results, self._progress.run(_carry_out(self.world, operations, timeout_s)))


async def _carry_out(world: World, operations: Sequence[Operation], timeout_s: float | None) -> None:
    for operation in [world.start(each, timeout_s=timeout_s) for each in operations]:
        await operation.finish()


def _make_manager(*, heartbeat_timeout_s: float = 10.0, **settings: Any) -> WorldManager:
    return WorldManager(heartbeat_timeout_s=heartbeat_timeout_s, **settings)


def _reduction(opts: Any) -> Any:
    """The reduction of the options of an operation, or the reduction itself."""
    return getattr(opts, "reduceOp", ReduceOp.SUM if opts is None else opts)


class _OutdatedError(Exception):
    """The store holds another address than that at which this member joins."""


def _read_address(store: Store, former: str, until_s: float) -> str:
    """Wait for an address other than `former`, and return its text. Raises TimeoutError after `until_s`, and RuntimeError of the store."""
    store.wait([_ADDRESS_KEY], timedelta(seconds=max(0.001, until_s - time.monotonic())))
    while (published := store.get(_ADDRESS_KEY).decode()) in ("", former):
        if time.monotonic() > until_s:
            raise TimeoutError("the store has the address of an earlier group")
        time.sleep(_REREAD_S)
    return published


def _own_address(store: Store) -> str:
    """The local address of the route to the store. The loopback address if the store has no address, as a FileStore."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    return local_host(host, port) if host else "127.0.0.1"


def _create_backend(options: Any, settings: dict[str, Any] | None) -> ProcessGroup:
    """Called by `init_process_group` and `new_group`. Their `pg_options` may be a dictionary of settings of `WorldManager`."""
    timeout_s = options.timeout.total_seconds()
    return WorldProcessGroup.from_store(
        options.store,
        options.group_rank,
        options.group_size,
        name=f"group {options.group_id}",
        timeout_s=timeout_s,
        operation_timeout_s=timeout_s,
        **(settings or {}),
    )


Backend.register_backend(BACKEND, _create_backend, extended_api=True, devices=["cpu"])

_started: weakref.WeakSet[ProgressThread] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Leave the groups at process exit, and let no thread compute while the interpreter ends."""
    threads = list(_started)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join()
