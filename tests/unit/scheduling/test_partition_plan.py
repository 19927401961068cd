"""Partitioning by compute cost of blocks and transfer cost of their outputs."""

import itertools
import json
import random

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.models.partition import partition
from multiworld_serving.server.versions.link_speed import local_link_bytes_per_s


def slowest(costs: list[float], transfers: list[float], ends: tuple[int, ...]) -> float:
    """The cost of the slowest stage of this partition, including transfers."""
    crossing = [0.0, *transfers, 0.0]
    return max(sum(costs[first:end]) + crossing[first] + crossing[end] for first, end in itertools.pairwise((0, *ends)))


@pytest.mark.parametrize("seed", range(60))
def test_partition_with_transfer_costs_is_as_good_as_brute_force(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 9)
    costs = [chance.choice((0.0, chance.random(), 1.0)) for _ in range(count)]
    transfers = [chance.choice((0.0, chance.random() / 2, 3.0)) for _ in range(count - 1)]
    for stages in range(1, count + 1):
        found = partition(costs, stages, [1.0] * (count - 1), transfers=transfers)
        assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
        assert found[-1][1] == count
        best = min(
            slowest(costs, transfers, (*inner, count)) for inner in itertools.combinations(range(1, count), stages - 1)
        )
        assert slowest(costs, transfers, tuple(end for _, end in found)) == pytest.approx(best)


def test_expensive_boundary_is_avoided() -> None:
    assert partition([1, 1, 1, 1], 2, [1, 1, 1]) == [(0, 2), (2, 4)]
    assert partition([1, 1, 1, 1], 2, [1, 1, 1], transfers=[0.1, 5.0, 0.2]) == [(0, 1), (1, 4)]


def test_loopback_bandwidth_is_measured() -> None:
    assert local_link_bytes_per_s() > 1e6


def test_plan_is_printed_as_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "resnet18", "--stages", "3", "--batch-size", "1", "--repeats", "1"]
    assert main([*arguments, "--link-gbps", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["stages"]) == 3
    assert all(stage["output_bytes"] for stage in said["stages"][:-1])
    assert said["rows_per_s"] == pytest.approx(1 / max(stage["seconds"] for stage in said["stages"]))
    assert main(arguments) == 0
    assert "rows/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--stages", "99"], "99 stages"), (["--model", "vgg"], "no such model"), (["--stages", "0"], "stages")],
)
def test_plan_refuses_an_impossible_partition(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--repeats", "1", "--batch-size", "1", *arguments]) == 2
    assert word in capsys.readouterr().err
