"""Ray Serve: python -m benchmarks.peers.ray_server --port 9000 --pids DIR"""

import os
import signal
import sys
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from benchmarks.peers.model import BATCH_TIMEOUT_S, MAX_BATCH_SIZE, Classifier, options

_MOST_ONGOING = 1000
"""As many as are asked at a time, so that none is refused; by default a replica takes five, which is less than a batch."""


class Model:
    """One replica, in a process that Ray starts.

    Args:
        arguments: of this program's command line.
    """

    def __init__(self, arguments: list[str]) -> None:
        sys.argv[1:] = arguments
        self.classifier = Classifier()

    async def __call__(self, request: Request) -> JSONResponse:
        """The five best classes of the JPEG in the body."""
        return JSONResponse(await self.classify(self.classifier.tensor(await request.body())))

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=BATCH_TIMEOUT_S)  # type: ignore[untyped-decorator]
    async def classify(self, images: list[Any]) -> list[dict[str, Any]]:
        """What shares a batch."""
        return self.classifier.classify(images)


if __name__ == "__main__":
    chosen, cores = options(), len(os.sched_getaffinity(0))
    # Ray has a replica compute on as many threads as it has cores. Its own helpers want some too, and never use them.
    ray.init("local", num_cpus=cores + 2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": chosen.port})
    replicas = {
        "num_replicas": chosen.workers,
        "max_ongoing_requests": _MOST_ONGOING,
        "ray_actor_options": {"num_cpus": cores // chosen.workers},
    }
    serve.run(serve.deployment(**replicas)(Model).bind(sys.argv[1:]), route_prefix="/predict")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
