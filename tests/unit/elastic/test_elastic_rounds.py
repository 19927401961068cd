"""Property tests: which operations have finished at all members, quantization error, and bucketing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.elastic.allreduce.bucket import BUCKET_BYTES, Workspace, make_buckets
from multiworld.elastic.allreduce.quantization import BLOCK, Quantization, dequantize, quantize, wire_bytes
from multiworld.elastic.protocol.rounds import Round, RoundMismatch


def rounds(flags: list[list[bool]], number: int = 4, signature: str = "same") -> list[Round]:
    made = [Round(number, len(each), signature) for each in flags]
    for round_, each in zip(made, flags, strict=True):
        round_.finished = list(each)
    return made


@given(
    st.integers(1, 40).flatmap(
        lambda count: st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=1, max_size=6)
    )
)
def test_finished_operations_are_those_finished_at_all_members(flags: list[list[bool]]) -> None:
    everybody = rounds(flags)
    summaries = [each.summary() for each in everybody]
    verdicts = {each.flags_agree(summaries) for each in everybody}
    assert verdicts == {all(each == flags[0] for each in flags)}
    said = [each.flags() for each in everybody]
    for each in everybody:
        each.intersect(said)
        assert each.finished == [all(column) for column in zip(*flags, strict=True)]


def test_members_with_different_operations_detect_it_alike() -> None:
    for other in (Round(5, 2, "same"), Round(4, 3, "same"), Round(4, 2, "other")):
        everybody = [*rounds([[False] * 2] * 2), other]
        for each in everybody:
            with pytest.raises(RoundMismatch) as raised:
                each.flags_agree([one.summary() for one in everybody])
            assert raised.value.rank == 2


def test_round_that_another_member_committed_is_committed_here_with_what_there_is() -> None:
    (round_,) = rounds([[True, True]])
    assert not round_.is_committed(4)
    assert round_.is_committed(5)
    (unfinished,) = rounds([[True, False]])
    with pytest.raises(RoundMismatch, match="not finished on this member"):
        unfinished.is_committed(5)


# -- quantization ----------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3 * BLOCK),
    st.integers(0, 2**31),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e20]),
    st.sampled_from([0.0, -5.0, 1000.0]),
    st.sampled_from(list(Quantization)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_quantization_error_is_within_the_documented_bound(
    count: int, seed: int, scale: float, shift: float, quantization: Quantization, dtype: torch.dtype
) -> None:
    if quantization is Quantization.BFLOAT16 and dtype is torch.bfloat16:
        return
    values = ((torch.randn(count, generator=torch.Generator().manual_seed(seed)) + shift) * scale).to(dtype)
    wire = quantize(values, quantization)
    assert (wire.dtype, wire.numel()) == (torch.uint8, wire_bytes(count, dtype, quantization))
    back = dequantize(wire, count, dtype, quantization)
    assert back.dtype is dtype
    rounding = {torch.float32: 2**-21, torch.float64: 2**-50, torch.bfloat16: 2**-7}[dtype]
    for begin in range(0, count, BLOCK):
        block, came = values[begin : begin + BLOCK].double(), back[begin : begin + BLOCK].double()
        low, high, largest = float(block.min()), float(block.max()), float(block.abs().max())
        if quantization is Quantization.MIN_MAX:
            bound = torch.full_like(block, (high - low) / 510)
        elif quantization is Quantization.ZERO_POINT_SCALE:
            bound = torch.full_like(block, (max(high, 0.0) - min(low, 0.0)) / 255)
        else:
            bound = block.abs() / 256
        assert bool(((came - block).abs() <= bound + largest * rounding).all())


@pytest.mark.parametrize("quantization", [Quantization.MIN_MAX, Quantization.ZERO_POINT_SCALE])
def test_only_blocks_with_nan_or_infinity_become_nan(quantization: Quantization) -> None:
    values = torch.ones(2 * BLOCK)
    values[5] = torch.inf
    back = dequantize(quantize(values, quantization), values.numel(), values.dtype, quantization)
    assert bool(back[:BLOCK].isnan().all())
    assert torch.equal(back[BLOCK:], values[BLOCK:])


def test_zero_stays_zero_with_symmetric_quantization() -> None:
    values = torch.cat((torch.zeros(100), torch.linspace(-3.3, 7.7, 100)))
    back = dequantize(quantize(values, Quantization.ZERO_POINT_SCALE), 200, values.dtype, Quantization.ZERO_POINT_SCALE)
    assert torch.equal(back[:100], values[:100])


# -- buckets ---------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([torch.float32, torch.int64])), max_size=40))
def test_buckets_hold_every_tensor_once_and_return_it_unchanged(
    kinds: list[tuple[int, torch.dtype]],
) -> None:
    tensors = [torch.arange(count).to(dtype) for count, dtype in kinds]
    made = make_buckets("test", tensors)
    assert sorted(index for bucket in made for index in bucket.indices) == list(range(len(tensors)))
    assert all(bucket.count for bucket in made), "an empty tensor shares the result of another one"
    for bucket, room in zip(made, Workspace().allocate(made), strict=True):
        assert bucket.nbytes <= BUCKET_BYTES or len(bucket.tensors) == 1
        bucket.pack(room)
        assert torch.equal(room, bucket.operand())
        bucket.unpack(room + 1)
    for (count, dtype), tensor in zip(kinds, tensors, strict=True):
        assert torch.equal(tensor, torch.arange(count).to(dtype) + 1)
