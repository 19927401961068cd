"""`multiworld plan`: measure a model and show how to partition it into stages."""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from multiworld_serving.cli.options import AsJson, value
from multiworld_serving.cli.stage_table import stage_facts, stage_table
from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    from multiworld_serving.models import Bundle

EPILOG = """
[bold]Examples[/bold]

multiworld plan --model resnet50 --stages 2

multiworld plan --model resnet152 --stages 4 --link-gbps 1 --json

`multiworld serve --cut measured` measures at start and uses such a partition.
"""

Model = Annotated[
    str, value("MODEL", "Model to partition: a model of torchvision for images such as resnet50, or a bundle.")
]
Stages = Annotated[int, value("N", "Number of pipeline stages.", min=1)]
BatchSize = Annotated[int, value("N", "Images per batch.", min=1)]
Device = Annotated[str, value("DEVICE", "Device to measure on: cpu, cuda or cuda:N.")]
Threads = Annotated[int, value("N", "Compute threads per worker; 0 divides the cores among the stages.", min=0)]
Repeats = Annotated[int, value("N", "Number of measurements of each operator.", min=1)]
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
    """Measure every operator of a model on this machine and show the partition that makes the slowest stage fastest.

    A model of torchvision has random weights: the values do not affect the time.
    """
    import torch

    from multiworld_serving.cli.console import console, progress_console
    from multiworld_serving.models import cut_graph, measure_nodes, times_of_blocks
    from multiworld_serving.server.versions.link_speed import local_link_bytes_per_s
    from multiworld_serving.workers.compute.device import check_device

    check_device(device)
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // stages))
    bundle = _bundle(model, batch_size)
    graph, manifest = bundle.graph, bundle.manifest
    try:
        speed = local_link_bytes_per_s() if link_gbps is None else link_gbps * 1e9 / 8
    except OSError as error:
        raise UserError(f"the network bandwidth cannot be measured: {error}; give it with --link-gbps") from error
    steps = progress_console()
    what = f"measuring the operators of {model}, {repeats} times each"
    waiting: AbstractContextManager[object] = steps.status(what) if steps.is_terminal else nullcontext()
    with waiting:
        inputs = [bundle.self_test[f"input.{node.name}"] for node in graph.inputs]
        rows = [tensor.repeat(batch_size, *[1] * (tensor.dim() - 1)) for tensor in inputs]
        weights = bundle.weights(node.target for node in graph.weights)
        times_s = measure_nodes(graph, weights, rows, repeats, device)
    cut = cut_graph(
        graph, times_of_blocks(manifest.costs_s, times_s), stages, manifest.lengths[-1], link_bytes_per_s=speed
    )
    sizes = [
        sum({node.target: node.row_bytes() for node in stage.weights}.values()) for stage in graph.cut(cut.positions)
    ]
    rows_per_s = 1 / max(cut.stage_s)
    if as_json:
        facts = {"model": manifest.name, "stages": stage_facts(cut, sizes), "rows_per_s": rows_per_s}
        int8 = None if manifest.int8 is None else asdict(manifest.int8)
        print(json.dumps(facts | {"balance": cut.balance, "int8": int8}))
        return 0
    out = console()
    out.print(f"{manifest.name} {manifest.version}, times and bytes per row", style="bold")
    out.print(stage_table(cut, sizes))
    out.print(f"{rows_per_s:.1f} rows/s with one device per stage; balance {cut.balance:.2f}")
    if manifest.int8 is not None:
        out.print(str(manifest.int8))
    return 0


def _bundle(model: str, batch_size: int) -> "Bundle":
    from multiworld_serving.models import MODEL_NAMES, classifier_bundle, load_model, read_bundle

    if model in MODEL_NAMES:
        return classifier_bundle(load_model(model, "random:0"), batch_size)
    if Path(model).exists():
        return read_bundle(Path(model))
    from multiworld_serving.models.export.published import PublishedModel, exported

    return read_bundle(exported(PublishedModel.choose(model, "random:0", max_batch_size=batch_size)))
