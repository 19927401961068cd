"""Fetching over real edges: several consumers, wrong tokens, lost tensors, and producers that end, freeze or lie."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch
from pydantic import SecretStr
from torch import Tensor

from multiworld import Cause, World
from multiworld_serving.common.edges import edge
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.inputs import ALL_ROWS, RowRef, RowsLostError
from tests.nursery import NURSERY, ForkedProcess
from tests.unit.edges.edge_parts import edges
from tests.waiting import until

ROWS = torch.arange(60, dtype=torch.float32).view(4, 15)


def kept(producer: Edges, tensor: Tensor = ROWS) -> int:
    number = producer.store.put("owner", tensor)
    assert number is not None
    return number


async def fetch(consumer: Edges, holder: str, number: int, *, take: bool = False) -> Tensor:
    return await consumer.fetch(holder, [RowRef(number, ALL_ROWS)], ROWS.dtype, tuple(ROWS.shape), take=take)


async def test_consumers_get_what_the_producer_keeps_and_rows_that_are_gone_fail_alone() -> None:
    async with edges("p") as producer, edges("a") as first, edges("b") as second:
        there = kept(producer)
        asked = ((first, there), (first, there + 1), (second, there), (second, there + 2))
        found = await asyncio.gather(
            *(fetch(each, producer.holder, number) for each, number in asked), return_exceptions=True
        )
        assert [isinstance(each, RowsLostError) for each in found] == [False, True, False, True]
        assert all(isinstance(each, Tensor) and torch.equal(each, ROWS) for each in found[::2])


async def test_another_incarnation_or_token_is_refused() -> None:
    async with edges("p") as producer, edges("c") as consumer, edges("d", secret="another") as stranger:
        number = kept(producer)
        address, _, _ = producer.holder.rpartition("/")
        with pytest.raises(RowsLostError, match="has ended"):
            await fetch(consumer, f"{address}/0123456789abcdef", number)
        with pytest.raises(RowsLostError, match="cannot be opened"):
            await fetch(stranger, producer.holder, number)
        with pytest.raises(RowsLostError):
            await fetch(consumer, "nonsense", number)
        assert torch.equal(await fetch(consumer, producer.holder, number), ROWS), "other producers are not affected"


async def test_local_processes_and_those_with_the_configured_token_reach_each_other(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("shared-token-of-this-test\nolder-token-of-this-test\n")
    shared = SecretStr("shared-token-of-this-test")
    async with (
        edges("local", secret="of the supervisor", edge_token=shared) as local,
        edges("external", secret="shared-token-of-this-test") as external,
        edges("rotated", secret="", token_file=tmp_path / "token") as rotated,
        edges("late", secret="older-token-of-this-test") as late,
    ):
        for producer, consumer in ((local, external), (external, local), (rotated, local), (rotated, late)):
            assert torch.equal(await fetch(consumer, producer.holder, kept(producer)), ROWS)


async def test_next_fetch_opens_a_new_edge_when_the_edge_has_broken() -> None:
    async with edges("p") as producer, edges("c") as consumer:
        number = kept(producer)
        await fetch(consumer, producer.holder, number)
        for world in consumer._manager.worlds.values():
            world.fail(Cause.HANG, 0, "it was frozen")
        assert torch.equal(await fetch(consumer, producer.holder, number), ROWS)


async def test_client_does_not_wait_for_a_frozen_producer() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        child = ForkedProcess(NURSERY.fork("tests.unit.edges.producer_program:keep_a_tensor", (), 2, theirs.fileno()))
    try:
        with ours, ours.makefile() as told:
            holder, number = (await asyncio.to_thread(told.readline)).split()
            async with edges("c") as consumer:
                await fetch(consumer, holder, int(number))
                child.send_signal(signal.SIGSTOP)
                with pytest.raises(RowsLostError, match="is silent"):
                    await fetch(consumer, holder, int(number), take=True)
                child.send_signal(signal.SIGCONT)
                with pytest.raises(RowsLostError, match="does not have it any more"):
                    await fetch(consumer, holder, int(number))
    finally:
        child.kill()
        child.wait()


async def test_cancelled_fetch_leaves_the_edge_to_the_others() -> None:
    async with edges("p") as producer, edges("c") as consumer:
        number = kept(producer)
        cancelled = asyncio.create_task(fetch(consumer, producer.holder, number))
        other = asyncio.create_task(fetch(consumer, producer.holder, number))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert torch.equal(await other, ROWS)
        assert len(consumer._edges) == 1


@pytest.mark.parametrize(
    "answer",
    [
        (edge.rows_head(torch.float64, (4, 15)), ROWS.double()),
        (edge.rows_head(torch.int32, (4, 15)), ROWS),
        (edge.rows_head(torch.float32, (3, 15)), ROWS[:3]),
        (edge.rows_head(torch.float32, (15, 4)), ROWS),
        (edge.rows_head(torch.float32, (4, 15)), ROWS[:3]),
        (edge.rows_head(torch.float32, (4, 15)), None),
        (b"", ROWS),
        None,
    ],
)
async def test_only_the_edge_breaks_when_the_producer_lies_or_does_not_answer(
    answer: tuple[bytes, Tensor | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lie(_: Edges, world: World) -> NoReturn:
        await world.recv_view(lambda *_: None, 1)
        if answer is not None:
            await world.start_send_message(*answer, 1)
        await asyncio.Event().wait()
        raise AssertionError

    async with edges("c") as consumer, edges("p") as liar, edges("q") as honest:
        number = kept(liar)
        with monkeypatch.context() as patch:
            patch.setattr(Edges, "_answer", lie)
            patch.setattr(edge, "_FETCH_S", 30.0 if answer else 0.2)
            with pytest.raises(RowsLostError, match="broke"):
                await fetch(consumer, liar.holder, number)
        assert torch.equal(await fetch(consumer, honest.holder, kept(honest)), ROWS)


@pytest.mark.parametrize(
    "question",
    [[[]], [[[1, 0, 0]]], [[[1, 0]] * 2000], [[["1", 0]]], {"refs": [[1, 0]]}, [[[1, 0]] * 40_000]],
    ids=["no rows", "no reference", "too many", "a text", "an object", "too long"],
)
async def test_only_the_edge_breaks_when_the_consumer_lies(question: object) -> None:
    async with edges("p") as producer, edges("c") as consumer:
        number = kept(producer)
        world = await consumer._open_world(producer.holder)
        sent = torch.frombuffer(bytearray(msgspec.msgpack.encode(question)), dtype=torch.uint8)
        world.start_send_message(b"", sent, 0)
        await until(lambda: world.state.ended)
        assert torch.equal(await fetch(consumer, producer.holder, number), ROWS)


async def test_large_output_is_read_in_place_and_its_memory_is_used_again_when_the_consumer_has_dropped_it() -> None:
    async with edges("p") as producer, edges("c") as consumer:

        def large_output(value: float) -> Tensor:
            return producer.allocate((64, 1024), torch.float32).fill_(value)

        output = large_output(7)
        place, number = output.data_ptr(), kept(producer, output)
        found = await consumer.fetch(producer.holder, [RowRef(number, ALL_ROWS)], output.dtype, tuple(output.shape))
        producer.store.release((number,))
        del output
        assert large_output(1).data_ptr() != place, "the consumer still reads this memory"
        assert (found == 7).all()
        del found
        await until(lambda: large_output(1).data_ptr() == place)
