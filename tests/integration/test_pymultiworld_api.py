"""pymultiworld's public API: names, signatures, errors, and the state after a failure."""

import asyncio
import inspect
import pickle

import pytest
import torch
from torch.distributed import ReduceOp

import multiworld
import multiworld.communicator
import multiworld.manager
from multiworld.communicator import BrokenWorldException, WorldCommunicator
from multiworld.manager import WorldManager


def _signature(function: object) -> list[tuple[str, object]]:
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.default) for each in parameters if each.name != "self" and each.kind != each.KEYWORD_ONLY]


REQUIRED = inspect.Parameter.empty
SIGNATURES = {
    "send": [("tensor", REQUIRED), ("dst", REQUIRED), ("world_name", "")],
    "recv": [("tensor", REQUIRED), ("src", REQUIRED), ("world_name", "")],
    "broadcast": [("tensor", REQUIRED), ("src", REQUIRED), ("world_name", "")],
    "all_reduce": [("tensor", REQUIRED), ("op", ReduceOp.SUM), ("world_name", "")],
    "reduce": [("tensor", REQUIRED), ("dst", REQUIRED), ("op", ReduceOp.SUM), ("world_name", "")],
    "all_gather": [("tensors", REQUIRED), ("tensor", REQUIRED), ("world_name", "")],
    "gather": [("tensor", REQUIRED), ("gather_list", None), ("dst", 0), ("world_name", "")],
    "scatter": [("tensor", REQUIRED), ("scatter_list", None), ("src", 0), ("world_name", "")],
    "is_broken": [("world_name", REQUIRED)],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_operations_have_the_signatures_of_pymultiworld(name: str) -> None:
    assert _signature(getattr(WorldCommunicator, name)) == SIGNATURES[name]


def test_manager_has_the_signatures_of_pymultiworld() -> None:
    assert _signature(WorldManager) == [("enable_monitor", True)]
    assert _signature(WorldManager.initialize_world) == [
        ("world_name", REQUIRED),
        ("rank", REQUIRED),
        ("world_size", REQUIRED),
        ("backend", "gloo"),
        ("addr", "127.0.0.1"),
        ("port", -1),
        ("timeout", 30),
        ("device", torch.device("cpu")),
    ]
    assert _signature(WorldManager.remove_world) == [("world_name", REQUIRED)]
    assert _signature(WorldManager.cleanup) == []


def test_modules_have_the_names_of_pymultiworld() -> None:
    assert multiworld.manager.WorldManager is multiworld.WorldManager
    assert multiworld.communicator.WorldCommunicator is multiworld.WorldCommunicator
    assert multiworld.communicator.BrokenWorldException is multiworld.BrokenWorldException
    assert isinstance(multiworld.__version__, str)


def test_broken_world_exception_has_the_constructor_of_pymultiworld() -> None:
    error = BrokenWorldException("world1", "exception raised by watchdog")
    assert str(error) == "world1 broken: exception raised by watchdog"
    assert error.args == ("world1", "exception raised by watchdog")
    assert (error._world_name, error._msg) == ("world1", "exception raised by watchdog")
    assert error.rank == -1


@pytest.mark.parametrize(
    "error",
    [
        BrokenWorldException("w", "a message"),
        BrokenWorldException("w", multiworld.Cause.HANG, 2, "silent"),
        multiworld.WorldNotFoundError("w", "removed"),
        multiworld.WorldExistsError("w", "there"),
    ],
)
def test_exceptions_survive_pickling(error: multiworld.WorldError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    if isinstance(error, BrokenWorldException) and isinstance(again, BrokenWorldException):
        assert (again.cause, again.rank, again.detail) == (error.cause, error.rank, error.detail)


async def test_unknown_and_removed_worlds_are_broken_and_raise() -> None:
    manager = WorldManager()
    communicator = manager.communicator
    assert communicator.is_broken("world1")
    with pytest.raises(ValueError, match="world1"):
        manager.remove_world("world1")
    operations = [
        communicator.send(torch.zeros(1), 1, "world1"),
        communicator.recv(torch.zeros(1), 1),
        communicator.all_reduce(torch.zeros(1), world_name="world1"),
    ]
    for operation in operations:
        with pytest.raises(BrokenWorldException):
            await operation
    await manager.initialize_world("world1", 0, 1, port=0)
    assert not communicator.is_broken("world1")
    with pytest.raises(ValueError, match="world1"):
        await manager.initialize_world("world1", 0, 1, port=0)
    manager.remove_world("world1")
    assert communicator.is_broken("world1")
    with pytest.raises(BrokenWorldException):
        await communicator.broadcast(torch.zeros(1), 0, "world1")
    await manager.initialize_world("world1", 0, 1, port=0)  # the name is free again
    manager.cleanup()


async def test_retry_loop_on_a_broken_world_yields_to_the_event_loop() -> None:
    manager = WorldManager()
    other = 0

    async def work() -> None:
        nonlocal other
        for _ in range(20):
            other += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(work())
    while not task.done():
        try:
            await manager.communicator.send(torch.zeros(1), 1, "gone")
        except BrokenWorldException:
            continue
    assert other == 20
