"""Settings of kvd. systemd/kvd.toml is the reference: it lists and explains every key."""

import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, field_validator

from kvd.core.eviction.policies import POLICIES
from kvd.core.records.entries import TTL_NEVER_NS
from kvd.core.records.tier import Admission
from shared.access.settings import (
    ClientName,
    ClientSettings,
    Listen,
    ListenTcp,
    Tenants,
    TlsSettings,
    check_distinct,
    check_guarded,
)
from shared.config import reload
from shared.config.reload import LiveSettings
from shared.config.room import Demand, check_room
from shared.config.settings import LoadedSettings, load_settings
from shared.process.runtime_dir import default_runtime_dir, default_state_dir
from shared.serving.observing_settings import (
    MetricsSettings,
    ProcessSettings,
    TracingSettings,
    is_open,
)
from shared.types.kv_layout import KVLayout
from shared.types.setting_types import (
    ByteSize,
    ByteSizeOrAuto,
    ByteSizeOrNone,
    Duration,
    DurationOrNever,
    IntOrAny,
    RateOrNone,
    Section,
    TenantName,
    to_list,
)
from shared.types.units import GIB, MIB, NS_PER_S

ENV_PREFIX = "KVD"
# Variables of the commands' options, which are not settings (kvd/cli/options.py, connection.py).
OTHER_VARIABLES = (
    *("KVD_CONFIG", "KVD_ADDRESS", "KVD_TOKEN_FILE"),
    *("KVD_TLS_CA_FILE", "KVD_TLS_CERT_FILE", "KVD_TLS_KEY_FILE"),
)
# Keys that a reload applies to a running kvd (shared/config/reload.py); others need a restart.
LIVE_KEYS = (
    "ssd.admission",
    "ssd.write_back_after",
    "dram.watermark",
    "integrity",
    "sessions",
    "tenants",
    "prefetch",
    "compaction",
    "remote",
    "limits.max_engines",
    "limits.max_layouts",
    "limits.max_tenants",
    "limits.max_leases",
    "limits.max_watchers",
    "limits.sessions_page",
    "limits.load_wait",
    "limits.store_wait",
    "limits.drain",
    "access.allowed_uids",
    "engine_users",
    "clients",
    "log.level",
)
MIN_DRAM_BYTES = 1 << 16  # a smaller size is a typing error


def uid_of(user: str) -> int:
    """Return the uid of a user who is given by name or by uid.

    Raises:
        ValueError: no user has this name.
    """
    if user.isascii() and user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError as error:
        raise ValueError(f"user {user[:40]!r} does not exist: give a name or a uid") from error


def _check_user(value: str) -> str:
    uid_of(value)
    return value


UserName = Annotated[str, BeforeValidator(str), AfterValidator(_check_user)]
UserList = Annotated[tuple[UserName, ...], BeforeValidator(to_list)]
RoleList = Annotated[tuple[Literal["reader", "operator"], ...], BeforeValidator(to_list)]
LayoutPrefix = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,64}$")]


class DramSettings(Section):
    """The DRAM tier."""

    bytes: ByteSizeOrAuto = Field(default=None, ge=MIN_DRAM_BYTES)
    total_bytes: ByteSizeOrNone = Field(default=None, ge=MIN_DRAM_BYTES)
    prefault: bool = True
    keep: Literal["auto", "fdstore", "file", "none"] = "auto"
    directory: Path = Path("/dev/shm")  # noqa: S108  # kvd makes a private directory in it
    hugepages: Literal["auto", "on", "off"] = "auto"
    numa_node: IntOrAny = Field(default=None, ge=0)
    watermark: float = Field(default=0.02, ge=0, le=0.5)


