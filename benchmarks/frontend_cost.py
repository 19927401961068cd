"""Cost of a small request in the frontend: microseconds of CPU time without sockets.

    python -m benchmarks.frontend_cost
    python -m cProfile -s tottime -m benchmarks.frontend_cost --repeats 50

One process holds the real application with 64 HTTP connections whose transports are fake, and a link to a leader whose world is fake. The
leader returns predictions of 1,000 classes when it has a batch of 32. Each client posts a JPEG of 40 x 40 pixels when it has the response.
`together` requests arrive in one turn of the event loop. Other programs disturb some repeats, so the minimum is the result.
"""

import argparse
import asyncio
import gc
import io
import logging
import socket
import statistics
import time
from collections import deque
from typing import Any, cast

import torch
import uvloop
from PIL import Image
from pydantic import SecretStr

from benchmarks.fake_world import FakeWorld
from multiworld import World
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.http.connection import HttpConnection
from multiworld_serving.common.http.server import HttpServer
from multiworld_serving.common.service.administration import Desired
from multiworld_serving.common.service.messages import FRONTEND_PROTOCOL, MAX_BYTES, LeaderState
from multiworld_serving.common.service.predictor import ImageSizes, ModelVersion, Prediction, ServedModel
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.common.settings.serve import FrontendSettings
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.common.wire.link import Link
from multiworld_serving.common.wire.protocol import Kind, Received, encode
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.server.frontend.api.app import create_api
from multiworld_serving.server.frontend.api.groups import ModelGroup, ModelGroups
from multiworld_serving.server.frontend.api.inference import Inference
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.leaders.link import LeaderLink
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.event_feed import EventFeed
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics

_CONNECTIONS, _BATCH, _CLASSES, _SIZES = 64, 32, 1000, ImageSizes(36, 32)
_REQUESTS = 512
"""In each repeat."""


class Transport(asyncio.Transport):
    """A connection whose client posts the next request when it has the response."""

    def __init__(self, load: "Load") -> None:
        super().__init__()
        self._load = load

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def write(self, data: Any) -> None:
        if not self._load.ended:
            assert data.startswith(b"HTTP/1.1 200"), data
            self._load.answered(self)

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass


class Load:
    """The clients and the leader of a frontend.

    Args:
        together: requests in each turn of the event loop.
    """

    def __init__(self, together: int) -> None:
        body = io.BytesIO()
        Image.effect_noise((40, 40), 50).convert("RGB").save(body, "JPEG")
        head = f"POST /predict HTTP/1.1\r\nContent-Type: image/jpeg\r\nContent-Length: {body.tell()}\r\n\r\n"
        self.world = FakeWorld(self._compute)
        self.costs = list[float]()
        self.progress, self.ended = asyncio.Event(), False
        self._request = head.encode() + body.getvalue()
        self._together = together
        self._connections: dict[Transport, HttpConnection] = {}
        self._idle: deque[Transport] = deque()
        self._batch: list[int] = []
        self._outputs = torch.rand(_CLASSES).softmax(0).numpy().tobytes()
        self._answered, self._started_s = 0, 0.0

    def connect(self, server: HttpServer, sock: socket.socket) -> None:
        transport = Transport(self)
        connection = HttpConnection(sock, server._idle, server.config, server.server_state)
        connection.connection_made(transport)
        self._connections[transport] = connection
        self._idle.append(transport)

    def post(self) -> None:
        """Some of the clients that have their responses post their next requests."""
        for _ in range(min(self._together, len(self._idle))):
            transport = self._idle.popleft()
            self._connections[transport].data_received(self._request)
        if self._idle:
            asyncio.get_running_loop().call_soon(self.post)

    def answered(self, transport: Transport) -> None:
        if not self._idle:
            asyncio.get_running_loop().call_soon(self.post)
        self._idle.append(transport)
        self._answered += 1
        if self._answered % _REQUESTS == 0:
            spent_s = time.process_time() - self.world.others_s
            self.costs.append((spent_s - self._started_s) / _REQUESTS * 1e6)
            self._started_s = spent_s
            self.progress.set()

    def _compute(self, transfer: memoryview) -> list[bytearray]:
        self._batch += [each.number for each in FRONTEND_PROTOCOL.decode(transfer)]
        if len(self._batch) < _BATCH:
            return []
        numbers, self._batch = self._batch[:_BATCH], self._batch[_BATCH:]
        body = Prediction(torch.empty(0), "m", "v", 0.001, 0.01, 0.0001, 1, ("stage0",), _BATCH)
        return [bytearray().join(encode(Kind.REPLY, number, body, self._outputs) for number in numbers)]


def make_link(pool: LeaderPool, world: FakeWorld, model: ServedModel) -> Link:
    """A link to a leader that has reported that it is ready."""
    link = LeaderLink(Address("127.0.0.1", 1), FrontendSettings.model_construct(), pool)
    pool.links.append(link)
    link._link = Link(cast(World, world), 0, FRONTEND_PROTOCOL, link._receive, MAX_BYTES)
    served = Desired(0, ModelVersion(1, model.version))
    snapshot = PipelineSnapshot(model.name, model.version, True, False, 0.0, 0, 0, ())
    link._receive(Received(Kind.MESSAGE, 0, LeaderState("h", 1, served, served, snapshot, model=model)))
    return link._link


async def measure(together: int, repeats: int) -> list[float]:
    """Microseconds for each request in each repeat."""
    images = TensorSpec("input", "uint8", (BATCH, 3, _SIZES.crop_size, _SIZES.crop_size))
    classes = TensorSpec("probabilities", "float32", (BATCH, _CLASSES))
    labels = tuple(f"class {number}" for number in range(_CLASSES))
    model = ServedModel("m", "v", (images,), (classes,), {}, _SIZES, labels)
    settings = WorkerSettings(leader="127.0.0.1:1", token=SecretStr("unused"), edge_min_bytes=1 << 30)
    load, metrics = Load(together), FrontendMetrics()
    edges = Edges("unused", "127.0.0.1", settings, EdgeMetrics(metrics))
    pool = LeaderPool(1.0, metrics, lambda _: None, edges, model.name)
    running = asyncio.create_task(make_link(pool, load.world, model).run())
    requests = metrics.requests.of_model(model.name)
    group = ModelGroup(pool, requests, EventFeed(requests))
    requests.declare(model.name, model.version, ("predict",))
    group.open(Inference(pool, model, RequestLimits()))
    with socket.socket() as sock:
        server = HttpServer(create_api(ModelGroups(group), metrics), sock, max_connections=_CONNECTIONS)
        for _ in range(_CONNECTIONS):
            load.connect(server, sock)
        gc.freeze()
        load.post()
        while len(load.costs) <= repeats:
            load.progress.clear()
            await load.progress.wait()
        load.ended = True
        running.cancel()
        await asyncio.wait({running})  # withdraws the other requests
    return load.costs[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument(
        "--together", type=int, nargs="+", default=[1, 8, 32], help="requests in each turn of the event loop"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # the end of a measurement withdraws requests
    print(f"{'together':>8} {'least µs/request':>17} {'median':>7}")
    for together in arguments.together:
        with torch.inference_mode():
            costs = uvloop.run(measure(together, arguments.repeats))
        print(f"{together:>8} {min(costs):>17.1f} {statistics.median(costs):>7.1f}", flush=True)


if __name__ == "__main__":
    main()
