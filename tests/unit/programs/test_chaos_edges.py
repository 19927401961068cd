"""Which connections the faults on edges affect."""

from multiworld_serving.testing.chaos.faults import BY_NAME
from multiworld_serving.testing.chaos.faults.on_edges import connections_between
from multiworld_serving.testing.chaos.system.processes import Connection


def test_only_connections_between_the_two_processes_are_affected() -> None:
    edge = Connection("127.0.0.1", 4000, "127.0.0.1", 5000)
    back = Connection("127.0.0.1", 4001, "127.0.0.1", 6000)
    leader = Connection("127.0.0.1", 4002, "127.0.0.1", 8001)
    other = [
        Connection("127.0.0.1", 5000, "127.0.0.1", 4000),
        Connection("127.0.0.1", 6000, "127.0.0.1", 4001),
        Connection("127.0.0.1", 5001, "127.0.0.1", 8001),
    ]
    assert connections_between([edge, leader, back], other) == [edge, back]


def test_no_world_of_a_leader_may_break_when_only_an_edge_is_cut() -> None:
    assert {name: BY_NAME[name].causes for name in ("edge-cut", "edge-reset")} == {
        "edge-cut": frozenset(),
        "edge-reset": frozenset(),
    }
