"""Messages for joining: a worker or frontend sends a join request, and the leader responds with a JoinOffer."""

import logging
from importlib.metadata import version
from typing import Annotated, Self

import msgspec
import torch
from msgspec import Meta

from multiworld import JoinError, World, WorldManager, ask
from multiworld.texts import MAX_HOST_CHARS, MAX_NAME_CHARS, one_line
from multiworld_serving.common.config.addresses import Address, parse_address
from multiworld_serving.common.wire.protocol import WireError

logger = logging.getLogger(__name__)

WORLD_BACKEND = "tcp"
"""Backend of leader-worker worlds: point-to-point over TCP, where the worker opens every connection to one port of the leader."""

RELEASE = version("multiworld-serving")
"""Sent in join requests, for messages to people. Different releases work together if their protocols are equal."""
PROTOCOL = 16
"""Version of all messages between processes: increase it with every change of them."""

MAX_HOLDER_CHARS = MAX_HOST_CHARS + MAX_NAME_CHARS
_MAX_ERROR_CHARS = 200
EDGE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By name, the dtypes as which float32 tensors may travel between stages."""
_MAX_JOIN_WORLD_S = 15.0
"""Limit for joining a world. The leader's own limit is shorter."""
MAX_HELD = 64
"""Most stages in a JoinRequest."""

