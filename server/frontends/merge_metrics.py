"""Merges the metrics of several processes into one text, with a `process` label on each sample."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")


def merge_metrics(texts: Iterable[tuple[str, str]]) -> str:
    """Merge expositions in Prometheus' text format.

    Args:
        texts: name of a process, and its metrics.
    """
    families: dict[str, list[str]] = {}
    for process, text in texts:
        family = ""
        label = 'process="' + process.replace("\\", r"\\").replace('"', r"\"") + '"'
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                families.setdefault(family, [line])
            elif line.startswith("# TYPE "):
                if len(families.setdefault(family, [])) == 1:
                    families[family].append(line)
            elif line and not line.startswith("#") and (match := _SAMPLE.fullmatch(line)) is not None:
                name, labels, value = match.groups()
                families.setdefault(family, []).append(f"{name}{{{label}{',' + labels if labels else ''}}} {value}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
