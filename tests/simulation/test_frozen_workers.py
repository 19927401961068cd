"""A worker process that freezes delays requests by less than the time until its heartbeats are missed."""

from functools import cache, partial

from multiworld_serving.server.leader.scheduling.actions import Answer, SendBatch
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import RequestArrived
from tests.simulation.scenarios import Scenario
from tests.simulation.simulator import Simulator, check_outcomes
from tests.simulation.workers import HEARTBEAT_TIMEOUT_S

FREEZES = 20
WARM_S, PERIOD_S = 10.0, 3.0
ADDED_S = 0.3
"""What a frozen worker may add to the longest request."""


@cache
def run(*, frozen: bool) -> Simulator:
    """Two stages of two replicas at half load. `frozen`: each replica is stopped in turn, for longer than the heartbeat timeout."""
    scenario = Scenario(
        name="frozen",
        config=SchedulerConfig(num_stages=2),
        replicas=2,
        rate=80.0,
        edges=True,
        timeout_s=(20.0, 30.0),
        recovery_s=0.3,
        recovery_varies=False,
    )
    simulator = Simulator(scenario, 2)
    simulator.trace = []

    def freeze(name: str) -> None:
        simulator.faults_injected += 1
        simulator.workers[name].partition(2 * HEARTBEAT_TIMEOUT_S, to=True, from_=True)

    for number in range(FREEZES if frozen else 0):
        name = f"s{number % 2}r{number // 2 % 2}"
        simulator.event_queue.at(WARM_S + number * PERIOD_S, partial(freeze, name))
    simulator.run(22_000)
    check_outcomes(simulator)
    assert simulator.faults_injected == (FREEZES if frozen else 0), "the run is too short"
    return simulator


def longest_s(simulator: Simulator) -> float:
    """The longest request after the service times are known."""
    assert simulator.trace is not None
    arrived_s: dict[int, float] = {}
    longest_s = 0.0
    for now_s, event, actions in simulator.trace:
        if isinstance(event, RequestArrived):
            arrived_s.setdefault(event.request, now_s)
        for answer in (action for action in actions if isinstance(action, Answer) and now_s > WARM_S):
            longest_s = max(longest_s, *(now_s - arrived_s[request] for request, _ in answer.rows))
    return longest_s


def test_frozen_worker_adds_little_to_the_longest_request() -> None:
    without, frozen = run(frozen=False), run(frozen=True)
    assert longest_s(frozen) < longest_s(without) + ADDED_S


def test_one_row_in_a_hundred_is_hedged_at_most_when_nothing_fails() -> None:
    simulator = run(frozen=False)
    assert simulator.trace is not None
    rows = {"first": 0, "hedge": 0}
    for _, _, actions in simulator.trace:
        for action in actions:
            if isinstance(action, SendBatch):
                rows[action.kind] += len(action.requests)
    config = simulator.scenario.config
    assert 0 < rows["hedge"] <= config.hedge_budget * rows["first"] + 4 * config.max_batch_size
