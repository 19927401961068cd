"""The scheduler's configuration from the settings of a leader."""

from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.scheduling.config import SchedulerConfig


def scheduler_config(settings: LeaderSettings, num_stages: int) -> SchedulerConfig:
    """The configuration of the scheduler."""
    return SchedulerConfig(
        num_stages=num_stages,
        max_batch_size=settings.max_batch_size,
        batch_timeout_s=settings.batch_timeout_s,
        queue_limit=settings.queue_limit,
        recovery_grace_s=settings.recovery_grace_s,
        hang_timeout_s=settings.hang_timeout_s,
        hedge_factor=settings.hedge_factor or None,
        target_latency_s=None if settings.target_latency_ms is None else settings.target_latency_ms / 1e3,
    )
