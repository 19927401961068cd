"""The settings of `multiworld leader` and those that frontends have too: every field with its unit, bounds, default and help text."""

import json
import os
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import SecretStr, field_validator, model_validator

from multiworld_serving.common.config.addresses import NAME_ALLOWED, NAME_PATTERN, name_after_host, parse_address
from multiworld_serving.common.config.settings import INTERNAL, AdvertisedAddress, Settings, setting
from multiworld_serving.common.service.model_versions import model_and_version


def _leader_name(settings: dict[str, Any]) -> str:
    """A name that other leaders do not have: with the join port, which stays the same after a restart; without one, with the process id."""
    return name_after_host(settings.get("join_port") or os.getpid())


class ServiceSettings(Settings):
    """Settings that leaders and frontends share."""

    recovery_grace_s: float = setting(15.0, "Failure", ge=0, le=3600)
    """How long a stage without a replica keeps its batches before it rejects them."""
    drain_timeout_s: float = setting(10.0, "Failure", ge=0, le=3600)
    """Maximum time for requests in flight to complete when the service stops."""
    queue_limit: int = setting(256, "Limits", ge=1, le=1_000_000)
    """Maximum number of images that wait for a batch; above it, requests are rejected with 429."""

    local_token: SecretStr | None = setting(None, INTERNAL)
    """Secret of the processes that `multiworld serve` starts."""

    @property
    def secret(self) -> bytes:
        """The secret with which this process joins, or that joining processes must know."""
        return self.local_token.get_secret_value().encode() if self.local_token is not None else super().secret

    def _without_token(self) -> Self:
        if self.local_token is not None:
            return self
        return super()._without_token()


