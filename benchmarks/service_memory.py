"""Memory of each process of a service: the default one, and one whose model has 2 GB of weights.

    python -m benchmarks.service_memory default    ResNet-50 in two stages with two workers each
    python -m benchmarks.service_memory large      the leader with 2 GB of weights, compared with one of 2 MB

PSS divides pages shared between processes among them, so it may be added up. The large model is written to the folder of temporary
files, and removed afterwards.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multiworld_client import Client
from multiworld_serving.models.export.exporter import ExportOptions, export_model
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService

_REQUESTS = 20
_LAYERS = 8
_WIDTHS = {"small": 256, "large": 8192}
"""Of the layers: 2 MB and 2.1 GB of float32."""
_FIELDS = {"RSS": "VmRSS", "not from files": "RssAnon", "highest RSS": "VmHWM"}
"""Of /proc/PID/status. The highest RSS includes pages of the mapped weights."""


def memory_mb(pid: int) -> dict[str, float]:
    """PSS, RSS and private memory of a process, in MB of 2^20 bytes."""
    kilobytes = dict[str, int]()
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        kilobytes[name.rstrip(":")] = int(value)
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {"PSS": kilobytes["Pss"] / 1024, "RSS": kilobytes["Rss"] / 1024, "private": private / 1024}


def processes_of(service: LocalService) -> dict[str, int]:
    """Process ids of all processes of the service, by what they do."""
    known = {
        pid: f"{kind} {slot}"
        for kind in ("leader", "frontend", "worker")
        for slot, pid in service.child_pids(kind).items()
    }
    known[service.pid] = "supervisor"
    found = [service.pid, *_descendants(service.pid)]
    return {known.get(pid, _command(pid)): pid for pid in found}


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _descendants(child)


def _command(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return " ".join(word.rpartition(".")[2] for word in words if not word.startswith("-"))[:40] + f" {pid}"


def default(model: str) -> None:
    """The service that `make serve` starts."""
    settings: dict[str, Any] = {"model": model, "stages": 2, "replicas": 2}
    if not Path(model).exists():
        settings["weights"] = "random:0"
    with LocalService(**settings) as service:
        with Client(service.url) as client:
            for _ in range(_REQUESTS):
                client.predict(photo())
        found = {name: memory_mb(pid) for name, pid in processes_of(service).items()}
    _print(found)
    total = sum(memory["PSS"] for memory in found.values())
    print(f"| all | {total:.0f} | | |")


def _print(found: Mapping[str, Mapping[str, float]]) -> None:
    print("| process | PSS, MB | RSS, MB | private, MB |\n|---|---|---|---|")
    for name, memory in found.items():
        print(f"| {name} | {memory['PSS']:.0f} | {memory['RSS']:.0f} | {memory['private']:.0f} |")


def large() -> None:
    """Leaders of the same model with small and with large weights."""
    leaders: dict[str, dict[str, float]] = {}
    for size, width in _WIDTHS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bundle"
            # A process of its own: this one would keep what exporting needs.
            subprocess.run([sys.executable, "-m", "benchmarks.service_memory", "export", size, str(path)], check=True)
            with LocalService(model=path, stages=2, replicas=1) as service:
                pid = service.child_pids("leader")[0]
                with Client(service.url) as client:
                    for _ in range(_REQUESTS):
                        client.infer({"rows": torch.zeros(1, width)})
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
                lines = dict(line.split(":", 1) for line in status)
                for name, field in _FIELDS.items():
                    leaders.setdefault(size, {})[name] = int(lines[field].split()[0]) / 1024
    print(f"| weights | {', MB | '.join(_FIELDS)}, MB |\n|---|" + "---|" * len(_FIELDS))
    for size, memory in leaders.items():
        weights_mb = _LAYERS * _WIDTHS[size] ** 2 * 4 / 2**20
        print(f"| {weights_mb:.0f} MB | " + " | ".join(f"{value:.0f}" for value in memory.values()) + " |")


def _export(size: str, path: Path) -> None:
    torch.manual_seed(0)
    width = _WIDTHS[size]
    layers = [nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
    options = ExportOptions(size, "1", ("rows",), max_batch_size=8, num_stages=2)
    export_model(nn.Sequential(*layers).requires_grad_(False), [torch.randn(2, width)], path, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("default").add_argument("--model", default="resnet50", help="a name or a bundle")
    parts.add_parser("large")
    export = parts.add_parser("export", help="write the bundle of `large`")
    export.add_argument("size", choices=_WIDTHS)
    export.add_argument("path", type=Path)
    options = parser.parse_args()
    match options.part:
        case "default":
            default(options.model)
        case "large":
            large()
        case _:
            _export(options.size, options.path)


if __name__ == "__main__":
    main()
