"""The settings of data edges, which workers and frontends share."""

from pydantic import SecretStr

from multiworld_serving.common.config.settings import INTERNAL, AdvertisedAddress, Settings, setting


class EdgeSettings(Settings):
    """How tensors reach a process and leave it."""

    edge_min_bytes: int = setting(8192, "Network", ge=0, le=1 << 30)
    """Smallest tensor in bytes that a process keeps for others to fetch. Smaller ones travel in the messages to and from the leader, which
    takes one round trip less."""
    advertise_edge: AdvertisedAddress = setting(
        None, "Network", allowed="HOST or HOST:PORT, such as worker-1.example or 203.0.113.7:9002"
    )
    """Address at which other processes fetch tensors: HOST, or HOST:PORT if the port differs too; by default the local address of the
    connection to the first leader."""


class EdgePortSettings(EdgeSettings):
    """How tensors reach one process and leave it."""

    edge_port: int = setting(0, "Network", ge=0, le=65535)
    """Port at which other processes of the service fetch tensors; 0 selects a free one."""
    edge_token: SecretStr | None = setting(None, INTERNAL)
    """Secret of edges, if it is not the one with which this process joins."""

    @property
    def edge_secrets(self) -> tuple[bytes, ...]:
        """The secret with which this process opens edges, then all that it accepts. Raises SettingsError.

        It is the configured token if there is one, also for processes of `multiworld serve` that join with a secret of their own, because
        workers on other machines know only that token.
        """
        own = (self.secret,) if self.edge_token is None else (self.edge_token.get_secret_value().encode(),)
        shared = own if self.edge_token is not None else self.secrets or own
        return tuple(dict.fromkeys((*shared, *self.secrets, *own)))
