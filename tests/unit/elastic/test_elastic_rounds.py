"""Rounds of members that do not match, and bucketing. What members agree on: tests/simulation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multiworld.elastic.calls import BUCKET_BYTES, flatten, make_buckets, write_back
from multiworld.elastic.protocol.rounds import Round
from multiworld.execution.failures import MismatchError


def test_members_with_different_operations_detect_it_alike() -> None:
    for other in (Round(5, 2, "same"), Round(4, 3, "same"), Round(4, 2, "other")):
        everybody = [Round(4, 2, "same"), Round(4, 2, "same"), other]
        for each in everybody:
            with pytest.raises(MismatchError) as raised:
                each.flags_agree([one.summary() for one in everybody])
            assert raised.value.rank == 2


def test_round_that_another_member_committed_is_committed_here_with_what_there_is() -> None:
    round_ = Round(4, 2, "same")
    assert not round_.is_committed(4)
    with pytest.raises(MismatchError, match="not finished on this member"):
        round_.is_committed(5)
    round_.finished = [True, True]
    assert round_.is_committed(5)


# -- buckets ---------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([torch.float32, torch.int64])), max_size=40))
def test_buckets_hold_every_tensor_once_and_return_it_unchanged(kinds: list[tuple[int, torch.dtype]]) -> None:
    tensors = [torch.arange(count).to(dtype) for count, dtype in kinds]
    made = make_buckets(tensors)
    assert [(each.numel(), each.dtype) for bucket in made for each in bucket] == kinds
    for bucket in made:
        assert sum(each.nbytes for each in bucket) <= BUCKET_BYTES or len(bucket) == 1
        write_back(bucket, flatten(bucket) + 1)
    for (count, dtype), tensor in zip(kinds, tensors, strict=True):
        assert torch.equal(tensor, torch.arange(count).to(dtype) + 1)
