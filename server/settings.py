"""The settings of `multiworld serve`, `leader` and `frontend`: every field with its unit, bounds, default and help text.

`serve` has the settings of all programs that it starts.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import SecretStr, field_validator, model_validator

from multiworld_serving.common.config import DEVICE_PATTERN, Settings, SettingsError, setting
from multiworld_serving.common.config.addresses import (
    NAME_ALLOWED,
    NAME_PATTERN,
    default_name,
    name_after_host,
    parse_address,
)
from multiworld_serving.common.config.edges import EdgePortSettings, EdgeSettings
from multiworld_serving.common.config.leaders import LeadersSettings

_TUNING_S = 2.0
_MAX_PORT = 65535
_MAX_WORKERS = 1024
_MIN_HUNG_S = 5.0
_CHANNELS = 3
_CHANNELS_ALLOWED = "three numbers, such as 0.5,0.5,0.5"
JOIN_PORT_STEP = 100
"""Distance between the join ports of the leaders that one `multiworld serve` starts."""


def _admin_port() -> Any:
    text = "Admin port: Prometheus metrics and admin endpoints; 0 selects a free one."
    return setting(8002, "Network", text, ge=0, le=65535)


def _channels(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(map(float, text.split(",")))


def _leader_name(settings: dict[str, Any]) -> str:
    """A name that other leaders do not have: with the join port, which stays the same after a restart; without one, with the process id."""
    return name_after_host(settings.get("join_port") or os.getpid())


class _ServiceSettings(Settings):
    """Settings that leaders and frontends share."""

    recovery_grace_s: float = setting(
        15.0, "Failure", "How long a stage without a replica keeps its batches before it rejects them.", ge=0, le=3600
    )
    drain_timeout_s: float = setting(
        10.0, "Failure", "Maximum time for requests in flight to complete when the service stops.", ge=0, le=3600
    )
    queue_limit: int = setting(
        256,
        "Limits",
        "Maximum number of images that wait for a batch; above it, requests are rejected with 429.",
        ge=1,
        le=1_000_000,
    )
    trace_ratio: float = setting(
        0.01,
        "Logging",
        "Share of the requests without their own `traceparent` that are traced, if an OTLP endpoint is set.",
        ge=0,
        le=1,
    )

    local_token: SecretStr | None = setting(
        None,
        "Access",
        "Secret of the processes that `multiworld serve` starts.",
        in_argv=False,
        hidden=True,
    )

    exit_with_parent: bool = setting(
        False, "Process", "Exit at end of file on standard input, which the supervisor holds open.", hidden=True
    )

    @property
    def secret(self) -> bytes:
        """The secret with which this process joins, or that joining processes must know."""
        return self.local_token.get_secret_value().encode() if self.local_token is not None else super().secret

    def _without_token(self) -> Self:
        if self.local_token is not None:
            return self
        return super()._without_token()


class LeaderSettings(_ServiceSettings):
    """Settings of a leader: the model, its pipeline, and how requests are scheduled."""

    section: ClassVar[str] = "leader"

    model: str = setting(
        "resnet50",
        "Model",
        "Model to serve: a ResNet of torchvision such as resnet50; another model of torchvision that takes images; or the "
        "path of a bundle that `multiworld export` wrote.",
    )
    weights: str = setting(
        "DEFAULT",
        "Model",
        "Name of torchvision weights (IMAGENET1K_V2, DEFAULT), a .pth, .pt, .ckpt or .safetensors file, random:SEED, or auto "
        "(DEFAULT if available, else random:0 with a warning).",
    )
    weights_dir: Path | None = setting(
        None,
        "Model",
        "Folder with weight files that an administrator may load as new versions while the service runs; none allows no files.",
    )
    labels: str | None = setting(
        None, "Model", "File with one label per line, in the order of the classes; none uses the labels of the weights."
    )
    image_size: int | None = setting(
        None,
        "Model",
        "Side in pixels of the square that is cropped from each image; none uses the size of the weights.",
        ge=8,
        le=4096,
    )
    mean: str | None = setting(
        None,
        "Model",
        "Mean of the red, green and blue values (from 0 to 1) of the training images; none uses that of the weights, or ImageNet's.",
        allowed=_CHANNELS_ALLOWED,
    )
    std: str | None = setting(
        None,
        "Model",
        "Standard deviation of the red, green and blue values of the training images; none uses that of the weights, or ImageNet's.",
        allowed=_CHANNELS_ALLOWED,
    )
    stages: int = setting(2, "Pipeline", "Number of pipeline stages that the model is partitioned into.", ge=1, le=64)
    replicas: int = setting(2, "Pipeline", "Number of workers per stage.", ge=1, le=256)
    spares: int = setting(
        0,
        "Pipeline",
        "Number of spare workers, which hold all stages and replace a failed worker immediately.",
        ge=0,
        le=256,
    )
    cut: Literal["counted", "measured"] = setting(
        "counted",
        "Pipeline",
        "What balances the stages: counted uses the multiply-adds of a ResNet or the times in the bundle, the same on every machine; "
        "measured uses the time of each operator on this machine, measured at start like `multiworld plan`.",
    )
    optimize: Literal["none", "eager", "compile", "auto"] = setting(
        "eager",
        "Pipeline",
        "Execution mode of the workers: none runs the model as written, bit for bit; eager folds batch normalization into the "
        "convolutions and uses channels-last tensors (differs by 1e-6); compile starts like eager, compiles in the background and "
        "caches the code on disk; auto measures these at warm-up, and compiled code if it is cached.",
    )
    precision: Literal["float32", "bfloat16", "float16", "auto"] = setting(
        "float32",
        "Pipeline",
        "Precision inside the stages; auto uses bfloat16 if the worker's device supports it in hardware and it is faster.",
    )
    edge_dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32",
        "Pipeline",
        "dtype as which float32 tensors travel between stages; bfloat16 and float16 halve their bytes and round the values.",
    )
    join_host: str = setting(
        "127.0.0.1", "Network", "Address at which workers join: a private network, never a public one."
    )
    advertise_host: str | None = setting(
        None,
        "Network",
        "Address that workers are told to join at, if it differs from the one that they connect to first: HOST, or HOST:PORT if "
        "the port differs too.",
        allowed="HOST or HOST:PORT, such as leader.example or 203.0.113.7:9001",
    )
    join_port: int = setting(8001, "Network", "Port at which workers join; 0 selects a free one.", ge=0, le=65535)
    max_batch_size: int = setting(8, "Batching", "Maximum number of images in a batch.", ge=1, le=1024)
    batching: Literal["adaptive", "fixed"] = setting(
        "adaptive",
        "Batching",
        "adaptive sends a batch immediately if a replica is idle, and otherwise waits for more images until one is nearly idle; "
        "fixed always waits.",
    )
    batch_timeout_s: float = setting(
        0.002, "Batching", "Maximum time that an image waits for its batch to fill.", ge=0, le=60
    )
    target_latency_ms: float | None = setting(
        None,
        "Batching",
        "Latency objective in milliseconds: the number of replicas that a stage needs is computed for it; none counts throughput only.",
        gt=0,
        le=3_600_000,
    )
    window: int = setting(2, "Batching", "Maximum number of batches in flight on one replica.", ge=1, le=64)
    max_attempts: int = setting(
        3, "Failure", "Number of worlds that one image may break before it is rejected as poison.", ge=2, le=100
    )
    hang_timeout_s: float = setting(
        10.0,
        "Failure",
        "Maximum time of a worker for one batch; after it, its link is closed as failed.",
        gt=0,
        le=3600,
    )
    hedge_factor: float = setting(
        2.0,
        "Failure",
        "A batch that takes this many times the usual time of its stage is sent to a second replica too; 0 disables hedging.",
        ge=0,
        le=1000,
        allowed="0, or a number from 1 to 1000",
    )
    hedge_floor_s: float = setting(0.05, "Failure", "Minimum time before a batch is hedged.", ge=0, le=3600)
    hedge_budget: float = setting(
        0.05, "Failure", "Maximum share of images that are sent a second time by hedging.", ge=0, le=1
    )
    breaker_s: float = setting(
        0.5,
        "Failure",
        "How long a worker that fails twice in a row is quarantined; doubles with each further failure.",
        gt=0,
        le=3600,
    )
    breaker_max_s: float = setting(30.0, "Failure", "Maximum time of a quarantine; 0 disables it.", ge=0, le=86400)
    reassign_after_s: float = setting(
        3.0,
        "Failure",
        "How long a stage may have no worker before a worker of a stage with several is reassigned to it; 0 disables this.",
        ge=0,
        le=3600,
    )

    leader_name: str = setting(
        None,
        "Network",
        "Name of this leader in logs, metrics and the status; by default HOSTNAME-PORT, with the join port.",
        default_factory=_leader_name,
        pattern=NAME_PATTERN,
        allowed=NAME_ALLOWED,
    )
    metrics_host: str | None = setting(None, "Network", "Address of the metrics port; none uses 127.0.0.1.")
    metrics_port: int | None = setting(
        None,
        "Network",
        "Port of this leader's Prometheus metrics and of /healthz and /readyz; by default there is none, since frontends serve the "
        "metrics of their leaders too.",
        ge=0,
        le=65535,
    )
    join_fd: int | None = setting(None, "Network", "Descriptor of a listening socket for the join port.", hidden=True)
    report_capacity: bool = setting(
        False, "Process", "Report the replicas that the load needs to the supervisor.", hidden=True
    )

    @property
    def channel_means(self) -> tuple[float, ...] | None:
        """`mean` as three numbers."""
        return _channels(self.mean)

    @property
    def channel_stds(self) -> tuple[float, ...] | None:
        """`std` as three numbers."""
        return _channels(self.std)

    @property
    def accepted_secrets(self) -> tuple[bytes, ...]:
        """Tokens that may join: those configured, and the one of this machine's own processes. Raises SettingsError."""
        local = () if self.local_token is None else (self.local_token.get_secret_value().encode(),)
        return (*self.secrets, *local)

    def advertised(self, join_port: int) -> str:
        """HOST:PORT at which workers join; empty = the address that they connected to."""
        if self.advertise_host is None:
            return ""
        address = parse_address(self.advertise_host, default_port=join_port)
        return str(address)

    @property
    def tuning_limit_s(self) -> float:
        """Maximum time of a worker's measurements per stage: a spare holds all stages and must join in time."""
        return min(_TUNING_S, self.join_timeout_s / (4 * self.stages))

    @field_validator("mean", "std")
    @classmethod
    def _channels_are_three_numbers(cls, text: str | None) -> str | None:
        if (values := _channels(text)) is not None and len(values) != _CHANNELS:
            raise ValueError("must be three numbers")
        return text

    @field_validator("advertise_host")
    @classmethod
    def _advertised_host_is_an_address(cls, host: str | None) -> str | None:
        if host is not None:
            parse_address(host, default_port=1)
        return host

    @field_validator("hedge_factor")
    @classmethod
    def _hedge_factor_is_off_or_more_than_usual(cls, factor: float) -> float:
        if 0 < factor < 1:
            raise ValueError("must be 0, or at least 1")
        return factor

    @model_validator(mode="after")
    def _precision_fits(self) -> Self:
        if self.optimize == "none" and self.precision in ("bfloat16", "float16"):
            raise ValueError(f"precision {self.precision} requires optimize eager, compile or auto; none uses float32")
        return self


