"""What every program shares: settings, the errors that are a person's to mend, and log lines."""

from config.access import NOTHING, Access
from config.errors import SettingsError, UserError
from config.limits import check_memory, end_with_parent, raise_descriptor_limit
from config.logs import configure_logging
from config.settings import DEVICE_PATTERN, Row, Settings, describe, effective, setting
from config.sources import load

__all__ = [
    "DEVICE_PATTERN",
    "NOTHING",
    "Access",
    "Row",
    "Settings",
    "SettingsError",
    "UserError",
    "check_memory",
    "configure_logging",
    "describe",
    "effective",
    "end_with_parent",
    "load",
    "raise_descriptor_limit",
    "setting",
]