class LeaderSettings(ServiceSettings):
    """Settings of a leader: the model, its pipeline, and how requests are scheduled."""

    section: ClassVar[str] = "leader"

    model: str = setting("resnet50", "Model")
    """Model to serve: the path of a bundle that `multiworld export` wrote; a pipeline of stages in Python, as FILE.py:LIST or
    MODULE:LIST; generate:FOLDER with a decoder of transformers; or a model of torchvision for images such as resnet50, which is exported
    into ~/.cache/multiworld/bundles at the first start. NAME=SOURCE serves it by another name."""
    weights: str = setting("DEFAULT", "Model")
    """Name of torchvision weights (IMAGENET1K_V2, DEFAULT), a .pth, .pt, .ckpt or .safetensors file, random:SEED, or auto (DEFAULT if
    available, else random:0 with a warning)."""
    weights_dir: Path | None = setting(None, "Model")
    """Folder with weight files that an administrator may load as new versions while the service runs; none allows no files."""
    image_size: int | None = setting(None, "Model", ge=8, le=4096)
    """Side in pixels of the square that is cropped from each image; none uses the size of the weights."""
    stages: int = setting(2, "Pipeline", ge=1, le=64)
    """Number of pipeline stages that the model is partitioned into; a pipeline in Python has its own number."""
    replicas: int = setting(2, "Pipeline", ge=1, le=256)
    """Number of workers per stage."""
    stage_settings: dict[str, dict[str, Any]] = setting(
        {}, "Pipeline", allowed="""a table for each stage, or JSON such as {"Tokenize": {"replicas": 4}}"""
    )
    """Settings of single stages of a pipeline in Python by the names of their classes: device, replicas, max_batch_size, max_wait_ms."""
    spares: int = setting(0, "Pipeline", ge=0, le=256)
    """Number of spare workers, which hold all stages and replace a failed worker immediately."""
    optimize: Literal["eager", "fused", "compile"] = setting("fused", "Pipeline")
    """How workers compute: eager runs the model as written, bit for bit; fused folds batch normalization into the convolutions
    and fuses them with what follows (differs by 1e-6); compile starts like fused, runs torch.compile in the background, and changes to
    the compiled code when it is ready."""
    precision: Literal["float32", "tf32", "bfloat16", "float16", "auto"] = setting("float32", "Pipeline")
    """Precision inside the stages; auto uses bfloat16 if the worker's device supports it in hardware. tf32 is float32 except on GPUs since
    Ampere."""
    edge_dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "Pipeline")
    """dtype as which float32 tensors travel between stages; bfloat16 and float16 halve their bytes and round the values."""
    session_tokens: int = setting(65_536, "Pipeline", ge=16, le=1 << 30)
    """Tokens of all sequences that one worker generates at the same time, prompts included; bounds the memory for keys and values."""
    join_host: str = setting("127.0.0.1", "Network")
    """Address at which workers join: a private network, never a public one."""
    advertise_host: AdvertisedAddress = setting(
        None, "Network", allowed="HOST or HOST:PORT, such as leader.example or 203.0.113.7:9001"
    )
    """Address at which workers join, if it differs from the address of their first connection."""
    join_port: int = setting(8001, "Network", ge=0, le=65535)
    """Port at which workers join; 0 selects a free one."""
    max_batch_size: int | None = setting(None, "Batching", ge=1, le=1024)
    """Maximum number of images in a batch; by default 8, and up to 32 while such a batch takes at most 50 ms."""
    batch_timeout_s: float = setting(0.002, "Batching", ge=0, le=60)
    """How long before a replica becomes free a batch is sent to it; while compute times are unknown, the longest wait of a row."""
    hang_timeout_s: float = setting(10.0, "Failure", gt=0, le=3600)
    """Maximum time of a worker for one batch; after it, its link is closed as failed."""
    hedge_factor: float = setting(2.0, "Failure", ge=0, le=1000, allowed="0, or a number from 1 to 1000")
    """A batch that takes this many times the usual time of its stage is sent to a second replica too; 0 disables hedging."""

    name: str = setting(None, "Network", default_factory=_leader_name, pattern=NAME_PATTERN, allowed=NAME_ALLOWED)
    """Name in logs, metrics and the status; by default HOSTNAME-PORT, with the join port."""
    metrics_host: str | None = setting(None, "Network")
    """Address of the metrics port; none uses 127.0.0.1."""
    metrics_port: int | None = setting(None, "Network", ge=0, le=65535)
    """Port of this leader's metrics, /healthz and /readyz; by default none, since frontends serve the metrics of their leaders too."""
    pipeline: str | None = setting(None, INTERNAL)
    """Description of a pipeline in Python as JSON; None: the leader reads it."""
    stage_replicas: tuple[int, ...] = setting((), INTERNAL)
    """Number of workers of each stage; empty: `replicas` for each."""
    join_fd: int | None = setting(None, INTERNAL)
    """Descriptor of a listening socket for the join port."""
    local_memory: bool = setting(False, INTERNAL)
    """Refuse the model if the memory of this machine does not suffice for all its workers."""
    report_capacity: bool = setting(False, INTERNAL)
    """Report the replicas that the load needs to the supervisor."""

    @property
    def model_name(self) -> str:
        """The name in NAME=SOURCE; empty if there is none."""
        name, equals, _ = self.model.partition("=")
        return name if equals and re.fullmatch(NAME_PATTERN, model_and_version(name)[0]) else ""

    @property
    def model_source(self) -> str:
        """`model` without a name."""
        return self.model.removeprefix(f"{self.model_name}=") if self.model_name else self.model

    @property
    def replicas_by_stage(self) -> tuple[int, ...]:
        """Number of workers of each stage."""
        return self.stage_replicas or (self.replicas,) * self.stages

    @property
    def accepted_secrets(self) -> tuple[bytes, ...]:
        """Tokens that may join: those configured, and the one of this machine's own processes. Raises SettingsError."""
        local = () if self.local_token is None else (self.local_token.get_secret_value().encode(),)
        return (*self.secrets, *local)

    def advertised(self, join_port: int) -> str:
        """HOST:PORT at which workers join; empty = the address that they connected to."""
        return "" if self.advertise_host is None else str(parse_address(self.advertise_host, default_port=join_port))

    @field_validator("stage_settings", mode="before")
    @classmethod
    def _stage_settings_may_be_json(cls, given: Any) -> Any:
        return json.loads(given) if isinstance(given, str) else given

    @field_validator("hedge_factor")
    @classmethod
    def _hedge_factor_is_off_or_more_than_usual(cls, factor: float) -> float:
        if 0 < factor < 1:
            raise ValueError("must be 0, or at least 1")
        return factor

    @model_validator(mode="after")
    def _precision_fits(self) -> Self:
        if self.optimize == "eager" and self.precision in ("tf32", "bfloat16", "float16"):
            raise ValueError(
                f"precision {self.precision} requires optimize fused or optimize compile; eager uses float32"
            )
        return self
