"""Throughput of the optimised model in a loop in one process, without a server: the upper bound for the service on the same cores.

    python -m benchmarks.bare_loop --model resnet50 --seconds 5

With `--on-demand` it reads numbers of seconds from standard input, one per line, and prints images per second after each loop.
`benchmarks.throughput` uses it in a child process.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.bundle.stage import BundleStage, load_bundle_stage
from multiworld_serving.models.export.bundle_cache import exported
from multiworld_serving.models.optimize.optimizing import optimize
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.server.versions.stage_plan import make_bundle_plan

_MAX_BATCH_SIZE = 64


def whole_model(name: str, image_size: int | None) -> tuple[BundleStage, tuple[int, ...]]:
    """A ResNet with random weights as one stage, as a worker loads it, and the shape of a row of its input."""
    bundle = read_bundle(exported(name, "random:0", image_size=image_size))
    (plan,) = make_bundle_plan(bundle, 1)
    return load_bundle_stage(plan.spec, torch.cat(list(plan.weights.chunks()))), plan.spec.input_rows.dims


class BareLoop:
    """The loop in a child process that runs on demand."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def images_per_s(self, seconds: float) -> float:
        """Run the loop for `seconds` and return images per second. Blocks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


@contextmanager
def bare_loop(*arguments: str) -> Iterator[BareLoop]:
    """A child process that is warmed up; `arguments` are those of this program. The child ends with the block."""
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
    parser.add_argument("--optimize", default="fused")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--on-demand", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    stage, shape = whole_model(chosen.model, None)
    tuning = Tuning(chosen.precision, chosen.optimize)
    made = optimize(stage, chosen.batch_size, tuning, chosen.device).module
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (chosen.batch_size, *shape), dtype=torch.uint8, generator=noise).to(chosen.device)
    for seconds in map(float, sys.stdin) if chosen.on_demand else [chosen.seconds]:
        count, began_s = 0, time.perf_counter()
        with torch.inference_mode():
            while (took_s := time.perf_counter() - began_s) < seconds or not count:
                made(images)
                if chosen.device.type == "cuda":
                    torch.cuda.synchronize(chosen.device)
                count += len(images)
        print(count / took_s, flush=True)


if __name__ == "__main__":
    main()
