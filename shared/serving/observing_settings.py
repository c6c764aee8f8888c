"""Sections of the settings by which a process is watched: [metrics], [tracing], [process]. Pure."""

from collections.abc import Mapping

from pydantic import Field, field_validator

from shared.access.addresses import check_guarded, is_loopback, is_tcp, is_unix
from shared.access.settings import ClientSettings, TlsSettings
from shared.process.runtime_dir import MAX_SOCKET_PATH
from shared.types.setting_types import Section


class MetricsSettings(Section):
    """Metrics and probes over HTTP.

    Attributes:
        listen: "unix:/path" or "host:port"; "" for nowhere.
    """

    listen: str = ""

    @field_validator("listen")
    @classmethod
    def _usable(cls, value: str) -> str:
        if not value or is_tcp(value):
            return value
        path = value.removeprefix("unix:")
        if is_unix(value) and path.startswith("/") and len(path.encode()) <= MAX_SOCKET_PATH:
            return value
        raise ValueError(f"write host:port, or unix:/path (at most {MAX_SOCKET_PATH} bytes)")

    @property
    def is_open(self) -> bool:
        """Whether whoever reaches the address may read: this machine does, nobody else."""
        return is_unix(self.listen) or is_loopback(self.listen)

    def check_guarded(self, tls: TlsSettings, clients: Mapping[str, ClientSettings]) -> None:
        """Refuse an address that strangers reach and nothing guards.

        Raises:
            UnguardedError: naming what is missing.
        """
        if self.listen and not self.is_open:
            check_guarded(self.listen, tls, clients)


class TracingSettings(Section):
    """Where traces go.

    Attributes:
        endpoint: URL of an OTLP collector (gRPC), "http://host:4317"; https for TLS; "" for none.
        sample_ratio: share of traces that begin here, in [0, 1]; others' callers have decided.
    """

    endpoint: str = Field(default="", pattern=r"^(https?://[^\s/]+)?$")
    sample_ratio: float = Field(default=1.0, ge=0, le=1)


class ProcessSettings(Section):
    """The process itself.

    Attributes:
        dumps: whether it may be dumped, and debugged by its own user: see shared/process/dumps.py.
    """

    dumps: bool = False
