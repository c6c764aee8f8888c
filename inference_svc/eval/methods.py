"""The ways to truncate a context that are compared. Pure.

*Source:* CachedAttention, USENIX ATC'24, §4.3.4 (OF) and §4.3.5 (CA, TT, NKVT).
"""

from typing import Literal, cast

from shared.types.errors import InvalidInputError

Method = Literal["ca", "ca-shift", "tt", "of", "nkvt"]
Positions = Literal["auto", "decoupled", "naive"]

METHODS: dict[Method, str] = {
    "ca": "kept KV is kept; keys are stored before RoPE, and embedded at their new positions",
    "ca-shift": "the same for a resident context: keys after RoPE are turned to new positions",
    "tt": "kept tokens are recomputed, all of them",
    "of": "keys are stored after RoPE: kept tokens from the first dropped one on are recomputed",
    "nkvt": "kept KV is kept as it is: keys have their old positions, new tokens the next free row",
}
REFERENCE: Method = "tt"
"""What the others are compared with: nothing in it is left over from dropped tokens."""


def methods_of(text: str) -> tuple[Method, ...]:
    """Read "ca,tt,nkvt", in any case and each once.

    Raises:
        InvalidInputError: another name is there, or none at all.
    """
    names = list(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise InvalidInputError(
            f"no such method: {', '.join(unknown) or 'none is named'}",
            f"name some of {', '.join(METHODS)}",
        )
    return tuple(cast("Method", name) for name in names)


def positions_of(method: Method) -> Positions:
    """How a model has to be calibrated for a method."""
    if method in {"ca", "ca-shift"}:
        return "decoupled"
    return "naive" if method == "nkvt" else "auto"
