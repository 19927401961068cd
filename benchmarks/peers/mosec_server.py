"""mosec: python -m benchmarks.peers.mosec_server --port 9000 --pids DIR --address 127.0.0.1 --timeout 30000"""

from typing import Any

import mosec
import torch

from benchmarks.peers.model import BATCH_TIMEOUT_S, MAX_BATCH_SIZE, classifier, options


class Inference(mosec.Worker):  # type: ignore[misc]
    """One worker."""

    def __init__(self) -> None:
        self.classifier = classifier(options())

    def deserialize(self, data: bytes) -> torch.Tensor:
        return self.classifier.tensor(data)

    def forward(self, data: list[torch.Tensor]) -> list[dict[str, Any]]:
        return self.classifier.classify(data)


if __name__ == "__main__":
    server = mosec.Server()
    server.append_worker(
        Inference,
        num=options().workers,
        max_batch_size=MAX_BATCH_SIZE,
        max_wait_time=max(1, round(BATCH_TIMEOUT_S * 1e3)),
        route="/predict",
    )
    server.run()
