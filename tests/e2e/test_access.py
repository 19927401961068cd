"""A service with API keys, TLS and client certificates at the admin port: access, refusals and renewal."""

import json
import os
import signal
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.common.config.client_options import client_options
from multiworld_serving.common.config.keys import hash_key
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.certificates import Authority
from tests.services import small_service

KEYS = {"alice": "inference-key-of-alice", "ops": "key-of-the-administrators"}
WATCHING = ("/", "/status", "/metrics", "/openapi.json")
RENEWED = "reloaded keys and certificates"


@dataclass(frozen=True)
class Guarded:
    """The service, and the credential files of it and its clients."""

    service: LocalService
    authority: Authority
    folder: Path

    def client(self, key: str = "", *, certificate: bool = False) -> httpx.Client:
        client_cert_file = self.folder / "client.pem" if certificate else None
        return httpx.Client(timeout=60.0, **client_options(key, self.authority.file, client_cert_file))

    @property
    def operators_url(self) -> str:
        return self.service.metrics_url.removesuffix("/metrics")

    def renew(self) -> str:
        """Send SIGHUP and return the message that each frontend logs then."""
        before = len(self.service.lines)
        os.kill(self.service.pid, signal.SIGHUP)

        def logged(frontend: str) -> str:
            return self.service.wait_for(
                lambda line: line["process"] == frontend and "keys and certificates" in line.message, 60.0, after=before
            ).message

        (message,) = {logged(name) for name in ("frontend-0", "frontend-1")}
        return message


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    authority = Authority(folder)
    authority.sign("server")
    authority.sign("client")
    (folder / "api.keys").write_text(f"# who may ask\n\nalice:{hash_key(KEYS['alice'])}\n")
    (folder / "admin.keys").write_text(f"ops:{hash_key(KEYS['ops'])}\n")
    (folder / "alice.key").write_text(KEYS["alice"] + "\n")
    (folder / "ops.key").write_text(KEYS["ops"] + "\n")
    (folder / "photo.jpg").write_bytes(photo())
    with small_service(
        credentials=client_options(KEYS["alice"], authority.file, folder / "client.pem"),
        frontends=2,
        api_keys_file=folder / "api.keys",
        admin_keys_file=folder / "admin.keys",
        tls_cert_file=folder / "server.pem",
        admin_client_ca_file=authority.file,
    ) as service:
        yield Guarded(service, authority, folder)
        assert service.stop() == 0


@pytest.mark.parametrize("key", ["", "wrong", KEYS["alice"] + "x", hash_key(KEYS["alice"])])
def test_other_routes_return_401_without_a_known_key(guarded: Guarded, key: str) -> None:
    image = {"content": photo(), "headers": {"content-type": "image/jpeg"}}
    with guarded.client(key) as client:
        asked = client.post(f"{guarded.service.url}/predict", **image)  # type: ignore[arg-type]
        for path in (
            *WATCHING,
            "/v2",
            "/v2/models/resnet18",
            "/nothing",
            "/admin/rolling-restart",
            "/healthz%2F..%2Fstatus",
        ):
            assert client.get(guarded.service.url + path).status_code == 401, path
    assert (asked.status_code, asked.json()["reason"]) == (401, "unauthenticated")
    assert asked.json()["request_id"] == asked.headers["x-request-id"]
    assert asked.headers["www-authenticate"].startswith("Bearer")


def test_inference_key_allows_inference_and_status_but_no_admin_verbs(guarded: Guarded) -> None:
    with guarded.client(KEYS["alice"], certificate=True) as client:
        answer = client.post(f"{guarded.service.url}/predict", content=photo(), headers={"content-type": "image/jpeg"})
        assert answer.status_code == 200, answer.text
        for path in WATCHING:
            assert client.get(guarded.service.url + path).status_code == 200
        refused = client.post(f"{guarded.operators_url}/admin/rolling-restart", json={})
        loading = client.post(f"{guarded.service.url}/v2/repository/models/resnet18/unload", json={})
    assert (refused.status_code, refused.json()["reason"]) == (403, "forbidden")
    assert loading.status_code == 403


