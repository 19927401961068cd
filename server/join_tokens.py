"""The tokens that workers must know to join, and operators where they have no keys; read again while the service runs."""

from collections.abc import Callable

from server.settings import ServeSettings


class JoinTokens:
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

    def reload(self) -> int:
        """Read the token's file again, if there is one; gives how many tokens are in force.

        Raises:
            SettingsError: it cannot be used, and what was in force stays.
        """
        self._take(self._settings.secrets)
        return len(self._secrets)

    def _take(self, secrets: tuple[bytes, ...]) -> None:
        # Our own workers know the one of the start, and no other.
        ours = () if self._settings.external_workers else (self._settings.secret,)
        self._secrets = tuple(dict.fromkeys((*secrets, *ours)))
        self._let_in(*self._secrets)
