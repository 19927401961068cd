"""`multiworld export`: write a PyTorch model as a bundle."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from multiworld_serving.cli.options import value
from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from multiworld_serving.models.export.exporter import ExportReport
    from multiworld_serving.models.preprocessing import Preprocessing

EPILOG = """
[bold]Examples[/bold]

multiworld export convnext_tiny --weights DEFAULT -o convnext.bundle

multiworld export model.py:make --input image:float32\\[batch,3,64,64] --stages auto -o model.bundle

multiworld export bert.py:make --example bert.py:example --dynamic ids:1,mask:1=1..512 --stages 3 -o bert.zip

SOURCE is code of yours, which is executed. The bundle contains none of it.
"""

_IMAGENET_MEAN, _IMAGENET_STD = "0.485,0.456,0.406", "0.229,0.224,0.225"

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="package.module:function or file.py:function, which returns an nn.Module; or the name of a torchvision model.",
        show_default=False,
    ),
]
Output = Annotated[
    Path, value("PATH", "Folder, or .zip file, to write. It must not exist.", "--output", "-o", show_default=False)
]
Stages = Annotated[str, value("N", "Number of stages, or auto: the most that take nearly equal time, up to 8.")]
Name = Annotated[
    str | None, value("NAME", "Name of the model.", show_default="that of the output, without .bundle or .zip")
]
Version = Annotated[str, value("VERSION", "Version of the model.")]
MaxBatchSize = Annotated[int, value("N", "Largest batch.", min=2, max=1024)]
Weights = Annotated[
    str | None,
    value(
        "NAME",
        "A file with a state dict (.pth, .pt, .safetensors). For a model of torchvision also a published name such as DEFAULT, or "
        "random:SEED. With this option it has labels.",
        show_default="random:0 for a model of torchvision",
    ),
]


@dataclass(frozen=True)
class Inputs:
    """What the model takes."""

    panel: ClassVar[str] = "Inputs of the model"

    example: Annotated[
        str | None,
        value(
            "FUNCTION",
            "file.py:function or package.module:function that returns example inputs: a tensor, a tuple, or a dict by parameter, "
            "with at least 2 rows.",
        ),
    ] = None
    input: Annotated[
        list[str] | None,
        value("SPEC", "Instead of an example: NAME:DTYPE\\[batch,N,…], once for each parameter of forward, in order."),
    ] = None
    dynamic: Annotated[
        list[str] | None,
        value(
            "SPEC",
            "Variable dimension: INPUT:DIM=LEAST..MOST; INPUT:DIM,INPUT:DIM=… for equal lengths. May be repeated.",
        ),
    ] = None


@dataclass(frozen=True)
class Images:
    """Preprocessing of images, and labels."""

    panel: ClassVar[str] = "Images and labels"

    image_size: Annotated[
        int | None,
        value(
            "PIXELS",
            "The model takes images of this size. The bundle normalizes them itself. Default for torchvision: as published.",
            *("--image-size", "--crop"),
            min=1,
        ),
    ] = None
    resize: Annotated[
        int | None,
        value("PIXELS", "Shorter side of an image before the crop.", min=1, show_default="8/7 of the image size"),
    ] = None
    mean: Annotated[str | None, value("R,G,B", "Mean of each channel.", show_default="ImageNet's")] = None
    std: Annotated[str | None, value("R,G,B", "Standard deviation of each channel.", show_default="ImageNet's")] = None
    labels: Annotated[
        Path | None,
        value(
            "FILE",
            "One label per class, or JSON. The bundle returns probabilities. Default: those of --weights.",
        ),
    ] = None


def export(
    *,
    source: Source,
    output: Output,
    inputs: Inputs,
    images: Images,
    weights: Weights = None,
    stages: Stages = "auto",
    name: Name = None,
    version: Version = "1",
    max_batch_size: MaxBatchSize = 64,
) -> int:
    """Write a PyTorch model as a bundle: a graph of known operators and its weights, cut into stages, without code.

    The model is captured with torch.export, and compared with the original at batch 1, 2 and the largest.
    """
    from multiworld_serving.cli.console import progress_console
    from multiworld_serving.models.export.exporter import ExportOptions, export_model
    from multiworld_serving.models.export.sources import load_module, num_classes, parse_dynamic
    from multiworld_serving.models.export.torchvision_models import INPUT, PROBABILITIES, load_model
    from multiworld_serving.models.weights.labels import read_labels

    steps = progress_console()
    count = _number_of_stages(stages)
    dynamic = tuple(map(parse_dynamic, inputs.dynamic or ()))
    steps.print("loading the model")
    published: Preprocessing | None = None
    labels: tuple[str, ...] = ()
    if ":" not in source:
        loaded = load_model(source, weights or "random:0")
        module, published, labels = loaded.module, loaded.preprocessing, loaded.labels
    else:
        module = load_module(source, weights)
    image = _preprocessing(images, published, given=bool(inputs.example or inputs.input))
    example = _example(module, inputs, image, "images" if published is None else INPUT)
    if images.labels is not None:
        labels = read_labels(str(images.labels), num_classes(module, example, image))
    elif image is None or weights is None:
        labels = ()
    options = ExportOptions(
        name=name or _name_of(output),
        version=version,
        inputs=tuple(example),
        max_batch_size=max_batch_size,
        dynamic=dynamic,
        num_stages=count,
        image=image,
        labels=labels,
        output=PROBABILITIES if published is not None and labels else None,
    )
    _show(export_model(module, list(example.values()), output, options, steps.print), output)
    return 0


def _name_of(output: Path) -> str:
    """The name of a model whose user gives none; letters that names cannot have become "_"."""
    return re.sub(r"[^A-Za-z0-9_.:+-]", "_", output.name.removesuffix(".zip").removesuffix(".bundle"))


def _number_of_stages(text: str) -> int | None:
    if text == "auto":
        return None
    if text.isdecimal() and 1 <= int(text) <= 1024:
        return int(text)
    raise UserError(f"--stages {text}: expected a number from 1 to 1024, or auto")


def _example(module: "nn.Module", inputs: Inputs, image: "Preprocessing | None", name: str) -> "dict[str, Tensor]":
    from multiworld_serving.models.export.sources import InputSpec, call_function, examples_from

    if inputs.example and (inputs.input or image is not None):
        raise UserError("--example, --input and the options of images exclude each other: give one of them")
    if inputs.example:
        return examples_from(call_function(inputs.example), module)
    texts = inputs.input or ([] if image is None else [f"{name}:float32[batch,3,224,224]"])
    examples = {spec.name: spec.example() for spec in map(InputSpec.parse, texts)}
    if not texts:
        raise UserError(
            "the inputs of the model are not known: give --input NAME:DTYPE[batch,N,…] for each, --example FUNCTION, or "
            "--image-size PIXELS"
        )
    if len(examples) < len(texts) or (image is not None and len(texts) > 1):
        raise UserError("--input: expected a name for each input, and one input if it is an image")
    return examples


def _preprocessing(images: Images, published: "Preprocessing | None", *, given: bool) -> "Preprocessing | None":
    from multiworld_serving.models.preprocessing import Preprocessing

    asked = (images.image_size, images.resize, images.mean, images.std)
    if all(option is None for option in asked) and (given or published is None):
        return None
    size = images.image_size or (published.crop_size if published else None)
    if size is None:
        raise UserError("--resize, --mean and --std describe images: give --image-size PIXELS, too")
    resize = images.resize or (
        published.resize_size if published and size == published.crop_size else round(size * 8 / 7)
    )
    mean = _channels(images.mean or _IMAGENET_MEAN, "--mean") if images.mean or not published else published.mean
    std = _channels(images.std or _IMAGENET_STD, "--std") if images.std or not published else published.std
    return Preprocessing(resize, size, mean, std)


def _channels(text: str, option: str) -> tuple[float, float, float]:
    try:
        red, green, blue = map(float, text.split(","))
    except ValueError as error:
        raise UserError(f"{option} {text}: expected three numbers R,G,B such as {_IMAGENET_MEAN}") from error
    return red, green, blue


def _show(report: "ExportReport", path: Path) -> None:
    from multiworld_serving.cli.console import console, table

    out, cut = console(), report.cut
    columns = ("stage", "ms", "share", "weights MB", "output KiB")
    rows = table(*columns, numbers=columns)
    for number, stage_s in enumerate(cut.stage_s):
        sent = f"{cut.boundary_bytes[number] / 1024:.0f}" if number < len(cut.boundary_bytes) else ""
        share = stage_s / (sum(cut.stage_s) or 1.0)
        rows.add_row(
            str(number), f"{stage_s * 1e3:.2f}", f"{share:.0%}", f"{report.weights_bytes[number] / 1e6:.1f}", sent
        )
    out.print(f"{report.manifest.name} {report.manifest.version}, times and bytes per row", style="bold")
    out.print(rows)
    batches = ", ".join(map(str, report.checked))
    out.print(
        f"{report.nodes} nodes of {report.operators} operators, balance {cut.balance:.2f}; "
        f"largest difference from the model at batch {batches}: {report.deviation:.2g}"
    )
    out.print(f"{path} is complete; serve it: multiworld serve --model {path} --stages {len(cut.stage_s)}")
