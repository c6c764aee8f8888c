"""How long the SSD tier takes, by bucket, for one layout. Pure; counted on the event loop."""

from dataclasses import dataclass, field

from shared.types.histogram import Histogram

LOAD, AHEAD = "load", "ahead"  # what a read is for when it begins; a load may come meanwhile


@dataclass(frozen=True)
class IoMeasures:
    """See the module docstring.

    Attributes:
        read_s: of one block, from the request to its verified bytes, by purpose.
        write_s: of one block, from the request until it is durable.
        load_wait_s: of one load, from its grant until the last block it waited for was there.
    """

    read_s: Histogram = field(default_factory=Histogram)
    write_s: Histogram = field(default_factory=Histogram)
    load_wait_s: Histogram = field(default_factory=Histogram)
