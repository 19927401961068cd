"""How fast a worker computes, by the way it computes: milliseconds an image, whole model as one stage, no network.

Claim: `--optimize eager` (the default) is no slower than the model as it is written at any batch size, and less than
1e-5 off; what a worker pays for it when it joins is `made_s`.

    python -m benchmarks.stage_speed
    python -m benchmarks.stage_speed --model resnet18 --batch-sizes 1 4 --rounds 3

All ways run in turn, round after round, so that what else the machine does hits all alike. Figures are the median and the
least of the rounds. Precisions that the processor has to emulate are left out unless `--emulated` asks for them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from models import Stage, Tuning, cut, deviation, load_model, optimize, reference_stage
from models.optimize.recipes import multiplies_bfloat16

_CPU = torch.device("cpu")


def ways(emulated: bool) -> list[Tuning]:
    found = [Tuning(), Tuning(optimize="eager")]
    if emulated or multiplies_bfloat16(_CPU):
        found.append(Tuning("bfloat16", "eager"))
    if emulated:
        found.append(Tuning("float16", "eager"))
    return found


def made(stage: Stage, tuning: Tuning, image_size: int, batch_size: int) -> tuple[str, nn.Module, float]:
    """Name, module and seconds that it took to make it."""
    started_s = time.perf_counter()
    optimized = optimize(stage, (3, image_size, image_size), batch_size, tuning, _CPU)
    return str(optimized.recipe), optimized.module, time.perf_counter() - started_s


def timed_ms(module: nn.Module, batch: Tensor) -> float:
    started_s = time.perf_counter()
    module(batch)
    return (time.perf_counter() - started_s) * 1e3 / len(batch)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--emulated", action="store_true", help="precisions that this processor lacks, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model, "random:0", image_size=arguments.image_size)
    stage = reference_stage(model, cut(model, 1)[0])
    candidates = [
        made(stage, tuning, arguments.image_size, max(arguments.batch_sizes)) for tuning in ways(arguments.emulated)
    ]
    noise = torch.Generator().manual_seed(0)
    shape = (max(arguments.batch_sizes), 3, arguments.image_size, arguments.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise)
    print(f"{'way':>16} {'batch':>6} {'ms/image':>9} {'least':>7} {'made_s':>7} {'deviation':>10}")
    for batch_size in arguments.batch_sizes:
        batch = images[:batch_size]
        rounds = [[timed_ms(module, batch) for _, module, _ in candidates] for _ in range(arguments.rounds + 1)][1:]
        expected = stage(batch)
        for (name, module, made_s), times_ms in zip(candidates, zip(*rounds, strict=True), strict=True):
            off = deviation(module(batch), expected, probabilities=not name.endswith("float32"))
            print(
                f"{name:>16} {batch_size:>6} {statistics.median(times_ms):>9.1f} {min(times_ms):>7.1f} {made_s:>7.2f} "
                f"{off:>10.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
