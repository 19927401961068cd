"""Results of elastic all-reduces without failures; all members have identical bits."""

import asyncio
import functools
import operator
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld import BrokenWorldException, WorldExistsError, ask
from multiworld.collectives.quantization import Quantization
from multiworld.elastic import (
    DesyncError,
    ElasticManager,
    ElasticRendezvous,
    ElasticWorld,
    RendezvousError,
    ViewChangeError,
    calls,
)
from multiworld.elastic.calls import DTYPES
from multiworld.elastic.protocol.messages import Admitted, Join, MemberInfo, decode, encode
from tests.torture import data
from tests.torture.data import LAYOUTS
from tests.waiting import until

FLOATING = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)
OPS = {
    "SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX, "PROD": ReduceOp.PRODUCT
}  # fmt: skip


def operand(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (values * 9).to(dtype) if dtype.is_floating_point else (values * 9).round().to(dtype)


def reference(operands: list[Tensor], op: str) -> Tensor:
    """Computed in float64, or with integers."""
    wide = [each.double() if each.is_floating_point() else each for each in operands]
    if op == "AVG":
        total = functools.reduce(operator.add, wide)
        return total.div(len(wide), rounding_mode=None if total.is_floating_point() else "trunc")
    combine: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": operator.add, "PROD": operator.mul, "MIN": torch.minimum, "MAX": torch.maximum
    }  # fmt: skip
    return functools.reduce(combine[op], wide)


def check_equal(results: list[Tensor], expected: Tensor) -> None:
    for result in results[1:]:
        assert torch.equal(result.view(torch.uint8), results[0].view(torch.uint8)), "the members differ"
    dtype = results[0].dtype
    if dtype.is_floating_point:
        tolerance = 40 * torch.finfo(dtype).eps
        assert torch.allclose(results[0].double(), expected, rtol=tolerance, atol=tolerance * 1000)
    else:
        assert torch.equal(results[0], expected)


# -- whole worlds --------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def worlds() -> AsyncIterator[list[ElasticWorld]]:
    """The three members of a world, by rank."""
    async with ElasticRendezvous(initial_members=3, heartbeat_timeout_s=30.0) as rendezvous:
        managers = [ElasticManager(heartbeat_timeout_s=30.0) for _ in range(3)]
        joined = await asyncio.gather(*(manager.join("w", port=rendezvous.port) for manager in managers))
        yield sorted(joined, key=lambda world: world.rank)
        for manager in managers:
            await manager.leave("w")


async def reduce(
    worlds: list[ElasticWorld], tensors: list[list[Tensor]], op: str = "SUM", **settings: Any
) -> list[Any]:
    """Reduce the tensors of each member. Returns the outcomes."""
    calls = zip(worlds, tensors, strict=True)
    return await asyncio.gather(*(w.all_reduce_multiple_with_retry(own, OPS[op], **settings) for w, own in calls))


@pytest.mark.parametrize("op", OPS)
async def test_tensors_of_all_dtypes_and_shapes_are_reduced_in_one_call(worlds: list[ElasticWorld], op: str) -> None:
    def tensors(rank: int) -> list[Tensor]:
        made = [
            operand(10 * rank + i, count, dtype) for dtype in DTYPES for i, count in enumerate((3, 1000, 0, 400_000))
        ]
        made += [operand(rank, 24, torch.float32).view(2, 3, 4), operand(rank, 60, torch.float32).view(6, 10).t()]
        return [*made, torch.tensor(float(rank)), operand(rank, 50, torch.float32)[::2].requires_grad_()]

    everybody = [tensors(rank) for rank in range(3)]
    expected = [reference([each.detach() for each in same], op) for same in zip(*everybody, strict=True)]
    outcomes = await reduce(worlds, everybody, op)
    for index, right in enumerate(expected):
        check_equal([own[index].detach().contiguous().view(-1) for own in everybody], right.reshape(-1))
    for outcome in outcomes:
        assert (outcome.success, outcome.retries, outcome.world_size) == (True, 0, 3)
        assert outcome.contributors == (3,) * len(expected)
        assert outcome.tx_bytes > 0 < outcome.rx_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_layout_and_dtype_is_reduced_and_memory_around_it_is_unchanged(
    worlds: list[ElasticWorld], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "layouts", (layout,))
    dtypes = [each for each in data.REDUCED["SUM"] if each in DTYPES]
    keys = [(dtype, count) for dtype in dtypes for count in ((1,) if layout == "0-d" else (24, 1, 0))]
    contents = [[data.reduced(f"{rank}/{key}", *key, "SUM") for key in keys] for rank in range(3)]
    boxes = [[data.Box(f"{layout}/{rank}", content) for content in own] for rank, own in enumerate(contents)]
    await reduce(worlds, [[box.tensor for box in own] for own in boxes])
    for own in boxes:
        for box, brought in zip(own, zip(*contents, strict=True), strict=True):
            box.check(data.reduction(list(brought), "SUM"), exact=False)


