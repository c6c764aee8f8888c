"""Certificates for tests: an authority of their own, and PEM files of what it signs."""

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
    """One, with its certificate in a file.

    Args:
        directory: for all files.
        name: of them.
    """

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self.path = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.path)

    def issue(self, file: str, *names: str, until: datetime | None = None) -> Pair:
        """A certificate of these names, written over the one that `file` had."""
        made = self._authority.issue_cert(*names, common_name=names[0], not_after=until)
        pair = Pair(self._directory / f"{file}.pem", self._directory / f"{file}.key")
        made.private_key_pem.write_to_path(pair.key)
        with pair.certificate.open("wb") as chain:
            for part in made.cert_chain_pems:
                chain.write(part.bytes())
        return pair

    def server(self, *, wants_certificates: bool) -> TlsSettings:
        """Settings of a server on this machine."""
        pair = self.issue("server", "localhost", "127.0.0.1")
        return TlsSettings(
            certificate=pair.certificate,
            key=pair.key,
            client_ca=self.path if wants_certificates else None,
        )

    def client(
        self, *names: str, token_file: Path | None = None, until: datetime | None = None
    ) -> ClientCredentials:
        """What a client of these names comes with; without names, no certificate."""
        pair = self.issue("client", *names, until=until) if names else None
        return read_credentials(
            token_file,
            self.path,
            None if pair is None else pair.certificate,
            None if pair is None else pair.key,
        )
