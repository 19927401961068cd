"""Small services for tests."""

from pathlib import Path
from typing import Any

from multiworld_serving.testing.local_service import LocalService


def small_service(**settings: Any) -> LocalService:
    """One stage with one replica of a ResNet-18 with random weights, for images of 32 x 32 pixels; `settings` change or add to that.

    All tensors travel over edges, although they are small.
    """
    small = {
        "model": "resnet18",
        "weights": "random:0",
        "image_size": 32,
        "stages": 1,
        "replicas": 1,
        "edge_min_bytes": 0,
    }
    return LocalService(**{**small, **settings})


def service_for_workers(token_file: Path, **settings: Any) -> LocalService:
    """The same without local workers: others join it with this token. The caller waits until it is ready."""
    return small_service(wait_until_ready=False, external_workers=True, token_file=token_file, **settings)
