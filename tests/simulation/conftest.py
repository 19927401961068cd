"""Options of the simulation: `pytest tests/simulation --sim-seed 7 --sim-events 1000000`.

Pytest reads options of this directory only when it is named on the command line, so each has an environment variable.
"""

from __future__ import annotations

import os

import pytest

SEEDS = (1, 2, 3)
EVENTS = 24_000
"""Per run: more than a million over all scenarios and seeds together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--sim-seed", type=int, help="replay every scenario with this seed (or MULTIWORLD_SIM_SEED)")
    group.addoption("--sim-events", type=int, help="events a run (or MULTIWORLD_SIM_EVENTS)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim_seed" in metafunc.fixturenames:
        seed = _option(metafunc.config, "--sim-seed", "MULTIWORLD_SIM_SEED")
        metafunc.parametrize("sim_seed", SEEDS if seed is None else [seed])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long runs get a longer timeout."""
    for item in items:
        if "sim_events" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(120 + _events(config) / 500))


@pytest.fixture
def sim_events(pytestconfig: pytest.Config) -> int:
    """Scheduler events per run."""
    return _events(pytestconfig)


def _events(config: pytest.Config) -> int:
    events = _option(config, "--sim-events", "MULTIWORLD_SIM_EVENTS")
    return EVENTS if events is None else events


def _option(config: pytest.Config, name: str, variable: str) -> int | None:
    value = config.getoption(name, default=None)
    if value is None and variable in os.environ:
        value = int(os.environ[variable])
    return int(value) if value is not None else None
