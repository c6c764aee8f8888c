"""What operators see of a layout's arena and volume, beyond what its core knows. Pure.

How long the SSD tier takes is counted in histograms, on the event loop.
"""

from dataclasses import dataclass, field

from shared.types.histogram import Histogram

LOAD, AHEAD = "load", "ahead"  # what a read is for when it begins; a load may come meanwhile


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """An arena as it is.

    Attributes:
        keep: what holds it when this process ends: "fdstore", "file", "none".
        pages: "hugetlb", "thp" (seen in smaps), "small"; "": not allocated yet.
        epoch: one more each time it is taken over.
        num_adopted: blocks taken over at this start.
        physical_bytes: memory that is allocated for its slots.
    """

    arena_id: str
    keep: str
    pages: str
    epoch: int
    num_adopted: int
    is_prefaulted: bool
    physical_bytes: int


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A volume as it is.

    Attributes:
        is_direct: its files are read and written with O_DIRECT.
        buffered_reason: why not; "" when direct.
        physical_bytes: what its files take up on the file system.
    """

    is_direct: bool
    buffered_reason: str
    physical_bytes: int


@dataclass(frozen=True, slots=True)
class EncryptionInfo:
    """What protects the SSD tier.

    Attributes:
        key: fingerprint of the master key; "": there is none.
        is_sealing: whether what is written now is encrypted.
        may_have_plain: blocks that are not may be on SSD, in use or in free space.
        num_tenants: that have a key.
    """

    key: str
    is_sealing: bool
    may_have_plain: bool
    num_tenants: int


@dataclass(frozen=True)
class IoHistograms:
    """How long the SSD tier of one layout takes.

    Attributes:
        read_s: of one block, from the request to its verified bytes, by purpose.
        write_s: of one block, from the request until it is durable.
        load_wait_s: of one load, from its grant until the last block it waited for was there.
    """

    read_s: Histogram = field(default_factory=Histogram)
    write_s: Histogram = field(default_factory=Histogram)
    load_wait_s: Histogram = field(default_factory=Histogram)
