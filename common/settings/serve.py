"""The settings of `multiworld frontend` and `serve`: every field with its unit, bounds, default and help text.

`serve` has the settings of all programs that it starts; those of leaders are in leader.py.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from multiworld_serving.common.config.addresses import (
    NAME_ALLOWED,
    NAME_PATTERN,
    Address,
    default_name,
    parse_addresses,
)
from multiworld_serving.common.config.edges import EdgePortSettings, EdgeSettings
from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.leaders import LeadersSettings
from multiworld_serving.common.config.settings import DEVICE_PATTERN, INTERNAL, checked_by, panel, setting
from multiworld_serving.common.config.sources import nearest, validated
from multiworld_serving.common.settings.leader import LeaderSettings, ServiceSettings

_MAX_PORT = 65535
_MAX_WORKERS = 1024
MODEL_NAME = r"^(?=.{1,48}$)[A-Za-z0-9][A-Za-z0-9._-]*(@[1-9][0-9]{0,8})?$"
MODEL_NAME_ALLOWED = (
    "1 to 48 letters, digits, dots, dashes or underscores, beginning with a letter or digit, "
    "and @VERSION with a whole number if several versions of the model serve"
)
"""Names of models in a service with several: the names of their processes begin with them."""
JOIN_PORT_STEP = 100
"""Distance between the join ports of the leaders that one `multiworld serve` starts."""


class HttpSettings(ServiceSettings):
    """Settings of the HTTP API and of the admin port."""

    host: str = setting("127.0.0.1", "Network")
    """Address of the HTTP API, and of the admin port unless --admin-host is set; 0.0.0.0 = all interfaces."""
    http_port: int = setting(8000, "Network", names=("--http-port", "--port"), ge=0, le=65535)
    """Port of the HTTP API; 0 selects a free one."""
    grpc_port: int | None = setting(None, "Network", ge=0, le=65535)
    """Port of the Open Inference Protocol over gRPC; 0 selects a free one; none disables it. Needs the extra grpc."""
    admin_port: int = setting(8002, "Network", names=("--admin-port", "--metrics-port"), ge=0, le=65535)
    """Admin port: Prometheus metrics and admin endpoints; 0 selects a free one."""
    admin_host: str | None = setting(None, "Network")
    """Address of the admin port; none uses --host."""
    share_by: str | None = setting(None, "Network", pattern=r"^[A-Za-z0-9_-]{1,64}$", allowed="the name of a header")
    """Header that divides the requests of a model among its versions: requests with one value get one version; none divides them evenly."""
    api_keys_file: Path | None = setting(None, "Access")
    """File with the inference keys, one NAME:HASH per line, as printed by `multiworld key`, or NAME:HASH:MODEL,MODEL for a key of some
    models; none disables authentication."""
    admin_keys_file: Path | None = setting(None, "Access")
    """File with the admin keys; none accepts admin requests from this machine only."""
    tls_cert_file: Path | None = setting(None, "Access")
    """Certificate chain (PEM); HTTP API and admin port then use TLS 1.2 or newer only."""
    tls_key_file: Path | None = setting(None, "Access")
    """Private key (PEM) of the certificate; none reads it from --tls-cert-file."""
    tls_client_ca_file: Path | None = setting(None, "Access")
    """CA certificates (PEM); every client of the HTTP API must present a certificate signed by one of them."""
    admin_client_ca_file: Path | None = setting(None, "Access")
    """CA certificates (PEM); every client of the admin port must present a certificate signed by one of them."""
    timeout_s: float = setting(30.0, "Limits", gt=0, le=3600)
    """Timeout of a request; the client's header may shorten it."""
    latency_objective_s: float = setting(0.5, "Limits", gt=0, le=3600)
    """Responses that take longer count as slow; the latency alerts fire when more than 1 % are."""
    max_body_bytes: int = setting(10 * 2**20, "Limits", ge=1, le=2**31)
    """Maximum size of a request body."""
    max_connections: int = setting(10_000, "Limits", ge=1, le=1_000_000)
    """Maximum number of HTTP connections, at most half of the file descriptors; above it, idle connections are closed, or requests get
    503."""
    finite_inputs: bool = setting(False, "Limits")
    """Reject inputs that contain NaN or infinity; otherwise, the model computes with them."""
    access_log: bool = setting(False, "Logging")
    """Log each HTTP request, not only inference requests that failed or needed several attempts."""
    otlp_endpoint: str | None = setting(
        None,
        "Logging",
        pattern=r"^https?://[^\s/]+/[^\s]+$",
        allowed="a URL with its path, such as http://127.0.0.1:4318/v1/traces",
    )
    """OTLP/HTTP URL that OpenTelemetry traces are sent to; by default there is no tracing."""
    trace_ratio: float = setting(0.01, "Logging", ge=0, le=1)
    """Share of the requests without their own `traceparent` that are traced, if an OTLP endpoint is set."""

    http_fd: int | None = setting(None, INTERNAL)
    """Descriptor of a listening socket for the HTTP API."""
    admin_fd: int | None = setting(None, INTERNAL)
    """Descriptor of a listening socket for the admin port."""
    grpc_fd: int | None = setting(None, INTERNAL)
    """Descriptor of a socket that is bound to the gRPC port and does not listen."""
    supervisor_metrics_file: Path | None = setting(None, INTERNAL)
    """File with the metrics of the supervisor."""
    failing_file: Path | None = setting(None, INTERNAL)
    """File with one line for each process that the supervisor restarts again and again."""
    http_shares: int = setting(1, INTERNAL, ge=1)
    """Number of frontends that share the sockets and the limits."""
    supervisor: str | None = setting(None, INTERNAL)
    """The Unix socket of the supervisor, which takes changes of the models; see `model_change`."""
    wait_until_ready: tuple[str, ...] | None = setting(None, INTERNAL)
    """Accept no connection before these models are ready and the others are known: until then other frontends accept them."""

    @property
    def admin_address(self) -> str:
        """Address of the admin port."""
        return self.host if self.admin_host is None else self.admin_host

    @model_validator(mode="after")
    def _grpc_is_installed(self) -> Self:
        if self.grpc_port is not None and not (find_spec("grpc") and find_spec("google")):
            raise ValueError("--grpc-port requires: pip install 'multiworld-serving[grpc]'")
        return self

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        for name in ("tls_key_file", "tls_client_ca_file", "admin_client_ca_file"):
            if getattr(self, name) is not None and self.tls_cert_file is None:
                raise ValueError(f"{name} requires tls_cert_file, the certificate of the service")
        return self


