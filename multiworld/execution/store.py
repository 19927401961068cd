"""The key-value store of a process group's rendezvous, replicated over the control connections.

Every `set` is relayed to all members, so a read only waits on a local dictionary. `abort` interrupts all waiting reads. It replaces
`torch.distributed.TCPStore`, which has no authentication, listens on all interfaces, and cannot be interrupted.
"""

import threading
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

_DEFAULT_TIMEOUT = timedelta(seconds=300)


class ControlStore(Store):
    """A `torch.distributed.Store` of one world and one generation.

    Args:
        publish: sends a key and its value to all other members; must not block.
        min_timeout_s: lower limit of the timeout of every wait. `abort` ends a wait earlier.
    """

    def __init__(self, publish: Callable[[str, bytes], None], min_timeout_s: float = 0.0) -> None:
        super().__init__()
        self._min_timeout_s = min_timeout_s
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

    def wait(self, keys: list[str], timeout: timedelta = _DEFAULT_TIMEOUT) -> None:
        """Wait until all keys are set. Raises DistStoreError after `timeout` or `min_timeout_s`, whichever is longer, and after `abort`."""
        timeout_s = max(timeout.total_seconds(), self._min_timeout_s)
        with self._changed:
            complete = self._changed.wait_for(
                lambda: self._aborted is not None or all(key in self._values for key in keys), timeout_s
            )
            if self._aborted is not None:
                raise DistStoreError(f"rendezvous aborted: {self._aborted}") from self._aborted
            if not complete:
                missing = [key for key in keys if key not in self._values]
                raise DistStoreError(f"rendezvous: no value for {missing} after {timeout_s:.1f} s")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete `key` at this member only. Returns whether it was set."""
        with self._changed:
            return self._values.pop(key, None) is not None
