"""Keys and certificates as the leader read them. Frontends that start later use the same, even if the files changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from multiworld_serving.common.config import SettingsError
from multiworld_serving.server.auth.credential_reloader import Credentials, read_credentials
from multiworld_serving.server.settings import ServeSettings

_NAMES = ("api_keys_file", "admin_keys_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")


def read_credential_files(settings: ServeSettings) -> dict[str, str]:
    """The content of the files that a frontend needs, by setting; bytes decoded as Latin-1.

    Raises:
        UserError: a file cannot be read or has invalid content; the message names it.
    """
    read_credentials(settings)
    found = {}
    for name in _NAMES:
        path = getattr(settings, name)
        if path is not None:
            try:
                found[name] = path.read_bytes().decode("latin-1")
            except OSError as error:
                raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    load_credentials(settings, found)  # the files may have changed since `read_credentials`
    return found


def load_credentials(settings: ServeSettings, files: Mapping[str, str]) -> Credentials:
    """The credentials in these files. Raises UserError, but not for the result of `read_credential_files`."""
    settings = settings.replace("metrics_client_ca_file", None, "leader")  # a frontend has no such port
    with ExitStack() as stack:
        for name, text in files.items():
            # In memory, to keep the private key off the disk. OpenSSL can only load files.
            file = stack.enter_context(open(os.memfd_create(name), "wb"))
            file.write(text.encode("latin-1"))
            file.flush()
            settings = settings.replace(name, Path(f"/proc/self/fd/{file.fileno()}"), "leader")
        return read_credentials(settings)
