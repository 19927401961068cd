"""What a process keeps for others to fetch: never more than its budget, and nothing that was released."""

import pytest
import torch

from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.edges.store import TensorStore
from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.common.wire.inputs import ALL_ROWS, RowRef
from tests.waiting import until

ROWS = torch.arange(12, dtype=torch.float32).view(4, 3)


def store(budget_bytes: int = 1000) -> TensorStore:
    return TensorStore(budget_bytes, EdgeMetrics(ProgramMetrics()))


def put(kept: TensorStore, tensor: torch.Tensor, owner: object = "a") -> int:
    number = kept.put(owner, tensor)
    assert number is not None
    return number


def test_rows_are_those_that_were_put_in_the_order_of_the_references() -> None:
    kept = store()
    first, second = put(kept, ROWS), put(kept, ROWS + 100)
    whole = kept.rows([RowRef(first, ALL_ROWS)])
    assert whole is not None
    assert whole.data_ptr() == ROWS.data_ptr(), "a single reference is not copied"
    some = kept.rows([RowRef(second, 1), RowRef(first, 3), RowRef(first, 0)])
    assert some is not None
    assert torch.equal(some, torch.stack([ROWS[1] + 100, ROWS[3], ROWS[0]]))


@pytest.mark.parametrize("ref", [RowRef(99, 0), RowRef(0, ALL_ROWS), RowRef(1, 4), RowRef(1, -2), RowRef(-1, 0)])
def test_nothing_is_returned_when_a_row_is_not_there(ref: RowRef) -> None:
    kept = store()
    assert put(kept, ROWS) == 1
    assert kept.rows([RowRef(1, 0), ref]) is None


def test_small_tensors_are_not_kept() -> None:
    kept = TensorStore(1000, EdgeMetrics(ProgramMetrics()), min_bytes=ROWS.nbytes)
    assert kept.put("a", ROWS) is not None
    assert kept.put("a", ROWS[1:]) is None
    assert kept.put("a", ROWS, expires_s=60) is None, "single rows are fetched, and they are small"
    assert kept.used_bytes == ROWS.nbytes


def test_tensor_is_refused_when_the_budget_is_used_up_until_another_is_released() -> None:
    kept = store(2 * ROWS.nbytes)
    first = put(kept, ROWS)
    put(kept, ROWS)
    assert kept.put("a", ROWS) is None
    assert kept.used_bytes == 2 * ROWS.nbytes
    kept.release([first])
    assert kept.put("a", ROWS) is not None


def test_tensor_is_freed_when_all_of_its_rows_are_taken() -> None:
    kept = store()
    number = put(kept, ROWS)
    kept.take([RowRef(number, 0), RowRef(number, 1), RowRef(number, 1)])
    assert len(kept) == 1
    kept.take([RowRef(number, 2), RowRef(number, 3), RowRef(77, 0)])
    assert (len(kept), kept.used_bytes) == (0, 0)


def test_owner_releases_only_its_own_tensors() -> None:
    kept = store()
    mine, other = put(kept, ROWS, "a"), put(kept, ROWS, "b")
    kept.release([mine, other, 55], "a")
    assert kept.rows([RowRef(mine, ALL_ROWS)]) is None
    assert kept.rows([RowRef(other, ALL_ROWS)]) is not None
    put(kept, ROWS, "b")
    kept.drop_owner("b")
    assert (len(kept), kept.used_bytes) == (0, 0)


async def test_tensor_is_freed_when_its_time_is_over() -> None:
    kept = store()
    kept.put("a", ROWS, expires_s=0.001)
    staying = put(kept, ROWS)
    await until(lambda: len(kept) == 1)
    assert kept.rows([RowRef(staying, ALL_ROWS)]) is not None
