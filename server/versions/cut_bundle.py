"""A bundle and where it is cut into stages, also for stages whose devices differ in speed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiworld_serving.models import Bundle, cut_graph, measure_nodes, times_of_blocks

logger = logging.getLogger(__name__)

_MEASURED_ROWS = 4
"""Batch size for measuring."""
_EQUAL = 1.1
"""Stages whose speeds differ by less than this factor are cut as for equal speeds."""


@dataclass(frozen=True)
class CutBundle:
    """Where a bundle is cut.

    Attributes:
        positions: in the graph, after which a stage ends, without the last stage.
        usual: the positions for stages of equal speed.
    """

    bundle: Bundle
    positions: tuple[int, ...]
    usual: tuple[int, ...]

    @classmethod
    def of(cls, bundle: Bundle, num_stages: int, *, measured: bool = False) -> CutBundle:
        """Cut a bundle into this number of stages: at its own positions if it was made with the same number.

        Args:
            measured: measure the nodes here, and cut by these times in place of those in the bundle.
        Raises:
            StageError: it can be cut into fewer stages.
        """
        if measured:
            bundle = _with_costs(bundle, _measured_costs_s(bundle))
        elif num_stages == len(bundle.manifest.cuts) + 1:
            return cls(bundle, bundle.manifest.cuts, bundle.manifest.cuts)
        cut = cut_graph(bundle.graph, bundle.manifest.costs_s, num_stages, bundle.manifest.lengths[-1])
        if measured:
            logger.info("measured: the slowest stage takes %.1f ms per row", 1e3 * max(cut.stage_s))
        return cls(bundle, cut.positions, cut.positions)

    def of_version(self, bundle: Bundle) -> CutBundle:
        """Another version of the model, cut at the same positions if it has the same graph.

        Raises StageError if its graph differs and can be cut into fewer stages.
        """
        if bundle.graph.to_json() != self.bundle.graph.to_json():
            return CutBundle.of(bundle, len(self.positions) + 1)
        return replace(self, bundle=_with_costs(bundle, self.bundle.manifest.costs_s))

    def for_speeds(self, speeds: Sequence[float]) -> CutBundle:
        """The same bundle, cut so that the slowest stage is as fast as possible.

        Args:
            speeds: > 0, of each stage. Only their ratios matter.
        """
        if max(speeds) < _EQUAL * min(speeds):
            return replace(self, positions=self.usual)
        usual = sum(speeds) / len(speeds)
        manifest = self.bundle.manifest
        cut = cut_graph(
            self.bundle.graph,
            manifest.costs_s,
            len(speeds),
            manifest.lengths[-1],
            speeds=[speed / usual for speed in speeds],
        )
        return replace(self, positions=cut.positions)

    @property
    def stage_costs_s(self) -> tuple[float, ...]:
        """Seconds that computing a row takes in each stage, or another measure of it."""
        ends = (*(position + 1 for position in self.positions), None)
        costs_s = self.bundle.manifest.costs_s
        return tuple(sum(costs_s[begin:end]) for begin, end in zip((0, *ends), ends, strict=False))

    def slowest_s(self, speeds: Sequence[float]) -> float:
        """Seconds per row of the slowest stage, if stages have these speeds."""
        return max(cost_s / speed for cost_s, speed in zip(self.stage_costs_s, speeds, strict=True))

    @property
    def weights_bytes(self) -> tuple[int, ...]:
        """Size of the weights of each stage."""
        stages = self.bundle.graph.cut(self.positions)
        return tuple(sum({node.target: node.row_bytes() for node in stage.weights}.values()) for stage in stages)


def _with_costs(bundle: Bundle, costs_s: tuple[float, ...]) -> Bundle:
    return replace(bundle, manifest=replace(bundle.manifest, costs_s=costs_s))


def _measured_costs_s(bundle: Bundle) -> tuple[float, ...]:
    weights = bundle.weights(node.target for node in bundle.graph.weights)
    inputs = [bundle.self_test[f"input.{node.name}"] for node in bundle.graph.inputs]
    rows = min(_MEASURED_ROWS, bundle.manifest.max_batch_size)
    examples = [tensor.repeat(rows, *[1] * (tensor.dim() - 1)) for tensor in inputs]
    return times_of_blocks(bundle.manifest.costs_s, measure_nodes(bundle.graph, weights, examples))
