"""The same with stock `torch.distributed`: one process group for all ranks, so one failure breaks everything.

Four ranks send a tensor to the leader, and all ranks get the sum. Run: python -m examples.launch single_world
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

from examples.two_worlds import add_network_options, device_of


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--worldsize", type=int, default=5, help="number of ranks (default: %(default)s)")
    add_network_options(parser)
    options = parser.parse_args()
    dist.init_process_group(
        options.backend,
        init_method=f"tcp://{options.addr}:{options.port}",
        rank=options.rank,
        world_size=options.worldsize,
    )
    number = 0
    try:
        for number in range(1, options.steps + 1):
            step(options.rank, options.worldsize, number, device_of(options.backend, options.rank))
            print(f"done with step: {number}")
            time.sleep(options.step_pause_s)
    except RuntimeError as error:
        print(f"caught an exception: {str(error).splitlines()[0]}")
        print(f"the process group is unusable: {number - 1} of {options.steps} steps done")
        return 1
    print(f"finished all {options.steps} steps")
    dist.destroy_process_group()
    return 0


def step(rank: int, size: int, number: int, device: torch.device) -> None:
    total = torch.full((3,), float(10 * number + rank), device=device)
    if rank > 0:
        print(f"rank: {rank} has tensor: {total}")
        dist.send(total, 0)
    else:
        for src in range(1, size):
            received = torch.zeros(3, device=device)
            dist.recv(received, src)
            print(f"rank: {rank} received {received} from rank {src}")
    dist.all_reduce(total)
    print(f"rank: {rank} has reduced tensor: {total}")


if __name__ == "__main__":
    sys.exit(main())
