"""Settings, user errors, logging and process limits of all programs. Start reading at `settings` and `sources`."""

from multiworld_serving.common.config.client_credentials import NO_CREDENTIALS, ClientCredentials
from multiworld_serving.common.config.errors import SettingsError, UserError
from multiworld_serving.common.config.logs import configure_logging
from multiworld_serving.common.config.process import (
    check_memory,
    exit_with_parent,
    raise_descriptor_limit,
    release_free_memory,
)
from multiworld_serving.common.config.settings import DEVICE_PATTERN, Settings, setting
from multiworld_serving.common.config.sources import load

__all__ = [
    "DEVICE_PATTERN",
    "NO_CREDENTIALS",
    "ClientCredentials",
    "Settings",
    "SettingsError",
    "UserError",
    "check_memory",
    "configure_logging",
    "exit_with_parent",
    "load",
    "raise_descriptor_limit",
    "release_free_memory",
    "setting",
]
