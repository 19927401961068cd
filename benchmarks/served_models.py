"""Exports models with random weights, serves them in 1, 2 and 4 stages, and compares the answers with the models.

    python -m benchmarks.served_models --json results.json                all models of `model_list`
    python -m benchmarks.served_models --json results.json resnet18 bert  some of them
    python -m benchmarks.served_models --json results.json --table        the results as the table of docs/models.md

Each model is exported once. Each service is `multiworld serve` with one worker per stage and default settings; it gets one request of
each batch size. The results file is read first: models that are in it are skipped, so a run can be continued.
"""

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from benchmarks.model_list import MODELS, TestedModel
from multiworld_client import Client
from multiworld_serving.models.bundle.cutting import cut_graph
from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.export.exporter import ExportOptions, export_model
from multiworld_serving.testing.local_service import LocalService

BATCHES = (1, 3, 8)
STAGES = (1, 2, 4)
TOLERANCE = 1e-4
"""Largest difference from the model, relative to the largest absolute value of the output."""
_LEAST_SPREAD = 1e-3
"""Least difference between the answers to different rows, likewise: ten times `TOLERANCE`."""
_ZERO = 1e-9
"""Answers below count as zero."""
_EXPORTED_STAGES = 2


def measure(name: str, tested: TestedModel, folder: Path) -> dict[str, Any]:
    """Facts about one model, with an `error` if it cannot be exported or served, or answers something else."""
    facts: dict[str, Any] = {"library": tested.library, "size": tested.size}
    torch.manual_seed(0)
    try:
        module = tested.make().requires_grad_(False)
        rows = tested.rows(max(BATCHES))
        if _spread(module, rows) < _LEAST_SPREAD:
            _enliven(module, rows)
        facts["spread"] = _spread(module, rows)
        if not facts["spread"] >= _LEAST_SPREAD:
            raise ValueError("the model answers nearly the same to different rows, so comparing answers shows nothing")
        options = ExportOptions(
            *(name, "1", tuple(rows)),
            max_batch_size=max(BATCHES),
            dynamic=tested.dynamic,
            num_stages=_EXPORTED_STAGES,
        )
        started_s = time.monotonic()
        report = export_model(module, [value[:2] for value in rows.values()], folder / name, options)
        facts |= {"export_s": time.monotonic() - started_s, "nodes": report.nodes}
        facts["weights_mb"] = sum(report.weights_bytes) / 1e6
        bundle = read_bundle(folder / name)
        facts["stages"] = {str(count): _served(folder / name, bundle, module, rows, count) for count in STAGES}
        worst = max(stages["difference"] for stages in facts["stages"].values())
        if not worst <= TOLERANCE:
            raise ValueError(f"the answers differ from the model by {worst:.2g}; at most {TOLERANCE:g} is expected")
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its result
        traceback.print_exc()
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def _served(
    path: Path, bundle: Bundle, module: nn.Module, rows: Mapping[str, Tensor], num_stages: int
) -> dict[str, Any]:
    """Balance, bytes per boundary, and the largest difference from the module, for a service of this many stages."""
    cut = cut_graph(bundle.graph, bundle.manifest.costs_s, num_stages, bundle.manifest.lengths[-1])
    started_s, worst = time.monotonic(), 0.0
    with LocalService(model=path, stages=num_stages, replicas=1, max_batch_size=max(BATCHES)) as service:
        ready_s = time.monotonic() - started_s
        with Client(service.url, timeout_s=60) as client:
            for count in BATCHES:
                batch = {name: value[:count] for name, value in rows.items()}
                answer = client.infer(batch)
                expected = _outputs(module, batch)
                found = [torch.from_numpy(answer[each.name]) for each in bundle.manifest.outputs]
                worst = max(worst, *(_difference(*pair) for pair in zip(found, expected, strict=True)))
    return {
        "largest_over_mean": 1 / cut.balance,
        "boundary_bytes": cut.boundary_bytes,
        "difference": worst,
        "ready_s": ready_s,
    }


def _outputs(module: nn.Module, rows: Mapping[str, Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        output = module(*rows.values())
    return [each for each in _pytree.tree_leaves(output) if isinstance(each, Tensor)]


def _spread(module: nn.Module, rows: Mapping[str, Tensor]) -> float:
    """How much the answers to different rows differ, relative to the largest absolute value: the least of all outputs."""
    return min(float((each - each[:1]).abs().max()) / _scale(each) for each in _outputs(module, rows))


def _enliven(module: nn.Module, rows: Mapping[str, Tensor]) -> None:
    """Make the answers depend on the inputs: random values for weights that begin as zeros, and statistics for batch normalisation."""
    for parameter in module.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.momentum = 1.0
            norm.train()
    _outputs(module, rows)
    module.eval()


def _scale(values: Tensor) -> float:
    return max(float(values.abs().max()), _ZERO)


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        raise ValueError(f"the service answered {list(found.shape)}; the model {list(expected.shape)}")
    return float((found.double() - expected.double()).abs().max()) / _scale(expected)


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: the models that work, then those that do not."""
    lines = [
        "| model | input | nodes | weights | export | 2 stages | 4 stages | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ordered = [name for name in MODELS if name in results]
    for name in ordered:
        if "error" not in (facts := results[name]):
            stages = facts["stages"]
            worst = max(each["difference"] for each in stages.values())
            lines.append(
                f"| {name} ({facts['library']}) | {facts['size']} | {facts['nodes']} | {facts['weights_mb']:.1f} MB | "
                f"{facts['export_s']:.1f} s | {_shown(stages['2'])} | {_shown(stages['4'])} | {worst:.1g} |"
            )
    if failed := [name for name in ordered if "error" in results[name]]:
        lines += ["", "| model | what happens |", "|---|---|"]
        lines += [
            f"| {name} ({results[name]['library']}) | {' '.join(results[name]['error'].split())} |" for name in failed
        ]
    return lines


def _shown(stages: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{size / 1024:.4g}" for size in stages["boundary_bytes"])
    return f"{stages['largest_over_mean']:.2f}; {sizes} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"by default all: {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, required=True, help="file of the results; continued if it exists")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no model after this time")
    parser.add_argument("--table", action="store_true", help="print the results and measure nothing")
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    begun_s = time.monotonic()
    for name in [] if options.table else options.models or MODELS:
        if name in results or time.monotonic() - begun_s > options.limit_s:
            continue
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, MODELS[name], Path(folder))
        options.json.write_text(json.dumps(results, indent=1))
        print(f"{name}: {time.monotonic() - started_s:.0f} s  {results[name].get('error', 'ok')}", flush=True)
        gc.collect()
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
