"""Ray Serve with a Ray of its own on this machine: python -m benchmarks.peers.ray_server --port 9000 --pids DIR"""

import argparse
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.peers.model import BATCH_TIMEOUT_S, MAX_BATCH_SIZE, classifier, options


@serve.deployment(max_ongoing_requests=100)
class Inference:
    """One replica."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.classifier = classifier(chosen)

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=BATCH_TIMEOUT_S)  # type: ignore[untyped-decorator]
    async def classify(self, bodies: list[bytes]) -> list[dict[str, Any]]:
        return self.classifier.classify([self.classifier.tensor(body) for body in bodies])

    async def __call__(self, request: Request) -> dict[str, Any]:
        answer: dict[str, Any] = await self.classify(await request.body())
        return answer


if __name__ == "__main__":
    chosen = options()
    ray.init(address="local", include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": chosen.port})
    serve.run(Inference.options(num_replicas=chosen.workers).bind(chosen), route_prefix="/predict", blocking=True)  # type: ignore[attr-defined]
