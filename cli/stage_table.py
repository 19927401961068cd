"""The stages into which the graph of a bundle is cut, for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from multiworld_serving.models.bundle.cutting import Cut


def stage_facts(cut: Cut, weights_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds and bytes of each stage."""
    return [
        {"seconds": stage_s, "weights_bytes": size, "output_bytes": output}
        for stage_s, size, output in zip(cut.stage_s, weights_bytes, (*cut.boundary_bytes, 0), strict=True)
    ]


def stage_table(cut: Cut, weights_bytes: Sequence[int]) -> Table:
    """One row per stage: time and bytes per row of a batch, and the size of its weights."""
    from multiworld_serving.cli.console import table

    columns = ("stage", "ms", "share", "weights MB", "output KiB")
    rows = table(*columns, numbers=columns)
    total_s = sum(cut.stage_s) or 1.0
    for number, stage in enumerate(stage_facts(cut, weights_bytes)):
        rows.add_row(
            str(number),
            f"{stage['seconds'] * 1e3:.2f}",
            f"{stage['seconds'] / total_s:.0%}",
            f"{stage['weights_bytes'] / 1e6:.1f}",
            f"{stage['output_bytes'] / 1024:.0f}" if stage["output_bytes"] else "",
        )
    return rows
