"""Settings of contexts: reuse after edits, overflow and compression."""

from typing import Literal

from pydantic import Field, field_validator

from inference_svc.core.edits import edit_policy
from inference_svc.core.truncation import MAX_SINK_TOKENS
from shared.types.setting_types import CountOrAuto, NumberOrAuto, Section


class ReuseSettings(Section):
    """Which KV is reused of a conversation that its client has edited.

    Attributes:
        edits: which KV is reused of unchanged text behind the first edit. "exact": none, so that
            the answer is that of recomputation; "keep": that of whole messages, though it was
            computed over the text before the edit; "heal:k": as "keep", but the first k tokens
            behind each seam are computed again. With coupled positions it is always "exact".
    """

    edits: str = "exact"

    @field_validator("edits")
    @classmethod
    def _check_edits(cls, value: str) -> str:
        edit_policy(value)
        return value


class OverflowSettings(Section):
    """Which tokens of a session are dropped when its window is full; a turn may name its own.

    Attributes:
        policy: "oldest": the oldest tokens; "half", "sinks": older names for "oldest"; "reject":
            none, the turn is refused.
        ratio: part of the droppable tokens that is dropped at once, in (0, 1]. None: an eighth if
            the KV that is left stays valid, half if it has to be computed again.
        sink_tokens: number of first tokens that are never dropped, by compression neither, at most
            half of the window; a system message counts. None: as many as the model needs, found at
            start.
        reserve_tokens: tokens of an answer for which there must be room when it begins; at most a
            quarter of the window.
        split_frames: whether messages of a chat may be cut anywhere; if not, only where one begins.
        drop_system: whether the system message may be dropped, too.
    """

    policy: Literal["oldest", "half", "sinks", "reject"] = "oldest"
    ratio: NumberOrAuto = Field(default=None, gt=0, le=1)
    sink_tokens: CountOrAuto = Field(default=None, ge=0, le=MAX_SINK_TOKENS)
    reserve_tokens: int = Field(default=256, ge=1)
    split_frames: bool = False
    drop_system: bool = False


class CompressionSettings(Section):
    """Which tokens of a session are dropped at the end of each turn; a turn may name its own.

    Attributes:
        policy: "none": no tokens; "sinks_recent": all but the first and the latest tokens;
            "snapkv", "h2o": the tokens that got least attention.
        keep_ratio: part of the context that is kept, in (0, 1].
        min_tokens: tokens of the shortest context that is compressed.
    """

    policy: Literal["none", "sinks_recent", "snapkv", "h2o"] = "none"
    keep_ratio: float = Field(default=0.5, gt=0, le=1)
    min_tokens: int = Field(default=256, ge=1)
