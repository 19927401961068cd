"""Errors that are a person's to mend: the command line prints each as one line and exits with status 2.

UserError          something that was asked for cannot be done; says what was wrong, what was expected, what to do
  SettingsError    a setting that is unknown, missing or out of its bounds
"""


class UserError(Exception):
    """Bad input of a person. The message is shown as it is, without a traceback."""


class SettingsError(UserError):
    """A setting is unknown, missing or out of its bounds; the message names it as the person wrote it."""
