"""Views of received messages: data that lies in shared memory of its sender until the receiver releases it."""

from collections.abc import Callable

import torch
from torch import Tensor


class View:
    """A received message. Its data is in shared memory of the sender, or in memory of this process if it could not be sent so.

    The sender keeps the memory until all tensors that use it are dropped, or until `release`. Until then the data does not change, also
    when the world ends or the sender dies. Tensors may be written: this changes only the memory of this process.

    Attributes:
        header: the sender's header, padded with zeros to MAX_HEADER_BYTES.
        data: uint8 [n].

    Args:
        check: called with header and size in bytes; raises ValueError to refuse the message.
    """

    def __init__(self, check: Callable[[bytes, int], object]) -> None:
        self.header = b""
        self.data = torch.empty(0, dtype=torch.uint8)
        self.size_bytes = 0
        self._check = check
        self._release: Callable[[], object] | None = None

    def release(self) -> None:
        """Let the sender use the memory again, although tensors may still use it: their content is undefined from now on. Idempotent."""
        self.data = torch.empty(0, dtype=torch.uint8)
        if self._release is not None:
            self._release()

    @property
    def shared(self) -> bool:
        """Whether the data lies, or lay, in shared memory of the sender."""
        return self._release is not None

    # -- called by the connection --------------------------------------------------------------------------------------------

    def accept(self, header: bytes, size_bytes: int) -> None:
        """Check an announced message. Raises ValueError."""
        self._check(header, size_bytes)
        self.header, self.size_bytes = header, size_bytes

    def allocate(self) -> Tensor:
        """Provide memory of this process for the data."""
        self.data = torch.empty(self.size_bytes, dtype=torch.uint8)
        return self.data

    def place(self, data: Tensor, release: Callable[[], object]) -> Tensor:
        """Use shared memory. `release` is also called when all tensors that use it are dropped."""
        self.data, self._release = data, release
        return data
