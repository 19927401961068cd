"""Exports a module as a bundle: captures and cuts it, checks it against the module, and writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from multiworld_serving.models.bundle.checking import check_graph
from multiworld_serving.models.bundle.cutting import Cut, cut_graph, estimate_costs
from multiworld_serving.models.bundle.files import write_bundle
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.manifest import MAX_BATCH_SIZE, NAME, Manifest, TensorSpec, spec_of
from multiworld_serving.models.bundle.nodes import BATCH, Call, Calls
from multiworld_serving.models.errors import ExportError
from multiworld_serving.models.export.independence import check_independent_rows
from multiworld_serving.models.export.refusals import not_tensors
from multiworld_serving.models.export.sources import output_for
from multiworld_serving.models.export.trace import Dynamic, capture, without_fast_path
from multiworld_serving.models.preprocessing import ImageModel, Preprocessing

_TOLERANCE = 1e-5
"""Largest difference from the module, relative to the largest absolute value of the output. Usually it is 0."""
_SHARES = (0.0, 1.0, 0.3, 0.7)
"""Where variable dimensions are checked, from their least to their largest length."""
_ROWS_CHANGED = (2, 3)
"""Batch sizes at which one row is changed."""


@dataclass(frozen=True)
class ExportSettings:
    """How to export a module.

    Attributes:
        inputs: names of the positional arguments of the module's `forward`.
        dynamic: variable dimensions besides the batch.
        num_stages: None: chosen by the estimated costs.
        image: the module takes one input of normalised images, float32 [B,3,size,size]. The bundle takes uint8 images and normalises them.
        labels: one per class. The bundle returns probabilities.
        logits: with labels, the module returns logits, which the bundle turns into probabilities.
        output: name of the only output; None: "output".
        checked: batch sizes at which the graph is compared with the module; None: 1, 2 and the largest.
    """

    name: str
    version: str
    inputs: tuple[str, ...]
    max_batch_size: int = 64
    dynamic: tuple[Dynamic, ...] = ()
    num_stages: int | None = 1
    image: Preprocessing | None = None
    labels: tuple[str, ...] = ()
    logits: bool = True
    output: str | None = None
    checked: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        deviation: largest difference from the module, relative to the largest absolute value of its output, over the batch sizes `checked`.
        weights_bytes: of each stage.
    """

    manifest: Manifest
    cut: Cut
    nodes: int
    operators: int
    weights_bytes: tuple[int, ...]
    deviation: float
    checked: tuple[int, ...]


@without_fast_path()
def export_model(
    model: nn.Module,
    example: Sequence[Tensor],
    path: Path,
    options: ExportSettings,
    progress: Callable[[str], object] = lambda _: None,
) -> ExportReport:
    """Export a module in eval mode as a bundle.

    Args:
        example: one tensor for each positional argument of `forward`, any number of rows.
        path: a folder, or a file that ends in .zip, that does not exist.
        progress: told each step.
    Raises:
        ExportError: the module cannot be exported; the message says what to change.
        BundleError, StageSpecError: the bundle cannot be written, or the module has too few places to cut.
    """
    _check_options(example, path, options)
    module = model.eval()
    to_probabilities = bool(options.labels) and options.logits
    if options.image is not None or to_probabilities:
        module = ImageModel(model, options.image, probabilities=to_probabilities)
    if options.image is not None:
        example = [_images(options.image)]
    progress("capturing the model")
    two = [_rows(tensor, 2) for tensor in example]
    # Before the capture, because its error names the wrong inputs in one line.
    output = output_for(module, dict(zip(options.inputs, two, strict=True)))
    if other := not_tensors(output):
        raise ExportError(other)
    names = _output_names(output, options.output or "output")
    graph, weights = capture(
        module, two, options.inputs, max_batch_size=options.max_batch_size, dynamic=options.dynamic, outputs=names
    )
    graph = Graph.from_json(graph.to_json())  # all that follows uses what a reader will see
    lengths = {each.name: each.most for each in options.dynamic}
    costs_s = estimate_costs(graph, {BATCH: 1} | lengths)
    cut = cut_graph(graph, costs_s, options.num_stages, lengths)
    specs = zip(names, map(graph.tensor, graph.outputs), strict=True)
    outputs = tuple(TensorSpec(name, node.dtype, node.shape) for name, node in specs)
    manifest = _manifest(graph, outputs, options, costs_s, cut)
    manifest.check_graph(graph)
    check_graph(graph, manifest.lengths)
    stages = graph.cut(cut.positions)
    computed = [stage.build(weights, torch.device("cpu")) for stage in stages]
    checked = options.checked or tuple(sorted({1, 2, options.max_batch_size}))
    deviation = 0.0
    for where, inputs in _inputs_to_compare(example, options, checked):
        progress(f"comparing with the model at {where}")
        deviation = max(deviation, _compare(module, computed, inputs, where, names))
    for count in sorted({min(each, options.max_batch_size) for each in options.checked or _ROWS_CHANGED} - {1}):
        progress(f"changing rows of batch {count}")
        rows = [_rows(tensor, count) for tensor in example]
        check_independent_rows(graph, weights, lambda *inputs: _run(computed, inputs)[-1], rows)
    progress("writing the bundle")
    self_test = _self_test(graph, computed, [_rows(tensor, 1) for tensor in example])
    manifest = write_bundle(path, manifest, graph, weights, self_test)
    operators = len({node.target for node in graph.nodes if isinstance(node, Call | Calls)})
    return ExportReport(
        manifest, cut, len(graph.nodes), operators, tuple(stage.weights_bytes for stage in stages), deviation, checked
    )