class HttpSettings(_ServiceSettings):
    """Settings of the HTTP API and of the admin port."""

    mutually_exclusive: ClassVar[tuple[frozenset[str], ...]] = (
        *Settings.mutually_exclusive,
        frozenset({"api_keys", "api_keys_file"}),
        frozenset({"admin_keys", "admin_keys_file"}),
    )

    decoding: Literal["fast", "exact"] = setting(
        "fast",
        "Model",
        "How images are scaled: exact matches torchvision within one grey level; fast decodes large JPEGs at a fraction of their "
        "size (differs by less than one grey level on average).",
    )
    handler: str | None = setting(
        None,
        "Model",
        "FILE.py:CLASS with methods decode and encode, which turn the body of /predict into inputs of the model, and its outputs into the "
        "answer; runs in processes of its own beside the frontends.",
        allowed="FILE.py:CLASS, such as tokenizer.py:Handler",
    )
    handler_timeout_s: float = setting(
        10.0, "Limits", "Maximum time of the handler for one body; after it, its process is replaced.", gt=0, le=3600
    )
    top_k: int = setting(5, "Model", "Number of most probable classes in a response.", ge=1, le=1000)
    host: str = setting(
        "127.0.0.1",
        "Network",
        "Address of the HTTP API, and of the admin port unless --metrics-host is set; 0.0.0.0 = all interfaces.",
    )
    http_port: int = setting(8000, "Network", "Port of the HTTP API; 0 selects a free one.", ge=0, le=65535)
    metrics_port: int = _admin_port()
    metrics_host: str | None = setting(None, "Network", "Address of the admin port; none uses --host.")
    api_keys_file: Path | None = setting(
        None,
        "Access",
        "File with the inference keys, one NAME:HASH per line, as printed by `multiworld key`; none disables authentication.",
    )
    api_keys: SecretStr | None = setting(
        None,
        "Access",
        "The same keys in an environment variable, separated by spaces.",
        allowed="NAME:HASH as printed by `multiworld key`, separated by spaces",
        in_argv=False,
    )
    admin_keys_file: Path | None = setting(
        None,
        "Access",
        "File with the admin keys; none uses the join token instead, or, if it was generated, accepts only this machine.",
    )
    admin_keys: SecretStr | None = setting(
        None,
        "Access",
        "The same keys in an environment variable, separated by spaces.",
        allowed="NAME:HASH as printed by `multiworld key`, separated by spaces",
        in_argv=False,
    )
    tls_cert_file: Path | None = setting(
        None, "Access", "Certificate chain (PEM); HTTP API and admin port then use TLS 1.2 or newer only."
    )
    tls_key_file: Path | None = setting(
        None, "Access", "Private key (PEM) of the certificate; none reads it from --tls-cert-file."
    )
    tls_client_ca_file: Path | None = setting(
        None,
        "Access",
        "CA certificates (PEM); every client of the HTTP API must present a certificate signed by one of them.",
    )
    metrics_client_ca_file: Path | None = setting(
        None,
        "Access",
        "CA certificates (PEM); every client of the admin port must present a certificate signed by one of them.",
    )
    timeout_s: float = setting(
        30.0, "Limits", "Timeout of a request; the client's header may shorten it.", gt=0, le=3600
    )
    max_body_bytes: int = setting(10 * 2**20, "Limits", "Maximum size of a request body.", ge=1, le=2**31)
    max_image_pixels: int = setting(
        50_000_000, "Limits", "Maximum size of an image, width times height.", ge=1, le=2**31
    )
    max_connections: int = setting(
        10_000,
        "Limits",
        "Maximum number of HTTP connections, limited by the file descriptors; above it, the longest idle one is closed.",
        ge=1,
        le=1_000_000,
    )
    idle_timeout_s: float = setting(
        75.0, "Limits", "Maximum time of an HTTP connection without a request.", gt=0, le=86400
    )
    header_timeout_s: float = setting(
        10.0, "Limits", "Maximum time to receive the head of a request, and for the TLS handshake.", gt=0, le=600
    )
    stall_timeout_s: float = setting(
        10.0,
        "Limits",
        "Maximum time without progress while a client sends a body or reads a response.",
        gt=0,
        le=3600,
    )
    max_header_bytes: int = setting(
        32 * 2**10, "Limits", "Maximum size of the head of a request: request line and headers.", ge=1024, le=2**20
    )
    max_headers: int = setting(100, "Limits", "Maximum number of headers of a request.", ge=16, le=10_000)
    access_log: bool = setting(
        False, "Logging", "Log one line per HTTP request; otherwise, only failed inference requests are logged."
    )

    metric_aliases: bool = setting(
        False,
        "Logging",
        "Export the metrics of requests under the names of Triton (nv_inference_…) and KServe (request_predict_seconds, …), too.",
    )

    http_fd: int | None = setting(None, "Network", "Descriptor of a listening socket for the HTTP API.", hidden=True)
    metrics_fd: int | None = setting(
        None, "Network", "Descriptor of a listening socket for the admin port.", hidden=True
    )
    supervisor_metrics_file: Path | None = setting(
        None, "Process", "File with the metrics of the supervisor.", hidden=True
    )
    banner: str | None = setting(None, "Process", "Text to print when the service is ready.", hidden=True)
    http_shares: int = setting(
        1, "Network", "Number of frontends that share the sockets and the limits.", ge=1, hidden=True
    )

    @property
    def admin_tokens(self) -> tuple[bytes, ...]:
        """Join tokens that permit admin requests if there are no admin keys; none if only the supervisor knows the token."""
        return self.secrets

    @property
    def needs_keys(self) -> bool:
        """Whether inference requires a key."""
        return self.api_keys is not None or self.api_keys_file is not None

    @property
    def admin_host(self) -> str:
        """Address of the admin port."""
        return self.host if self.metrics_host is None else self.metrics_host

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        for name in ("tls_key_file", "tls_client_ca_file", "metrics_client_ca_file"):
            if getattr(self, name) is not None and self.tls_cert_file is None:
                raise ValueError(f"{name} requires tls_cert_file, the certificate of the service")
        return self


