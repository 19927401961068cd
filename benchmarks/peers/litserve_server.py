"""LitServe with workers that it starts again when they end: python -m benchmarks.peers.litserve_server --port 9000 --pids DIR"""

import base64
from typing import Any

import litserve
import torch

from benchmarks.peers.model import BATCH_TIMEOUT_S, MAX_BATCH_SIZE, classifier, options


class Api(litserve.LitAPI):  # type: ignore[misc]
    """One worker."""

    def setup(self, device: str) -> None:
        self.classifier = classifier(options())

    def decode_request(self, request: dict[str, str]) -> torch.Tensor:
        return self.classifier.tensor(base64.b64decode(request["body"]))

    def predict(self, images: list[torch.Tensor]) -> list[dict[str, Any]]:
        return self.classifier.classify(images)

    def batch(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return inputs

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    chosen = options()
    api = Api(max_batch_size=MAX_BATCH_SIZE, batch_timeout=BATCH_TIMEOUT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=chosen.workers, restart_workers=True)
    server.run(host="127.0.0.1", port=chosen.port, generate_client_file=False)
