"""The join tokens of workers, which also permit admin requests if there are no admin keys. Reloaded while the service runs."""

from collections.abc import Callable

from multiworld_serving.server.settings import ServeSettings


class JoinTokens:
    """The tokens of a running service.

    Args:
        set_accepted_secrets: called with the secrets that workers may join with, at once and after each change.
    """

    def __init__(self, settings: ServeSettings, set_accepted_secrets: Callable[..., None]) -> None:
        self._settings = settings
        self._set_accepted_secrets = set_accepted_secrets
        self._secrets = (settings.secret,)
        self._take(settings.secrets)

    def admin_tokens(self) -> tuple[bytes, ...]:
        """Tokens that permit admin requests; empty if the token was generated, since no one else knows it."""
        return () if self._settings.token_is_generated else self._secrets

    def read(self) -> tuple[bytes, ...]:
        """The tokens in the file now, if there is one. Raises SettingsError if the file is invalid."""
        return self._settings.secrets

    def use(self, secrets: tuple[bytes, ...]) -> int:
        """Accept these tokens from now on; returns the number of accepted tokens."""
        self._take(secrets)
        return len(self._secrets)

    def _take(self, secrets: tuple[bytes, ...]) -> None:
        # Local workers keep the token from the start of the service.
        ours = () if self._settings.external_workers else (self._settings.secret,)
        self._secrets = tuple(dict.fromkeys((*secrets, *ours)))
        self._set_accepted_secrets(*self._secrets)
