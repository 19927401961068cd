"""Which processes of a service share a node of a Ray cluster, and what is said if they do not fit."""

import pytest

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.deploy.ray.placement import NodeResources, place

ONE = NodeResources(1)
GPU = NodeResources(1, 1)


def group(role: str, count: int, need: NodeResources = ONE) -> dict[str, NodeResources]:
    return {f"{role}-{index}": need for index in range(count)}


SERVICE = [group("leader", 2), group("frontend", 2), group("worker", 4)]


def test_each_bundle_has_one_leader_and_one_replica_of_every_stage_on_a_node_of_its_own() -> None:
    placement = place(SERVICE, [NodeResources(4)] * 3, spread=2)
    assert placement.strict
    assert placement.bundles == (
        ("leader-0", "frontend-0", "worker-0", "worker-2"),
        ("leader-1", "frontend-1", "worker-1", "worker-3"),
    )


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 9])
def test_no_node_has_more_workers_than_stages_when_there_are_as_many_nodes_as_replicas(nodes: int) -> None:
    stages, replicas = 3, 4
    placement = place([group("worker", stages * replicas)], [NodeResources(20)] * nodes, spread=replicas)
    assert placement.strict
    assert len(placement.bundles) == min(nodes, replicas)
    if nodes >= replicas:
        assert {len(bundle) for bundle in placement.bundles} == {stages}
    assert sum(len(bundle) for bundle in placement.bundles) == stages * replicas


def test_processes_are_bundles_of_their_own_when_no_node_has_room_for_a_share() -> None:
    placement = place([group("leader", 1), group("worker", 4, GPU)], [NodeResources(2, 1)] * 4, spread=2)
    assert not placement.strict
    assert placement.bundles == (("leader-0",), ("worker-0",), ("worker-1",), ("worker-2",), ("worker-3",))


@pytest.mark.parametrize(
    ("workers", "nodes", "message"),
    [
        (group("worker", 9), [NodeResources(4), NodeResources(2.5)], "lacks 3 CPUs: the service needs 9 CPUs"),
        (group("worker", 4, GPU), [NodeResources(8, 1)] * 2, "lacks 2 GPUs: the service needs 4 CPUs + 4 GPUs"),
        (group("worker", 3, GPU), [NodeResources(1)], "lacks 2 CPUs + 3 GPUs: "),
        (group("worker", 1), [], "lacks 1 CPUs"),
        (
            group("worker", 1, NodeResources(4)),
            [NodeResources(3)] * 2,
            "needs 4 CPUs, and the nodes have free 3 CPUs; 3 CPUs",
        ),
    ],
)
def test_missing_resources_are_named_and_counted(
    workers: dict[str, NodeResources], nodes: list[NodeResources], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        place([workers], nodes, spread=1)
    assert message in str(raised.value)
