"""What is exported: a module from the user's code, and examples of its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld_serving.models.bundle.nodes import DTYPES, MAX_DIMS
from multiworld_serving.models.errors import ExportError, LabelsError
from multiworld_serving.models.export.checkpoints import load_state, read_checkpoint
from multiworld_serving.models.export.parameters import bind_example
from multiworld_serving.models.export.refusals import advice_for, line_of
from multiworld_serving.models.export.trace import Dynamic, without_fast_path
from multiworld_serving.models.preprocessing import Preprocessing

EXAMPLE_ROWS = 2
"""Rows of an example. torch.export fixes dimensions of length 1."""
_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_.]*)"
_SPEC = re.compile(_NAME + r":(?P<dtype>[a-z0-9]+)\[batch(?P<dims>(,\s*[1-9][0-9]{0,8})*)\]")
_DYNAMIC = re.compile(r"(?P<places>[A-Za-z0-9_.:,]+)=(?P<least>[0-9]{1,9})\.\.(?P<most>[0-9]{1,9})")
_PLACE = re.compile(_NAME + r":(?P<dim>[1-7])")
_FILE_MODULE = "exported_model"
_RANDOM_INTEGERS = 2
"""Integers in examples are 0 or 1: valid token ids, masks and classes of any model."""
_MAX_LABELS_BYTES = 16 << 20


def parse_input(text: str) -> tuple[str, Tensor]:
    """Name and example of an input, from text such as `image:float32[batch,3,224,224]`. The values are random, and equal in every call.

    Raises:
        ExportError: it is something else.
    """
    found = _SPEC.fullmatch(text.strip())
    dims = [int(dim) for dim in found["dims"].split(",")[1:]] if found else []
    if found is None or found["dtype"] not in DTYPES or len(dims) >= MAX_DIMS:
        raise ExportError(
            f"--input {text!r} is not an input: expected NAME:DTYPE[batch,N,…] such as image:float32[batch,3,224,224], "
            f"with a DTYPE of {', '.join(DTYPES)}"
        )
    dtype, generator = DTYPES[found["dtype"]], torch.Generator().manual_seed(0)
    size = (EXAMPLE_ROWS, *dims)
    if dtype.is_floating_point:
        return found["name"], torch.randn(size, generator=generator).to(dtype)
    most = 256 if dtype == torch.uint8 else _RANDOM_INTEGERS
    return found["name"], torch.randint(most, size, generator=generator).to(dtype)


def parse_dynamic(text: str) -> Dynamic:
    """A variable dimension from text such as `ids:1=1..512` or `ids:1,mask:1=1..512`. Raises ExportError."""
    found = _DYNAMIC.fullmatch(text.strip())
    places = [_PLACE.fullmatch(place) for place in found["places"].split(",")] if found else []
    if found is None or None in places or not 1 <= int(found["least"]) < int(found["most"]):
        raise ExportError(
            f"--dynamic {text!r} is not a variable dimension: expected INPUT:DIMENSION=LEAST..MOST such as ids:1=1..512, "
            "or ids:1,mask:1=1..512 for dimensions of equal length"
        )
    return Dynamic(
        tuple((place["name"], int(place["dim"])) for place in places if place), int(found["least"]), int(found["most"])
    )


def load_module(source: str, checkpoint: str | None = None) -> nn.Module:
    """The module to export, in eval mode.

    Args:
        source: `package.module:function` or `file.py:function`, the function returns the module.
        checkpoint: a state dict (.pth, .pt, .safetensors) that is loaded into the module.
    Raises:
        ExportError: there is no such function, it fails, or the weights do not fit.
        WeightsError: the checkpoint cannot be read.
    """
    module = call_function(source)
    if not isinstance(module, nn.Module):
        raise ExportError(f"{source} returned {type(module).__name__}; expected a torch.nn.Module")
    module = _unwrapped(module)
    if checkpoint is not None:
        load_state(module, read_checkpoint(checkpoint).tensors, checkpoint, source)
    return module.eval().requires_grad_(False)


def _unwrapped(module: nn.Module, path: str = "the model") -> nn.Module:
    """The module without the wrappers of torch.compile and data parallelism, also in its submodules.

    Raises:
        ExportError: it contains a TorchScript module.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ExportError(
            f"{path} is a TorchScript module, which torch.export cannot capture; export the nn.Module that it was made from"
        )
    while isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | torch._dynamo.OptimizedModule):
        inner: Any = module._orig_mod if isinstance(module, torch._dynamo.OptimizedModule) else module.module
        module = inner
    for name, child in list(module.named_children()):
        if (inner := _unwrapped(child, f"{path}.{name}")) is not child:
            setattr(module, name, inner)
    return module


