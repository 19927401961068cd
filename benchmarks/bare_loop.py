"""The optimised model in a loop in one process, no server: how fast these cores can go. `benchmarks.throughput` runs it as a child.

    python -m benchmarks.bare_loop --model resnet50 --seconds 5

With `--on-demand` it waits for a line on standard input, loops for so many seconds as that says, and prints images a second.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from models import Tuning, build_stage, cut, load_model, optimize, stage_weights


class BareLoop:
    """The loop in a child process that waits to be asked."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def images_per_s(self, seconds: float) -> float:
        """Loop for so long. Blocks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


@contextmanager
def bare_loop(*arguments: str) -> Iterator[BareLoop]:
    """A child that is ready, with these arguments of this script."""
    command = [sys.executable, "-m", "benchmarks.bare_loop", "--on-demand", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        loop = BareLoop(process)
        loop.images_per_s(0.1)
        try:
            yield loop
        finally:
            process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--optimize", default="eager")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--on-demand", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model = load_model(chosen.model, "random:0")
    spec = cut(model, 1)[0]
    stage = build_stage(spec)
    stage.load_state_dict(stage_weights(model, spec))
    size = model.preprocessing.crop_size
    tuning = Tuning(chosen.precision, chosen.optimize)
    made = optimize(stage, (3, size, size), chosen.batch_size, tuning, torch.device("cpu")).module
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (chosen.batch_size, 3, size, size), dtype=torch.uint8, generator=noise)
    for seconds in map(float, sys.stdin) if chosen.on_demand else [chosen.seconds]:
        count, began_s = 0, time.perf_counter()
        with torch.inference_mode():
            while (took_s := time.perf_counter() - began_s) < seconds or not count:
                made(images)
                count += len(images)
        print(count / took_s, flush=True)


if __name__ == "__main__":
    main()
