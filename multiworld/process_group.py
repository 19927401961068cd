# mypy: disable-error-code="override"
"""A process group of torch over a world, for `DistributedDataParallel`, `DeviceMesh` and the functions of `torch.distributed`.

    group = WorldProcessGroup.form("train", rank, size, addr="10.0.0.1", port=29500)
    model = DistributedDataParallel(module, process_group=group)

If a member is lost, every pending and later operation fails, also in the middle of a backward pass. No wait outlives the group, and no
process ends. The group cannot be used any more: the remaining members form a new one and wrap their modules again.

The import registers the backend "multiworld". `init_process_group("multiworld")` and `init_device_mesh` form worlds through torch's store.
If the host of that store is lost, the new group needs another store.

Tensors of GPUs are copied through pinned memory of the host, on streams of their own; this has not run on a GPU yet. A receive needs a
source rank.

Each group has a daemon thread with an event loop that runs the operations. So any thread may wait for them, also those of autograd. A
thread that waits for a send or receive serves its connection itself.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, Work
from torch.distributed import Backend, ProcessGroup, ReduceOp

from multiworld.collectives import movement, reductions
from multiworld.errors import BrokenWorldException, Cause, WorldError
from multiworld.execution.outcome import Outcome
from multiworld.group_forming import form, form_through, make_manager
from multiworld.manager import DEFAULT_PORT
from multiworld.ops import p2p
from multiworld.ops.buffers import check_distinct
from multiworld.ops.operation import Message, Operation
from multiworld.progress import GroupBrokenError, ProgressThread, WorldWork, never_compiled
from multiworld.world import World

__all__ = ["BACKEND", "GroupBrokenError", "WorldProcessGroup"]

BACKEND = "multiworld"
"""The name of the backend for `init_process_group`."""


@never_compiled
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
        manager = make_manager(**settings)
        return cls(*form(name, rank, size, (addr, port), timeout_s, manager), operation_timeout_s)

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
        return cls(*form_through(store, name, rank, size, timeout_s, settings), operation_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def failure(self) -> BrokenWorldException | None:
        """Return why the group broke, with the rank of the lost member; None while it works and after `close`."""
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
        """Return the name that torch has registered the group by; by default that of its world."""
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
        return _transfer(self, [], p2p.send(self.world.facts, _only(tensors), dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        return _transfer(self, tensors, p2p.recv(self.world.facts, _only(tensors), src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        raise NotImplementedError("a world has no receive from any rank; name the source")

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _split(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return the parts for each rank: of equal size if there are no sizes. Raises ValueError if that is not possible."""
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
            operation.capture_stream()
        outputs = [tensor for each in results for tensor in ([each] if isinstance(each, Tensor) else each)]
        if len(operations) > 1:  # each operation has checked its own results
            check_distinct(f"{operations[0].name} of several tensors", outputs)
        # As torch's own groups do, so that autograd detects that a saved tensor was overwritten.
        torch.autograd.graph.increment_version(outputs)
        limit_s = getattr(opts, "timeout", timedelta(0)).total_seconds()
        timeout_s = limit_s if limit_s > 0 else self._timeout_s
        devices = {each.device for each in outputs if each.is_cuda}
        return WorldWork(results, self._progress.run(_carry_out(self.world, operations, timeout_s)), devices)


def _transfer(group: WorldProcessGroup, results: Sequence[Tensor], operation: Message) -> Work:
    """Start a send or receive on this thread, and not on the progress thread, which would cost two switches.

    No method, because each method costs some microseconds for the compiler; see `never_compiled`.
    """
    operation.capture_stream()
    torch.autograd.graph.increment_version(results)
    operation.outcome = outcome = Outcome()
    devices = {each.device for each in results if each.is_cuda}
    try:
        group._progress.check()
        return WorldWork(results, outcome, devices, group.world.start_on_thread(operation, group._timeout_s))
    except (WorldError, RuntimeError) as error:
        outcome.complete(error)
        return WorldWork(results, outcome, devices)


async def _carry_out(world: World, operations: Sequence[Operation], timeout_s: float | None) -> None:
    for operation in [world.start(each, timeout_s=timeout_s) for each in operations]:
        await operation.finish()


def _only(tensors: list[Tensor]) -> Tensor:
    """Return the tensor of a send or receive. Torch's groups take no more than one either."""
    if len(tensors) != 1:
        raise ValueError(f"expected a list of one tensor, got {len(tensors)}; start one operation for each")
    return tensors[0]


def _reduction(opts: Any) -> Any:
    """Return the reduction of the options of an operation, or the reduction itself."""
    return getattr(opts, "reduceOp", ReduceOp.SUM if opts is None else opts)


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


Backend.register_backend(BACKEND, _create_backend, extended_api=True, devices=["cpu", "cuda"])
