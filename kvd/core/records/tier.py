"""The tiers of kvd, and when a block is written to the lower one."""

from enum import Enum


class Tier(Enum):
    """A tier of kvd: where KV bytes may be."""

    DRAM = "dram"
    SSD = "ssd"


class Admission(Enum):
    """When a stored block is written to SSD."""

    WRITE_THROUGH = "write_through"  # at once
    WRITE_BACK = "write_back"  # when its session was not used for a while, or room is short
    ON_EVICT = "on_evict"  # when its room in DRAM is needed
