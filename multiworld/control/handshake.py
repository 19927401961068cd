"""Mutual authentication of two processes by a shared secret, at the start of each connection.

Challenge and response with HMAC-SHA256: the server sends a nonce; the client answers with its body, its own nonce and a proof over all
three; the server answers with its own proof over the same data. Every connection has new nonces, so a recorded handshake cannot be
replayed. The secret is never sent. Data after the handshake is neither encrypted nor signed.
"""

import hashlib
import hmac
import os

import msgspec

from multiworld.control.frames import PROTOCOL_VERSION, Address, Challenge, Frame, FrameError, SignedHello, Welcome
from multiworld.texts import one_line

NONCE_BYTES = 32
WRONG_SECRET = "wrong secret"  # noqa: S105 - a text for people
"""The reason of a refusal."""


class RefusedError(Exception):
    """The other process refused us for good, or does not know the secret."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The client's request: join `world` as `rank` of `size`; or, if `peer` is set, a data connection to that rank; or, if
    `question` is set, a query.

    `generation` 0 means the next generation that forms. `formation` is the random name that rank 0 gave this forming of the world, for a
    data connection. Generations alone begin at 1 again when the process of rank 0 is replaced. `settings` must equal those of rank 0.
    `address` says where the member accepts data connections.
    """

    world: str = ""
    rank: int = 0
    size: int = 0
    generation: int = 0
    question: str | None = None
    peer: int | None = None
    formation: str = ""
    settings: str = ""
    address: Address = Address()


def _proof(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(secret, role, hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


class ServerHandshake:
    """The server side: `challenge`, then `accept` the client's `SignedHello`, then `welcome`, with the answer of a query.

    Args:
        secrets: the client must know one of these. The server's proof uses the same one.
    """

    def __init__(self, *secrets: bytes) -> None:
        self._secrets = secrets
        self._secret = secrets[0]
        self._nonce = os.urandom(NONCE_BYTES)
        self._transcript: tuple[bytes, ...] = ()

    def challenge(self) -> Challenge:
        return Challenge(PROTOCOL_VERSION, self._nonce)

    def accept(self, frame: Frame) -> Hello:
        """Check the client's proof and return its request. Raises FrameError for a malformed hello, PermissionError for a wrong secret."""
        if not isinstance(frame, SignedHello) or len(frame.nonce) != NONCE_BYTES:
            raise FrameError(f"expected a hello, got {type(frame).__name__}")
        self._transcript = (self._nonce, frame.nonce, frame.hello)
        known = [s for s in self._secrets if hmac.compare_digest(frame.proof, _proof(s, b"client", *self._transcript))]
        if not known:
            raise PermissionError(WRONG_SECRET)
        self._secret = known[0]
        try:
            return msgspec.msgpack.decode(frame.hello, type=Hello)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise FrameError(f"not a hello: {one_line(str(error), 200)}") from error

    def welcome(self, answer: bytes = b"") -> Welcome:
        return Welcome(_proof(self._secret, b"server", *self._transcript, answer), answer)


class ClientHandshake:
    """The client side: answer the `Challenge` with `hello`, then check the server's `Welcome`."""

    def __init__(self, secret: bytes, hello: Hello) -> None:
        self._secret = secret
        self._body = msgspec.msgpack.encode(hello)
        self._transcript: tuple[bytes, ...] = ()

    def hello(self, challenge: Frame) -> SignedHello:
        """Return our request. Raises FrameError when the server has another protocol or protocol version."""
        if not isinstance(challenge, Challenge):
            raise FrameError(f"expected a challenge, got {type(challenge).__name__}")
        if challenge.version != PROTOCOL_VERSION or len(challenge.nonce) != NONCE_BYTES:
            raise FrameError(
                f"the server uses version {challenge.version} of the control protocol, we use {PROTOCOL_VERSION}: "
                "upgrade the side with the lower number"
            )
        nonce = os.urandom(NONCE_BYTES)
        self._transcript = (challenge.nonce, nonce, self._body)
        return SignedHello(self._body, nonce, _proof(self._secret, b"client", *self._transcript))

    def check_welcome(self, frame: Frame) -> bytes:
        """Return the answer. Raises RefusedError when the server does not know the secret, FrameError for another frame."""
        if not isinstance(frame, Welcome):
            raise FrameError(f"unexpected {type(frame).__name__} before the welcome")
        if not hmac.compare_digest(frame.proof, _proof(self._secret, b"server", *self._transcript, frame.answer)):
            raise RefusedError("the server does not know the secret")
        return frame.answer
