"""Compute time of a worker by optimisation and precision: milliseconds per image, whole model as one stage, no network.

Claim: `--optimize eager` (the default) is not slower than the unoptimised model at any batch size, and its results differ by less than
1e-5. `made_s` is the time that a worker needs to optimise the model when it joins.

    python -m benchmarks.stage_speed
    python -m benchmarks.stage_speed --model resnet18 --batch-sizes 1 4 --rounds 3
    python -m benchmarks.stage_speed --device cuda:0 --batch-sizes 1 8 32     # compiled code and CUDA graphs, too; never run so far

All variants are measured in turn in each round, so that other load on the machine affects all of them. Figures are the median and the
minimum over the rounds. Precisions that the processor emulates are skipped without `--emulated`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from torch import Tensor, nn

from multiworld_serving.models import Stage, Tuning, deviation, load_model, optimize, reference_stage, split_model
from multiworld_serving.models.optimize.execution_modes import has_native_bfloat16


def ways(device: torch.device, emulated: bool) -> list[Tuning]:
    found = [Tuning(), Tuning(optimize="eager")]
    if emulated or has_native_bfloat16(device):
        found.append(Tuning("bfloat16", "eager"))
    if emulated:
        found.append(Tuning("float16", "eager"))
    if device.type == "cuda":
        found += [Tuning("float16", "eager"), Tuning("float16", "compile"), Tuning("auto", "auto")]
    return list(dict.fromkeys(found))


def made(
    stage: Stage, tuning: Tuning, image_size: int, batch_size: int, device: torch.device
) -> tuple[str, nn.Module, float]:
    """Name of the variant, optimised module, and seconds for the optimisation."""
    started_s = time.perf_counter()
    optimized = optimize(copy.deepcopy(stage), (3, image_size, image_size), batch_size, tuning, device)
    return str(optimized.mode), optimized.module, time.perf_counter() - started_s


def timed_ms(module: nn.Module, batch: Tensor) -> float:
    started_s = time.perf_counter()
    module(batch)
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)
    return (time.perf_counter() - started_s) * 1e3 / len(batch)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--emulated", action="store_true", help="precisions that this processor lacks, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model, "random:0", image_size=arguments.image_size)
    stage = reference_stage(model, split_model(model, 1)[0])
    candidates = [
        made(stage, tuning, arguments.image_size, max(arguments.batch_sizes), arguments.device)
        for tuning in ways(arguments.device, arguments.emulated)
    ]
    noise = torch.Generator().manual_seed(0)
    shape = (max(arguments.batch_sizes), 3, arguments.image_size, arguments.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise)
    print(f"{'way':>16} {'batch':>6} {'ms/image':>9} {'least':>7} {'made_s':>7} {'deviation':>10}")
    for batch_size in arguments.batch_sizes:
        batch = images[:batch_size].to(arguments.device)
        rounds = [[timed_ms(module, batch) for _, module, _ in candidates] for _ in range(arguments.rounds + 1)][1:]
        expected = stage(images[:batch_size])
        for (name, module, made_s), times_ms in zip(candidates, zip(*rounds, strict=True), strict=True):
            off = deviation(module(batch).cpu(), expected, probabilities=not name.endswith("float32"))
            print(
                f"{name:>16} {batch_size:>6} {statistics.median(times_ms):>9.1f} {min(times_ms):>7.1f} {made_s:>7.2f} "
                f"{off:>10.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
