"""The caller's tensors as c10d can take them: dense, contiguous, on the right device; and the way back.

Data is only moved where it has to be. Whatever moves data without computing on it sends plain bytes, so that every dtype can travel.
"""

import torch
from torch import Tensor

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
"""What Gloo can add up."""


def flat_bytes(tensor: Tensor) -> Tensor:
    """uint8 [nbytes]: the memory of a contiguous tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(
        torch.uint8
    )  # one element counts as contiguous whatever its stride


def arithmetic(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one that c10d can compute with: bool as bytes of 0 and 1, complex as pairs."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises TypeError for anything but a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"{name}: expected a dense tensor, got layout {tensor.layout}, dtype {tensor.dtype}, {tensor.device}"
        )


def check_computable(name: str, tensor: Tensor, op: str) -> None:
    """Raises TypeError where Gloo has no such reduction of such numbers."""
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
        raise TypeError(f"{name}: gloo cannot reduce {dtype} with {op}; convert the tensor, to float32 or int64 say")


class Outgoing:
    """A tensor that is read: `open` gives its data, contiguous, on the host when it has to go there."""

    __slots__ = ("_on_host", "tensor")

    def __init__(self, tensor: Tensor, on_host: bool) -> None:
        self.tensor = tensor.detach()
        self._on_host = on_host

    def open(self) -> Tensor:
        tensor = self.tensor
        if self._on_host:
            tensor = tensor.cpu()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor.contiguous()


class Incoming:
    """A tensor that is written: c10d writes into it, or into a contiguous stand-in that `deliver` copies back.

    Raises ValueError for a tensor that cannot be written into: elements that share memory, a lazy conjugate.
    """

    __slots__ = ("_direct", "_on_host", "_staged", "tensor")

    def __init__(self, name: str, tensor: Tensor, on_host: bool) -> None:
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name}: cannot write into a conjugated or negated view; resolve it first")
        self.tensor = tensor.detach()
        self._on_host = on_host
        self._direct = tensor.is_contiguous() and not on_host
        self._staged: Tensor | None = None
        if not self._direct and not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(f"{name}: cannot write into an expanded tensor, strides {tensor.stride()}; clone it first")

    @property
    def direct(self) -> bool:
        """Whether nothing has to be delivered."""
        return self._direct

    def open(self, *, load: bool = False) -> Tensor:
        """Where c10d writes to; with `load` it holds what the tensor holds now."""
        if self._direct:
            return self.tensor
        device = torch.device("cpu") if self._on_host else self.tensor.device
        if load:
            self._staged = self.tensor.to(device).contiguous()  # a copy, or we would write directly
        else:
            self._staged = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=device)
        return self._staged

    @property
    def result(self) -> Tensor:
        """What c10d wrote."""
        return self.tensor if self._staged is None else self._staged

    def deliver(self) -> None:
        """Copy the results to where the caller expects them."""
        if self._staged is not None:
            with torch.inference_mode():  # also for tensors that were made in it
                self.tensor.copy_(self._staged)
            self._staged = None
