"""A process that cannot continue ends, whatever state it is in."""

import asyncio
import os
import sys

import pytest
import torch
import uvloop

from multiworld_serving.workers.exit_timer import arm_exit_timer, handle_loop_errors, is_out_of_memory
from tests.nursery import NURSERY, ForkedProcess


def run_out_of_memory_in_a_callback() -> None:
    def callback() -> None:
        raise MemoryError("no room")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        handle_loop_errors(loop)
        loop.call_soon(callback)
        await loop.create_future()  # what the callback was to set

    uvloop.run(main())


def end_in_time() -> None:
    arm_exit_timer(60.0)
    print("in good order", file=sys.stderr)


def outcome(program: str) -> tuple[int, str]:
    """Exit status of a process that calls this function, and what it has written."""
    reader, writer = os.pipe()
    process = ForkedProcess(NURSERY.fork(f"{__name__}:{program}", (), writer))
    os.close(writer)
    with os.fdopen(reader) as written:
        said = written.read()
    return process.wait(60), said


def test_process_ends_by_its_timer_when_a_callback_ran_out_of_memory() -> None:
    status, said = outcome("run_out_of_memory_in_a_callback")
    assert status == -14
    assert "MemoryError: no room" in said


def test_regular_exit_is_not_interrupted() -> None:
    assert outcome("end_in_time") == (0, "in good order\n")


def too_large_for_torch() -> BaseException:
    """The error that torch raises."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 56, dtype=torch.uint8)
    return refused.value


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (too_large_for_torch(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (ValueError("bad_alloc"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: BaseException, lacks: bool) -> None:
    assert is_out_of_memory(error) is lacks
