"""Settings of kvd. systemd/kvd.toml is the reference: it lists and explains every key."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from kvd.core.eviction import POLICIES
from shared.config import (
    ByteSize,
    ByteSizeOrAuto,
    Duration,
    DurationOrNever,
    IntList,
    LoadedSettings,
    Section,
    load_settings,
)
from shared.runtime_dir import default_runtime_dir, default_state_dir

ENV_PREFIX = "KVD"
GIB = 1 << 30


class DramSettings(Section):
    """The DRAM tier."""

    bytes: ByteSizeOrAuto = Field(default=None, ge=1 << 16)
    prefault: bool = True


class SsdSettings(Section):
    """The SSD tier."""

    bytes: ByteSizeOrAuto = Field(default=None, ge=0)
    segment_bytes: ByteSize = Field(default=GIB // 4, ge=1 << 16)
    read_threads: int = Field(default=4, ge=1, le=64)


class SessionSettings(Section):
    """How long sessions live."""

    default_ttl: DurationOrNever = Field(default=7 * 86400.0, gt=0)
    max_sessions: int = Field(default=100_000, ge=1)


class EvictionSettings(Section):
    """Who goes first."""

    policy: str = "lru"

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"not a policy: choose one of {', '.join(sorted(POLICIES))}")
        return value


class LimitSettings(Section):
    """Bounds on what peers may ask for."""

    max_engines: int = Field(default=64, ge=1)
    max_layouts: int = Field(default=8, ge=1)
    max_tenants: int = Field(default=10_000, ge=1)
    max_leases: int = Field(default=4096, ge=1)
    max_rpcs: int = Field(default=1024, ge=8)
    max_queue_jobs: int = Field(default=10_000, ge=1)
    max_watchers: int = Field(default=16, ge=1)
    sessions_page: int = Field(default=1000, ge=1, le=10_000)
    load_wait: Duration = Field(default=10.0, gt=0)
    store_wait: Duration = Field(default=5.0, gt=0)
    drain: Duration = Field(default=10.0, ge=0)


class AccessSettings(Section):
    """Who may connect."""

    allowed_uids: IntList = ()
    tcp: str = Field(default="", pattern=r"^((127\.0\.0\.1|localhost|\[::1\]):\d{1,5})?$")


class LogSettings(Section):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"


class Settings(Section):
    """All of it."""

    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    state_dir: Path = Field(default_factory=default_state_dir)
    dram: DramSettings = DramSettings()
    ssd: SsdSettings = SsdSettings()
    sessions: SessionSettings = SessionSettings()
    eviction: EvictionSettings = EvictionSettings()
    limits: LimitSettings = LimitSettings()
    access: AccessSettings = AccessSettings()
    log: LogSettings = LogSettings()


def load(config_path: Path | None, flags: dict[str, object]) -> LoadedSettings[Settings]:
    """Read kvd's settings; see shared/config.py.

    Raises:
        InvalidSettingsError: naming every problem.
    """
    return load_settings(Settings, config_path, ENV_PREFIX, flags)