class FrontendSettings(LeadersSettings, EdgePortSettings, HttpSettings):
    """Settings of a frontend: the leaders to use, and its HTTP API."""

    section: ClassVar[str] = "frontend"

    name: str = setting(
        None,
        "Network",
        "Name of this frontend in logs, metrics and the status; by default HOSTNAME-PID.",
        default_factory=default_name,
        pattern=NAME_PATTERN,
        allowed=NAME_ALLOWED,
    )


class ServeSettings(EdgeSettings, HttpSettings, LeaderSettings):
    """Settings of `multiworld serve`, which starts leaders, frontends and local workers."""

    section: ClassVar[str] = "serve"

    metrics_port: int = _admin_port()

    leaders: int = setting(
        1,
        "Pipeline",
        "Number of leader processes. With two, the service survives the loss of one without a failed request. Leader N listens for "
        f"workers at --join-port + {JOIN_PORT_STEP} * N.",
        ge=1,
        le=16,
    )
    external_workers: bool = setting(
        False, "Pipeline", "Start no local workers; wait for `multiworld worker` processes to join."
    )
    autoscale: str | None = setting(
        None,
        "Pipeline",
        "Start and stop local workers as the load changes: the least and the largest number of workers, of all stages together; none "
        "keeps --replicas of each stage.",
        pattern=r"[0-9]{1,4}\.\.[0-9]{1,4}",
        allowed=f"MIN..MAX, such as 4..12, at most {_MAX_WORKERS}",
    )
    autoscale_down_after_s: float = setting(
        60.0, "Pipeline", "How long a worker is not needed before --autoscale stops it.", ge=1, le=3600
    )
    device: str = setting(
        "cpu", "Pipeline", "Device of the local workers.", pattern=DEVICE_PATTERN, allowed="cpu, cuda or cuda:N"
    )
    worker_threads: int = setting(
        0,
        "Pipeline",
        "Compute threads of each worker; 0 shares the cores: a worker also uses the cores of idle workers. With --launcher ray, the CPUs "
        "that Ray reserves for each worker, and 0 is 1.",
        ge=0,
        le=1024,
    )
    replace_hung_after_s: float = setting(
        10.0,
        "Failure",
        "Time after which a local worker that is frozen is killed and replaced; 0 disables this.",
        ge=0,
        le=86400,
        allowed="0, or a number of seconds from 5 to 86,400",
    )
    frontends: int = setting(
        1, "Network", "Number of processes that serve HTTP; use more if one core is not enough.", ge=1, le=64
    )

    launcher: Literal["local", "ray"] = setting(
        "local",
        "Launcher",
        "What starts the processes: local starts them on this machine and stops them when it ends; ray starts them on the nodes of a Ray "
        "cluster, where they run until `multiworld down`.",
    )
    ray_address: str = setting(
        "auto",
        "Launcher",
        "Ray cluster: auto for the one of this machine, or HOST:PORT of its head.",
        allowed="auto or HOST:PORT",
    )
    ray_namespace: str = setting(
        "multiworld",
        "Launcher",
        "Namespace of the actors in the Ray cluster; several services need different ones.",
        pattern=NAME_PATTERN,
        allowed=NAME_ALLOWED,
    )
    worker_memory: int = setting(
        0,
        "Launcher",
        "Bytes of memory that Ray reserves for each worker; 0 reserves none.",
        ge=0,
        le=1 << 44,
    )

    @property
    def num_workers(self) -> int:
        """Number of workers at start: replicas of all stages, and spares; or the least number of `autoscale`."""
        return self.stages * self.replicas + self.spares if self.worker_limits is None else self.worker_limits[0]

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

    @field_validator("replace_hung_after_s")
    @classmethod
    def _hung_is_longer_than_a_busy_moment(cls, seconds: float) -> float:
        if 0 < seconds < _MIN_HUNG_S:
            raise ValueError(
                f"must be 0, or at least {_MIN_HUNG_S:g}: a busy machine delays a healthy worker by seconds"
            )
        return seconds

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = {name: getattr(self, name) for name in ("http_port", "join_port", "metrics_port")}
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
        (least, most), needed = self.worker_limits, self.stages * self.replicas + self.spares
        if self.external_workers:
            raise ValueError("autoscale starts local workers, and external_workers allows none: use one of them")
        if self.launcher != "local":
            raise ValueError(f"autoscale starts local workers, and launcher is {self.launcher}: use one of them")
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
