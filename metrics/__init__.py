"""What leader and workers count, and how they tell it to Prometheus. Which series there are is said by each of them."""

from metrics.families import Counter, Families, Gauge, Histogram, Info
from metrics.program import ProgramMetrics, build_labels

__all__ = ["Counter", "Families", "Gauge", "Histogram", "Info", "ProgramMetrics", "build_labels"]
