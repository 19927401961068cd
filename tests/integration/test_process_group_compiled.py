"""Functions that torch.compile has compiled use a process group of the library."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import multiworld.process_group  # noqa: F401 - registers the backend
from tests.nursery import NURSERY, ForkedProcess

PATIENCE_S = 300.0


def exchange(tensor: Tensor, rank: int) -> Tensor:
    """The compiled function. Of two ranks that pass ones, both get fours."""
    summed = tensor * 1
    work = dist.all_reduce(summed, async_op=True)
    assert work is not None
    work.wait()
    received = torch.zeros_like(summed)
    if rank == 0:
        dist.send(summed, 1)
        dist.recv(received, 1)
    else:
        dist.recv(received, 0)
        dist.send(summed, 0)
    dist.broadcast(received, 1)
    return received + summed


def run_compiled(url: str, rank: int) -> None:
    """In a forked process: a member that compiles, and raises an error if a result is wrong."""
    dist.init_process_group("multiworld", init_method=url, rank=rank, world_size=2)
    compiled = torch.compile(exchange, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(3), rank), torch.full((3,), 4.0))
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    compiled_model = torch.compile(model, backend="eager")
    for _ in range(2):
        model.zero_grad()
        compiled_model(torch.full((1, 2), float(rank))).sum().backward()
    for parameter, mean in zip(model.parameters(), (0.5, 1.0), strict=True):
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, mean))
    dist.destroy_process_group()


def test_compiled_functions_and_models_use_the_group(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        url = f"file://{tmp_path / 'store'}"
        members = [
            ForkedProcess(NURSERY.fork(f"{__name__}:run_compiled", [url, rank], log.fileno())) for rank in range(2)
        ]
        statuses = [member.wait(PATIENCE_S) for member in members]
    assert statuses == [0, 0], (tmp_path / "log").read_text()
