"""`multiworld export`: write a PyTorch model as a bundle."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from multiworld_serving.cli.console import table
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import Options, setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from multiworld_serving.models.export.exporter import ExportReport, ExportSettings
    from multiworld_serving.models.preprocessing import Preprocessing

    Loaded = tuple[nn.Module, dict[str, Tensor], ExportSettings]
    """A module, examples of its inputs by name, and how to export it."""

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CHANNELS = "three numbers R,G,B such as 0.485,0.456,0.406"

Channels = Annotated[tuple[float, float, float], BeforeValidator(lambda text: text.split(","))]


class ExportOptions(Options):
    """Options of `export`."""

    source: str = setting(positional=True)
    """package.module:function or file.py:function, which returns an nn.Module; the name of a torchvision model; or hf:NAME_OR_FOLDER, a
    model of transformers."""
    output: Path = setting(names=("--output", "-o"), metavar="PATH")
    """Folder, or .zip file, to write. It must not exist."""
    weights: str | None = setting(None, metavar="NAME")
    """A file with a state dict (.pth, .pt, .safetensors). For a model of torchvision also a published name such as DEFAULT, or random:SEED,
    which is random:0 by default. With this option it has labels."""
    stages: str = setting(
        "auto", metavar="N", pattern=r"^(auto|[1-9][0-9]{0,3})$", allowed="a number from 1 to 1024, or auto"
    )
    """Number of stages, or auto: the most that take nearly equal time, up to 8."""
    name: str | None = setting(None)
    """Name of the model; by default that of the output, without .bundle or .zip."""
    version: str = setting("1")
    """Version of the model."""
    max_batch_size: int = setting(64, ge=2, le=1024)
    """Largest batch."""

    example: str | None = setting(None, "Inputs of the model", metavar="FUNCTION")
    """file.py:function or package.module:function that returns example inputs: a tensor, a tuple, or a dict by parameter, with at least 2
    rows. A parameter may take a dict or list of tensors."""
    input: tuple[str, ...] = setting((), "Inputs of the model", metavar="SPEC")
    """Instead of an example: NAME:DTYPE[batch,N,…] for each parameter of forward that takes a tensor, by its name. PARAMETER.KEY if it
    takes a dict."""
    dynamic: tuple[str, ...] = setting((), "Inputs of the model", metavar="SPEC")
    """Variable dimension: INPUT:DIM=LEAST..MOST; INPUT:DIM,INPUT:DIM=… for equal lengths. May be repeated."""

    image_size: int | None = setting(
        None, "Images and labels", names=("--image-size", "--crop"), metavar="PIXELS", ge=1
    )
    """The model takes images of this size. The bundle normalizes them itself, with --mean and --std. Default for torchvision: as
    published."""
    resize: int | None = setting(None, "Images and labels", metavar="PIXELS", ge=1)
    """Shorter side of an image before the crop; by default 8/7 of the image size."""
    mean: Channels | None = setting(None, "Images and labels", metavar="R,G,B", allowed=_CHANNELS)
    """Mean of each channel; by default ImageNet's."""
    std: Channels | None = setting(None, "Images and labels", metavar="R,G,B", allowed=_CHANNELS)
    """Standard deviation of each channel; by default ImageNet's."""
    labels: Path | None = setting(None, "Images and labels", metavar="FILE")
    """Text with one label per line, in the order of the classes. The bundle returns probabilities. Default: those of --weights."""


def export(options: ExportOptions) -> int:
    """Write a PyTorch model as a bundle: a graph of known operators and its weights, cut into stages, without code.

    The model is captured with torch.export, and compared with the original at batch 1, 2 and the largest.

    Examples:
        multiworld export convnext_tiny --weights DEFAULT -o convnext.bundle
        multiworld export model.py:make --input image:float32[batch,3,64,64] --stages auto -o model.bundle
        multiworld export bert.py:make --example bert.py:example --dynamic ids:1,mask:1=1..512 --stages 3 -o bert.zip
        multiworld export hf:distilbert/distilbert-base-uncased-finetuned-sst-2-english -o sentiment.bundle

    SOURCE is code of yours, which is executed. The bundle contains none of it.
    """
    from multiworld_serving.models.export import exporter
    from multiworld_serving.models.export.sources import parse_dynamic

    settings = exporter.ExportSettings(
        name=options.name or _name_of(options.output),
        version=options.version,
        inputs=(),
        max_batch_size=options.max_batch_size,
        dynamic=tuple(map(parse_dynamic, options.dynamic)),
        num_stages=None if options.stages == "auto" else int(options.stages),
    )
    exporter.check_path(options.output)
    progress = partial(print, file=sys.stderr, flush=True)
    progress("loading the model")
    load = _of_transformers if options.source.startswith("hf:") else _of_torch
    module, example, settings = load(options, settings)
    report = exporter.export_model(module, list(example.values()), options.output, settings, progress)
    _show(report, options.output)
    return 0


