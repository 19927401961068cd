"""Throughput of the optimised model in a loop in one process, without a server: the upper bound for the service on the same cores.

    python -m benchmarks.bare_loop --model resnet50 --seconds 5

`benchmarks.gpu_check` does it on a GPU.
"""

import argparse
import os
import time

import torch
from torch import Tensor

from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.bundle.stage import load_bundle_stage
from multiworld_serving.models.export.bundle_cache import exported
from multiworld_serving.models.optimize.compiled import CompiledStage
from multiworld_serving.models.optimize.optimizing import OptimizedStage, optimize
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan, make_bundle_plan


def optimized(plan: BundlePlan, tuning: Tuning, batch_size: int, device: torch.device) -> OptimizedStage:
    """The stage for batches of this size, compiled if the tuning says so. Raises CompileError."""
    stage = load_bundle_stage(plan.spec, torch.cat(list(plan.weights.chunks())))
    if tuning.optimize != "compile":
        return optimize(stage, batch_size, tuning, device)
    made = CompiledStage(stage, batch_size, tuning, device)
    made.compile_for(batch_size)
    return OptimizedStage(made, made.mode, "compiled for this batch size only")


@torch.inference_mode()
def images_per_s(stage: OptimizedStage, images: Tensor, seconds: float) -> float:
    """Call the stage again and again, and wait for the device each time."""
    count, began_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began_s) < seconds or not count:
        stage(images)
        if images.is_cuda:
            torch.cuda.synchronize(images.device)
        count += len(images)
    return count / took_s


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
    made = optimized(plan, Tuning(chosen.precision, chosen.optimize), chosen.batch_size, chosen.device)
    noise = torch.Generator().manual_seed(0)
    shape = chosen.batch_size, *plan.spec.input_rows.dims
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise).to(chosen.device)
    print(images_per_s(made, images, chosen.seconds))


if __name__ == "__main__":
    main()
