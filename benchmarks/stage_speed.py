"""Compute time of a worker by optimisation and precision: milliseconds per image, whole model as one stage, no network.

Claim: `--optimize eager` (the default) is not slower than the unoptimised model at any batch size, and its results differ by less than
1e-5. `made_s` is the time that a
worker needs to optimise the model when it joins.

    python -m benchmarks.stage_speed
    python -m benchmarks.stage_speed --model resnet18 --batch-sizes 1 4 --rounds 3
    python -m benchmarks.stage_speed --bundle vit/            # what `multiworld export` has written; int8, too, if it is calibrated
    python -m benchmarks.stage_speed --bundle vit/ --compiled # code of inductor, too, which takes minutes and is cached
    python -m benchmarks.stage_speed --device cuda:0 --batch-sizes 1 8 32     # compiled code and CUDA graphs, too; never run so far

All variants are measured in turn in each round, so that other load on the machine affects all of them. Figures are the median and the
minimum over the rounds. Precisions that the processor emulates are skipped without `--emulated`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from multiworld_serving.models import (
    Bundle,
    BundleStage,
    CompiledStageCache,
    CompileRequest,
    Tuning,
    classifier_bundle,
    compiled_mode,
    deviation,
    load_bundle_stage,
    load_model,
    optimize,
    read_bundle,
)
from multiworld_serving.models.optimize.execution_modes import has_fast_int8, has_native_bfloat16
from multiworld_serving.server.versions.cut_bundle import CutBundle
from multiworld_serving.server.versions.stage_plan import StagePlan, make_bundle_plan

MAX_BATCH_SIZE = 64


def ways(device: torch.device, emulated: bool, compiled: bool, calibrated: bool) -> list[Tuning]:
    found = [Tuning(), Tuning(optimize="eager")]
    if emulated or has_native_bfloat16(device):
        found.append(Tuning("bfloat16", "eager"))
    if emulated:
        found.append(Tuning("float16", "eager"))
    if compiled:
        found += [Tuning(each.precision, "compile") for each in found[1:]]
    if calibrated and has_fast_int8(device):
        found.append(Tuning("int8", "eager"))
    if device.type == "cuda":
        found += [Tuning("float16", "eager"), Tuning("float16", "compile"), Tuning("auto", "auto")]
    return list(dict.fromkeys(found))


def whole_model(name: str, image_size: int | None) -> tuple[BundleStage, tuple[int, ...]]:
    """A ResNet with random weights as one stage, as a worker loads it, and the shape of a row of its input."""
    plan, weights = whole_plan(name, None, image_size)
    return load_bundle_stage(plan.spec, weights), plan.input_shape


def whole_plan(name: str, bundle: Path | None, image_size: int | None) -> tuple[StagePlan, bytearray]:
    """A ResNet with random weights, or a bundle, as one stage, and the file of weights that a worker receives."""
    read = read_bundle(bundle) if bundle is not None else _resnet(name, image_size)
    (plan,) = make_bundle_plan(CutBundle.of(read, 1))
    return plan, bytearray(b"".join(chunk.numpy().tobytes() for chunk in plan.weights.chunks()))


def _resnet(name: str, image_size: int | None) -> Bundle:
    return classifier_bundle(load_model(name, "random:0", image_size=image_size), MAX_BATCH_SIZE)


def made(
    plan: StagePlan, weights: bytearray, tuning: Tuning, batch_size: int, device: torch.device
) -> tuple[str, nn.Module, float]:
    """Name of the variant, optimised module, and seconds for loading and optimising, as in a worker."""
    shape, compiled = plan.input_shape, None
    if tuning.optimize == "compile" and device.type == "cpu":
        precision, threads = compiled_mode(tuning, device).precision, (torch.get_num_threads(),)
        request = CompileRequest(plan.spec, shape, batch_size, precision, threads, weights)
        cache = CompiledStageCache()
        cache.compile(request)
        if why := cache.slower(request):
            print(f"compiled code is not used: {why}", flush=True)
        compiled = cache.load(request)
    started_s = time.perf_counter()
    optimized = optimize(load_bundle_stage(plan.spec, bytearray(weights)), shape, batch_size, tuning, device, compiled)
    return str(optimized.mode), optimized.module, time.perf_counter() - started_s


def timed_ms(module: nn.Module, batch: Tensor) -> float:
    started_s = time.perf_counter()
    module(batch)
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)
    return (time.perf_counter() - started_s) * 1e3 / len(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--bundle", type=Path, help="instead of --model")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--compiled", action="store_true", help="code of inductor, too, on a CPU")
    parser.add_argument("--emulated", action="store_true", help="precisions that this processor lacks, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan, weights = whole_plan(arguments.model, arguments.bundle, arguments.image_size)
    calibrated = arguments.bundle is not None and read_bundle(arguments.bundle).manifest.int8 is not None
    candidates = [
        made(plan, weights, tuning, max(arguments.batch_sizes), arguments.device)
        for tuning in ways(arguments.device, arguments.emulated, arguments.compiled, calibrated)
    ]
    stage = load_bundle_stage(plan.spec, bytearray(weights))
    rows = plan.self_test_input.repeat(max(arguments.batch_sizes), *[1] * (plan.self_test_input.dim() - 1))
    print(f"{'way':>16} {'batch':>6} {'ms/image':>9} {'least':>7} {'made_s':>7} {'deviation':>10}")
    with torch.inference_mode():
        show(arguments, candidates, stage, rows)


def show(
    arguments: argparse.Namespace, candidates: list[tuple[str, nn.Module, float]], stage: BundleStage, rows: Tensor
) -> None:
    for batch_size in arguments.batch_sizes:
        batch = rows[:batch_size].to(arguments.device)
        rounds = [[timed_ms(module, batch) for _, module, _ in candidates] for _ in range(arguments.rounds + 1)][1:]
        expected = stage.spec.unpack_output(stage(rows[:batch_size]))
        for (name, module, made_s), times_ms in zip(candidates, zip(*rounds, strict=True), strict=True):
            probabilities = stage.spec.probabilities and not name.endswith("float32")
            pairs = zip(stage.spec.unpack_output(module(batch).cpu()), expected, strict=True)
            off = max(deviation(*pair, probabilities=probabilities) for pair in pairs)
            print(
                f"{name:>16} {batch_size:>6} {statistics.median(times_ms):>9.1f} {min(times_ms):>7.1f} {made_s:>7.2f} "
                f"{off:>10.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
