"""A processor that computes as a GPU does in TF32."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multiworld_serving.models.optimize import optimizing, tuning
from multiworld_serving.models.optimize.tuning import ExecutionMode
from tests.fakes.gpu import GPU

_TF32_BITS = 10
_FLOAT32_BITS = 23
aten = torch.ops.aten


class Tf32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes convolutions and matrix products of float32 as a GPU does: in TF32 while the flag of their library is set."""

    _LIBRARIES: Mapping[Any, Any] = {
        aten.convolution.default: torch.backends.cudnn,
        aten.conv2d.default: torch.backends.cudnn,  # in inference mode
        aten.linear.default: torch.backends.cuda.matmul,
        aten.mm.default: torch.backends.cuda.matmul,
        aten.addmm.default: torch.backends.cuda.matmul,
        aten.bmm.default: torch.backends.cuda.matmul,
    }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library = self._LIBRARIES.get(func)
        if library is not None and library.allow_tf32:
            factors = 3 if func is aten.addmm.default else 2
            args = (*(_rounded(each) for each in args[:factors]), *args[factors:])
        return func(*args, **(kwargs or {}))


def _rounded(tensor: Tensor) -> Tensor:
    """float32 values rounded to the mantissa of TF32, to nearest."""
    if tensor.dtype != torch.float32:
        return tensor
    dropped = _FLOAT32_BITS - _TF32_BITS
    bits = tensor.contiguous().view(torch.int32) + (1 << (dropped - 1))
    return (bits & -(1 << dropped)).view(torch.float32).view(tensor.shape)


def use_processor_with_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed in an execution mode runs as on a GPU with TF32. All else, such as references, runs as on a processor."""
    active = ExecutionMode.active

    @contextmanager
    def on_gpu(mode: ExecutionMode, _: torch.device) -> Iterator[None]:
        with active(mode, GPU), Tf32():  # type: ignore[no-untyped-call]
            yield

    assert torch.backends.cudnn.allow_tf32, "the default of torch"
    monkeypatch.setattr(ExecutionMode, "active", on_gpu)
    monkeypatch.setattr(optimizing, "fusable", lambda *_: False)
    monkeypatch.setattr(tuning, "has_tf32", lambda _: True)
