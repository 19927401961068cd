"""The settings of `multiworld serve`: every field once, with its unit, bounds, default and sentence."""

from collections import Counter
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import SecretStr, field_validator, model_validator

from config import DEVICE_PATTERN, Settings, SettingsError, setting
from config.addresses import parse_address
from config.tokens import new_token

_GENERATED = "generated"
_TUNING_S = 2.0


class ServeSettings(Settings):
    """What the leader, its HTTP API and its local workers are told."""

    section: ClassVar[str] = "serve"
    rivals: ClassVar[tuple[frozenset[str], ...]] = (
        *Settings.rivals,
        frozenset({"api_keys", "api_keys_file"}),
        frozenset({"admin_keys", "admin_keys_file"}),
    )

    model: str = setting("resnet50", "Model", "Model to serve: resnet18, resnet34, resnet50, resnet101 or resnet152.")
    weights: str = setting(
        "DEFAULT",
        "Model",
        "Name of torchvision weights (IMAGENET1K_V2, DEFAULT), a .pth or .safetensors file, random:SEED, or auto "
        "(DEFAULT if it can be had at once, else random:0 and a warning).",
    )
    weights_dir: Path | None = setting(
        None,
        "Model",
        "Folder of the files with further versions of the weights that an operator may load while it serves; none allows no files.",
    )
    labels: str | None = setting(
        None, "Model", "File with one label a line, in the order of the classes; none takes those of the weights."
    )
    image_size: int | None = setting(
        None,
        "Model",
        "Side in pixels of the square that is cut from each image; none takes that of the weights.",
        ge=8,
        le=4096,
    )
    decoding: Literal["fast", "exact"] = setting(
        "fast",
        "Model",
        "How images are made small: exact as torchvision does it, within one grey level; fast decodes large JPEGs at a fraction "
        "of their size (less than one grey level off on average).",
    )
    top_k: int = setting(5, "Model", "Number of most probable labels in an answer.", ge=1, le=1000)

    stages: int = setting(2, "Pipeline", "Number of slices that the model is cut into.", ge=1, le=64)
    replicas: int = setting(2, "Pipeline", "Number of workers for each stage.", ge=1, le=256)
    spares: int = setting(
        0,
        "Pipeline",
        "Further workers that hold all stages ready and take over at once when one fails.",
        ge=0,
        le=256,
    )
    external_workers: bool = setting(
        False, "Pipeline", "Start no local workers: wait for `multiworld worker` processes to join from anywhere."
    )
    device: str = setting(
        "cpu", "Pipeline", "Device of the local workers.", pattern=DEVICE_PATTERN, allowed="cpu, cuda or cuda:N"
    )
    worker_threads: int = setting(
        0,
        "Pipeline",
        "Compute threads of each local worker; 0 shares the cores: a worker that computes while others are idle takes theirs too.",
        ge=0,
        le=1024,
    )

    cut: Literal["counted", "measured"] = setting(
        "counted",
        "Pipeline",
        "By what the model is cut: the multiply-adds of each block, the same everywhere; or measured on this machine at start, as "
        "`multiworld plan` shows it.",
    )
    optimize: Literal["none", "eager", "compile", "auto"] = setting(
        "eager",
        "Pipeline",
        "How workers compute: none as the model is written, bit for bit; eager with batch normalisation folded into the "
        "convolutions and channels-last tensors (1e-6 off); compile begins with eager, compiles beside it, and keeps the code on the "
        "disk; auto measures all of these when it warms up, compiled code where there is some.",
    )
    precision: Literal["float32", "bfloat16", "float16", "auto"] = setting(
        "float32",
        "Pipeline",
        "Precision inside the stages; auto takes bfloat16 where a worker's device has it in hardware and it is faster.",
    )

    host: str = setting(
        "127.0.0.1",
        "Network",
        "Address that the HTTP API listens on, and the operators' port unless --metrics-host says otherwise; 0.0.0.0 for all.",
    )
    http_port: int = setting(8000, "Network", "Port of the HTTP API; 0 takes any free one.", ge=0, le=65535)
    frontends: int = setting(
        1,
        "Network",
        "Number of processes that answer HTTP: read requests, decode images, write answers; 1 is the leader itself. More where one "
        "core cannot do it.",
        ge=1,
        le=64,
    )
    join_host: str = setting(
        "127.0.0.1", "Network", "Address that workers join at: an inner network, never a public one."
    )
    advertise_host: str | None = setting(
        None,
        "Network",
        "Address that workers are told to join at, where it is not the one that they ask at: HOST, or HOST:PORT where the port "
        "is another outside.",
        allowed="HOST or HOST:PORT, such as leader.example or 203.0.113.7:9001",
    )
    join_port: int = setting(8001, "Network", "Port that workers join at; 0 takes any free one.", ge=0, le=65535)
    metrics_port: int = setting(
        8002,
        "Network",
        "The operators' port, of the Prometheus metrics and the admin verbs; 0 takes any free one.",
        ge=0,
        le=65535,
    )
    metrics_host: str | None = setting(
        None, "Network", "Address that the operators' port listens on; none takes that of --host."
    )

    api_keys_file: Path | None = setting(
        None,
        "Access",
        "File with the keys for inference, one NAME:HASH a line, as `multiworld key` makes them; none lets everybody in.",
    )
    api_keys: SecretStr | None = setting(
        None,
        "Access",
        "The same keys in the environment, with spaces between.",
        allowed="NAME:HASH, as `multiworld key` makes it, with spaces between",
        in_argv=False,
    )
    admin_keys_file: Path | None = setting(
        None,
        "Access",
        "File with the keys for admin verbs; none takes the join token instead, or where nobody was told it, this machine only.",
    )
    admin_keys: SecretStr | None = setting(
        None,
        "Access",
        "The same keys in the environment, with spaces between.",
        allowed="NAME:HASH, as `multiworld key` makes it, with spaces between",
        in_argv=False,
    )
    tls_cert_file: Path | None = setting(
        None, "Access", "Certificate chain (PEM): HTTP API and operators' port speak TLS 1.2 or newer only."
    )
    tls_key_file: Path | None = setting(
        None, "Access", "Private key (PEM) of the certificate; none looks for it in --tls-cert-file."
    )
    tls_client_ca_file: Path | None = setting(
        None,
        "Access",
        "Authorities (PEM) of which one must have signed the certificate of every client of the HTTP API.",
    )
    metrics_client_ca_file: Path | None = setting(
        None,
        "Access",
        "Authorities (PEM) of which one must have signed the certificate of every client of the operators' port.",
    )

    max_batch_size: int = setting(8, "Batching", "Most images that travel together.", ge=1, le=1024)
    batching: Literal["adaptive", "fixed"] = setting(
        "adaptive",
        "Batching",
        "adaptive sends a batch at once to a replica that idles, and while all are busy waits for others to share it until one is "
        "nearly free; fixed always waits.",
    )
    batch_timeout_s: float = setting(
        0.002, "Batching", "How long an image waits for others to share its batch.", ge=0, le=60
    )
    window: int = setting(2, "Batching", "Most batches in flight on one link.", ge=1, le=64)

    max_attempts: int = setting(
        3, "Failure", "Worlds that one image may break before it is refused as poison.", ge=2, le=100
    )
    recovery_grace_s: float = setting(
        15.0, "Failure", "How long a stage without a replica keeps its batches before it refuses them.", ge=0, le=3600
    )
    hang_timeout_s: float = setting(
        10.0, "Failure", "Longest time that a worker may take for one batch before its link is broken.", gt=0, le=3600
    )
    hedge_factor: float = setting(
        2.0,
        "Failure",
        "A batch that takes so many times what its stage usually takes is sent to a second replica; 0 never does.",
        ge=0,
        le=1000,
        allowed="0, or a number from 1 to 1000",
    )
    hedge_floor_s: float = setting(0.05, "Failure", "No batch counts as late before this.", ge=0, le=3600)
    hedge_budget: float = setting(
        0.05, "Failure", "Extra work that second copies may cost, as a share of all images sent.", ge=0, le=1
    )
    breaker_s: float = setting(
        0.5,
        "Failure",
        "How long a worker that fails twice in a row is kept away; doubles with each further failure.",
        gt=0,
        le=3600,
    )
    breaker_max_s: float = setting(
        30.0, "Failure", "Longest time that a failing worker is kept away; 0 keeps nobody away.", ge=0, le=86400
    )
    reassign_after_s: float = setting(
        3.0,
        "Failure",
        "How long a stage may have no worker before one of a stage with several goes there; 0 never does.",
        ge=0,
        le=3600,
    )
    drain_timeout_s: float = setting(
        10.0, "Failure", "Longest time for what is in flight to end when the service stops.", ge=0, le=3600
    )

    timeout_s: float = setting(
        30.0, "Limits", "Longest time for one request; its own header may shorten it.", gt=0, le=3600
    )
    queue_limit: int = setting(
        256,
        "Limits",
        "Most images that wait for a batch; beyond it, requests are refused with 429.",
        ge=1,
        le=1_000_000,
    )
    max_body_bytes: int = setting(10 * 2**20, "Limits", "Largest body of a request.", ge=1, le=2**31)
    max_image_pixels: int = setting(50_000_000, "Limits", "Largest image, width times height.", ge=1, le=2**31)

    max_connections: int = setting(
        10_000,
        "Limits",
        "Most HTTP connections at once, as far as there are descriptors; beyond it the longest idle one is closed.",
        ge=1,
        le=1_000_000,
    )
    idle_timeout_s: float = setting(
        75.0, "Limits", "Longest time that an HTTP connection may be open without a request.", gt=0, le=86400
    )
    header_timeout_s: float = setting(
        10.0, "Limits", "Longest time for the head of a request, and for the handshake of TLS.", gt=0, le=600
    )
    stall_timeout_s: float = setting(
        10.0,
        "Limits",
        "Longest time for which a client may send nothing of a body that it has begun, or take nothing of its answer.",
        gt=0,
        le=3600,
    )
    max_header_bytes: int = setting(
        32 * 2**10, "Limits", "Longest head of a request: its line and all headers.", ge=1024, le=2**20
    )
    max_headers: int = setting(100, "Limits", "Most headers of a request.", ge=16, le=10_000)

    trace_ratio: float = setting(
        0.01,
        "Logging",
        "Share of the requests without a `traceparent` of their own that are traced, where traces are sent anywhere.",
        ge=0,
        le=1,
    )
    access_log: bool = setting(False, "Logging", "Log one line for every HTTP request.")

    @property
    def num_workers(self) -> int:
        """How many workers the pipeline wants: one for each replica of each stage, and the spares."""
        return self.stages * self.replicas + self.spares

    def advertised(self, join_port: int) -> str:
        """HOST:PORT that workers are to join at; empty for where they ask."""
        if self.advertise_host is None:
            return ""
        address = parse_address(self.advertise_host, default_port=join_port)
        return str(address)

    @property
    def tuning_limit_s(self) -> float:
        """How long a worker may measure for each stage: a spare holds all stages, and must have joined in time."""
        return min(_TUNING_S, self.join_timeout_s / (4 * self.stages))

    @property
    def token_is_ours(self) -> bool:
        """Nobody gave a token, and so we made one up for our own local workers."""
        return self._origins.get("token") == _GENERATED

    @field_validator("advertise_host")
    @classmethod
    def _advertised_host_is_an_address(cls, host: str | None) -> str | None:
        if host is not None:
            parse_address(host, default_port=1)
        return host

    @property
    def needs_keys(self) -> bool:
        """Whether inference needs a key."""
        return self.api_keys is not None or self.api_keys_file is not None

    @property
    def operators_host(self) -> str:
        """Address of the operators' port."""
        return self.host if self.metrics_host is None else self.metrics_host

    @field_validator("hedge_factor")
    @classmethod
    def _hedge_factor_is_off_or_more_than_usual(cls, factor: float) -> float:
        if 0 < factor < 1:
            raise ValueError("must be 0, or 1 and more")
        return factor

    @model_validator(mode="after")
    def _precision_fits(self) -> Self:
        if self.optimize == "none" and self.precision in ("bfloat16", "float16"):
            raise ValueError(f"precision {self.precision} needs optimize eager, compile or auto; none is float32")
        return self

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        for name in ("tls_key_file", "tls_client_ca_file", "metrics_client_ca_file"):
            if getattr(self, name) is not None and self.tls_cert_file is None:
                raise ValueError(f"{name} needs tls_cert_file, the certificate that the service shows")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = {name: getattr(self, name) for name in ("http_port", "join_port", "metrics_port")}
        for port, count in Counter(ports.values()).items():
            if port and count > 1:
                names = " and ".join(name for name, value in ports.items() if value == port)
                raise ValueError(f"{names} are both {port}: give each a port of its own, or 0 for any free one")
        return self

    def _without_token(self) -> Self:
        if not self.external_workers:
            return self.replace("token", new_token(), _GENERATED)
        raise SettingsError(
            "no join token, which workers from outside need: make one with `openssl rand -hex 32 > token`, "
            "then give --token-file token (or MULTIWORLD_TOKEN) to the leader and to every worker"
        )
