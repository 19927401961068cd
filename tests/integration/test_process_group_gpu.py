"""Tensors of GPUs in a process group. A fake GPU stands for a real one; `make gpu` runs the tests that need one."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import multiworld.process_group  # noqa: F401 - registers the backend
from tests.fakes.gpu import FakeStream, current, install, on_gpu, stage_all
from tests.integration.test_process_group import OPERATIONS, form
from tests.nursery import NURSERY, ForkedProcess

PATIENCE_S = 300.0


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_writes_its_result_when_tensors_are_copied_through_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_all(monkeypatch)
    rows, groups = torch.arange(9.0).view(3, 3) ** 2, form(3)
    started = [OPERATIONS[name](group, group.rank(), rows[group.rank()].clone(), rows) for group in groups]
    for work, outputs, expected in started:
        assert work.wait()
        torch.testing.assert_close(outputs, list(expected), rtol=0, atol=0)
    for group in groups:
        group.close()


def test_copies_follow_the_work_of_the_callers_stream_and_are_complete_after_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each member computes on a stream of its own. Work that it queues after the operation is not awaited."""
    install(monkeypatch)
    first, second = form(2)
    with first, second:
        own = [on_gpu(torch.zeros(2, 3).t()) for _ in range(2)]
        got, late = on_gpu(torch.zeros(4)), list[str]()
        works = []
        for group, tensor in zip((first, second), own, strict=True):
            with current(FakeStream()) as stream:
                stream.queue(partial(tensor.fill_, group.rank() + 1.0))
                works.append(group.allreduce([tensor]))
                stream.queue(lambda: late.append("ran"))
        with current(FakeStream()) as stream:
            sent = on_gpu(torch.zeros(4))
            stream.queue(partial(sent.fill_, 5.0))
            works += [second.send([sent], 0, 3), first.recv([got], 1, 3)]
        for work in works:
            assert work.wait()
        assert all((tensor == 3.0).all() for tensor in own)
        assert got.tolist() == [5.0] * 4
        assert not late


def train(url: str, rank: int, report: str) -> None:
    """In a forked process: write the parameters that DDP and FSDP train, without and with copies through other memory of the host."""
    dist.init_process_group("multiworld", init_method=url, rank=rank, world_size=2)
    found: list[list[list[float]]] = []
    mesh = init_device_mesh("cpu", (2,))
    for staged in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if staged:
                stage_all(patch)
            wraps: tuple[Callable[[nn.Module], Any], ...] = (
                lambda model: DistributedDataParallel(model, device_mesh=mesh),
                lambda model: fully_shard(model, mesh=mesh),
            )
            for wrap in wraps:
                torch.manual_seed(0)
                model = wrap(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for step in range(3):
                    optimizer.zero_grad()
                    model(torch.full((4, 3), rank + step + 1.0)).square().sum().backward()
                    optimizer.step()
                whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
                found.append([each.detach().flatten().tolist() for each in whole])
    Path(report).write_text(json.dumps(found))
    dist.destroy_process_group()


def test_ddp_and_fsdp_train_equally_when_tensors_are_copied_through_the_host(tmp_path: Path) -> None:
    reports = [tmp_path / f"report-{rank}" for rank in range(2)]
    with (tmp_path / "log").open("wb") as log:
        members = [
            ForkedProcess(
                NURSERY.fork(f"{__name__}:train", [f"file://{tmp_path / 'store'}", rank, str(report)], log.fileno())
            )
            for rank, report in enumerate(reports)
        ]
        statuses = [member.wait(PATIENCE_S) for member in members]
    assert statuses == [0, 0], (tmp_path / "log").read_text()
    (ddp, fsdp, staged_ddp, staged_fsdp), other = (json.loads(report.read_text()) for report in reports)
    assert other == [ddp, fsdp, staged_ddp, staged_fsdp]
    assert (staged_ddp, staged_fsdp) == (ddp, fsdp)
    torch.testing.assert_close([torch.tensor(each) for each in fsdp], [torch.tensor(each) for each in ddp])
