"""Requests that are wrong, byte by byte, and what a service of ResNet-18 with images of 32 pixels answers to them."""

from dataclasses import dataclass

from multiworld_serving.testing.load.images import photo

SIDE = 32
BODY_LIMIT = 2**20
"""`max_body_bytes` of the service that is asked."""


@dataclass(frozen=True)
class HostileRequest:
    """One request on a connection of its own.

    Attributes:
        answer: status and reason of the response of a frontend; several responses are separated by commas.
        proxied: the responses through HAProxy, if only HAProxy rejects the request or handles it correctly.
    """

    name: str
    data: bytes
    answer: str
    proxied: str = ""


def _http(path: str, method: str = "POST", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Length: 0"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _get(*lines: str, path: str = "/healthz") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()


def _post(*lines: str, body: bytes = b"") -> bytes:
    """An image for /predict, framed as these headers say."""
    return (
        "\r\n".join(["POST /predict HTTP/1.1", "Host: x", "Content-Type: image/jpeg", *lines, "", ""]).encode() + body
    )


_RAW = "400"

_CHUNKED = "Transfer-Encoding: chunked"
_END = b"0\r\n\r\n"
_GOOD = _post(f"Content-Length: {len(photo())}", body=photo())

HOSTILE_REQUESTS = (
    # the head
    HostileRequest("no HTTP at all", b"hello\r\n\r\n", _RAW),
    HostileRequest("the first bytes of TLS", bytes.fromhex("16030100c8010000c40303"), _RAW),
    HostileRequest("HTTP/2 without asking", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", _RAW),
    HostileRequest("1,000 headers", _get("Host: x", *(f"h{number}: v" for number in range(1000))), "200", "400"),
    HostileRequest("one header of 1 MiB", _http("/predict", X_Long="a" * 2**20), "431", "400"),
    HostileRequest("a path of 1 MiB", _http("/" + "a" * 2**20, method="GET"), "431", "400"),
    HostileRequest("a zero byte in a header", _http("/predict", X_Zero="\0"), _RAW),
    HostileRequest("Content-Length and chunks (smuggling)", _post("Content-Length: 3", _CHUNKED, body=_END), _RAW),
    HostileRequest("two Content-Lengths", _post("Content-Length: 3", "Content-Length: 4", body=b"abc"), _RAW),
    HostileRequest("a negative Content-Length", _post("Content-Length: -1"), _RAW),
    HostileRequest("the same Content-Length twice", _post("Content-Length: 3", "Content-Length: 3", body=b"abc"), _RAW),
    HostileRequest("a list of Content-Lengths", _post("Content-Length: 3, 3", body=b"abc"), _RAW),
    HostileRequest(
        "5,000 zeros before a Content-Length", _post(f"Content-Length: {len(photo()):05000}", body=photo()), "200"
    ),
    HostileRequest("no Host", _get("Accept: */*"), "200", "400"),
    HostileRequest("two Hosts", _get("Host: x", "Host: y"), "200", "400"),
    HostileRequest("a header over two lines", _get("Host: x", "A: b", " c"), _RAW),
    HostileRequest("a carriage return in a header", _get("Host: x", "A: b\rc"), _RAW),
    HostileRequest("a space before a colon", _get("Host: x", "A : b"), _RAW),
    HostileRequest("chunks in gzip", _post("Transfer-Encoding: gzip, chunked", body=_END), "422 invalid_body"),
    HostileRequest("gzip in chunks", _post("Transfer-Encoding: chunked, gzip", body=_END), _RAW),
    HostileRequest("gzip without chunks", _post("Transfer-Encoding: gzip", body=b"abc"), _RAW),
    HostileRequest(
        "chunks in HTTP/1.0", _post(_CHUNKED, body=_END).replace(b"HTTP/1.1", b"HTTP/1.0"), "422 invalid_body"
    ),
    HostileRequest("a chunk of no size", _post(_CHUNKED, body=b"xyz\r\n"), _RAW),
    HostileRequest("a chunk of a negative size", _post(_CHUNKED, body=b"-1\r\n"), _RAW),
    HostileRequest("a chunk beyond 64 bits", _post(_CHUNKED, body=b"f" * 17 + b"\r\na\r\n"), _RAW),
    HostileRequest("a chunk longer than it says", _post(_CHUNKED, body=b"1\r\nabc\r\n" + _END), _RAW),
    HostileRequest("a chunk extension of 1 MiB", _post(_CHUNKED, body=b"1;" + b"a" * 2**20), "431", "400 or 408"),
    HostileRequest("a trailer of 1 MiB", _post(_CHUNKED, body=b"0\r\nX: " + b"a" * 2**20), "431", "400"),
    HostileRequest("CONNECT", b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", _RAW),
    HostileRequest(
        "an upgrade to h2c with a body",
        _post("Connection: Upgrade", "Upgrade: h2c", f"Content-Length: {len(photo())}", body=photo()),
        "422 invalid_body",
        "200",
    ),
    HostileRequest(
        "a scrape in a format of no version",
        _get("Host: x", "Accept: application/openmetrics-text; version=abc", path="/metrics"),
        "200",
    ),
    HostileRequest("no HTTP behind a good request", _GOOD + b"hello\r\n\r\n", "200, 400"),
    HostileRequest("a bad chunk behind a good request", _GOOD + _post(_CHUNKED, body=b"xyz\r\n"), "200, 400"),
    HostileRequest(
        "a long header behind a good request", _GOOD + _get("Host: x", "X: " + "a" * 2**20), "200, 431", "200, 400"
    ),
    HostileRequest("10,000 requests at once", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000, "200"),
    # paths and methods
    HostileRequest("/../../etc/passwd", _http("/../../etc/passwd", method="GET"), "404 not_found"),
    HostileRequest("the same, escaped", _http("/status-page/..%2f..%2fsettings.py", method="GET"), "404 not_found"),
    HostileRequest("a zero byte in a path", _http("/v2/models/resnet18%00/infer"), "404 unknown_model"),
    HostileRequest("wrong UTF-8 in a path", _http("/v2/models/%ff%fe/infer"), "404 unknown_model"),
    HostileRequest("a model in another folder", _http("/v2/models/..%2fresnet18/infer"), "404 not_found"),
    HostileRequest("the method TRACE", _http("/predict", method="TRACE"), "405 method_not_allowed"),
    HostileRequest(
        "an endless request id", _http("/nothing", X_Request_Id="a" * 10_000, method="GET"), "404 not_found"
    ),
)
