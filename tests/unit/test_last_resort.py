"""A process that cannot go on ends, whatever state it is in."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.last_resort import lacks_memory

TREE = Path(__file__).parents[2]

CALLBACK_WITHOUT_MEMORY = """
import asyncio, uvloop
from workers import last_resort

def callback():
    raise MemoryError("no room")

async def main():
    loop = asyncio.get_running_loop()
    last_resort.watch(loop)
    loop.call_soon(callback)
    await loop.create_future()  # what the callback was to set

uvloop.run(main())
"""

ENDS_IN_TIME = """
from workers.last_resort import end_within
end_within(60.0)
print("in good order")
"""

THE_SOONER_COUNTS = """
import time
from workers.last_resort import end_within
end_within(0.2)
end_within(60.0)
time.sleep(60)
"""


def outcome(program: str) -> tuple[int, str]:
    """Exit status and output."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=TREE, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_process_ends_by_an_alarm_when_a_callback_lacked_memory() -> None:
    status, said = outcome(CALLBACK_WITHOUT_MEMORY)
    assert status == -14
    assert "MemoryError: no room" in said


def test_who_ends_in_good_order_is_not_ended() -> None:
    assert outcome(ENDS_IN_TIME) == (0, "in good order\n")


def test_the_sooner_of_two_ends_counts() -> None:
    assert outcome(THE_SOONER_COUNTS) == (-14, "")


def too_large_for_torch() -> BaseException:
    """What torch really raises."""
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
def test_what_says_that_the_host_has_no_memory(error: BaseException, lacks: bool) -> None:
    assert lacks_memory(error) is lacks