@pytest.mark.parametrize("quantization", get_args(Quantization))
@pytest.mark.parametrize("op", ["SUM", "AVG", "MIN", "MAX"])
async def test_quantized_results_have_the_documented_error_and_equal_bits(
    worlds: list[ElasticWorld], op: str, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands are strided, empty, of one element, of all floating dtypes, sent whole, in shares, and in several chunks."""
    monkeypatch.setattr("multiworld.collectives.allreduce.CHUNK_BYTES", 1 << 16)

    def tensors(rank: int) -> list[Tensor]:
        made = [operand(10 * rank, count, dtype) for dtype in FLOATING for count in (0, 1, 5000, 150_000)]
        return [
            *made,
            operand(rank, 1_700_000, torch.float32),
            operand(rank, 60, torch.float32).view(6, 10).t(),
            operand(rank, 50, torch.float32)[::2],
        ]

    everybody = [tensors(rank) for rank in range(3)]
    receive = [[torch.zeros(each.shape, dtype=each.dtype) for each in own] for own in everybody]
    outcomes = await asyncio.gather(
        *(
            world.all_reduce_multiple_with_retry(own, OPS[op], receive=target, quantization=quantization)
            for world, own, target in zip(worlds, everybody, receive, strict=True)
        )
    )
    assert all(outcome.contributors == (3,) * len(receive[0]) for outcome in outcomes)
    assert all(map(torch.equal, everybody[0], tensors(0))), "an operand changed"
    fold = {"SUM": "sum", "AVG": "mean"}.get(op, "amax")
    for operands, results in zip(zip(*everybody, strict=True), zip(*receive, strict=True), strict=True):
        if not results[0].numel():
            continue
        exact = reference(list(operands), op)
        spans = [each.double() for each in operands]
        if quantization == "min_max":
            spans = [each.max() - each.min() for each in spans]
        elif quantization == "zero_point_scale":
            spans = [each.max().clamp(min=0) - each.min().clamp(max=0) for each in spans]
        span = getattr(torch.stack([each.abs() for each in spans]), fold)(dim=0)
        limit = span / (127 if quantization == "bfloat16" else 254)
        rounding = max(torch.finfo(results[0].dtype).eps, 1e-6) * (exact.abs() + limit)
        assert (results[0].double() - exact).abs().le(limit + rounding).all()
        assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("quantization", [None, *get_args(Quantization)])
async def test_results_are_written_to_other_tensors_by_handles(
    worlds: list[ElasticWorld], quantization: Quantization | None
) -> None:
    received = [torch.zeros(3) for _ in worlds]
    handles = [
        world.all_reduce_async(torch.tensor(2.0).expand(3), receive=own, quantization=quantization)
        for world, own in zip(worlds, received, strict=True)
    ]
    await asyncio.gather(*map(_await, handles))
    for own in received:
        assert own.tolist() == pytest.approx([6.0] * 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
async def test_short_dtypes_are_reduced_in_float32(worlds: list[ElasticWorld], dtype: torch.dtype) -> None:
    """In the dtype itself, 2048 + 1 is 2048 for the first two members, and the sum that is averaged overflows float16."""
    for count in (4, 500_000):
        small = [torch.full((count,), value, dtype=dtype) for value in (2048.0, 1.0, 15.0)]
        await reduce(worlds, [[own] for own in small])
        assert all(own.eq(2064).all() for own in small)
        large = [torch.full((count,), 49152.0, dtype=dtype) for _ in worlds]
        await reduce(worlds, [[own] for own in large], "AVG")
        assert all(own.eq(49152).all() for own in large)


async def test_quantized_numbers_that_are_not_finite_give_nan_on_all_members(worlds: list[ElasticWorld]) -> None:
    for poison in (torch.nan, torch.inf, 3.0e38):  # the last one: the sum of three overflows
        everybody = [torch.full((5,), poison if world.rank or poison < torch.inf else 1.0) for world in worlds]
        await reduce(worlds, [[own] for own in everybody], quantization="min_max")
        assert not any(tensor.isfinite().any() for tensor in everybody)


@pytest.mark.parametrize("mismatch", ["min_max", "bfloat16", None])
async def test_all_members_fail_alike_when_their_quantizations_differ(
    worlds: list[ElasticWorld], mismatch: Quantization | None
) -> None:
    results = await asyncio.gather(
        worlds[0].all_reduce_with_retry(torch.ones(2), quantization=mismatch),
        *(world.all_reduce_with_retry(torch.ones(2), quantization="zero_point_scale") for world in worlds[1:]),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [DesyncError] * 3, results


async def test_handle_fails_when_another_member_quantizes_otherwise(worlds: list[ElasticWorld]) -> None:
    handles = [
        world.all_reduce_async(torch.ones(2), quantization="min_max" if world.rank else "zero_point_scale")
        for world in worlds
    ]
    results = await asyncio.gather(*map(_await, handles), return_exceptions=True)
    assert all(isinstance(result, BrokenWorldException) for result in results), results
    assert any("zero_point_scale" in str(result) and "min_max" in str(result) for result in results), results


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_tensors_on_a_gpu_are_not_copied_on_the_event_loop(
    worlds: list[ElasticWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()

    def observe(original: Callable[..., Any], *arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return original(*arguments)

    for name in ("flatten", "write_back"):
        monkeypatch.setattr(calls, name, functools.partial(observe, getattr(calls, name)))
    tensors = [torch.full((4,), float(world.rank), device="cuda") for world in worlds]
    await reduce(worlds, [[own] for own in tensors])
    assert [own.tolist() for own in tensors] == [[3.0] * 4] * 3
    assert threading.current_thread() not in threads


async def test_handles_report_progress_and_agree_completes_a_round(worlds: list[ElasticWorld]) -> None:
    """The members start the all-reduces in different order. Equal tags belong together."""
    tensors = [torch.full((4,), float(world.rank)) for world in worlds]
    first = worlds[0].all_reduce_async(tensors[0], tag=7)
    await asyncio.sleep(0)
    assert (first.status, first.done()) == ("pending", False)
    others = [world.all_reduce_async(torch.ones(4), tag=8) for world in worlds[1:]]
    others += [world.all_reduce_async(own, tag=7) for world, own in zip(worlds[1:], tensors[1:], strict=True)]
    others += [worlds[0].all_reduce_async(torch.ones(4), tag=8)]
    await asyncio.gather(*(_await(handle) for handle in (first, *others)))
    assert (first.status, first.world_size, first.view_number) == ("done", 3, 1)
    assert [own.tolist() for own in tensors] == [[3.0] * 4] * 3

    flags = [[True, True, False], [True, False, False], [True, True, True]]
    assert (
        await asyncio.gather(*(w.agree(own) for w, own in zip(worlds, flags, strict=True)))
        == [[True, False, False]] * 3
    )
    assert await asyncio.gather(*(w.agree([True] * 3) for w in worlds)) == [[True] * 3] * 3
    again = await asyncio.gather(*(world.all_reduce_with_retry(torch.ones(2)) for world in worlds))
    assert all(outcome.success for outcome in again)


async def _await(handle: "asyncio.Future[None] | object") -> None:
    await handle  # type: ignore[misc]


async def test_leave_succeeds_when_it_is_called_twice_at_once_and_again() -> None:
    async with ElasticRendezvous() as rendezvous, ElasticManager() as manager:
        await manager.join("w", port=rendezvous.port)
        await asyncio.gather(manager.leave("w"), manager.leave("w"))
        await manager.leave("w")
        assert (await manager.join("w", port=rendezvous.port)).size == 1


async def test_member_with_a_wrong_secret_is_refused() -> None:
    async with ElasticRendezvous(secret="open sesame") as rendezvous:
        async with ElasticManager(secret="open barley") as stranger:
            with pytest.raises(RendezvousError, match="wrong secret"):
                await stranger.join("w", port=rendezvous.port)
        async with ElasticManager(secret="open sesame") as guest:
            world = await guest.join("w", port=rendezvous.port)
            assert (world.rank, world.size) == (0, 1)
            with pytest.raises(WorldExistsError):
                await guest.join("w", port=rendezvous.port)


async def test_newcomer_gets_an_error_when_no_view_admits_it_and_can_retry() -> None:
    async with ElasticRendezvous(initial_members=2) as rendezvous, ElasticManager() as one, ElasticManager() as two:
        with pytest.raises(ViewChangeError, match="no view included this member"):
            await one.join("w", port=rendezvous.port, timeout_s=0.5)
        await until(lambda: not rendezvous.connected("w"))  # otherwise the first view may still include it
        worlds = await asyncio.gather(*(each.join("w", port=rendezvous.port) for each in (one, two)))
        assert [world.size for world in worlds] == [2, 2]


async def test_invalid_arguments_are_rejected_without_affecting_others(worlds: list[ElasticWorld]) -> None:
    world, one = worlds[0], torch.ones(3)
    for tensors, settings, error, words in (
        ([one], {"op": ReduceOp.BAND}, ValueError, "only SUM, AVG"),
        ([one], {"op": torch.ones(999)}, ValueError, r"tensor\(\[.{1,40} is not supported"),
        ([one], {"max_in_flight": 0}, ValueError, "at least 1"),
        ([one, one], {}, ValueError, "same memory"),
        ([one], {"receive": [one, torch.ones(3)]}, ValueError, "each of 1 tensors, got 2"),
        ([one], {"receive": [torch.ones(3, 1)]}, ValueError, r"\[3\] on cpu, got torch.float32 \[3, 1\]"),
        ([one, one], {"receive": [torch.ones(3)] * 2}, ValueError, "same memory"),
        ([one], {"quantization": "int4"}, ValueError, "min_max, zero_point_scale, bfloat16, got 'int4'"),
        ([one], {"quantization": "min_max", "op": ReduceOp.PRODUCT}, ValueError, "product has no bound"),
        ([one.int()], {"quantization": "bfloat16"}, TypeError, "int32; expected one of float32, .*bfloat16$"),
        ([torch.ones(3, dtype=torch.bool)], {}, TypeError, "expected one of float32"),
        ([torch.ones(1).expand(4)], {}, ValueError, "same memory"),
        ([torch.ones(4, dtype=torch.complex64).conj().imag], {}, ValueError, "negated view"),
    ):
        with pytest.raises(error, match=words):
            await world.all_reduce_multiple_with_retry(tensors, **settings)
    outcomes = await asyncio.gather(*(each.all_reduce_with_retry(torch.ones(2)) for each in worlds))
    assert all(outcome.success for outcome in outcomes)


async def test_all_reduce_is_refused_while_another_one_with_its_tag_is_in_flight(worlds: list[ElasticWorld]) -> None:
    first = worlds[0].all_reduce_async(torch.ones(2), tag=5)
    with pytest.raises(ValueError, match="with tag 5 is in flight"):
        worlds[0].all_reduce_async(torch.ones(2), tag=5)
    others = [world.all_reduce_async(torch.ones(2), tag=5) for world in worlds[1:]]
    await asyncio.gather(*(_await(handle) for handle in (first, *others)))
    await asyncio.gather(*(_await(world.all_reduce_async(torch.ones(2), tag=5)) for world in worlds))


async def test_all_members_fail_alike_when_one_is_at_a_boundary_and_the_others_reduce(
    worlds: list[ElasticWorld],
) -> None:
    results = await asyncio.gather(
        worlds[0].all_reduce_with_retry(torch.ones(2)),
        worlds[1].update_membership(),
        worlds[2].all_reduce_with_retry(torch.ones(2)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [DesyncError] * 3, results
    assert {str(result) for result in results} == {
        "world 'w': rank 1: its operation or its tensors differ from those of rank 0"
    }


async def test_slow_disk_delays_only_its_own_world_and_its_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def fsync(_fd: int) -> None:
        began.set()
        may_end.wait(60.0)
        ended.set()

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("multiworld.elastic.rendezvous._SAVE_TIMEOUT_S", 60.0)
    async with ElasticRendezvous(state_file=tmp_path / "state") as rendezvous, ElasticManager() as manager:
        joining = asyncio.create_task(manager.join("w", port=rendezvous.port))
        await until(began.is_set)
        question = encode(Join("other", MemberInfo("m", "h", 1), resume=False)).decode()
        assert decode(await ask("127.0.0.1", rendezvous.port, question)) == Admitted()
        assert not ended.is_set(), "the rendezvous server was blocked"
        assert not joining.done(), "sent before it was persisted"
        may_end.set()
        assert (await joining).size == 1
