"""Keys and certificates as the leader has read them: a frontend that starts later has the same, whatever became of the files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from config import SettingsError
from server.credentials import Credentials, read_credentials
from server.settings import ServeSettings

_NAMES = ("api_keys_file", "admin_keys_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")


def read_files(settings: ServeSettings) -> dict[str, str]:
    """What is in the files that a frontend needs, by the setting that names each; their bytes as Latin-1.

    Raises:
        UserError: one cannot be read, or does not hold what it should; names it.
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
    credentials_of(settings, found)  # they may have been written between the two
    return found


def credentials_of(settings: ServeSettings, files: Mapping[str, str]) -> Credentials:
    """The same as of those files. Raises UserError, which cannot be where `read_files` has raised none."""
    settings = settings.replace("metrics_client_ca_file", None, "leader")  # a frontend has no such port
    with ExitStack() as stack:
        for name, text in files.items():
            # In memory: a private key is not to be on the disk twice. OpenSSL reads from nothing but files.
            file = stack.enter_context(open(os.memfd_create(name), "wb"))
            file.write(text.encode("latin-1"))
            file.flush()
            settings = settings.replace(name, Path(f"/proc/self/fd/{file.fileno()}"), "leader")
        return read_credentials(settings)