def leaders_by_model(text: str) -> dict[str, tuple[Address, ...]]:
    """Split "MODEL=host:port,host:port,MODEL=host:port". Raises ValueError."""
    texts: dict[str, list[str]] = {}
    name = ""
    for part in map(str.strip, text.split(",")):
        given, equals, address = part.rpartition("=")
        name = given if equals else name
        if equals and not name:
            raise ValueError("must name a model before =")
        texts.setdefault(name, []).append(address)
    if "" in texts and len(texts) > 1:
        raise ValueError("must name the model of each leader")
    return {model: parse_addresses(",".join(addresses)) for model, addresses in texts.items()}


class FrontendSettings(LeadersSettings, EdgePortSettings, HttpSettings):
    """Settings of a frontend: the leaders to use, and its HTTP API."""

    section: ClassVar[str] = "frontend"

    leader: Annotated[str | None, checked_by(leaders_by_model)] = setting(
        None, "Network", allowed="[MODEL=]HOST:PORT, such as node1:8001,node2:8001, each once"
    )
    """Join port of a leader; repeat the option, or separate with commas, for several leaders. With several models, write
    MODEL=HOST:PORT; leaders without MODEL= serve the model before them. Required without --leaders-file."""

    shares_file: Path | None = setting(None, "Network")
    """JSON file with the share of each version of a model in percent, or "shadow", such as {"search@1": 95, "search@2": 5}, read again
    every second; without it, the first version has all requests."""
    name: str = setting(None, "Network", default_factory=default_name, pattern=NAME_PATTERN, allowed=NAME_ALLOWED)
    """Name in logs, metrics and the status; by default HOSTNAME-PID."""
    model_settings: dict[str, dict[str, Any]] = setting({}, INTERNAL)
    """The settings that each model has of its own, by name. If each has a file of leaders, `leaders_file` is any of them."""

    @property
    def models(self) -> dict[str, Self]:
        """The settings for each model by its name; "" = the leaders decide the name of the only model."""
        by_model = self.model_settings or {"": {}}
        if self.leader is not None:
            by_model = {
                name: {**self.model_settings.get(name, {}), "leader": ",".join(map(str, leaders))}
                for name, leaders in leaders_by_model(self.leader).items()
            }
        given = dict(self) | {"token": None}  # it may have been read from `token_file`
        return {
            name: type(self)(**given | own).model_copy(update={"token": self.token}) for name, own in by_model.items()
        }


