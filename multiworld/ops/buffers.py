"""Converts the caller's tensors to what connections and c10d accept (dense, contiguous, on the right device) and copies results back.

Tensors are copied only if necessary. Operations that move data without computing on it send bytes, so they support every dtype.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multiworld.execution import cuda

_COMPUTED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
"""Real dtypes that reductions support."""


def flat_bytes(tensor: Tensor) -> Tensor:
    """uint8 [nbytes]: the memory of a contiguous tensor."""
    return flat(tensor).view(torch.uint8)


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host. The view and its slices keep the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = _byte_array(tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined] # the memoryview keeps only the array alive
    return memoryview(array).cast("B")


@functools.lru_cache(256)
def _byte_array(size_bytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * size_bytes


def arithmetic(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor with a dtype that c10d can reduce: bool as uint8 0 and 1, complex [...] as real [..., 2]."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as a view [n] with stride 1."""
    # Not `reshape`, which keeps the strides of a tensor of one dimension. A tensor of one element is contiguous with any stride.
    return tensor.as_strided((tensor.numel(),), (1,))


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless `tensor` is a strided tensor whose elements are in memory that it owns."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    kind = type(tensor)
    # DTensor, FakeTensor and other wrappers: their data pointer is not that of their elements.
    if kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name}: expected a plain tensor, got {kind.__name__}; pass its local data, such as `to_local()`"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"{name}: expected a dense tensor, got layout {tensor.layout}, dtype {tensor.dtype}, {tensor.device}"
        )
    try:
        storage = tensor.untyped_storage()
        owned = storage.data_ptr() and (tensor.storage_offset() + _extent(tensor)) * tensor.itemsize <= storage.nbytes()
    except (NotImplementedError, RuntimeError):  # inside of torch.func transformations
        owned = False
    if not owned and tensor.numel():
        raise TypeError(f"{name}: the storage of the tensor was freed or is too small; pass a tensor with data")


def _extent(tensor: Tensor) -> int:
    """Number of elements from the first one to the last one in memory; 0 for an empty tensor."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel()
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def check_distinct(name: str, outputs: Sequence[Tensor]) -> None:
    """Raises ValueError when two elements of the dense tensors, of one device, have the same memory."""
    spans = sorted(
        (each.data_ptr(), each.data_ptr() + _extent(each) * each.itemsize, index)
        for index, each in enumerate(outputs)
        if each.numel()
    )
    cluster: list[tuple[int, int, int]] = []
    for span in [*spans, None]:  # clusters of spans that reach into each other, such as the columns of a matrix
        if span is None or (cluster and span[0] >= max(end for _, end, _ in cluster)):
            if cluster and _overlap([outputs[index] for _, _, index in cluster], cluster):
                raise ValueError(f"{name}: elements of the tensors for results use the same memory; clone the tensors")
            cluster = []
        if span is not None:
            cluster.append(span)


def _overlap(tensors: Sequence[Tensor], spans: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether two elements have the same memory. Counts the uses of each byte unless strides or addresses decide it."""
    if len(tensors) == 1:
        reach = 0
        for stride, length in sorted(zip(tensors[0].stride(), tensors[0].shape, strict=True)):
            if length > 1 and stride <= reach:
                break
            reach += stride * (length - 1)
        else:
            return False
    elif all(each.is_contiguous() for each in tensors):
        return True
    start, end = spans[0][0], max(end for _, end, _ in spans)
    used = torch.zeros(end - start, dtype=torch.bool)
    for tensor, (address, _, _) in zip(tensors, spans, strict=True):
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        own = used.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), address - start)
        before = int(used.sum())
        own.fill_(True)
        if int(used.sum()) - before != tensor.nbytes:
            return True
    return False


def check_computable(name: str, tensor: Tensor, op: str) -> None:
    """Raises TypeError when reduction `op` does not support the dtype of `tensor`."""
    dtype = tensor.dtype
    if dtype is torch.bool:
        possible = op in {"MIN", "MAX", "BAND", "BOR", "BXOR"}
    elif dtype in {torch.complex64, torch.complex128}:
        possible = op in {"SUM", "AVG"}
    elif op in {"BAND", "BOR", "BXOR"}:
        possible = dtype in _COMPUTED and not dtype.is_floating_point
    elif op == "AVG":
        possible = dtype in _COMPUTED and dtype.is_floating_point
    else:
        possible = dtype in _COMPUTED
    if not possible:
        raise TypeError(f"{name}: {op} does not support {dtype}; convert the tensor, for example to float32 or int64")


def contiguous(tensor: Tensor, on_host: bool) -> Tensor:
    """Return the data of `tensor` as a contiguous tensor, on the host if `on_host`.

    It copies only if necessary, and may block on a copy from a device. The caller's tensor is not changed.
    """
    data = tensor.detach()
    if on_host:
        return cuda.host_copy(data, load=True)
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    return data.contiguous()


class RecvBuffer:
    """A tensor that results are written into, directly or through a contiguous staging tensor that `copy_back` copies back.

    Raises ValueError for a tensor that cannot be written: its elements share memory, or it is a conjugated or negated view.
    """

    __slots__ = ("_on_host", "_staged", "direct", "tensor")

    def __init__(self, name: str, tensor: Tensor, on_host: bool) -> None:
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name}: cannot write into a conjugated or negated view; resolve it first")
        self.tensor = tensor.detach()
        self._on_host = on_host
        self.direct = tensor.is_contiguous() and not on_host
        """Whether results are written into the caller's tensor, so that `copy_back` is not necessary."""
        self._staged: Tensor | None = None
        if not tensor.is_contiguous():
            check_distinct(name, [tensor])

    def materialize(self, *, load: bool = False) -> Tensor:
        """Return the contiguous tensor to write into. With `load` it contains the caller's data, else its content is undefined."""
        if self.direct:
            return self.tensor
        if self._on_host:
            self._staged = cuda.host_copy(self.tensor, load=load)
        elif load:
            self._staged = self.tensor.contiguous()  # always a copy, because `direct` is false
        else:
            self._staged = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)
        return self._staged

    def copy_back(self) -> None:
        """Copy the results from the staging tensor to the caller's tensor. Idempotent."""
        if self._staged is not None:
            with torch.inference_mode():  # so that inference tensors can be written
                self.tensor.copy_(self._staged)
            self._staged = None


def copy_back_of(targets: Sequence[RecvBuffer]) -> Callable[[], None] | None:
    """Return what copies the results to the caller's tensors; None if they are all written directly."""
    indirect = [target for target in targets if not target.direct]

    def copy_back() -> None:
        for target in indirect:
            target.copy_back()

    return copy_back if indirect else None
