"""Merges the metrics of several processes into one text, with a `process` label on each sample."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_EXEMPLAR = re.compile(r' # \{trace_id="[0-9a-f]+"\} \S+ \S+$')
# With an exemplar, the second group ends in the exemplar's labels. All groups are copied, so this does not matter.
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")


def merge_metrics(texts: Iterable[tuple[str, str]], *, openmetrics: bool = False) -> str:
    """Merge expositions.

    Args:
        texts: name of a process, and its metrics: Prometheus' text format, whose buckets may have exemplars.
        openmetrics: whether to return OpenMetrics 1.0 with the exemplars, instead of Prometheus' text format without them.
    """
    families: dict[str, list[str]] = {}
    for process, text in texts:
        family = ""
        label = 'process="' + process.replace("\\", r"\\").replace('"', r"\"") + '"'
        for found in text.splitlines():
            line = found if openmetrics or " # {" not in found else _EXEMPLAR.sub("", found)
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                families.setdefault(family, [line])
            elif line.startswith("# TYPE "):
                if len(families.setdefault(family, [])) == 1:
                    families[family].append(line)
            elif line and not line.startswith("#") and (match := _SAMPLE.fullmatch(line)) is not None:
                name, labels, value = match.groups()
                families.setdefault(family, []).append(f"{name}{{{label}{',' + labels if labels else ''}}} {value}")
    if openmetrics:
        return "".join(f"{line}\n" for lines in families.values() for line in _openmetrics(lines)) + "# EOF\n"
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _openmetrics(lines: list[str]) -> Iterator[str]:
    """The lines of one family. In OpenMetrics, the name of a counter's family has no suffix."""
    is_counter = any(line.startswith("# TYPE ") and line.endswith(" counter") for line in lines[:2])
    for line in lines:
        if not line.startswith("#"):
            yield line
            continue
        _, keyword, name, *rest = line.split(" ", 3)
        text = "".join(rest)
        text = text.replace('"', r"\"") if keyword == "HELP" else {"untyped": "unknown"}.get(text, text)
        yield f"# {keyword} {name.removesuffix('_total') if is_counter else name} {text}"
