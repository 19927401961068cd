"""The key-value store of a process group's rendezvous, replicated over the control connections.

Every `set` is relayed to all members, so a read only waits on a local dictionary. `abort` interrupts all waiting reads; the world calls it
when it has not formed in time. The store replaces
`torch.distributed.TCPStore`, which has no authentication, listens on all interfaces, and cannot be interrupted.
"""

import threading
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError


class ControlStore(Store):
    """A `torch.distributed.Store` of one world and one generation.

    Args:
        publish: sends a key and its value to all other members; must not block.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._aborted: Exception | None = None

    def receive(self, key: str, value: bytes) -> None:
        """Another member has set `key`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def abort(self, error: Exception) -> None:
        """Delete all keys. All current and later waits raise DistStoreError from `error`, or from that of an earlier call."""
        with self._changed:
            self._aborted = self._aborted or error
            self._values.clear()
            self._changed.notify_all()

    # -- torch.distributed.Store -----------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.receive(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raises DistStoreError after `abort`. It replaces `timeout`, which c10d chooses."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted is not None or all(key in self._values for key in keys))
            if self._aborted is not None:
                raise DistStoreError(f"rendezvous aborted: {self._aborted}") from self._aborted

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete `key` at this member only. Returns whether it was set."""
        with self._changed:
            return self._values.pop(key, None) is not None
