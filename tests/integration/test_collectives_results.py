"""Every operation gives the locally computed result for any size, dtype, shape, layout, root and reduction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld import World, WorldManager
from multiworld.collectives import allreduce, transfers
from tests.integration.crew import MAX_SIZE, Crew, T
from tests.integration.crew import Part as PartOf

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8)
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
SHAPES = ((), (0,), (1,), (7,), (2, 3), (3, 0, 2), (4, 3, 2), (1500,))

some = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Case:
    """One world and the properties of its tensors."""

    size: int
    root: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    verified: bool
    small_pieces: bool
    seed: int

    def run(self, crew: Crew, part: PartOf[T]) -> list[T]:
        """Run all ranks; with `small_pieces`, short tensors use the algorithms for long tensors."""
        with pytest.MonkeyPatch.context() as patch:
            if self.small_pieces:
                patch.setattr(allreduce, "ONE_SHOT_BYTES", 8)
                patch.setattr(allreduce, "CHUNK_BYTES", 64)
                patch.setattr(allreduce, "SLICE_ELEMENTS", 5)
                patch.setattr(transfers, "_CHUNK_BYTES", 100)
            return crew.run(self.size, part, verified=self.verified)

    def values(self, *, powers: bool = False) -> list[Tensor]:
        """One contiguous tensor per rank whose values every dtype can add, or multiply (`powers` of 2), exactly."""
        generator = torch.Generator().manual_seed(self.seed)
        low, high = (0, 4) if not self.dtype.is_signed or self.dtype is torch.bool else (-3, 4)
        made = []
        for _ in range(self.size):
            numbers = torch.randint(low, high, self.shape, generator=generator)
            made.append((2 ** numbers.clamp(0, 1) if powers else numbers).to(self.dtype))
        return made

    def laid_out(self, tensor: Tensor) -> Tensor:
        """A copy with the same content and this case's memory layout."""
        if self.layout == "transposed" and tensor.dim() > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if self.layout == "strided" and tensor.numel() and tensor.dim():
            wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] * 2), dtype=tensor.dtype)
            wide[..., ::2] = tensor
            return wide[..., ::2]
        return tensor.clone()

    def blank(self) -> Tensor:
        return self.laid_out(torch.ones(self.shape).to(self.dtype))


def cases(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Case]:
    return st.integers(1, MAX_SIZE).flatmap(
        lambda size: st.builds(
            Case,
            size=st.just(size),
            root=st.integers(0, size - 1),
            dtype=st.sampled_from(dtypes),
            shape=st.sampled_from(SHAPES),
            layout=st.sampled_from(("contiguous", "transposed", "strided")),
            verified=st.booleans(),
            small_pieces=st.booleans(),
            seed=st.integers(0, 1000),
        )
    )


def same(got: Tensor, expected: Tensor) -> bool:
    return got.dtype == expected.dtype and got.shape == expected.shape and _bytes(got) == _bytes(expected)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).tolist())


def reduced(name: str, tensors: Sequence[Tensor]) -> Tensor:
    if name == "AVG":
        total = reduced("SUM", tensors)
        if total.is_complex():  # real and imaginary part separately: complex division rounds differently
            return torch.view_as_complex(torch.view_as_real(total).div(len(tensors)))
        return total.div(len(tensors))
    result = tensors[0]
    for tensor in tensors[1:]:
        result = REDUCTIONS[name](result, tensor)
    return result


reductions = st.one_of(
    st.tuples(st.sampled_from(("SUM", "PRODUCT", "MIN", "MAX", "AVG")), cases(FLOATS)),
    st.tuples(st.sampled_from(("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")), cases(INTEGERS)),
    st.tuples(st.sampled_from(("MIN", "MAX", "BAND", "BOR", "BXOR")), cases((torch.bool,))),
    st.tuples(st.sampled_from(("SUM", "AVG")), cases((torch.complex64,))),
)


@some
@given(reduction=reductions, to_root=st.booleans())
def test_all_reduce_and_reduce_give_the_reduction_to_every_rank_or_the_root(
    crew: Crew, reduction: tuple[str, Case], to_root: bool
) -> None:
    name, case = reduction
    values, op = case.values(powers=name == "PRODUCT"), getattr(ReduceOp, name)

    async def part(manager: WorldManager, world: World) -> Tensor:
        tensor = case.laid_out(values[world.rank])
        if to_root:
            await manager.communicator.reduce(tensor, case.root, op, world.name)
        else:
            await manager.communicator.all_reduce(tensor, op, world.name)
        return tensor

    results, expected = case.run(crew, part), reduced(name, values)
    assert all(same(got, expected) for got in (results[case.root : case.root + 1] if to_root else results))