def _manifest(
    graph: Graph, outputs: tuple[TensorSpec, ...], options: ExportSettings, costs_s: tuple[float, ...], cut: Cut
) -> Manifest:
    """The manifest of a bundle whose rows `export_model` has proven to be independent before it writes the bundle."""
    variable = {each.name: (each.least, each.most) for each in options.dynamic}
    return Manifest(
        name=options.name,
        version=options.version,
        inputs=tuple(map(spec_of, graph.inputs)),
        outputs=outputs,
        dimensions={BATCH: (1, options.max_batch_size)} | variable,
        cuts=cut.positions,
        costs_s=costs_s,
        image=options.image,
        labels=options.labels,
        made_with=f"torch {torch.__version__}",
        sha256={},
        independent_rows=True,
    )


def check_path(path: Path) -> None:
    """Raises ExportError if something exists there."""
    if path.exists():
        raise ExportError(f"{path} exists; choose another path or remove it")


def _check_options(example: Sequence[Tensor], path: Path, options: ExportSettings) -> None:
    check_path(path)
    if not 2 <= options.max_batch_size <= MAX_BATCH_SIZE:
        raise ExportError(f"the largest batch is {options.max_batch_size}; expected 2 to {MAX_BATCH_SIZE} rows")
    if len(options.inputs) != len(example) or not example:
        raise ExportError(f"the model has {len(example)} example inputs but {len(options.inputs)} names for them")
    for what, text in (("name", options.name), ("version", options.version)):
        if not NAME.fullmatch(text):
            raise ExportError(f"{what} is {text!r:.60}; expected letters, digits and . _ : + -, at most 100")


def _inputs_to_compare(
    example: Sequence[Tensor], options: ExportSettings, batch_sizes: Sequence[int]
) -> Iterator[tuple[str, list[Tensor]]]:
    """Inputs of these batch sizes, and of lengths of variable dimensions from the least to the largest, with what they are."""
    for count in batch_sizes:
        yield f"batch {count}", [_rows(tensor, count) for tensor in example]
    for share in _SHARES if options.dynamic else ():
        lengths = {each: each.least + round(share * (each.most - each.least)) for each in options.dynamic}
        resized = {name: _rows(tensor, 2) for name, tensor in zip(options.inputs, example, strict=True)}
        for dynamic, length in lengths.items():
            for name, dim in dynamic.places:
                resized[name] = _rows(resized[name].transpose(0, dim), length).transpose(0, dim).contiguous()
        yield ", ".join(f"{each.name} {length}" for each, length in lengths.items()), list(resized.values())


def _images(image: Preprocessing) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, image.crop_size, image.crop_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _rows(tensor: Tensor, count: int) -> Tensor:
    """The rows of a tensor, repeated or cut to this number."""
    repeats = -(-count // len(tensor))
    return tensor.repeat(repeats, *[1] * (tensor.dim() - 1))[:count].contiguous()


def _compare(
    module: nn.Module, stages: Sequence[nn.Module], example: Sequence[Tensor], where: str, names: Sequence[str]
) -> float:
    """The largest relative difference between the stages and the module. Raises ExportError if it is too large."""
    try:
        with torch.no_grad():
            expected = _tensors(module(*example))
        values = _run(stages, example)[-1]
    except Exception as error:  # whatever the code of the model raises
        raise ExportError(f"the model fails at {where}: {' '.join(str(error).split())[:300]}") from error
    for name, each in zip(names, expected, strict=True):
        if not each.isfinite().all():
            raise ExportError(
                f"the output {name!r} contains infinity or NaN for the example; return finite numbers, such as "
                "torch.finfo(x.dtype).min for -inf, or give an example or weights for which they are finite"
            )
    worst = 0.0
    for found, wanted in zip(values, expected, strict=True):
        scale = max(float(wanted.double().abs().max()), 1e-12) if wanted.numel() else 1.0
        difference = float((found.double() - wanted.double()).abs().max()) / scale if wanted.numel() else 0.0
        if found.shape != wanted.shape or found.dtype != wanted.dtype or not difference <= _TOLERANCE:
            raise ExportError(
                f"the exported model computes something else than the model at {where} (difference {difference:.2g}): "
                "does it depend on the batch size, on random numbers, or on state between calls?"
            )
        worst = max(worst, difference)
    return worst


def _tensors(output: object) -> list[Tensor]:
    return [value for value in _pytree.tree_leaves(output) if isinstance(value, Tensor)]


def _run(stages: Sequence[nn.Module], example: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The outputs of each stage."""
    values, found = tuple(example), []
    with torch.no_grad():
        for stage in stages:
            values = stage(*values)
            found.append(values)
    return found


def _output_names(output: object, single: str) -> list[str]:
    """The keys of the dictionary that the module returns, or `single`, or "output_0" and so on."""
    if isinstance(output, Mapping) and all(isinstance(value, Tensor) for value in output.values()):
        return [str(key) for key in output]
    count = len(_tensors(output))
    return [f"output_{index}" for index in range(count)] if count > 1 else [single]


def _self_test(graph: Graph, stages: Sequence[nn.Module], example: Sequence[Tensor]) -> dict[str, Tensor]:
    """See `Bundle.self_test`."""
    inputs = {f"input.{node.name}": tensor for node, tensor in zip(graph.inputs, example, strict=True)}
    return inputs | {
        f"boundary.{number}.{index}": value
        for number, values in enumerate(_run(stages, example))
        for index, value in enumerate(values)
    }
