"""The front of an ensemble: accepts images over HTTP and runs the rendezvous server. It is not a member and computes nothing.

curl --data-binary @photo.jpg http://127.0.0.1:8000/predict
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from examples.elastic_members import MEMBERS, run_rendezvous
from examples.two_worlds import add_network_options

MAX_IMAGE_BYTES = 20 << 20


class RequestTable:
    """Images and their answers by number. Numbers start at 1."""

    def __init__(self) -> None:
        self._count = 0
        loop = asyncio.get_running_loop()
        self._images: defaultdict[int, asyncio.Future[bytes]] = defaultdict(loop.create_future)
        self._answers: defaultdict[int, asyncio.Future[dict[str, Any]]] = defaultdict(loop.create_future)

    async def ask(self, image: bytes) -> dict[str, Any]:
        """Assign the next number to an image and wait for its answer."""
        self._count += 1
        number = self._count
        self._images[number].set_result(image)
        answer = await self._answers[number]
        self._images.pop(number - MEMBERS, None)  # no current member is this far behind
        self._answers.pop(number - MEMBERS, None)
        return answer

    async def image(self, number: int) -> bytes:
        """Wait for the request with number `number` and return its image."""
        return await asyncio.shield(self._images[number])

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Store the answer of a member. All members send the same answer; the first one counts."""
        if not self._answers[number].done():
            self._answers[number].set_result(answer)


def create_app(table: RequestTable) -> FastAPI:
    app = FastAPI()

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        image = await request.body()
        if not 0 < len(image) <= MAX_IMAGE_BYTES:
            raise HTTPException(413, f"expected an image of at most {MAX_IMAGE_BYTES} bytes, got {len(image)}")
        return await table.ask(image)

    @app.get("/images/{number}")
    async def image(number: int) -> Response:
        return Response(await table.image(number))

    @app.post("/answers/{number}")
    async def answer(number: int, reply: dict[str, Any]) -> None:
        table.answer(number, reply)

    return app


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http-port", type=int, default=8000, help="port for images (default: %(default)s)")
    add_network_options(parser)
    options, _ = parser.parse_known_args()
    config = uvicorn.Config(
        create_app(RequestTable()),
        host=options.addr,
        port=options.http_port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await run_rendezvous(options)
    server.should_exit = True
    await serving
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