def test_plain_http_and_old_tls_are_refused(guarded: Guarded) -> None:
    with pytest.raises(httpx.HTTPError), httpx.Client(timeout=60.0) as client:
        client.get(guarded.service.url.replace("https", "http") + "/healthz")
    port = guarded.service.url.rpartition(":")[2]
    hello = ["openssl", "s_client", "-cipher", "DEFAULT:@SECLEVEL=0", "-connect", f"127.0.0.1:{port}"]
    shaken = {
        version: subprocess.run(
            [*hello, version], stdin=subprocess.DEVNULL, capture_output=True, check=False
        ).returncode
        for version in ("-tls1_1", "-tls1_2", "-tls1_3")
    }
    assert (shaken["-tls1_1"] != 0, shaken["-tls1_2"], shaken["-tls1_3"]) == (True, 0, 0)


def test_admin_port_requires_a_client_certificate_of_the_authority(guarded: Guarded) -> None:
    with guarded.client(certificate=True) as client:
        assert "multiworld_requests_total" in client.get(guarded.service.metrics_url).text
    with guarded.client() as client, pytest.raises(httpx.HTTPError):
        client.get(guarded.service.metrics_url)
    stranger = Authority(guarded.folder, "stranger").sign("strange-client")
    options = client_options("", guarded.authority.file, stranger)
    with httpx.Client(timeout=60.0, **options) as client, pytest.raises(httpx.HTTPError):
        client.get(guarded.service.metrics_url)


def test_cli_verbs_connect_with_key_and_authority(guarded: Guarded, capsys: pytest.CaptureFixture[str]) -> None:
    folder, url = guarded.folder, guarded.service.url
    ways = ["--api-key-file", f"{folder}/alice.key", "--ca-file", str(guarded.authority.file)]
    assert main(["status", "--url", url, "--json", *ways]) == 0
    assert main(["predict", "--url", url, "--json", *ways, f"{folder}/photo.jpg"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["predictions"]
    bench = ["bench", "--url", url, "--duration", "1ms", "--warm-up", "0s", *ways]  # ends with its first response
    assert main([*bench, "--clients", "2", "--json"]) == 0
    assert main([*bench, "--rate", "9", "--rows", "1"]) == 0
    capsys.readouterr()
    restart = ["rolling-restart", "--url", guarded.operators_url, "--ca-file", str(guarded.authority.file)]
    restart += ["--client-cert-file", f"{folder}/client.pem"]
    assert main([*restart, "--api-key-file", f"{folder}/alice.key"]) == 1
    assert "HTTP 403" in capsys.readouterr().err
    assert main([*restart, "--json", "--api-key-file", f"{folder}/ops.key"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"] == "done"
    guarded.service.wait_for(lambda line: "admin request" in line.message and line["by"] == "ops", 60.0)


def test_sighup_renews_keys_and_certificates_and_ignores_invalid_files(guarded: Guarded) -> None:
    service, folder, keys = guarded.service, guarded.folder, guarded.folder / "api.keys"
    before = keys.read_text()
    with guarded.client(KEYS["alice"]) as kept:
        assert kept.get(f"{service.url}/status").status_code == 200
        keys.write_text(before + f"bob:{hash_key('key-of-bob')}\n")
        old = _certificate(service.url, guarded.authority.file)
        guarded.authority.sign("server")
        assert guarded.renew().startswith(RENEWED)
        assert _certificate(service.url, guarded.authority.file) != old
        assert kept.get(f"{service.url}/status").status_code == 200  # on the connection that was open before
    with guarded.client("key-of-bob") as bob:
        assert bob.get(f"{service.url}/status").status_code == 200
        keys.write_text("bob:no hash\n")
        assert f"line 1 of {keys}" in guarded.renew()
        assert bob.get(f"{service.url}/status").status_code == 200
        keys.write_text(before)
        (folder / "server.pem").rename(folder / "aside")
        assert "server.pem" in guarded.renew()
        (folder / "aside").rename(folder / "server.pem")
        assert guarded.renew().startswith(RENEWED)
        assert bob.get(f"{service.url}/status").status_code == 401


def _certificate(url: str, authority: Path) -> str:
    """The certificate that new connections receive."""
    return ssl.get_server_certificate(("127.0.0.1", int(url.rpartition(":")[2])), ca_certs=str(authority))


def test_keys_are_never_logged(guarded: Guarded) -> None:
    text = "\n".join(json.dumps(replace(line).fields) for line in guarded.service.lines)
    assert not [name for name, key in KEYS.items() if key in text or hash_key(key) in text]
