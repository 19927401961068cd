"""A worker in which an assertion fails on the GPU after SIGUSR1. A CPU pretends to be lost.

python -m benchmarks.gpu.failing_worker worker --leader HOST:PORT
"""

import signal
import sys
from typing import Any

import torch

from multiworld_serving.cli.main import run
from multiworld_serving.workers.compute.engine import Engine


def main() -> None:
    forward, is_due = Engine._forward, False

    def request(*_: object) -> None:
        nonlocal is_due
        is_due = True

    def failing(engine: Engine, *arguments: Any) -> Any:
        if is_due and engine.device.type == "cuda":
            torch.zeros(1, device=engine.device)[torch.tensor([1 << 20], device=engine.device)]
            torch.cuda.synchronize(engine.device)
        elif is_due:
            setattr(Engine, "_has_lost_device", lambda _: True)  # noqa: B010
            raise RuntimeError("no device")
        return forward(engine, *arguments)

    signal.signal(signal.SIGUSR1, request)
    setattr(Engine, "_forward", failing)  # noqa: B010 - mypy rejects the assignment
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
