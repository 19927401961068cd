"""A process that cannot continue ends, whatever state it is in."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from multiworld_serving.workers.exit_timer import is_out_of_memory

TREE = Path(__file__).parents[3]

CALLBACK_WITHOUT_MEMORY = """
import asyncio, uvloop
from multiworld_serving.workers import exit_timer as exit_timer

def callback():
    raise MemoryError("no room")

async def main():
    loop = asyncio.get_running_loop()
    exit_timer.handle_loop_errors(loop)
    loop.call_soon(callback)
    await loop.create_future()  # what the callback was to set

uvloop.run(main())
"""

ENDS_IN_TIME = """
from multiworld_serving.workers.exit_timer import arm_exit_timer
arm_exit_timer(60.0)
print("in good order")
"""


def outcome(program: str) -> tuple[int, str]:
    """Exit status and output."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=TREE, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_process_ends_by_its_timer_when_a_callback_ran_out_of_memory() -> None:
    status, said = outcome(CALLBACK_WITHOUT_MEMORY)
    assert status == -14
    assert "MemoryError: no room" in said


def test_regular_exit_is_not_interrupted() -> None:
    assert outcome(ENDS_IN_TIME) == (0, "in good order\n")


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
