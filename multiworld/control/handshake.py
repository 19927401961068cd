"""Mutual authentication of two processes by a shared secret, at the start of each connection.

Challenge and response with HMAC-SHA256: the server sends a nonce; the client answers with its body, its own nonce and a proof over all
three; the server answers with its own proof over the same data. Every connection has new nonces, so a recorded handshake cannot be
replayed. The secret is never sent. Data after the handshake is neither encrypted nor signed.
"""

import hashlib
import hmac
import json
import os
from dataclasses import asdict, dataclass

from multiworld.control.frames import PROTOCOL_VERSION, Frame, FrameError, Kind
from multiworld.texts import shown

NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """The client's request: join `world` as `rank` of `size`; or, if `peer` is set, a data connection to that rank; or, if
    `question` is set, a query.

    `generation` 0 means the next generation that forms. `formation` is the random name that rank 0 gave this forming of the world, for a
    data connection. Generations alone begin at 1 again when the process of rank 0 is replaced. `settings` must equal those of rank 0.
    `host`, `port` and `local` say where the member accepts data connections (multiworld/membership/roster.py).
    """

    world: str = ""
    rank: int = 0
    size: int = 0
    generation: int = 0
    question: str | None = None
    peer: int | None = None
    formation: str = ""
    settings: str = ""
    host: str = ""
    port: int = 0
    local: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> "Hello":
        """Raises FrameError when the bytes are not a valid Hello."""
        try:
            hello = Hello(**json.loads(data))
        except (ValueError, TypeError, RecursionError) as error:
            raise FrameError(f"not a hello: {shown(str(error), 200)}") from error
        texts = (hello.world, hello.question or "", hello.formation, hello.settings, hello.host, hello.local)
        numbers = (hello.rank, hello.size, hello.generation, hello.port, 0 if hello.peer is None else hello.peer)
        if not all(isinstance(text, str) for text in texts) or not all(type(value) is int for value in numbers):
            raise FrameError("not a hello: a field has the wrong type")
        if not all(abs(value) < 1 << 63 for value in numbers):
            raise FrameError("not a hello: a number is out of range")
        return hello


def _proof(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(secret, role, hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


class ServerHandshake:
    """The server side: `challenge`, then `accept` the client's HELLO, then `welcome`, or `reply` to a query.

    Args:
        secrets: the client must know one of these. The server's proof uses the same one.
    """

    def __init__(self, *secrets: bytes) -> None:
        self._secrets = secrets
        self._secret = secrets[0]
        self._nonce = os.urandom(NONCE_BYTES)
        self._transcript: tuple[bytes, ...] = ()

    def challenge(self) -> Frame:
        return Frame(Kind.CHALLENGE, (bytes([PROTOCOL_VERSION]), self._nonce))

    def accept(self, frame: Frame) -> Hello:
        """Check the client's proof and return its request. Raises FrameError for a malformed HELLO, PermissionError for a wrong secret."""
        if frame.kind is not Kind.HELLO or len(frame.fields) != 3 or len(frame.fields[1]) != NONCE_BYTES:
            raise FrameError(f"expected a hello, got {frame.kind.name}")
        body, client_nonce, proof = frame.fields
        self._transcript = (self._nonce, client_nonce, body)
        known = [s for s in self._secrets if hmac.compare_digest(proof, _proof(s, b"client", *self._transcript))]
        if not known:
            raise PermissionError("wrong secret")
        self._secret = known[0]
        return Hello.decode(body)

    def welcome(self) -> Frame:
        return Frame(Kind.WELCOME, (_proof(self._secret, b"server", *self._transcript),))

    def reply(self, answer: bytes) -> Frame:
        return Frame(Kind.REPLY, (answer, _proof(self._secret, b"reply", *self._transcript, answer)))


class ClientHandshake:
    """The client side: answer the CHALLENGE with `hello`, then check the server's WELCOME or REPLY."""

    def __init__(self, secret: bytes, hello: Hello) -> None:
        self._secret = secret
        self._body = hello.encode()
        self._transcript: tuple[bytes, ...] = ()

    def hello(self, challenge: Frame) -> Frame:
        """Return the HELLO for this CHALLENGE. Raises FrameError when the server has another protocol or protocol version."""
        if challenge.kind is not Kind.CHALLENGE or len(challenge.fields) != 2:
            raise FrameError(f"expected a challenge, got {challenge.kind.name}")
        version, server_nonce = challenge.fields
        if version != bytes([PROTOCOL_VERSION]) or len(server_nonce) != NONCE_BYTES:
            raise FrameError(f"the server uses version {version!r} of the control protocol, we use {PROTOCOL_VERSION}")
        nonce = os.urandom(NONCE_BYTES)
        self._transcript = (server_nonce, nonce, self._body)
        return Frame(Kind.HELLO, (self._body, nonce, _proof(self._secret, b"client", *self._transcript)))

    def check_welcome(self, frame: Frame) -> None:
        """Raises PermissionError when the server does not know the secret."""
        if len(frame.fields) != 1 or not hmac.compare_digest(
            frame.fields[0], _proof(self._secret, b"server", *self._transcript)
        ):
            raise PermissionError("the server does not know the secret")

    def check_reply(self, frame: Frame) -> bytes:
        """Return the server's answer. Raises PermissionError when its proof is wrong."""
        if len(frame.fields) != 2 or not hmac.compare_digest(
            frame.fields[1], _proof(self._secret, b"reply", *self._transcript, frame.fields[0])
        ):
            raise PermissionError("the answer is not from a server that knows the secret")
        return frame.fields[0]
