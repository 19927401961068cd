"""Property tests: which operations have finished at all members, and bucketing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multiworld.elastic.operations import BUCKET_BYTES, make_buckets
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


# -- buckets ---------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([torch.float32, torch.int64])), max_size=40))
def test_buckets_hold_every_tensor_once_and_return_it_unchanged(
    kinds: list[tuple[int, torch.dtype]],
) -> None:
    tensors = [torch.arange(count).to(dtype) for count, dtype in kinds]
    made = make_buckets("test", tensors)
    assert [(each.numel(), each.dtype) for bucket in made for each in bucket.tensors] == kinds
    for bucket in made:
        assert bucket.nbytes <= BUCKET_BYTES or len(bucket.tensors) == 1
        bucket.unpack(bucket.copy() + 1)
    for (count, dtype), tensor in zip(kinds, tensors, strict=True):
        assert torch.equal(tensor, torch.arange(count).to(dtype) + 1)
