"""Another process lies on an edge: in messages, and in the memory that it shares. Only that edge breaks, and nothing is kept."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from multiworld_serving.common.edges import Edges, HolderUnreachableError, pool
from multiworld_serving.common.wire import ALL_ROWS, RowRef
from tests.integration.lying_producer import LIES, SECRET, SHAPE
from tests.unit.edges.edge_parts import edges, until


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """A process with a port for each lie."""
    program = [sys.executable, "-m", "tests.integration.lying_producer"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


async def fetch(consumer: Edges, holder: str, number: int) -> torch.Tensor:
    return await consumer.fetch(holder, [RowRef(number, ALL_ROWS)], torch.float32, SHAPE)


def held() -> tuple[int, int]:
    """Descriptors of this process, and mappings of shared memory."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/memfd:")


@pytest.mark.parametrize("lie", LIES)
async def test_only_the_edge_breaks_and_nothing_is_kept_when_the_producer_lies(
    lie: str, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_FETCH_S", 0.2 if lie == "silence" else 60.0)
    monkeypatch.setattr(pool, "_TOTAL_S", 120.0)
    monkeypatch.setattr(pool, "_OPEN_S", 60.0)
    async with edges("c", secret=SECRET) as consumer, edges("p", secret=SECRET) as honest:
        number = honest.store.put("owner", torch.ones(SHAPE))
        assert number is not None
        assert torch.equal(await fetch(consumer, honest.holder, number), torch.ones(SHAPE))
        before = held()
        with pytest.raises(HolderUnreachableError, match="broke"):
            await fetch(consumer, f"127.0.0.1:{ports[lie]}/0123456789abcdef", 1)
        assert torch.equal(await fetch(consumer, honest.holder, number), torch.ones(SHAPE))
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