class ServeSettings(EdgeSettings, HttpSettings, LeaderSettings):
    """Settings of `multiworld serve`, which starts leaders, frontends and local workers."""

    section: ClassVar[str] = "serve"

    metrics_host: str | None = setting(None, INTERNAL)
    metrics_port: int | None = setting(None, INTERNAL)
    """The admin port serves the metrics of the leaders."""
    name: str = setting("", INTERNAL)
    """Leaders, frontends and workers have names of their own."""
    models: tuple[dict[str, Any], ...] = setting((), INTERNAL, allowed="tables [[models]]")
    """The tables [[models]] of the settings file."""
    models_file: Path | None = setting(None, INTERNAL)
    """The settings file that has these tables."""
    reload: Callable[[], Any] | None = setting(None, INTERNAL)
    """Loads the settings again, with the file as it is then."""

    leaders: int = setting(1, "Pipeline", ge=1, le=16)
    """Number of leader processes. With two, the loss of one costs no request. Leader N listens for workers at --join-port + 100 * N."""
    external_workers: bool = setting(False, "Pipeline")
    """Start no local workers; wait for `multiworld worker` processes to join."""
    autoscale: str | None = setting(
        None,
        "Pipeline",
        pattern=r"[0-9]{1,4}\.\.[0-9]{1,4}",
        allowed=f"MIN..MAX, such as 4..12, at most {_MAX_WORKERS}",
    )
    """Start and stop workers as the load changes, between these numbers of all stages together; none keeps --replicas of each stage."""
    device: str = setting("cpu", "Pipeline", pattern=DEVICE_PATTERN, allowed="cpu, cuda or cuda:N")
    """Device of the local workers."""
    threads: int = setting(0, "Pipeline", ge=0, le=1024)
    """Compute threads of each worker; 0 divides the cores by the number of workers. With --launcher ray, the CPUs that Ray reserves for
    each worker, and 0 is 1."""
    frontends: int = setting(1, "Network", ge=1, le=64)
    """Number of processes that serve HTTP; use more if one core is not enough."""

    share: Annotated[float, Field(ge=0, le=100)] | Literal["shadow"] | None = setting(
        None, INTERNAL, allowed="a percentage from 0 to 100, or shadow"
    )
    """Share of a version in the requests of its model; see `model_versions`."""

    launcher: Literal["local", "ray"] = setting("local", "Launcher")
    """What starts the processes: local starts them on this machine; ray starts them on the nodes of a Ray cluster, that of RAY_ADDRESS
    or of this machine, where they run until `multiworld down`."""
    ray_namespace: str = setting("multiworld", "Launcher", pattern=NAME_PATTERN, allowed=NAME_ALLOWED)
    """Namespace of the actors in the Ray cluster; several services need different ones."""

    @property
    def groups(self) -> tuple[Self, ...]:
        """The settings of each model. Raises ValueError."""
        if not self.models:
            sources = [source.strip() for source in self.model.split(",")]
            if len(sources) == 1:
                return (self,)
            return tuple(self._of_model({}, source, is_first=not index) for index, source in enumerate(sources))
        return tuple(self.group_of(table, is_first=not index) for index, table in enumerate(self.models))

    def group_of(self, table: Mapping[str, Any], *, is_first: bool = False) -> Self:
        """The settings of the model of a table [[models]]. The first one has the join port. Raises ValueError."""
        own = dict(table)
        name, source = own.pop("name", None), own.pop("source", None)
        if not isinstance(name, str) or not re.fullmatch(MODEL_NAME, name):
            raise ValueError(f"name = {name!r} of a table [[models]]: must be {MODEL_NAME_ALLOWED}")
        if not source:
            raise ValueError(
                f"source of the model {name} is missing: the path of a bundle, FILE.py:LIST, or a name such as resnet50"
            )
        return self._of_model(own, f"{name}={source}", is_first=is_first)

    def _of_model(self, own: dict[str, Any], model: str, *, is_first: bool) -> Self:
        """Validate the settings of one model: the common ones, replaced by its own ones. Raises ValueError."""
        if unknown := [name for name in own if name not in OF_MODEL]:
            if unknown[0] in type(self).model_fields:
                raise ValueError(f"{unknown[0]} of the model {model}: this setting belongs into [serve]")
            raise ValueError(f"unknown setting {unknown[0]} of the model {model}{nearest(unknown[0], OF_MODEL)}")
        common = {name: getattr(self, name) for name in type(self).model_fields if name != "models"}
        if not is_first:
            common["join_port"] = 0
        try:
            return validated(type(self), common | own | {"model": model}, lambda name, value: f"{name} = {value}")
        except SettingsError as error:
            raise ValueError(f"model {model}: {error}") from error

    @property
    def num_workers(self) -> int:
        """Number of workers at start: replicas of all stages, and spares; or the least number of `autoscale`."""
        return sum(self.replicas_by_stage) + self.spares if self.worker_limits is None else self.worker_limits[0]

    @property
    def max_workers(self) -> int:
        """Largest number of workers."""
        return self.num_workers if self.worker_limits is None else self.worker_limits[1]

    @property
    def worker_limits(self) -> tuple[int, int] | None:
        """The numbers of `autoscale`."""
        if self.autoscale is None:
            return None
        least, _, most = self.autoscale.partition("..")
        return int(least), int(most)

    def join_port_of(self, leader: int) -> int:
        """Port at which this leader listens; 0 selects a free one."""
        return self.join_port and self.join_port + JOIN_PORT_STEP * leader

    @model_validator(mode="after")
    def _models_are_valid(self) -> Self:
        if self.models and self.model != type(self).model_fields["model"].default:
            raise ValueError(
                "--model and tables [[models]] are mutually exclusive: give all models in the settings file"
            )
        self.groups  # noqa: B018 - raises
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = {name: getattr(self, name) for name in ("http_port", "join_port", "admin_port")}
        if self.grpc_port is not None:
            ports["grpc_port"] = self.grpc_port
        if self.join_port:
            ports |= {f"join_port of leader {index}": self.join_port_of(index) for index in range(1, self.leaders)}
        if (last := max(ports.values())) > _MAX_PORT:
            raise ValueError(
                f"the join port of leader {self.leaders - 1} would be {last}; choose a lower join_port, or 0 for free ports"
            )
        for port, count in Counter(ports.values()).items():
            if port and count > 1:
                names = " and ".join(name for name, value in ports.items() if value == port)
                raise ValueError(f"{names} are both {port}; choose different ports, or 0 for a free one")
        return self

    @model_validator(mode="after")
    def _autoscale_keeps_redundancy(self) -> Self:
        if self.worker_limits is None:
            return self
        (least, most), needed = self.worker_limits, sum(self.replicas_by_stage) + self.spares
        if self.external_workers:
            raise ValueError("--autoscale and --external-workers are mutually exclusive")
        if not least <= most <= _MAX_WORKERS:
            raise ValueError(
                f"autoscale is {self.autoscale}: expected MIN..MAX, MIN at most MAX, MAX at most {_MAX_WORKERS}"
            )
        if least < needed:
            raise ValueError(
                f"autoscale is {self.autoscale}: {self.stages} stages x {self.replicas} replicas + {self.spares} spares need at least "
                f"{needed} workers; use {needed}..{max(needed, most)}, or fewer replicas"
            )
        return self

    def _without_token(self) -> Self:
        if not self.external_workers:
            return self
        raise SettingsError(
            "no join token, which external workers require; create one with `openssl rand -hex 32 > token`, "
            "then pass --token-file token (or MULTIWORLD_TOKEN) to the leader and to every worker"
        )


OF_MODEL = frozenset(
    {name for name, field in ServeSettings.model_fields.items() if panel(field) in ("Model", "Pipeline", "Batching")}
    - {"model"}
    | {
        "share",
        "queue_limit",
        "timeout_s",
        "latency_objective_s",
        "recovery_grace_s",
        "hang_timeout_s",
        "hedge_factor",
        "join_port",
    }
)
"""The settings that a table [[models]] may have, beside name and source."""
