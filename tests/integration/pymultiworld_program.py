"""A program as users of pymultiworld write it; it does not know that another library provides the API.

python pymultiworld_program.py --worldinfo 1,0 --worldinfo 2,0 --base 29500 --steps 3
"""

import argparse
import asyncio
import time

import torch
from torch.distributed import ReduceOp

from multiworld.communicator import BrokenWorldException, WorldCommunicator
from multiworld.manager import WorldManager


async def init_world(
    world_manager: WorldManager, world_name: str, rank: int, size: int, backend: str, addr: str, port: int
) -> None:
    await world_manager.initialize_world(
        world_name, rank, size, backend=backend, addr=addr, port=port, device=torch.device("cpu")
    )


async def every_operation(communicator: WorldCommunicator, rank: int, size: int, w: str) -> None:
    tensor = torch.ones(1) * (rank + 1)
    await communicator.all_reduce(tensor, ReduceOp.SUM, w)
    print(f"rank: {rank} from {w} has reduced tensor: {tensor}")

    tensor = torch.ones(3) * (rank + 1)
    await communicator.reduce(tensor, 0, ReduceOp.SUM, w)
    if rank == 0:
        print(f"rank: 0 from {w} has reduced to root: {tensor}")

    tensor = torch.full((3,), 7.0) if rank == 0 else torch.zeros(3)
    await communicator.broadcast(tensor, 0, w)
    print(f"rank: {rank} from {w} recieves tensor: {tensor}")

    tensor = torch.full((3,), float(rank))
    tensors = [torch.zeros(3) for _ in range(size)]
    await communicator.all_gather(tensors, tensor, w)
    print(f"rank: {rank} from {w} has gathered tensors: {tensors}")

    gather_list = [torch.zeros(3) for _ in range(size)] if rank == 0 else None
    await communicator.gather(tensor, gather_list, 0, w)

    scatter_list = [torch.full((3,), float(i)) for i in range(size)] if rank == 0 else None
    await communicator.scatter(tensor, scatter_list, 0, w)
    print(f"rank: {rank} from {w} has tensor: {tensor}")

    number = torch.zeros((1,), dtype=torch.int64)
    if rank == 0:
        for src in range(1, size):
            await communicator.recv(number, src, w)
            print(f"received {number} from rank {src} in {w}")
    else:
        await communicator.send(torch.tensor([rank]), 0, w)


async def run(communicator: WorldCommunicator, rank: int, size: int, w: str, steps: int) -> None:
    for step in range(1, steps + 1):
        try:
            await every_operation(communicator, rank, size, w)
        except Exception as e:  # noqa: BLE001 - as in all of their examples
            print(f"caught an exception: {e}", flush=True)
            print(f"{w} failed: {isinstance(e, BrokenWorldException)} {communicator.is_broken(w)}", flush=True)
            break
        print(f"done with step: {step} in {w}", flush=True)
        if rank != 0:
            time.sleep(0.05)  # noqa: ASYNC251 - their programs do hold up the loop
        await asyncio.sleep(0.05)


async def main(args: argparse.Namespace) -> None:
    world_manager = WorldManager()
    size = args.size
    worlds = {}
    for item in args.worldinfo:
        index, rank = (int(x) for x in item.split(","))
        world_name = f"world{index}"
        await init_world(
            world_manager, world_name, rank, size, args.backend, args.addr, args.base + (index if args.own_ports else 0)
        )
        print(f"initialized {world_name}", flush=True)
        worlds[world_name] = rank

    communicator = world_manager.communicator
    tasks = [asyncio.create_task(run(communicator, rank, size, name, args.steps)) for name, rank in worlds.items()]
    await asyncio.gather(*tasks)
    if args.cleanup:
        world_manager.cleanup()
    print("got to the end", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--addr", default="127.0.0.1")
    parser.add_argument("--worldinfo", type=str, action="append")
    parser.add_argument("--base", type=int, default=29500)
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--own_ports", action="store_true")
    parser.add_argument("--cleanup", action="store_true")
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(main(parser.parse_args()))
