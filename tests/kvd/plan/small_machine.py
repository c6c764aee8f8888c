"""A machine, and turns, whose replays can be computed by hand."""

from dataclasses import replace

from kvd.plan.hardware import EngineConstants, Hardware, ReplayOptions
from kvd.plan.trace import Session, Turn

# A token is 1000 bytes. It takes a second to prefill, and 0.25 s to decode; a prefill takes half a
# second more. DRAM to HBM takes 0.125 s a token; a read from SSD, half a second.
ENGINE = EngineConstants(slots=1, prefill_s_per_token=1.0, decode_step_s=0.25, fixed_s=0.5)
MACHINE = Hardware(
    dram_bytes=1_000_000,
    ssd_bytes=0,
    ssd_bytes_per_s=2000,
    pcie_bytes_per_s=8000,
    engine=ENGINE,
)
LRU = ReplayOptions("lru", 1000, tiers="exclusive", load_policy="always")
FIRST = Turn(new_tokens=10, output_tokens=6, history_tokens=0, think_s=0.0)  # 10.5 s, 1.5 s
SECOND = Turn(new_tokens=2, output_tokens=4, history_tokens=16, think_s=8.0)
SSD_ONLY = replace(MACHINE, dram_bytes=0, ssd_bytes=1_000_000)


def at(start_s: float, *turns: Turn) -> Session:
    return Session(start_s, turns)
