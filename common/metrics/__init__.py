"""Prometheus metric families and their exposition. The leader and the workers each declare their own metrics on `ProgramMetrics`."""

from multiworld_serving.common.metrics.observers import guarded
from multiworld_serving.common.metrics.program import ProgramMetrics, accepts_openmetrics, build_labels

__all__ = ["ProgramMetrics", "accepts_openmetrics", "build_labels", "guarded"]
