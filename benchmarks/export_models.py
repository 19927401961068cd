"""Exports models of torchvision with random weights, reads the bundles, and compares them with the models in 1, 2 and 4 stages.

python -m benchmarks.export_models                  all models, as a table for docs/reference/bundle.md
python -m benchmarks.export_models vit_b_16 swin_t  some of them
"""

import gc
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils import _pytree

from multiworld_serving.models.bundle.cutting import cut_graph
from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.errors import ModelError
from multiworld_serving.models.export.exporter import ExportOptions, export_model
from multiworld_serving.models.export.sources import load_module

MODELS = [
    "alexnet",
    "convnext_tiny",
    "deeplabv3_resnet50",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "fcn_resnet50",
    "googlenet",
    "inception_v3",
    "lraspp_mobilenet_v3_large",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "r3d_18",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "squeezenet1_0",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vit_b_16",
    "wide_resnet50_2",
]
SIZES = {"inception_v3": (3, 299, 299), "r3d_18": (3, 8, 112, 112)}
BATCHES = (1, 3, 8)
STAGES = (1, 2, 4)


def row(name: str, folder: Path) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    module = load_module(name)
    example = torch.randn(2, *SIZES.get(name, (3, 224, 224)))
    started_s = time.monotonic()
    try:
        options = ExportOptions(name, "1", ("images",), max_batch_size=max(BATCHES), num_stages=2)
        report = export_model(module, [example], folder / name, options)
        exported_s = time.monotonic() - started_s
        bundle = read_bundle(folder / name)
        read_s = time.monotonic() - started_s - exported_s
        worst = max(difference(bundle, module, example, num_stages) for num_stages in STAGES)
    except ModelError as error:
        return f"| {name} | {error} | | | | | |"
    cut = report.cut
    sizes = ", ".join(f"{size / 1024:.0f}" for size in cut.boundary_bytes)
    return (
        f"| {name} | {report.nodes} | {exported_s:.1f} s | {read_s:.1f} s | {sum(report.weights_bytes) / 1e6:.0f} MB | "
        f"{cut.balance:.2f}, {sizes} KiB | {worst:.1g} |"
    )


def difference(bundle: Bundle, module: nn.Module, example: torch.Tensor, num_stages: int) -> float:
    """Largest difference from the module over all batch sizes, relative to the largest absolute value of the output."""
    cut = cut_graph(bundle.graph, bundle.manifest.costs_s, num_stages)
    stages = [bundle.build(stage) for stage in bundle.graph.cut(cut.positions)]
    worst = 0.0
    for rows in BATCHES:
        batch = torch.cat([example] * 4)[:rows]
        values: tuple[torch.Tensor, ...] = (batch,)
        with torch.no_grad():
            expected = [each for each in _pytree.tree_leaves(module(batch)) if isinstance(each, torch.Tensor)]
            for stage in stages:
                values = stage(*values)
        for found, wanted in zip(values, expected, strict=True):
            scale = max(float(wanted.abs().max()), 1e-12)
            worst = max(worst, float((found - wanted).abs().max()) / scale)
    return worst


def main() -> None:
    print("| model | nodes | export | read | weights | 2 stages: balance, bytes per row that cross | difference |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or MODELS:
            print(row(name, Path(folder)), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
