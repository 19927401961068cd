"""Data-parallel training on four processes. If one is killed in the middle of a backward pass, the others continue with equal weights.

Run: python -m examples.launch data_parallel --kill-rank 1,2
"""

import argparse
import hashlib
import time

import torch
import torch._dynamo  # imported by DistributedDataParallel, which takes seconds: here, the launcher imports it once for all members
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from examples.elastic_members import HEARTBEAT_TIMEOUT_S, MEMBERS, member_parser
from examples.two_worlds import JOIN_TIMEOUT_S
from multiworld.process_group import WorldProcessGroup


def main() -> None:
    options = member_parser().parse_args()
    torch.set_num_threads(1)  # the members of an example share one machine
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    done = torch.tensor(0)  # steps
    first = next(module.parameters())
    first.register_hook(lambda _: print(f"in the middle of step: {done + 1} "))  # type: ignore[no-untyped-call]
    rank, size = options.number, MEMBERS
    while done < options.steps:
        name, timeout_s = f"training on {size}", JOIN_TIMEOUT_S
        with WorldProcessGroup.form(
            name, rank, size, options.addr, options.port, timeout_s=timeout_s, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S
        ) as group:
            train(module, done, group, options)
        if group.failure is not None:
            print(f"caught an exception: {group.failure}")
            rank, size = rank - (rank > group.failure.rank), size - 1
    print(f"finished all {options.steps} steps")


def train(module: nn.Module, done: Tensor, group: WorldProcessGroup, options: argparse.Namespace) -> None:
    """Train from the weights and the step of rank 0 until all steps are done or a member is lost."""
    try:
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.1)
        group.broadcast([done]).wait()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while done < options.steps:
            optimizer.zero_grad()
            model(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
            done += 1
            weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in module.parameters()))
            print(f"done with step: {done} ({group.size()} members, weights {weights.hexdigest()[:8]})")
            time.sleep(options.step_pause_s)
    except RuntimeError:
        if group.failure is None:
            raise


if __name__ == "__main__":
    main()
