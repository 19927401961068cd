"""Errors that the user can fix: the command line prints each as one line and exits with status 2.

UserError          a request that cannot be fulfilled; says what was wrong, what was expected, what to do
  SettingsError    a setting is unknown, missing or out of bounds
"""


class UserError(Exception):
    """Invalid user input. The message is shown without a traceback."""


class SettingsError(UserError):
    """A setting is unknown, missing or out of bounds; the message names it as the user wrote it."""
