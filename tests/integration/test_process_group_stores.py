"""A stale address of rank 0 in a store of torch only delays the formation of a group."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from multiworld.group_forming import ADDRESS_KEY
from multiworld.process_group import WorldProcessGroup
from tests.nursery import NURSERY, ForkedProcess
from tests.programs import free_port

PATIENCE_S = 200.0
LATE_S = 0.3
"""By how much rank 0 starts later than rank 1, so that rank 1 reads what the store holds before. The tests pass with any value."""


def sum_of(store: Store, rank: int) -> float:
    """Form a group, add a one of each member, and close the group."""
    time.sleep(0.0 if rank else LATE_S)
    with WorldProcessGroup.from_store(store, rank, 2, timeout_s=PATIENCE_S, heartbeat_timeout_s=PATIENCE_S) as group:
        group.allreduce([ones := torch.ones(1)]).wait()
        group.barrier().wait()
    return ones.item()


def sums(store: Callable[[int], Store]) -> list[float]:
    with ThreadPoolExecutor(2) as members:
        return list(members.map(lambda rank: sum_of(store(rank), rank), range(2)))


def test_group_forms_again_on_one_tcp_store() -> None:
    host = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    stores = [host, TCPStore("127.0.0.1", host.port, 2, wait_for_workers=False)]
    assert [sums(stores.__getitem__) for _ in range(3)] == [[2.0, 2.0]] * 3


def test_group_forms_when_another_group_has_the_port_of_the_stale_address() -> None:
    with WorldProcessGroup.from_store(store := HashStore(), 0, 1) as other:
        assert other.world.acceptor is not None
        store.set(ADDRESS_KEY, f"another-secret 127.0.0.1 {other.world.acceptor.port}")
        assert sums(lambda _: store) == [2.0, 2.0]


def join_default_groups(url: str, rank: int, rounds: int, report: int) -> None:
    """In a forked process: form the default group `rounds` times, and write one byte for each.

    The host of the store keeps it. Otherwise torch fails if the other member connects to a store that is about to end.
    """
    stores = []
    for _ in range(rounds):
        dist.init_process_group(
            "multiworld", init_method=url, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_S)
        )
        stores.append(dist.distributed_c10d._get_default_store())
        dist.all_reduce(torch.ones(1))
        os.write(report, b".")
        dist.destroy_process_group()
        time.sleep(0.0 if rank else LATE_S)


def start(log: int, url: str, rank: int, rounds: int = 1) -> tuple[ForkedProcess, int]:
    reader, writer = os.pipe()
    process = ForkedProcess(NURSERY.fork(f"{__name__}:join_default_groups", [url, rank, rounds], log, writer))
    os.close(writer)
    return process, reader


def test_default_group_forms_again_after_rank_0_was_killed_while_it_formed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with (tmp_path / "log").open("wb") as log:
        killed, _ = start(log.fileno(), f"file://{path}", 0)
        until_s = time.monotonic() + PATIENCE_S
        while not (path.exists() and ADDRESS_KEY.encode() in path.read_bytes()) and time.monotonic() < until_s:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(PATIENCE_S) == -signal.SIGKILL
        late, reader = start(log.fileno(), f"file://{path}", 1)
        time.sleep(LATE_S)
        first, _ = start(log.fileno(), f"file://{path}", 0)
        assert (first.wait(PATIENCE_S), late.wait(PATIENCE_S)) == (0, 0), (tmp_path / "log").read_text()
    assert os.read(reader, 8) == b"."


def test_default_group_forms_again_on_one_port(tmp_path: Path) -> None:
    url, rounds = f"tcp://127.0.0.1:{free_port(hold=False)}", 3
    with (tmp_path / "log").open("wb") as log, contextlib.ExitStack() as stack:
        members = [start(log.fileno(), url, rank, rounds) for rank in range(2)]
        for process, _ in members:
            stack.callback(process.kill)
        statuses = [process.wait(PATIENCE_S) for process, _ in members]
        assert statuses == [0, 0], (tmp_path / "log").read_text()
    assert [os.read(reader, 8) for _, reader in members] == [b"." * rounds] * 2
