"""`multiworld plan`: where a model would be cut, and why."""

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.service import AsJson
from config import UserError

if TYPE_CHECKING:
    from server.cut_plan import CutPlan

EPILOG = """
[bold]Examples[/bold]

multiworld plan --model resnet50 --stages 2

multiworld plan --model resnet152 --stages 4 --link-gbps 1 --json

`multiworld serve --cut measured` cuts like this.
"""

_BAR = 40

Model = Annotated[
    str, typer.Option("--model", help="Model to cut: resnet18, resnet34, resnet50, resnet101, resnet152.")
]
Stages = Annotated[int, typer.Option("--stages", min=1, metavar="N", help="Stages that it is cut into.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Images that travel together.")]
Device = Annotated[str, typer.Option("--device", help="Where to measure: cpu, cuda or cuda:N.")]
Threads = Annotated[
    int,
    typer.Option(
        "--threads", min=0, metavar="N", help="Compute threads of a worker; 0 shares the cores among the stages."
    ),
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Times that each block is measured.")]
LinkGbps = Annotated[
    float | None,
    typer.Option(
        "--link-gbps", min=1e-3, help="Gigabits a second between the machines; measured on this one if not given."
    ),
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
    """Measure every block of a model on this machine, and show where to cut it so that the slowest stage is as fast as possible.

    Weights do not matter for that: random ones are used.
    """
    import torch

    from models import load_model
    from server.cut_plan import measured_cut
    from workers.device import check_device

    check_device(device)
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // stages))
    speed = None if link_gbps is None else link_gbps * 1e9 / 8
    try:
        found = measured_cut(
            load_model(model, "random:0"),
            stages,
            batch_size=batch_size,
            device=device,
            repeats=repeats,
            link_bytes_per_s=speed,
        )
    except OSError as error:
        raise UserError(f"the link cannot be measured: {error}; give its speed with --link-gbps") from error
    if as_json:
        print(json.dumps(_facts(found, model)))
    else:
        _show(found, model)
    return 0


def _facts(found: "CutPlan", model: str) -> dict[str, Any]:
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


def _show(found: "CutPlan", model: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from cli.console import console

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("block")
    table.add_column("ms", justify="right")
    table.add_column("")
    table.add_column("out KiB", justify="right")
    table.add_column("to move ms", justify="right")
    longest = max(found.block_s)
    crossings = [*zip(found.boundary_bytes, found.transfer_s, strict=True), (0, 0.0)]
    for number, (first, end) in enumerate(found.stages):
        for block in range(first, end):
            size, transfer_s = crossings[block]
            time_s, last = found.block_s[block], block == end - 1
            table.add_row(
                *(str(number) if block == first else "", found.blocks[block], f"{time_s * 1e3:.2f}"),
                "█" * max(1, round(_BAR * time_s / longest)),
                *(f"{size / 1024:.0f}" if size else "", f"{transfer_s * 1e3:.2f}" if size else ""),
                end_section=last,
            )
    out = console()
    out.print(f"{model}, for one image", style="bold")
    out.print(table)
    times = ", ".join(f"stage {number} {time_s * 1e3:.1f} ms" for number, time_s in enumerate(found.stage_s))
    out.print(
        f"{times}: {found.images_per_s:.1f} images a second, each stage on a device of its own; balance {found.balance:.2f}"
    )
