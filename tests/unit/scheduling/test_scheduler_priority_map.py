"""The heap for the scheduler's timers and loads, compared with a plain dictionary."""

import math

from hypothesis import given
from hypothesis import strategies as st

from multiworld_serving.server.leader.scheduling.priority_map import PriorityMap

_OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["set", "discard", "pop"]), st.integers(0, 8), st.floats(0, 10)), max_size=200
)


@given(_OPERATIONS)
def test_priority_map_agrees_with_a_dictionary(operations: list[tuple[str, int, float]]) -> None:
    found: PriorityMap[int, float] = PriorityMap()
    expected: dict[int, float] = {}
    for name, key, priority in operations:
        if name == "set":
            found.set(key, priority)
            expected[key] = priority
        elif name == "discard":
            found.discard(key)
            expected.pop(key, None)
        else:
            least = min(expected.values(), default=math.inf)
            popped = found.pop_until(priority)
            assert (popped is not None) == (least <= priority)
            if popped is not None:
                assert expected.pop(popped) == least
        assert len(found) == len(expected)
        assert found.least() == min(expected.values(), default=None)
        first = found.first()
        assert (first is None) == (not expected)
        if first is not None:
            assert expected[first] == found.least()
            second = found.first(excluding=first)
            rest = {key: value for key, value in expected.items() if key != first}
            assert (None if second is None else rest[second]) == min(rest.values(), default=None)


def test_equal_priorities_are_returned_in_insertion_order() -> None:
    found: PriorityMap[str, float] = PriorityMap()
    for key in "cab":
        found.set(key, 1.0)
    assert [found.pop_until(1.0) for _ in range(3)] == ["c", "a", "b"]
