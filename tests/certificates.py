"""Certificates for tests, created with openssl: a CA, the service's, and a client's."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Authority:
    """Signs certificates into one folder, each as `NAME.pem` including its private key."""

    folder: Path
    name: str = "authority"

    def __post_init__(self) -> None:
        self._openssl(
            *("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={self.name}"),
            *("-keyout", f"{self.name}.key", "-out", f"{self.name}.crt"),
        )

    @property
    def file(self) -> Path:
        """The authority's own certificate."""
        return self.folder / f"{self.name}.crt"

    def sign(self, name: str) -> Path:
        """A new certificate for 127.0.0.1 and its key, in one file. The same name replaces it."""
        self._openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (self.folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-days", "2", "-extfile", "names", "-out", f"{name}.crt"),
            *("-CA", self.file.name, "-CAkey", f"{self.name}.key", "-CAcreateserial"),
        )
        both = self.folder / f"{name}.pem"
        both.write_text((self.folder / f"{name}.crt").read_text() + (self.folder / f"{name}.key").read_text())
        return both

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
