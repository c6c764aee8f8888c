"""Certificates for tests: a test authority, and PEM files of the certificates it signs."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme

from shared.access.channels import ClientCredentials, read_credentials
from shared.access.settings import TlsSettings


@dataclass(frozen=True)
class Pair:
    """A certificate with its key, in files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority, with its certificate in a file.

    Args:
        directory: for all files.
        name: of the files.
    """

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self.path = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.path)

    def issue(self, file: str, *names: str, until: datetime | None = None) -> Pair:
        """Issue a certificate of these names; it replaces an earlier one in `file`."""
        made = self._authority.issue_cert(*names, common_name=names[0], not_after=until)
        pair = Pair(self._directory / f"{file}.pem", self._directory / f"{file}.key")
        made.private_key_pem.write_to_path(pair.key)
        with pair.certificate.open("wb") as chain:
            for part in made.cert_chain_pems:
                chain.write(part.bytes())
        return pair

    def server(self, *, wants_certificates: bool) -> TlsSettings:
        """Return the TLS settings of a server on this machine."""
        pair = self.issue("server", "localhost", "127.0.0.1")
        return TlsSettings(
            certificate=pair.certificate,
            key=pair.key,
            client_ca=self.path if wants_certificates else None,
        )

    def client(
        self, *names: str, token_file: Path | None = None, until: datetime | None = None
    ) -> ClientCredentials:
        """Return the credentials of a client of these names; without names, no certificate."""
        pair = self.issue("client", *names, until=until) if names else None
        return read_credentials(
            token_file,
            self.path,
            None if pair is None else pair.certificate,
            None if pair is None else pair.key,
        )
