"""Reloading keys and certificates: all are used or none, with a log line that says which."""

from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.common.config.keys import hash_key
from multiworld_serving.common.config.sources import load
from multiworld_serving.common.settings.serve import FrontendSettings
from multiworld_serving.server.frontend.auth.credentials import Credentials, read_credentials, reload_credentials
from tests.certificates import Authority


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a file of keys."""
    (tmp_path / "api.keys").write_text(f"alice:{hash_key('key-of-alice')}\n")
    (tmp_path / "token").write_text("former")
    return tmp_path


def settings(files: Path, **options: Any) -> FrontendSettings:
    given = {"token_file": str(files / "token"), "api_keys_file": str(files / "api.keys"), "leader": "127.0.0.1:1"}
    return load(FrontendSettings, {**given, **options}).with_token()


@pytest.mark.parametrize(
    ("file", "content"),
    [("api.keys", "alice:no-hash\n"), ("api.keys", None), ("server.pem", "no certificate"), ("server.pem", None)],
)
def test_nothing_is_used_when_one_file_is_no_good(
    files: Path, file: str, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    Authority(files).sign("server")
    if content is None:
        (files / file).unlink()
    else:
        (files / file).write_text(content)
    used: list[Credentials] = []
    reload_credentials(settings(files, tls_cert_file=str(files / "server.pem")), used.append)
    assert not used
    assert "are unchanged" in caplog.text
    assert not any(record.exc_info for record in caplog.records), "a mistake in a file is not a defect of ours"


def test_key_of_both_kinds_is_refused(files: Path) -> None:
    with pytest.raises(Exception, match="the same key is used for inference"):
        read_credentials(settings(files, admin_keys_file=str(files / "api.keys")))
