"""A leader sends images to the workers in turn, and each worker runs a ResNet. Each worker has its own world with the leader.

Run: python -m examples.launch resnet --num_workers 2
"""

import argparse
import asyncio
import itertools
import sys
from pathlib import Path

import torch

from examples.resnet.images import load_images
from examples.two_worlds import JOIN_TIMEOUT_S, add_network_options, device_of, place
from multiworld import BrokenWorldException, Cause, WorldError, WorldManager
from multiworld_serving.models.export.torchvision_models import LoadedModel, load_model

RETRY_S = 0.2


class Leader:
    """Rank 0 of every world. A world is in `free`, is processing an image, or is being joined."""

    def __init__(self, manager: WorldManager, model: LoadedModel, options: argparse.Namespace) -> None:
        self._manager = manager
        self._model = model
        self._options = options
        self._device = device_of(options.backend, 0)
        self._free: asyncio.Queue[str] = asyncio.Queue()
        self._tasks = asyncio.TaskGroup()
        self._joining: set[asyncio.Task[None]] = set()

    async def lead(self) -> None:
        """Get an answer for every image from the available workers."""
        async with self._tasks:
            for index in range(1, self._options.num_workers + 1):
                self._start_to_join(f"world{index}")
            await self._send_all()
            for task in self._joining:  # of workers that did not connect
                task.cancel()

    async def _send_all(self) -> None:
        options = self._options
        images = itertools.cycle(load_images(options.image, self._model.image).items())
        for number, (name, image) in zip(range(1, options.steps + 1), images, strict=False):
            print(f"Predicted class: {await self._answer(name, image)}")
            print(f"done with step: {number}")
            await asyncio.sleep(options.step_pause_s)

    async def _answer(self, name: str, image: torch.Tensor) -> str:
        while True:
            world = await self._free.get()
            try:
                label = await self._ask(world, name, image)
            except BrokenWorldException as error:
                print(f"skipped {world} until its worker joins again: {error}")
                self._start_to_join(world)
                continue
            self._free.put_nowait(world)
            return label

    async def _ask(self, world: str, name: str, image: torch.Tensor) -> str:
        communicator = self._manager.communicator
        probabilities = torch.empty(1, len(self._model.labels), device=self._device)
        await communicator.send(image.to(self._device), 1, world)
        print(f"Sent {name} to {world} for processing")
        await communicator.recv(probabilities, 1, world)
        return describe(self._model, probabilities)

    def _start_to_join(self, world: str) -> None:
        task = self._tasks.create_task(self._join(world))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _join(self, name: str) -> None:
        """Wait for the worker without a time limit. The other worlds do not wait for it."""
        options = self._options
        while True:
            try:
                world = await self._manager.initialize_world(
                    name, 0, 2, options.backend, options.addr, options.port, JOIN_TIMEOUT_S, self._device
                )
                break
            except WorldError as error:
                print(f"{name} did not form, trying again: {error}")
                await asyncio.sleep(RETRY_S)
        print(f"{name} joined, generation {world.generation}")
        self._free.put_nowait(name)


async def work(manager: WorldManager, model: LoadedModel, options: argparse.Namespace, index: int) -> None:
    """Classify images until the leader closes the world."""
    name, device = f"world{index}", device_of(options.backend, index)
    classify, communicator = model.classifier(), manager.communicator
    crop_size = model.image.crop_size
    image = torch.empty(1, 3, crop_size, crop_size, dtype=torch.uint8, device=device)
    await manager.initialize_world(name, 1, 2, options.backend, options.addr, options.port, JOIN_TIMEOUT_S, device)
    for number in itertools.count(1):
        await communicator.recv(image, 0, name)
        probabilities = classify(image.cpu())
        await communicator.send(probabilities.to(device), 0, name)
        print(f"Predicted class: {describe(model, probabilities)}")
        print(f"done with step: {number} ({name})")


def describe(model: LoadedModel, probabilities: torch.Tensor) -> str:
    """Return the most likely class of float32 [1,num_classes], with its probability."""
    probability, class_id = probabilities[0].max(dim=0)
    return f"{model.labels[int(class_id)]} ({float(probability):.1%})"


async def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # the workers of an example share one machine
    model = load_model(options.model, options.weights)
    # Long, because a member of a busy machine may have to wait for a core. A killed member is detected at once.
    async with WorldManager(heartbeat_timeout_s=10.0) as manager:
        if options.worldinfo is None:
            await Leader(manager, model, options).lead()
            return 0
        try:
            await work(manager, model, options, options.worldinfo[0])
        except BrokenWorldException as error:
            if error.cause is not Cause.LEFT:
                print(f"caught an exception: {error}")
                return 1
            print("the leader has left")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--worldinfo", type=place, metavar="INDEX,1", help="run the worker of world INDEX; without it, run the leader"
    )
    parser.add_argument("--num_workers", type=int, default=2, help="number of workers (default: %(default)s)")
    parser.add_argument("--model", default="resnet18", help="of torchvision, for images (default: %(default)s)")
    parser.add_argument(
        "--weights",
        default="random:0",
        help="path of a file, random:SEED, or DEFAULT for those of torchvision (default: %(default)s)",
    )
    parser.add_argument("--image", type=Path, help="path of an image (default: two of scikit-learn)")
    add_network_options(parser)
    options = parser.parse_args()
    if options.worldinfo is not None and options.worldinfo[1] != 1:
        parser.error("--worldinfo: a worker is rank 1 of its world; start the leader without this option")
    return options


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse_options())))