def _of_transformers(options: ExportOptions, settings: "ExportSettings") -> "Loaded":
    from multiworld_serving.models.export.transformers_models import load_model

    given = ("weights", "example", "input", "image_size", "resize", "mean", "std", "labels")
    if unused := [name for name in given if getattr(options, name)]:
        raise UserError(
            f"--{unused[0].replace('_', '-')} does not apply to {options.source}, which has its own weights, inputs and labels: leave it "
            "out, or export a function that returns the model"
        )
    return load_model(options.source.removeprefix("hf:"), settings)


def _of_torch(options: ExportOptions, settings: "ExportSettings") -> "Loaded":
    """A model of torchvision, or the module that a function returns."""
    from multiworld_serving.models.export.sources import load_module, num_classes, read_labels
    from multiworld_serving.models.export.torchvision_models import INPUT, PROBABILITIES, load_model

    source, weights = options.source, options.weights
    published: Preprocessing | None = None
    labels: tuple[str, ...] = ()
    if ":" not in source:
        loaded = load_model(source, weights or "random:0")
        module, published, labels = loaded.module, loaded.preprocessing, loaded.labels
    else:
        module = load_module(source, weights)
    image = _preprocessing(options, published)
    module, example = _example(module, options, image, "images" if published is None else INPUT)
    if options.labels is not None:
        labels = read_labels(str(options.labels), num_classes(module, example, image))
    elif image is None or weights is None:
        labels = ()
    output = PROBABILITIES if published is not None and labels else None
    return module, example, replace(settings, inputs=tuple(example), image=image, labels=labels, output=output)


def _name_of(output: Path) -> str:
    """The default name of a model. Letters that names cannot have become "_"."""
    return re.sub(r"[^A-Za-z0-9_.:+-]", "_", output.name.removesuffix(".zip").removesuffix(".bundle"))


def _example(
    module: "nn.Module", options: ExportOptions, image: "Preprocessing | None", name: str
) -> "tuple[nn.Module, dict[str, Tensor]]":
    """The module to export, which takes the examples by position, and the examples by name."""
    from multiworld_serving.models.export.parameters import bind_inputs
    from multiworld_serving.models.export.sources import call_function, examples_from, parse_input

    if options.example and (options.input or image is not None):
        raise UserError("--example, --input and the options of images exclude each other: give one of them")
    if options.example:
        return examples_from(call_function(options.example), module)
    texts = options.input or (() if image is None else (f"{name}:float32[batch,3,224,224]",))
    examples = dict(map(parse_input, texts))
    if not texts:
        raise UserError(
            "the inputs of the model are not known: give --input NAME:DTYPE[batch,N,…] for each, --example FUNCTION, or "
            "--image-size PIXELS"
        )
    if len(examples) < len(texts) or (image is not None and len(texts) > 1):
        raise UserError("--input: expected a name for each input, and one input if it is an image")
    return bind_inputs(module, examples) if options.input else (module, examples)


def _preprocessing(options: ExportOptions, published: "Preprocessing | None") -> "Preprocessing | None":
    from multiworld_serving.models.preprocessing import Preprocessing

    given = (options.image_size, options.resize, options.mean, options.std)
    if all(option is None for option in given) and (options.example or options.input or published is None):
        return None
    if published is None and options.image_size is None:
        raise UserError("--resize, --mean and --std describe images: give --image-size PIXELS, too")
    usual = published or Preprocessing(256, 224, _IMAGENET_MEAN, _IMAGENET_STD)
    size = options.image_size or usual.crop_size
    resize = options.resize or (usual.resize_size if size == usual.crop_size else round(size * 8 / 7))
    return Preprocessing(resize, size, options.mean or usual.mean, options.std or usual.std)


def _show(report: "ExportReport", path: Path) -> None:
    from multiworld_serving.server.frontend.api.oip.tensors import DATATYPES

    cut = report.cut
    columns = ("stage", "ms", "share", "weights MB", "output KiB")
    rows = []
    for number, stage_s in enumerate(cut.stage_s):
        sent = f"{cut.boundary_bytes[number] / 1024:.0f}" if number < len(cut.boundary_bytes) else ""
        share, megabytes = stage_s / (sum(cut.stage_s) or 1.0), report.weights_bytes[number] / 1e6
        rows.append((str(number), f"{stage_s * 1e3:.2f}", f"{share:.0%}", f"{megabytes:.1f}", sent))
    print(f"{report.manifest.name} {report.manifest.version}, times and bytes per row")
    print(table(columns, rows, numbers=columns))
    batches = ", ".join(map(str, report.checked))
    print(
        f"{report.nodes} nodes of {report.operators} operators, balance {cut.balance:.2f}; "
        f"largest difference from the model at batch {batches}: {report.deviation:.2g}"
    )
    for kind, tensors in (("input", report.manifest.inputs), ("output", report.manifest.outputs)):
        for each in tensors:
            shape = ",".join("?" if dim is None else str(dim) for dim in each.shape)
            print(f"{kind} {each.name} {DATATYPES[each.dtype]} [{shape}]")
    if (image := report.manifest.image) is not None:
        sides = f"shorter side resized to {image.resize_size}, center crop of {image.crop_size}"
        print(f"images: {sides}, mean {image.mean}, std {image.std}")
    print(f"{path} is complete; serve it: multiworld serve --model {path} --stages {len(cut.stage_s)}")
