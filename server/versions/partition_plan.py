"""Partitions a model by measured costs: the compute time of each block and the transfer time at each boundary."""

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from multiworld_serving.models import LoadedModel, StageSpec, block_names, boundary_bytes, measure_costs, split_model

_PROBE_BYTES = 4 << 20
_PROBES = 5


@dataclass(frozen=True)
class PartitionPlan:
    """A partition and the measurements it is based on. Times are seconds per image.

    Attributes:
        blocks: names of the blocks.
        block_s: compute time of each block.
        boundary_bytes: size of the tensor after each block except the last.
        transfer_s: time to send or receive each of these tensors.
        specs: the stages.
    """

    blocks: tuple[str, ...]
    block_s: tuple[float, ...]
    boundary_bytes: tuple[int, ...]
    transfer_s: tuple[float, ...]
    specs: tuple[StageSpec, ...]

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """(first block, end block) of each stage."""
        return tuple((spec.first_block, spec.end_block) for spec in self.specs)

    @property
    def stage_s(self) -> tuple[float, ...]:
        """Time of each stage, including transfers."""
        crossing = (0.0, *self.transfer_s, 0.0)
        return tuple(sum(self.block_s[first:end]) + crossing[first] + crossing[end] for first, end in self.stages)

    @property
    def images_per_s(self) -> float:
        """Predicted throughput with each stage on its own device like the measured one; the slowest stage limits it."""
        return 1 / max(self.stage_s)

    @property
    def balance(self) -> float:
        """Mean stage time divided by the slowest stage's time; 1 is perfectly balanced."""
        return sum(self.stage_s) / len(self.stage_s) / max(self.stage_s)


def measure_partition(
    model: LoadedModel,
    num_stages: int,
    *,
    batch_size: int = 1,
    device: str = "cpu",
    repeats: int = 5,
    link_bytes_per_s: float | None = None,
) -> PartitionPlan:
    """Measure every block on the device, and find the partition whose slowest stage is fastest. Blocks for several inferences.

    Args:
        link_bytes_per_s: bandwidth between the machines; None: measure a loopback connection on this machine.
    Raises:
        ModelError: there are more stages than blocks, or a count is below 1.
    """
    batch_s = measure_costs(model, batch_size=batch_size, device=device, repeats=repeats)
    sizes = boundary_bytes(model)
    speed = local_link_bytes_per_s() if link_bytes_per_s is None else link_bytes_per_s
    return partition_for(
        model, num_stages, [time_s / batch_size for time_s in batch_s], [size / speed for size in sizes]
    )


def partition_for(
    model: LoadedModel, num_stages: int, block_s: Sequence[float], transfer_s: Sequence[float]
) -> PartitionPlan:
    """The best partition for these times."""
    specs = split_model(model, num_stages, costs=block_s, transfers=transfer_s)
    names = block_names(model.name)
    return PartitionPlan(names, tuple(block_s), boundary_bytes(model), tuple(transfer_s), tuple(specs))


def local_link_bytes_per_s() -> float:
    """Measure the bandwidth of a loopback TCP connection, the best of a few runs.

    Raises:
        OSError: connecting to 127.0.0.1 failed.
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
            raise ConnectionError("the loopback connection was closed during the measurement")
        at += count
    thread.join()
    return time.perf_counter() - started_s
