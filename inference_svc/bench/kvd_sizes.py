"""What a kvd of the bench is given."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvdSizes:
    """What one kvd of the bench is given.

    Attributes:
        ssd_bytes: 0: no SSD tier.
        writes_through: to SSD at once; else only what has to leave DRAM is written.
        policy: of eviction; "": kvd's default.
    """

    dram_bytes: int
    ssd_bytes: int = 0
    segment_bytes: int = 64 << 20
    writes_through: bool = True
    policy: str = ""

    def toml(self) -> str:
        """Settings: nothing expires, nothing outlives the process but what is on SSD."""
        admission = "write_through" if self.writes_through else "on_evict"
        eviction = f'[eviction]\npolicy = "{self.policy}"\n' if self.policy else ""
        return f"""
[dram]
bytes = {self.dram_bytes}
keep = "none"
[ssd]
bytes = {self.ssd_bytes}
segment_bytes = {self.segment_bytes}
reserve_bytes = 0
admission = "{admission}"
[sessions]
default_ttl = "never"
[limits]
load_wait = "120s"
[log]
level = "warning"
format = "json"
{eviction}"""
