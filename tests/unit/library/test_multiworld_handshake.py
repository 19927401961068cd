"""The handshake rejects both sides without the secret, and replayed or modified messages."""

import msgspec
import pytest
from msgspec.structs import replace

from multiworld.control.frames import PROTOCOL_VERSION, Challenge, Frame, FrameError, Heartbeat, SignedHello, Welcome
from multiworld.control.handshake import NONCE_BYTES, ClientHandshake, Hello, RefusedError, ServerHandshake

SEAT = Hello("w", 1, 2, 3)


@pytest.mark.parametrize("secret", [b"new", b"former"])
def test_handshake_succeeds_with_any_of_several_secrets(secret: bytes) -> None:
    host, guest = ServerHandshake(b"new", b"former"), ClientHandshake(secret, SEAT)
    assert host.accept(guest.hello(host.challenge())) == SEAT
    assert guest.check_welcome(host.welcome()) == b""
    assert guest.check_welcome(host.welcome(b"answer")) == b"answer"


def test_server_with_a_wrong_secret_is_refused() -> None:
    """A server that accepts every client and replies with a secret of its own."""
    impostor, guest = ServerHandshake(b"wrong"), ClientHandshake(b"right", SEAT)
    hello = guest.hello(impostor.challenge())
    impostor._transcript = (impostor._nonce, hello.nonce, hello.hello)
    with pytest.raises(RefusedError, match="does not know the secret"):
        guest.check_welcome(impostor.welcome(b"answer"))


def test_replayed_hello_is_refused() -> None:
    first, second = ServerHandshake(b"secret"), ServerHandshake(b"secret")
    recorded = ClientHandshake(b"secret", SEAT).hello(first.challenge())
    first.accept(recorded)
    with pytest.raises(PermissionError):
        second.accept(recorded)


def test_replayed_welcome_is_refused() -> None:
    host, guest = ServerHandshake(b"secret"), ClientHandshake(b"secret", SEAT)
    challenge = host.challenge()
    host.accept(guest.hello(challenge))
    later = ClientHandshake(b"secret", SEAT)
    later.hello(challenge)
    with pytest.raises(RefusedError):
        later.check_welcome(host.welcome())


def test_reflected_proof_is_refused() -> None:
    host, guest = ServerHandshake(b"secret"), ClientHandshake(b"secret", SEAT)
    hello = guest.hello(host.challenge())
    with pytest.raises(RefusedError):
        guest.check_welcome(Welcome(hello.proof))


def test_modified_answer_is_refused() -> None:
    host, guest = ServerHandshake(b"secret"), ClientHandshake(b"secret", Hello(question="where?"))
    host.accept(guest.hello(host.challenge()))
    with pytest.raises(RefusedError):
        guest.check_welcome(Welcome(host.welcome(b"here").proof, b"there"))


def test_hello_with_a_modified_body_is_refused() -> None:
    host, guest = ServerHandshake(b"secret"), ClientHandshake(b"secret", SEAT)
    hello = guest.hello(host.challenge())
    with pytest.raises(PermissionError):
        host.accept(replace(hello, hello=msgspec.msgpack.encode(Hello("w", 2, 3, 3))))


@pytest.mark.parametrize(
    "body", [None, {"rank": "1"}, {"rank": True}, {"generation": 1.5}, {"size": None}, {"other": 1}]
)
def test_malformed_hello_is_refused(body: object) -> None:
    host, guest = ServerHandshake(b"secret"), ClientHandshake(b"secret", SEAT)
    guest._body = msgspec.msgpack.encode(body)
    with pytest.raises(FrameError, match="not a hello"):
        host.accept(guest.hello(host.challenge()))


@pytest.mark.parametrize(
    "frame", [Heartbeat(), Challenge(PROTOCOL_VERSION + 1, b"n" * NONCE_BYTES), Challenge(PROTOCOL_VERSION, b"short")]
)
def test_client_rejects_a_malformed_server(frame: Frame) -> None:
    with pytest.raises(FrameError):
        ClientHandshake(b"", SEAT).hello(frame)


@pytest.mark.parametrize("frame", [Heartbeat(), SignedHello(b"", b"short nonce", b"")])
def test_server_rejects_a_malformed_client(frame: Frame) -> None:
    with pytest.raises(FrameError):
        ServerHandshake(b"").accept(frame)
