"""Drivers that wait for each batch to fill, so that tests decide what is in it."""

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

from multiworld_serving.server.pipeline.scheduler_config import scheduler_config


def fixed_batching() -> AbstractContextManager[object]:
    """Drivers that are made in the block have no adaptive batching."""
    return patch(
        "multiworld_serving.server.pipeline.driver.scheduler_config",
        lambda *given: replace(scheduler_config(*given), adaptive_batching=False),
    )