def call_function(place: str) -> Any:
    """What the function at `package.module:function` or `file.py:function` returns. It is called without arguments.

    Raises:
        ExportError: there is no such function, or it raises; names the line.
    """
    where, _, name = place.rpartition(":")
    if not where or not name.isidentifier():
        raise ExportError(f"{place!r} is not a function: expected package.module:function or file.py:function")
    try:
        function = getattr(_import(where), name, None)
        if not callable(function):
            raise ExportError(f"{where} has no function {name!r}")
        return function()
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(f"{place} raised {type(error).__name__}: {_one_line(error)}{line_of(error)}") from error


def _import(where: str) -> Any:
    path = Path(where)
    is_file = where.endswith(".py")
    if not is_file and (path.is_file() or "/" in where):
        raise ExportError(f"{where} is not a Python file; expected file.py:function or package.module:function")
    if is_file and not path.is_file():
        raise ExportError(f"{where} does not exist; check the path (seen from {Path.cwd()})")
    folder = str(path.resolve().parent if is_file else Path.cwd())
    sys.path.insert(0, folder)
    try:
        if not is_file:
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(_FILE_MODULE, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_FILE_MODULE] = module  # dataclasses look modules up by name
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)


@without_fast_path()
def output_for(module: nn.Module, example: Mapping[str, Tensor]) -> Any:
    """What the module returns for an example, by input. Raises ExportError if it fails."""
    try:
        with torch.no_grad():
            return module(*example.values())
    except Exception as error:  # whatever the code of the model raises
        given = ", ".join(
            f"{name} {str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for name, each in example.items()
        )
        raise ExportError(
            f"the model fails for {given}: {type(error).__name__}: {_one_line(error)}{line_of(error)}"
            f"{advice_for(str(error)) or '; check --input, --example or --image-size'}"
        ) from error


def num_classes(module: nn.Module, example: Mapping[str, Tensor], image: Preprocessing | None) -> int:
    """Number of columns of the module's output [B,classes].

    Raises:
        ExportError: the output is something else, or the module has several inputs.
    """
    if image is not None:
        example = {"images": torch.zeros((EXAMPLE_ROWS, 3, image.crop_size, image.crop_size))}
    output = output_for(module, example) if len(example) == 1 else None
    if not isinstance(output, Tensor) or output.ndim != 2:
        raise ExportError("labels need one input and one output [batch, classes]; leave --labels out")
    return int(output.shape[1])


def read_labels(path: str, num_classes: int) -> tuple[str, ...]:
    """Labels from a file, one per class, in the order of the class ids.

    The file is UTF-8 text with one label per line. Empty lines at the end are ignored.

    Raises:
        LabelsError: the file is missing or malformed, or does not contain exactly `num_classes` labels.
    """
    expected = "expected UTF-8 text with one label per line"
    if path.lower().endswith(".json"):
        raise LabelsError(f"{path} is JSON; {expected}")
    try:
        if Path(path).stat().st_size > _MAX_LABELS_BYTES:
            raise LabelsError(
                f"{path} is larger than {_MAX_LABELS_BYTES} bytes, so it is not a file of labels; {expected}"
            )
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LabelsError(f"cannot read labels from {path}: {error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise LabelsError(f"{path} is not UTF-8 text; {expected}") from error
    labels = tuple(line.strip() for line in text.rstrip().split("\n"))
    if "" in labels:
        raise LabelsError(f"{path} is empty, or has an empty line {labels.index('') + 1} among its labels; {expected}")
    if len(labels) != num_classes:
        raise LabelsError(
            f"{path} has {len(labels)} labels, but the model has {num_classes} classes; expected one label per class"
        )
    return labels


def examples_from(value: Any, module: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """The example that the user's function returned: see `bind_example`.

    Raises:
        ExportError: it does not match the parameters of `forward`, or has too few rows.
    """
    bound, tensors = bind_example(module, value)
    rows = {each.shape[0] if each.ndim else 0 for each in tensors.values()}
    if len(rows) != 1 or min(rows) < EXAMPLE_ROWS:
        raise ExportError(
            f"the example needs the same number of rows (at least {EXAMPLE_ROWS}) in dimension 0 of each tensor"
        )
    return bound, tensors


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
