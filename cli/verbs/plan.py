"""`multiworld plan`: measure a model and show how to partition it into stages."""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from multiworld_serving.cli.options import AsJson, value
from multiworld_serving.cli.stage_table import stage_facts, stage_table
from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    from multiworld_serving.server.versions.partition_plan import PartitionPlan

EPILOG = """
[bold]Examples[/bold]

multiworld plan --model resnet50 --stages 2

multiworld plan --model resnet152 --stages 4 --link-gbps 1 --json

`multiworld serve --cut measured` uses this partition of a ResNet. A bundle is cut by the times that `multiworld export` measured.
"""

_BAR = 40

Model = Annotated[
    str, value("MODEL", "Model to partition: resnet18, resnet34, resnet50, resnet101, resnet152, or a bundle.")
]
Stages = Annotated[int, value("N", "Number of pipeline stages.", min=1)]
BatchSize = Annotated[int, value("N", "Images per batch.", min=1)]
Device = Annotated[str, value("DEVICE", "Device to measure on: cpu, cuda or cuda:N.")]
Threads = Annotated[int, value("N", "Compute threads per worker; 0 divides the cores among the stages.", min=0)]
Repeats = Annotated[int, value("N", "Number of measurements of each block.", min=1)]
LinkGbps = Annotated[
    float | None,
    value("GBPS", "Bandwidth between the machines in Gbit/s; by default measured on this machine.", min=1e-3),
]


def plan(
    model: Model = "resnet50",
    stages: Stages = 2,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    threads: Threads = 0,
    repeats: Repeats = 5,
    link_gbps: LinkGbps = None,
    as_json: AsJson = False,
) -> int:
    """Measure every block of a model on this machine and show the partition that makes the slowest stage fastest.

    A ResNet has random weights: the values do not affect the time.
    """
    import torch

    from multiworld_serving.cli.console import progress_console
    from multiworld_serving.models import MODEL_NAMES, load_model
    from multiworld_serving.server.versions.partition_plan import measure_partition
    from multiworld_serving.workers.compute.device import check_device

    check_device(device)
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // stages))
    if model not in MODEL_NAMES and Path(model).exists():
        if device != "cpu":
            raise UserError("a bundle is measured on the CPU: leave --device out")
        _plan_bundle(Path(model), stages, batch_size, repeats, as_json=as_json)
        return 0
    speed = None if link_gbps is None else link_gbps * 1e9 / 8
    steps = progress_console()
    what = f"measuring the blocks of {model}, {repeats} times each"
    waiting: AbstractContextManager[object] = steps.status(what) if steps.is_terminal else nullcontext()
    try:
        with waiting:
            found = measure_partition(
                load_model(model, "random:0"),
                stages,
                batch_size=batch_size,
                device=device,
                repeats=repeats,
                link_bytes_per_s=speed,
            )
    except OSError as error:
        raise UserError(f"the network bandwidth cannot be measured: {error}; give it with --link-gbps") from error
    if as_json:
        print(json.dumps(_facts(found, model)))
    else:
        _show(found, model)
    return 0


def _plan_bundle(path: Path, num_stages: int, batch_size: int, repeats: int, *, as_json: bool) -> None:
    """Measure every operator of a bundle, and cut it by these times."""
    from multiworld_serving.cli.console import console
    from multiworld_serving.models import cut_graph, read_bundle
    from multiworld_serving.models.bundle.cutting import measure_nodes

    bundle = read_bundle(path)
    inputs = [bundle.self_test[f"input.{node.name}"] for node in bundle.graph.inputs]
    rows = [tensor.repeat(batch_size, *[1] * (tensor.dim() - 1)) for tensor in inputs]
    costs_s = measure_nodes(bundle.graph, bundle.weights(node.target for node in bundle.graph.weights), rows, repeats)
    cut = cut_graph(bundle.graph, costs_s, num_stages, bundle.manifest.lengths[-1])
    sizes = [
        sum({node.target: node.row_bytes() for node in stage.weights}.values())
        for stage in bundle.graph.cut(cut.positions)
    ]
    rows_per_s = 1 / max(cut.stage_s)
    if as_json:
        facts = {"model": bundle.manifest.name, "stages": stage_facts(cut, sizes), "rows_per_s": rows_per_s}
        print(json.dumps(facts | {"balance": cut.balance}))
        return
    out = console()
    out.print(f"{bundle.manifest.name} {bundle.manifest.version}, times and bytes per row", style="bold")
    out.print(stage_table(cut, sizes))
    out.print(f"{rows_per_s:.1f} rows/s with one device per stage; balance {cut.balance:.2f}")


def _facts(found: "PartitionPlan", model: str) -> dict[str, Any]:
    crossings = [*zip(found.boundary_bytes, found.transfer_s, strict=True), (0, 0.0)]
    return {
        "model": model,
        "blocks": [
            {"name": name, "compute_s": time_s, "output_bytes": size, "transfer_s": transfer_s}
            for name, time_s, (size, transfer_s) in zip(found.blocks, found.block_s, crossings, strict=True)
        ],
        "stages": [
            {"blocks": list(found.blocks[first:end]), "seconds": time_s}
            for (first, end), time_s in zip(found.stages, found.stage_s, strict=True)
        ],
        "images_per_s": found.images_per_s,
        "balance": found.balance,
    }


def _show(found: "PartitionPlan", model: str) -> None:
    from multiworld_serving.cli.console import console, table

    rows = table(
        *("stage", "block", "ms", "", "output KiB", "transfer ms"),
        numbers=("stage", "ms", "output KiB", "transfer ms"),
    )
    longest = max(found.block_s)
    crossings = [*zip(found.boundary_bytes, found.transfer_s, strict=True), (0, 0.0)]
    for number, (first, end) in enumerate(found.stages):
        for block in range(first, end):
            size, transfer_s = crossings[block]
            time_s, last = found.block_s[block], block == end - 1
            rows.add_row(
                *(str(number) if block == first else "", found.blocks[block], f"{time_s * 1e3:.2f}"),
                "█" * max(1, round(_BAR * time_s / longest)),
                *(f"{size / 1024:.0f}" if size else "", f"{transfer_s * 1e3:.2f}" if size else ""),
                end_section=last,
            )
    out = console()
    out.print(f"{model}, times per image", style="bold")
    out.print(rows)
    times = ", ".join(f"stage {number} {time_s * 1e3:.1f} ms" for number, time_s in enumerate(found.stage_s))
    out.print(f"{times}: {found.images_per_s:.1f} images/s with one device per stage; balance {found.balance:.2f}")
