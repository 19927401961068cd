"""Throughput of the optimised model in a loop in one process, without a server: the upper bound for the service on the same cores.

    python -m benchmarks.bare_loop --model resnet50 --seconds 5

`benchmarks.gpu` runs it on a GPU.
"""

import argparse
import os
import time

import torch

from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.bundle.stage import load_bundle_stage
from multiworld_serving.models.export.bundle_cache import exported
from multiworld_serving.models.optimize.optimizing import optimize
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.server.leader.versions.stage_plan import make_bundle_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--optimize", default="fused")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=5.0)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    (plan,) = make_bundle_plan(read_bundle(exported(chosen.model, "random:0")), 1)
    stage = load_bundle_stage(plan.spec, torch.cat(list(plan.weights.chunks())))
    tuning = Tuning(chosen.precision, chosen.optimize)
    made = optimize(stage, chosen.batch_size, tuning, chosen.device).module
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(
        0, 256, (chosen.batch_size, *plan.spec.input_rows.dims), dtype=torch.uint8, generator=noise
    ).to(chosen.device)
    count, began_s = 0, time.perf_counter()
    with torch.inference_mode():
        while (took_s := time.perf_counter() - began_s) < chosen.seconds or not count:
            made(images)
            if chosen.device.type == "cuda":
                torch.cuda.synchronize(chosen.device)
            count += len(images)
    print(count / took_s)


if __name__ == "__main__":
    main()
