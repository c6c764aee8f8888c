"""Settings for observing a process: sections [metrics], [tracing], [process]. Pure."""

from collections.abc import Mapping

from pydantic import Field

from shared.access.addresses import is_loopback, is_unix
from shared.access.settings import ClientSettings, Listen, TlsSettings, check_guarded
from shared.types.setting_types import Section


class MetricsSettings(Section):
    """Metrics and probes over HTTP.

    Attributes:
        listen: addresses, each "unix:/path" or "host:port"; none: metrics are not served.
    """

    listen: Listen = ()

    def check_guarded(self, tls: TlsSettings, clients: Mapping[str, ClientSettings]) -> None:
        """Refuse addresses that are reachable from other machines and not guarded.

        Raises:
            UnguardedError: an address is; the message names what is missing.
        """
        guarded = [address for address in self.listen if not is_open(address)]
        check_guarded(guarded, tls, clients)


def is_open(address: str) -> bool:
    """Whether metrics may be read at an address without authentication: only this machine can."""
    return is_unix(address) or is_loopback(address)


class TracingSettings(Section):
    """Export of traces.

    Attributes:
        endpoint: URL of an OTLP collector (gRPC), "http://host:4317"; https for TLS; "" for none.
        sample_ratio: share of the traces that begin here, in [0, 1]; for others the caller decides.
    """

    endpoint: str = Field(default="", pattern=r"^(https?://[^\s/]+)?$")
    sample_ratio: float = Field(default=1.0, ge=0, le=1)


class ProcessSettings(Section):
    """The process itself.

    Attributes:
        dumps: whether it may be dumped, and debugged by its own user; see shared/process/dumps.py.
    """

    dumps: bool = False
