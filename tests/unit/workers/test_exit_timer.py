"""A process that cannot continue ends, whatever state it is in."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from multiworld_serving.workers.exit_timer import is_device_failure, is_out_of_memory

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

BLOCKED_LOOP = """
import asyncio, logging, time
from multiworld_serving.workers.exit_timer import exit_when_blocked
logging.basicConfig()

async def main():
    with exit_when_blocked(asyncio.get_running_loop(), 1.0):
        await asyncio.sleep(1.5)
        print("not blocked", flush=True)
        time.sleep(60)

asyncio.run(main())
"""

BUSY_THREADS = """
import asyncio, time
from multiworld_serving.workers.exit_timer import exit_when_blocked

async def main():
    with exit_when_blocked(asyncio.get_running_loop(), 1.0):
        await asyncio.to_thread(time.sleep, 2.5)
        time.sleep(0.6)
    time.sleep(1.5)
    print("in good order")

asyncio.run(main())
"""

STOPPED = """
import asyncio, os, signal, subprocess
from multiworld_serving.workers.exit_timer import exit_when_blocked

async def main():
    with exit_when_blocked(asyncio.get_running_loop(), 1.0):
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.sleep(1.0)
    print("in good order")

asyncio.run(main())
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


def test_process_ends_and_says_where_when_its_event_loop_is_blocked() -> None:
    status, said = outcome(BLOCKED_LOOP)
    assert status == 70
    assert said.startswith("not blocked")
    assert "the event loop has been blocked for 1.0 s: exiting" in said
    assert "time.sleep(60)" in said or "in main" in said


@pytest.mark.parametrize("program", [BUSY_THREADS, STOPPED], ids=["busy threads", "stopped"])
def test_process_goes_on_when_its_event_loop_is_not_to_blame(program: str) -> None:
    assert outcome(program) == (0, "in good order\n")


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


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (RuntimeError("an illegal memory access was encountered"), False),
        (ValueError("CUDA error: misaligned address"), False),
    ],
)
def test_errors_after_which_the_gpu_is_lost_to_the_process_are_recognized(error: BaseException, failed: bool) -> None:
    assert is_device_failure(error) is failed
