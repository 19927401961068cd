"""What a stage computes on the device, how fast, and how long it takes to compile."""

import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.bare_loop import images_per_s, optimized
from benchmarks.gpu.setup import NeedsGpuError, Setup
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.bundle.stage import load_bundle_stage
from multiworld_serving.models.export.bundle_cache import exported
from multiworld_serving.models.export.exporter import ExportSettings, export_model
from multiworld_serving.models.optimize import compiled
from multiworld_serving.models.optimize.compiled import CompiledStage
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation_of_rows
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.models.preprocessing import Preprocessing
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan, make_bundle_plan

MODEL = "resnet50"
_SIZE, _CLASSES = 16, 5
_MODES = (
    ("float32", "eager"),
    ("float32", "fused"),
    ("tf32", "fused"),
    ("bfloat16", "fused"),
    ("float16", "fused"),
    ("bfloat16", "compile"),
    ("tf32", "compile"),
    ("float32", "compile"),
    ("float16", "compile"),
)


def bundle_path(setup: Setup) -> Path:
    """The bundle of ResNet-50 with random weights, or of a small classifier of images."""
    if not setup.small:
        return exported(MODEL, "random:0")
    path = setup.folder / "small.bundle"
    if not path.exists():
        torch.manual_seed(0)
        layers = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * _SIZE**2, _CLASSES),
        )
        image = Preprocessing(_SIZE, _SIZE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        labels = tuple(f"class {number}" for number in range(_CLASSES))
        settings = ExportSettings("small", "1", ("images",), max_batch_size=32, image=image, labels=labels)
        export_model(nn.Sequential(*layers).eval(), [torch.randn(2, 3, _SIZE, _SIZE)], path, settings)
    return path


def _skip_compiler(setup: Setup) -> None:
    """A rehearsal calls the graph as it is: the compiler of CPUs takes a minute."""
    if setup.small:
        torch.compile = lambda module, **_: module  # type: ignore[assignment]
        setup.add("compiler", "none")


def _plan(setup: Setup) -> BundlePlan:
    (plan,) = make_bundle_plan(read_bundle(bundle_path(setup)), 1)
    return plan


def precisions(setup: Setup) -> None:
    """Deviation from the model on the CPU and images per second, for each way to compute and each precision."""
    plan, device = _plan(setup), torch.device(setup.device)
    size, seconds = (2, 0.05) if setup.small else (32, 2.0)
    rows = plan.spec.example(size)
    reference = load_bundle_stage(plan.spec, torch.cat(list(plan.weights.chunks())))
    with torch.inference_mode():
        expected = reference(rows)
    setup.add("batch size", size)
    _skip_compiler(setup)
    for precision, way in _MODES:
        name = f"{way}/{precision}"
        began_s = time.perf_counter()
        try:
            made = optimized(plan, Tuning(precision, way), size, device)
            ready_s = time.perf_counter() - began_s
            with torch.inference_mode():
                output = made(rows.to(device)).cpu()
            off = deviation_of_rows(output, expected, plan.spec, made.mode.precision)
            speed = images_per_s(made, rows.to(device), seconds)
        except Exception as error:  # noqa: BLE001 - the other ways have results of their own
            setup.add(name, {"error": f"{type(error).__name__}: {str(error)[:500]}"})
            continue
        result = {
            "mode": str(made.mode),
            "why": made.why,
            "images/s": round(speed, 1),
            "ready after s": round(ready_s, 2),
        }
        setup.add(name, result | {"deviation": off, "allowed": TOLERANCE[made.mode.precision]})
    if not setup.on_gpu:
        raise NeedsGpuError("computed on the CPU, where tf32 is float32")


def compiled_sizes(setup: Setup) -> None:
    """The time of each of the first five calls of a compiled stage, by batch size, and the memory of its CUDA graphs."""
    plan, device = _plan(setup), torch.device(setup.device)
    _skip_compiler(setup)
    compiled._CALLS = 1  # the calls are counted here
    largest = 1 if setup.small else 32
    stage = load_bundle_stage(plan.spec, torch.cat(list(plan.weights.chunks())))
    made = CompiledStage(stage, largest, Tuning("bfloat16" if setup.on_gpu else "float32", "compile"), device)
    for size in (1,) if setup.small else (1, 8, 32):
        rows, calls_ms = plan.spec.example(size).to(device), list[float]()
        began_s = time.perf_counter()
        made.compile_for(size)
        calls_ms.append(1e3 * (time.perf_counter() - began_s))
        with torch.inference_mode(), made.mode.active(device):
            for _ in range(4):
                began_s = time.perf_counter()
                made(rows).cpu()
                calls_ms.append(1e3 * (time.perf_counter() - began_s))
        reserved_mib = torch.cuda.memory_reserved(device) / (1 << 20) if setup.on_gpu else None
        setup.add(f"batch {size}", {"calls in ms": [round(each, 2) for each in calls_ms], "reserved MiB": reserved_mib})
    if not setup.on_gpu:
        raise NeedsGpuError("CUDA graphs; the CPU compiled")