class SsdSettings(Section):
    """The SSD tier."""

    bytes: ByteSizeOrAuto = Field(default=None, ge=0)
    reserve_bytes: ByteSize = Field(default=GIB, ge=0)
    segment_bytes: ByteSize = Field(default=GIB // 4, ge=1 << 16)
    io_threads: int = Field(default=4, ge=1, le=64)
    in_flight_bytes: ByteSize = Field(default=256 * MIB, ge=1 << 16)
    direct: Literal["auto", "on", "off"] = "auto"
    admission: Admission = Admission.WRITE_THROUGH
    write_back_after: Duration = Field(default=30.0, ge=0)


class CopierSettings(Section):
    """Processes that copy for engines between DRAM and a GPU, one for each GPU."""

    enabled: bool = True


class EncryptionSettings(Section):
    """Encryption of the SSD tier."""

    key_file: str = ""
    enabled: bool = True


class RemoteSettings(Section):
    """The remote store for sessions, and the rules of `kvd remote follow`."""

    url: Annotated[str, StringConstraints(pattern=r"^$|^(s3|gs|az|file|mooncake)://[^@?#]+$")] = ""
    write: Literal["none", "drain", "evicted", "all"] = "none"
    quiet: Duration = Field(default=10.0, ge=0)
    pull: bool = False
    wait: Duration = Field(default=30.0, ge=0, le=60)  # kvd/rpc/service.py: MAX_WAIT_S
    rate: ByteSizeOrNone = Field(default=None, ge=1 << 10)  # a second, each way
    requests: RateOrNone = Field(default=None, ge=1)  # a second
    drain: Duration = Field(default=60.0, ge=0)
    metrics: Listen = ()

    @field_validator("metrics")
    @classmethod
    def _check_local(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if closed := [address for address in value if not is_open(address)]:
            raise ValueError(f"{closed[0][:60]} is not local: write unix:/path or 127.0.0.1")
        return value


class IntegritySettings(Section):
    """Verification of blocks in addition to the checks of every read from SSD."""

    verify_on_load: bool = False
    scrub_rate: ByteSize = Field(default=256 * MIB, ge=1 << 16)  # a second


class SessionSettings(Section):
    """Defaults of sessions and tenants: TTL, quota and retention."""

    default_ttl: DurationOrNever = Field(default=7 * 86400.0, gt=0)
    default_quota: ByteSizeOrNone = Field(default=None, ge=0)
    max_retention: Duration = Field(default=3600.0, ge=0)
    max_sessions: int = Field(default=250_000, ge=1)


class TenantSettings(Section):
    """One tenant's values in place of the defaults; an omitted key keeps the default."""

    ttl: DurationOrNever = Field(default=None, gt=0)
    max_retention: Duration = Field(default=0.0, ge=0)
    quota: ByteSizeOrNone = Field(default=None, ge=0)


class LayoutSettings(Section):
    """Budgets of one layout: in place of dram.bytes, and within ssd.bytes; None: the default."""

    dram: ByteSizeOrAuto = Field(default=None, ge=MIN_DRAM_BYTES)
    ssd: ByteSizeOrAuto = Field(default=None, ge=0)


class EvictionSettings(Section):
    """The eviction policy: which sessions leave DRAM first."""

    policy: str = "predictive"

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"not an eviction policy: give one of {', '.join(sorted(POLICIES))}")
        return value


class PrefetchSettings(Section):
    """Prefetching from SSD."""

    in_flight_bytes: ByteSize = Field(default=32 * MIB, ge=0)
    returning: bool = True


class CompactionSettings(Section):
    """Compaction of the rows that discards leave of a session's blocks."""

    max_waste: float = Field(default=0.5, gt=0, le=1)
    min_bytes: ByteSize = Field(default=MIB, ge=0)
    rest: Duration = Field(default=2.0, ge=0)


class LimitSettings(Section):
    """Bounds on the requests of peers."""

    max_engines: int = Field(default=64, ge=1)
    max_layouts: int = Field(default=8, ge=1)
    max_tenants: int = Field(default=10_000, ge=1)
    max_leases: int = Field(default=4096, ge=1, le=1_000_000)  # each reserves memory
    max_rpcs: int = Field(default=1024, ge=8, le=1_000_000)
    max_queue_jobs: int = Field(default=10_000, ge=1, le=1_000_000)
    max_watchers: int = Field(default=16, ge=1)
    max_streams_per_client: int = Field(default=8, ge=1)
    sessions_page: int = Field(default=1000, ge=1, le=10_000)
    load_wait: Duration = Field(default=10.0, gt=0)
    store_wait: Duration = Field(default=5.0, gt=0)
    drain: Duration = Field(default=10.0, ge=0)


class AccessSettings(Section):
    """Users, groups and addresses that may connect."""

    allowed_uids: UserList = ()
    engine_group: str = ""
    operator_group: str = ""
    reader_group: str = ""
    tcp: ListenTcp = ()

    @property
    def groups(self) -> tuple[str, str, str]:
        """Groups of the engine, operator and reader sockets."""
        return self.engine_group, self.operator_group, self.reader_group


class EngineUserSettings(Section):
    """The tenants that engines of one user may name."""

    tenants: Tenants


class KvdClientSettings(ClientSettings):
    """One client that authenticates with a token or a certificate."""

    roles: RoleList = ("reader",)


class LogSettings(Section):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"


class Settings(Section):
    """All settings of kvd."""

    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    state_dir: Path = Field(default_factory=default_state_dir)
    dram: DramSettings = DramSettings()
    ssd: SsdSettings = SsdSettings()
    copier: CopierSettings = CopierSettings()
    encryption: EncryptionSettings = EncryptionSettings()
    remote: RemoteSettings = RemoteSettings()
    integrity: IntegritySettings = IntegritySettings()
    sessions: SessionSettings = SessionSettings()
    tenants: Mapping[TenantName, TenantSettings] = Field(default_factory=dict)
    layouts: Mapping[LayoutPrefix, LayoutSettings] = Field(default_factory=dict)
    eviction: EvictionSettings = EvictionSettings()
    prefetch: PrefetchSettings = PrefetchSettings()
    compaction: CompactionSettings = CompactionSettings()
    limits: LimitSettings = LimitSettings()
    access: AccessSettings = AccessSettings()
    engine_users: Mapping[UserName, EngineUserSettings] = Field(default_factory=dict)
    clients: Annotated[Mapping[ClientName, KvdClientSettings], AfterValidator(check_distinct)] = (
        Field(default_factory=dict)
    )
    tls: TlsSettings = TlsSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    process: ProcessSettings = ProcessSettings()
    log: LogSettings = LogSettings()

    def tenant_ttl_ns(self, tenant: str) -> int | None:
        """Return a tenant's own TTL; None if it has none, TTL_NEVER_NS for never."""
        own = self.tenants.get(tenant)
        if own is None or "ttl" not in own.model_fields_set:
            return None
        return TTL_NEVER_NS if own.ttl is None else int(own.ttl * NS_PER_S)

    def tenant_retention_ns(self, tenant: str) -> int | None:
        """Return a tenant's own bound on retention; None if it has none."""
        own = self.tenants.get(tenant)
        if own is None or "max_retention" not in own.model_fields_set:
            return None
        return int(own.max_retention * NS_PER_S)

    def tenant_quota_bytes(self, tenant: str) -> int | None:
        """Return the quota of a tenant, its own or the default; None for no bound."""
        own = self.tenants.get(tenant)
        if own is None or "quota" not in own.model_fields_set:
            return self.sessions.default_quota
        return own.quota

    def engine_uids(self) -> tuple[int, ...]:
        """Return the uids whose engines may attach, besides kvd's own and root."""
        return tuple(map(uid_of, (*self.access.allowed_uids, *self.engine_users)))

    def engine_tenants(self) -> dict[int, tuple[str, ...]]:
        """Return uid → tenants of the users whose engines may not name all tenants."""
        return {uid_of(user): own.tenants for user, own in self.engine_users.items()}

    def layout_settings(self, layout: KVLayout) -> LayoutSettings:
        """Return a layout's budgets: those of the longest prefix of its fingerprint or model."""
        names = (layout.fingerprint, layout.model)
        matching = [p for p in self.layouts if any(name.startswith(p) for name in names)]
        return self.layouts[max(matching, key=len)] if matching else LayoutSettings()


def check_access(settings: Settings) -> None:
    """Refuse settings with which any client could connect.

    Raises:
        UnguardedError: a guard is missing; the message names it.
    """
    check_guarded(settings.access.tcp, settings.tls, settings.clients)
    settings.metrics.check_guarded(settings.tls, settings.clients)


def check_possible(settings: Settings) -> None:
    """Refuse sizes that exceed this machine's memory or disk.

    Raises:
        InvalidSettingsError: sizes are too large; the message names each.
    """
    dram, ssd, disk = settings.dram, settings.ssd, settings.state_dir
    check_room(
        (
            Demand("dram.bytes", dram.bytes, instead='"auto"'),
            Demand("dram.total_bytes", dram.total_bytes, instead='"none"'),
            Demand("ssd.bytes", ssd.bytes, disk, '"auto"'),
            Demand("ssd.reserve_bytes", ssd.reserve_bytes, disk),
            Demand("ssd.segment_bytes", ssd.segment_bytes, disk),
            Demand("ssd.in_flight_bytes", ssd.in_flight_bytes),
            Demand("prefetch.in_flight_bytes", settings.prefetch.in_flight_bytes),
            *(Demand(f"layouts.{k}.dram", v.dram) for k, v in settings.layouts.items()),
            *(Demand(f"layouts.{k}.ssd", v.ssd, disk) for k, v in settings.layouts.items()),
        )
    )


def load(config_path: Path | None, flags: dict[str, object]) -> LoadedSettings[Settings]:
    """Read kvd's settings; see shared/config/settings.py.

    Raises:
        InvalidSettingsError: settings are not valid; the message names every problem.
        UnguardedError: any client could connect.
    """
    found = load_settings(Settings, config_path, ENV_PREFIX, flags, other_variables=OTHER_VARIABLES)
    check_possible(found.settings)
    check_access(found.settings)
    return found


def is_live(key: str) -> bool:
    """Whether a reload applies a setting, given as a dotted key."""
    return reload.is_live(key, LIVE_KEYS)


def load_live(config_path: Path | None, flags: dict[str, object]) -> LiveSettings[Settings]:
    """Read kvd's settings for a daemon, which reads them again at each reload.

    Raises:
        InvalidSettingsError: settings are not valid; the message names every problem.
        UnguardedError: any client could connect.
    """
    return LiveSettings(load(config_path, flags), lambda: load(config_path, flags), LIVE_KEYS)