@some
@given(reduction=reductions, whole=st.booleans())
def test_reduce_scatter_gives_each_rank_its_chunk_of_the_reduction(
    crew: Crew, reduction: tuple[str, Case], whole: bool
) -> None:
    name, case = reduction
    values = [
        Case(**{**case.__dict__, "seed": case.seed + rank}).values(powers=name == "PRODUCT")
        for rank in range(case.size)
    ]

    async def part(manager: WorldManager, world: World) -> tuple[Tensor, bool]:
        output, given_ = case.blank(), [case.laid_out(each) for each in values[world.rank]]
        if whole:
            joined = torch.cat([each.reshape(-1) for each in given_])
            await manager.communicator.reduce_scatter_tensor(output, joined, getattr(ReduceOp, name), world.name)
            given_ = (
                [each.reshape(case.shape) for each in torch.split(joined, output.numel())] if output.numel() else given_
            )
        else:
            await manager.communicator.reduce_scatter(output, given_, getattr(ReduceOp, name), world.name)
        return output, all(same(now, was) for now, was in zip(given_, values[world.rank], strict=True))

    results = case.run(crew, part)
    for rank, (output, inputs_unchanged) in enumerate(results):
        assert same(output, reduced(name, [values[sender][rank] for sender in range(case.size)]))
        assert inputs_unchanged


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"])
@some
@given(each=cases(MOVED))
def test_tensors_arrive_unchanged_where_they_belong(crew: Crew, name: str, each: Case) -> None:
    values = each.values()

    async def part(manager: WorldManager, world: World) -> list[Tensor]:
        here, at_root = manager.communicator, world.rank == each.root
        own, blanks = each.laid_out(values[world.rank]), [each.blank() for _ in range(each.size)]
        match name:
            case "broadcast":
                await here.broadcast(own, each.root, world.name)
                return [own]
            case "all_gather":
                await here.all_gather(blanks, own, world.name)
                return [*blanks, own]
            case "all_gather_into_tensor":
                whole = torch.zeros((each.size, *each.shape)).to(each.dtype)
                await here.all_gather_into_tensor(whole, own, world.name)
                return [*whole, own]
            case "gather":
                await here.gather(own, blanks if at_root else None, each.root, world.name)
                return [*blanks, own] if at_root else [own]
            case _:
                sent = [each.laid_out(value) for value in values] if at_root else None
                await here.scatter(blanks[0], sent, each.root, world.name)
                return blanks[:1]

    for rank, results in enumerate(each.run(crew, part)):
        expected = [*values, values[rank]] if len(results) > 1 else [values[each.root if name == "broadcast" else rank]]
        assert all(same(got, value) for got, value in zip(results, expected, strict=True))


@some
@given(case=cases(MOVED), spread=st.integers(0, 5))
def test_all_to_all_exchanges_tensors_between_all_ranks(crew: Crew, case: Case, spread: int) -> None:
    def message(src: int, dst: int) -> Tensor:
        count = (src * spread + dst) % 4 if spread else 3
        return torch.arange(src + dst, src + dst + count).remainder(4).to(case.dtype)

    async def part(manager: WorldManager, world: World) -> list[Tensor]:
        outputs = [torch.empty_like(message(src, world.rank)) for src in range(case.size)]
        inputs = [message(world.rank, dst) for dst in range(case.size)]
        await manager.communicator.all_to_all(outputs, inputs, world.name)
        return outputs

    for rank, outputs in enumerate(case.run(crew, part)):
        assert all(same(got, message(src, rank)) for src, got in enumerate(outputs))


@some
@given(case=cases(MOVED), tag=st.integers(0, 2**29 - 1))
def test_send_recv_around_the_ring_delivers_each_tensor(crew: Crew, case: Case, tag: int) -> None:
    if case.size == 1:
        return
    values = case.values()

    async def part(manager: WorldManager, world: World) -> Tensor:
        tensor, name = case.blank(), world.name
        sending = manager.communicator.isend(
            case.laid_out(values[world.rank]), (world.rank + 1) % case.size, name, tag=tag
        )
        await manager.communicator.recv(tensor, (world.rank - 1) % case.size, name, tag=tag)
        await sending
        assert sending.done()
        assert sending.status == "done"
        return tensor

    for rank, got in enumerate(case.run(crew, part)):
        assert same(got, values[rank - 1])


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("size", range(1, MAX_SIZE + 1))
def test_barrier_waits_for_all_ranks(crew: Crew, size: int, verified: bool) -> None:
    came: list[int] = []

    async def part(manager: WorldManager, world: World) -> int:
        came.append(world.rank)
        await manager.communicator.barrier(world.name)
        return len(came)

    assert crew.run(size, part, verified=verified) == [size] * size


def test_results_are_correct_when_inputs_and_outputs_share_memory(crew: Crew) -> None:
    async def part(manager: WorldManager, world: World) -> list[list[float]]:
        here, name, rank = manager.communicator, world.name, world.rank
        places = [torch.full((5,), 10.0 * rank + place) for place in range(3)]
        await here.all_to_all(places, places, name)
        gathered = [torch.full((5,), float(rank)) for _ in range(3)]
        await here.all_gather(gathered, gathered[(rank + 1) % 3], name)
        scattered = [torch.full((5,), 10.0 * rank + place) for place in range(3)]
        await here.reduce_scatter(scattered[(rank + 1) % 3], scattered, world_name=name)
        return [[each[4].item() for each in tensors] for tensors in (places, gathered, [scattered[(rank + 1) % 3]])]

    for rank, results in enumerate(crew.run(3, part)):
        assert results == [[rank, 10.0 + rank, 20.0 + rank], [0.0, 1.0, 2.0], [30.0 + 3 * rank]]
