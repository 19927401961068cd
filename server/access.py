"""Who is let in: the tokens that workers and operators must know, read again while the service runs."""

import logging
from collections.abc import Callable

from config import SettingsError
from server.settings import ServeSettings

logger = logging.getLogger(__name__)


class Access:
    """The tokens of a running service.

    Args:
        let_in: is told the secrets that workers may come with, at once and whenever they change.
    """

    def __init__(self, settings: ServeSettings, let_in: Callable[..., None]) -> None:
        self._settings = settings
        self._let_in = let_in
        self._secrets = (settings.secret,)
        self._take(settings.secrets)

    def operators(self) -> tuple[bytes, ...]:
        """What an admin verb must know, one of these. Nothing where we made the token up, for nobody can know it."""
        return () if self._settings.token_is_ours else self._secrets

    def reload(self) -> None:
        """Read the token's file again. What it held stays in force when it cannot be read."""
        if self._settings.token_file is None:
            logger.warning("SIGHUP: there is no --token-file to read again")
            return
        try:
            self._take(self._settings.secrets)
        except SettingsError as error:
            logger.error("SIGHUP: %s; the former tokens stay in force", error)  # noqa: TRY400 - it is a person's mistake
            return
        logger.info("tokens read again file=%s tokens=%d", self._settings.token_file, len(self._secrets))

    def _take(self, secrets: tuple[bytes, ...]) -> None:
        # Our own workers know the one of the start, and no other.
        ours = () if self._settings.external_workers else (self._settings.secret,)
        self._secrets = tuple(dict.fromkeys((*secrets, *ours)))
        self._let_in(*self._secrets)
