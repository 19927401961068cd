"""A worker with one fault in its computation.

Only this process is faulty; joining, links and everything else work normally.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from multiworld_serving.workers.compute import engine
from tests.nursery import run_program

SELF_TESTS = 1
"""Batches without the fault."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(3600)


def _raise() -> None:
    raise RuntimeError("the device fell off the bus")


def _run_out_of_memory() -> None:
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held, held))
    _ = bytearray(1 << 30)


def _fail_device() -> None:
    engine.Engine._has_lost_device = lambda self: True  # type: ignore[method-assign]
    raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")


def _slow() -> None:
    time.sleep(0.5)


BEFORE_COMPUTING = {
    "dies": _die,
    "hangs": _hang,
    "raises": _raise,
    "no-memory": _run_out_of_memory,
    "device-fails": _fail_device,
    "slow": _slow,
}


def _plant(fault: str) -> None:
    forward, compute, batches = engine.Engine._forward, engine.Engine.compute, 0

    def faulty_forward(*arguments: Any) -> Callable[[], Tensor]:
        if fault == "dies-warming":
            _die()
        if fault == "device-fails-loading":
            _fail_device()
        if fault in BEFORE_COMPUTING and batches > SELF_TESTS:
            BEFORE_COMPUTING[fault]()
        output = forward(*arguments)
        return (lambda: output() + 1) if fault == "lies" else output

    async def counted_compute(*arguments: Any) -> engine.ComputedBatch:
        nonlocal batches
        batches += 1
        return await compute(*arguments)

    engine.Engine._forward, engine.Engine.compute = faulty_forward, counted_compute  # type: ignore[assignment, method-assign]


def _die_after_weights() -> None:
    def die(*_: object, **__: object) -> None:
        _die()

    engine.Engine.load = die  # type: ignore[assignment, method-assign]


def run_faulty(arguments: list[str], environment: dict[str, str]) -> None:
    """Run a worker with the fault that is the first argument."""
    fault, *options = arguments
    if fault == "dies-loading":
        _die_after_weights()
    _plant(fault)
    run_program(options, environment)