Name = Annotated[str, Meta(pattern=rf"^[!-~]{{1,{MAX_NAME_CHARS}}}\Z")]
"""Printable ASCII characters without spaces: names appear in logs, metrics and the status."""
NoName = Annotated[str, Meta(pattern=rf"^[!-~]{{0,{MAX_NAME_CHARS}}}\Z")]
"""A name, or nothing."""
Host = Annotated[str, Meta(pattern=rf"^[!-~]{{1,{MAX_HOST_CHARS}}}\Z")]
Holder = Annotated[str, Meta(pattern=r"^[!-~]+\Z", max_length=MAX_HOLDER_CHARS)]
"""A producer of tensors: HOST:PORT/INCARNATION."""
NoHolder = Annotated[str, Meta(pattern=r"^([!-~]+/[!-~]+)?\Z", max_length=MAX_HOLDER_CHARS)]
"""A producer, or nothing."""
Pid = Annotated[int, Meta(ge=1, lt=1 << 32)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


_STARTING = (ConnectionRefusedError, BlockingIOError)
"""While a leader loads its model, nothing listens on its port, or the kernel accepts the connection and no frame arrives."""
_STARTS = 100
"""A leader that is not reached in so many attempts, about three minutes, does not just start."""


def log_failure(leader: Address, error: Exception, failures: int) -> None:
    """Log that a leader cannot be joined, after this number of failures in a row, unless that repeats. A leader may be starting."""
    if failures in (0, 10, _STARTS) or failures % 1000 == 0:
        starting = isinstance(error.__cause__, _STARTING) and failures < _STARTS
        advice = "; it answers when it has loaded its model" if starting else ""
        logger.log(
            logging.INFO if starting else logging.WARNING, "leader=%s cannot be joined: %s%s", leader, error, advice
        )


class JsonMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that is a JSON object."""

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Decode. Raises WireError unless the text is an object with valid fields of this class, and no others."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            detail = one_line(str(error), _MAX_ERROR_CHARS)
            raise WireError(f"{cls.__name__}: {detail}; do both sides run the same release?") from error


class JoinRequest(JsonMessage, frozen=True, forbid_unknown_fields=True):
    """A worker asks for a world. A second request with the same `worker` name replaces the first worker.

    Attributes:
        host, pid: where the worker runs, for operators; `host` is its --advertise-host.
        edge: where others fetch its tensors, HOST:PORT/INCARNATION; empty if it uses no edges.
        gpu: the PCI address of its GPU, because `device` is only the number that this process gives it; empty without a GPU.
        held: `StageAssignment.digest`s of the stages that it has in memory.
        serves: whether another leader has it now. It asks whether it may move here.
        alone: whether no other leader takes it.
        protocol: must be the leader's.
        release: of the worker, for messages.
    """

    worker: Name
    device: Name
    host: Host
    pid: Pid
    held: Annotated[tuple[Digest, ...], Meta(max_length=MAX_HELD)] = ()
    serves: bool = False
    alone: bool = False
    edge: NoHolder = ""
    gpu: NoName = ""
    protocol: int = PROTOCOL
    release: Name = RELEASE

    @property
    def process(self) -> tuple[int, str]:
        """Identifies the process: the pid may repeat, because it is 1 in every container, and the incarnation in `edge` does not."""
        return self.pid, self.edge

    @property
    def places(self) -> tuple[str, str]:
        """Its host and its GPU, each of which may fail as a whole. Without a GPU, both are the host."""
        return self.host, f"{self.host} {self.gpu}" if self.gpu else self.host


class FrontendJoinRequest(JsonMessage, frozen=True, forbid_unknown_fields=True):
    """A frontend asks for a world. A second request with the same `frontend` name replaces the first frontend.

    Attributes:
        edge: where others fetch its tensors, HOST:PORT/INCARNATION; empty if it uses no edges.
        protocol: must be the leader's.
        release: of the frontend, for messages.
    """

    frontend: Name
    host: Host
    pid: Pid
    edge: NoHolder = ""
    protocol: int = PROTOCOL
    release: Name = RELEASE


class _Sender(msgspec.Struct):
    """What any release says of itself in a join request."""

    worker: str = ""
    frontend: str = ""
    protocol: int = 0
    release: str = "unknown"


def parse_join_request(text: str) -> JoinRequest | FrontendJoinRequest:
    """Decode the request of a process that may have another release. Raises WireError if it is invalid or of another protocol."""
    try:
        sender = msgspec.json.decode(text, type=_Sender)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return JoinRequest.from_json(text)  # says why
    kind, advice = "worker", "leaders and workers change together"
    if sender.frontend:
        kind, advice = "frontend", "upgrade one leader first, then the frontends, then the other leaders"
    if sender.protocol != PROTOCOL:  # other fields may differ, too
        older = "leader" if sender.protocol > PROTOCOL else kind
        raise WireError(
            f"{kind} {sender.worker or sender.frontend!r:.70} has release {one_line(sender.release, 20)} with protocol "
            f"{sender.protocol}, and this leader release {RELEASE} with protocol {PROTOCOL}: upgrade this {older} ({advice})"
        )
    return FrontendJoinRequest.from_json(text) if sender.frontend else JoinRequest.from_json(text)


class EdgeJoinRequest(JsonMessage, frozen=True, forbid_unknown_fields=True):
    """A consumer asks a producer for an edge.

    Attributes:
        consumer: its name, for the producer's log.
        incarnation: of the producer that has the tensors.
    """

    consumer: Name
    incarnation: Name


class JoinOffer(JsonMessage, frozen=True, forbid_unknown_fields=True):
    """The world to join, as rank 1 of 2.

    Attributes:
        world: empty if there is none now. Ask again after `wait_ms`, not before.
        wait_ms: at most a day, the longest quarantine of a failing worker.
        address: HOST:PORT to join at; empty for the address that the request was sent to.
        elsewhere: whether a worker joins this leader only if no other one takes it.
    """

    world: NoName
    generation: int
    wait_ms: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    address: str = ""
    elsewhere: bool = False

    @classmethod
    async def ask(
        cls, address: Address, question: str, *, secret: bytes, timeout_s: float, bind_host: str = ""
    ) -> Self:
        """Ask the process that listens at `address` for a world. Raises AskError, PermissionError, WireError, OSError."""
        answer = await ask(*address, question, secret=secret, timeout_s=timeout_s, bind_host=bind_host)
        return cls.from_json(answer)

    async def form(self, manager: WorldManager, rank: int, address: Address, timeout_s: float) -> World:
        """Form the world: the process that offers it has rank 0 and listens at `address`. Raises JoinError, WorldError, OSError."""
        return await manager.initialize_world(
            *(self.world, rank, 2, WORLD_BACKEND),
            addr=address.host,
            port=address.port,
            generation=self.generation,
            timeout=timeout_s,
        )

    async def join(self, manager: WorldManager, asked: Address, timeout_s: float) -> World:
        """Join the world as rank 1, if the request was sent to `asked`. Raises WireError, JoinError, WorldError, OSError."""
        try:
            address = parse_address(self.address) if self.address else asked
        except ValueError as error:
            raise WireError(f"JoinOffer: address is {self.address!r:.60}; expected HOST:PORT") from error
        try:
            return await self.form(manager, 1, address, min(_MAX_JOIN_WORLD_S, timeout_s))
        except JoinError as error:
            if address == asked:
                raise
            raise JoinError(
                self.world,
                f"{error.message}; the leader announced {address}: its --advertise-host must be an address that this machine "
                f"can reach",
            ) from error
