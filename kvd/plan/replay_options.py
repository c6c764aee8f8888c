"""What a replay assumes beside the machine. Pure."""

from dataclasses import dataclass
from typing import Literal

Charge = Literal["packed", "window"]
TierMode = Literal["inclusive", "exclusive"]
LoadPolicy = Literal["always", "auto", "never"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """See the module docstring.

    Attributes:
        policy: by name; `belady` too.
        charge: "packed": a session takes its bytes; "window": those of a full window.
        window_tokens: of the model; 0: no bound.
        ttl_s: None: sessions stay.
        watermark: share of DRAM kept free.
        warmup_turns: turns that are not measured.
        load_policy: "auto": load unless computing is faster; "never": recompute always (RE).
        end_hints: a session's last turn says that it is the last.
        think_scale: multiplies think times; 0: no thinking.
    """

    policy: str
    kv_bytes_per_token: float
    charge: Charge = "packed"
    window_tokens: int = 0
    tiers: TierMode = "inclusive"
    ttl_s: float | None = None
    watermark: float = 0.0
    warmup_turns: int = 0
    load_policy: LoadPolicy = "auto"
    end_hints: bool = False
    think_scale: float = 1.0
