"""Where to cut a model: what each block costs on this machine, what each boundary costs to cross, and what the pipeline would do then."""

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from models import LoadedModel, StageSpec, block_names, boundary_bytes, cut, measure_costs

_PROBE_BYTES = 4 << 20
_PROBES = 5


@dataclass(frozen=True)
class CutPlan:
    """A cut, and what it rests on. Times are of one image, in seconds.

    Attributes:
        blocks: their names.
        block_s: to compute each.
        boundary_bytes: of the tensor behind each block but the last.
        transfer_s: to take in or give out each of these.
        stages: (first block, end block) of each.
        stage_s: of each stage, transfers included.
    """

    blocks: tuple[str, ...]
    block_s: tuple[float, ...]
    boundary_bytes: tuple[int, ...]
    transfer_s: tuple[float, ...]
    specs: tuple[StageSpec, ...]

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        return tuple((spec.first_block, spec.end_block) for spec in self.specs)

    @property
    def stage_s(self) -> tuple[float, ...]:
        crossing = (0.0, *self.transfer_s, 0.0)
        return tuple(sum(self.block_s[first:end]) + crossing[first] + crossing[end] for first, end in self.stages)

    @property
    def images_per_s(self) -> float:
        """Predicted, with a replica of each stage on a device of its own like the one measured: what the slowest stage does."""
        return 1 / max(self.stage_s)

    @property
    def balance(self) -> float:
        """The mean stage's time over the slowest's: 1 where no device ever waits for another."""
        return sum(self.stage_s) / len(self.stage_s) / max(self.stage_s)


def measured_cut(
    model: LoadedModel,
    num_stages: int,
    *,
    batch_size: int = 1,
    device: str = "cpu",
    repeats: int = 5,
    link_bytes_per_s: float | None = None,
) -> CutPlan:
    """Measure every block on the device, and cut so that the slowest stage is as fast as possible. Blocks for some inferences.

    Args:
        link_bytes_per_s: of the links between the machines; None measures a connection of this machine with itself.
    Raises:
        ModelError: more stages than blocks, or a count below 1.
    """
    batch_s = measure_costs(model, batch_size=batch_size, device=device, repeats=repeats)
    sizes = boundary_bytes(model)
    speed = local_link_bytes_per_s() if link_bytes_per_s is None else link_bytes_per_s
    return plan_of(model, num_stages, [time_s / batch_size for time_s in batch_s], [size / speed for size in sizes])


def plan_of(model: LoadedModel, num_stages: int, block_s: Sequence[float], transfer_s: Sequence[float]) -> CutPlan:
    """The best cut for these times."""
    specs = cut(model, num_stages, costs=block_s, transfers=transfer_s)
    names = block_names(model.name)
    return CutPlan(names, tuple(block_s), boundary_bytes(model), tuple(transfer_s), tuple(specs))


def local_link_bytes_per_s() -> float:
    """How fast bytes go from one socket of this machine to another, both ends included: the fastest of a few tries.

    Raises:
        OSError: this machine lets nobody connect to 127.0.0.1.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            return _PROBE_BYTES / min(_probe_s(sender, receiver) for _ in range(_PROBES))


def _probe_s(sender: socket.socket, receiver: socket.socket) -> float:
    memory = memoryview(bytearray(_PROBE_BYTES))
    thread = threading.Thread(target=sender.sendall, args=(bytes(_PROBE_BYTES),), daemon=True)
    started_s, at = time.perf_counter(), 0
    thread.start()
    while at < _PROBE_BYTES:
        count = receiver.recv_into(memory[at:])
        if not count:
            raise ConnectionError("a connection of this machine with itself ended")
        at += count
    thread.join()
    return time.perf_counter() - started_s
