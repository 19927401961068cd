"""Cost of a small request in the leader: microseconds of CPU time without the transport.

    python -m benchmarks.leader_cost
    python -m cProfile -s tottime -m benchmarks.leader_cost --repeats 500

One process holds a real leader and two links whose worlds are fake. 64 requests are in flight, in batches of 32. Inputs of 3 KB and outputs
of 4 KB pass the leader, as in a service, or the frontend and the worker keep all tensors, as they keep larger ones. The clock is virtual:
the worker returns a batch after 20 ms, when it has the next one. The time in the frontend and in the worker is subtracted. Other programs
disturb some repeats, so the minimum is the result.
"""

import argparse
import asyncio
import gc
import itertools
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import uvloop
from torch import nn

from benchmarks.fake_world import FakeWorld
from multiworld import World
from multiworld_serving.common.service.messages import FRONTEND_PROTOCOL, Predict
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.wire.join import FrontendJoinRequest, JoinRequest
from multiworld_serving.common.wire.link import Link
from multiworld_serving.common.wire.protocol import Kind, Received, encode
from multiworld_serving.common.wire.work import WORKER_PROTOCOL, Batch, Computed
from multiworld_serving.models.export.exporter import ExportSettings, export_model
from multiworld_serving.models.optimize.tuning import NO_TUNING
from multiworld_serving.server.leader.leader import Leader
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.replicas.worker import SlotId, Worker
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.sessions import FrontendSession
from multiworld_serving.server.leader.versions.model_source import ModelSource

_IN_FLIGHT, _ROWS, _WINDOW = 64, 32, 2
_INPUTS, _OUTPUTS = 768, 1000
"""Values of float32 in a row."""
_BATCH_S = 0.02
_BATCHES = 2
"""In each repeat."""


class Clock:
    """Virtual time."""

    now_s = 1000.0


class Load:
    """The frontend and the worker of a leader.

    Args:
        together: requests in each transfer of the frontend.
        kept: the frontend keeps the inputs, and the worker the outputs.
        on_batch: called when a full batch has been answered.
    """

    def __init__(self, together: int, kept: bool, on_batch: Callable[[], None]) -> None:
        self.clock = Clock()
        self._kept = kept
        self._together = together
        self._on_batch = on_batch
        self._sent = self._outputs = 0
        self._batches: deque[Received] = deque()
        self.frontend, self.worker = FakeWorld(self._answer), FakeWorld(self._compute)

    def requests(self, count: int) -> list[bytearray]:
        transfers = []
        while count:
            transfer = bytearray()
            for _ in range(min(count, self._together)):
                self._sent += 1
                body = Predict(f"{self._sent:032x}", 60.0, tensor=self._sent if self._kept else None)
                transfer += encode(Kind.MESSAGE, self._sent, body, b"" if self._kept else bytes(4 * _INPUTS))
                count -= 1
            transfers.append(transfer)
        return transfers

    def _answer(self, transfer: memoryview) -> list[bytearray]:
        replies = sum(received.kind is Kind.REPLY for received in FRONTEND_PROTOCOL.decode(transfer))
        if replies == _ROWS:
            self._on_batch()
        return self.requests(replies)

    def _compute(self, transfer: memoryview) -> list[bytearray]:
        self._batches.extend(each for each in WORKER_PROTOCOL.decode(transfer) if isinstance(each.body, Batch))
        if len(self._batches) < _WINDOW:
            return []
        self.clock.now_s += _BATCH_S
        self._outputs += 1
        batch = self._batches.popleft()
        body = Computed(int(_BATCH_S * 1e9), 0, (_OUTPUTS,), self._outputs if self._kept else None)
        payload = b"" if self._kept else bytes(4 * _OUTPUTS * batch.body.inputs.rows)
        return [encode(Kind.REPLY, batch.number, body, payload)]


def make_leader(bundle: Path) -> Leader:
    settings = LeaderSettings(model=str(bundle), stages=1, replicas=1, max_batch_size=_ROWS)
    model, plan = ModelSource(settings).open(NO_TUNING)
    return Leader(model, plan, settings, LeaderMetrics())


async def measure(leader: Leader, together: int, kept: bool, repeats: int) -> list[float]:
    """Microseconds for each request in each repeat."""
    done, costs = asyncio.Event(), list[float]()
    batches, started_s = 0, 0.0

    def count() -> None:
        nonlocal batches, started_s
        batches += 1
        if batches % _BATCHES == 0:
            spent_s = time.process_time() - load.frontend.others_s - load.worker.others_s
            costs.append((spent_s - started_s) / (_BATCHES * _ROWS) * 1e6)
            started_s = spent_s
            if len(costs) == repeats + 1:
                done.set()

    load = Load(together, kept, count)
    time.monotonic = lambda: load.clock.now_s
    session = FrontendSession(
        leader._frontends, FrontendJoinRequest("f", "h", 1, "10.0.0.1:7000/f"), cast(World, load.frontend)
    )
    worker = Worker(JoinRequest("w", "cpu", "h", 2, edge="10.0.0.2:7000/w"), SlotId(0, 0), 1, state="ready")
    plan = leader._versions.current
    link = WorkerLink(worker, plan.stages, lambda _: None, leader.driver.on_batch)
    link._link = Link(cast(World, load.worker), 1, WORKER_PROTOCOL, link._receive)
    leader.driver.activate(link, plan)
    running = [asyncio.create_task(each.run()) for each in (session.link, link._link)]
    load.frontend.put(load.requests(_IN_FLIGHT))
    gc.freeze()
    await done.wait()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return costs[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4, 32], help="requests in each transfer")
    arguments = parser.parse_args()
    print(f"{'tensors':>8} {'together':>8} {'least µs/request':>17} {'median':>7}")
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        export_model(nn.Linear(_INPUTS, _OUTPUTS), [torch.zeros(2, _INPUTS)], bundle, ExportSettings("m", "1", ("x",)))
        for kept, together in itertools.product((False, True), arguments.together):
            with torch.inference_mode():
                costs = uvloop.run(measure(make_leader(bundle), together, kept, arguments.repeats))
            where = "kept" if kept else "relayed"
            print(f"{where:>8} {together:>8} {min(costs):>17.1f} {statistics.median(costs):>7.1f}", flush=True)


if __name__ == "__main__":
    main()
