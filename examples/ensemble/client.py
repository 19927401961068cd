"""Sends images to the ensemble one after the other: two from scikit-learn, or one from a file."""

import argparse
import asyncio
import io
import itertools
import sys
from pathlib import Path

import httpx
from PIL import Image

from examples.two_worlds import JOIN_TIMEOUT_S, add_network_options

RETRY_S = 0.2


def load_images(path: Path | None) -> dict[str, bytes]:
    """Return encoded image files by name, as a browser would send them."""
    if path is not None:
        return {path.name: path.read_bytes()}
    from sklearn.datasets import load_sample_image  # noqa: PLC0415 - this import takes seconds

    files = {}
    for name in ("china.jpg", "flower.jpg"):
        file = io.BytesIO()
        Image.fromarray(load_sample_image(name)).save(file, "PNG")
        files[name] = file.getvalue()
    return files


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http-port", type=int, default=8000, help="port of the front (default: %(default)s)")
    parser.add_argument("--image", type=Path, help="path of an image")
    add_network_options(parser)
    options, _ = parser.parse_known_args()
    base_url = f"http://{options.addr}:{options.http_port}"
    numbered = zip(range(options.steps), itertools.cycle(load_images(options.image).items()), strict=False)
    async with httpx.AsyncClient(base_url=base_url, timeout=JOIN_TIMEOUT_S) as client:
        for _, (name, file) in numbered:
            print(f"{name} shows {await ask(client, file)}")
            await asyncio.sleep(options.step_pause_s)
    return 0


async def ask(client: httpx.AsyncClient, file: bytes) -> str:
    """Return the answer of the ensemble. Retries while the front is starting, for up to `JOIN_TIMEOUT_S`."""
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        while True:
            try:
                answer = (await client.post("/predict", content=file)).raise_for_status().json()
            except httpx.ConnectError:
                await asyncio.sleep(RETRY_S)
                continue
            return f"{answer['label']} ({answer['probability']:.1%}), average of {answer['models']} models"


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
