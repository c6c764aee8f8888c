"""The table of compression policies, by the name that requests and settings give them. Pure."""

from collections.abc import Callable

from inference_svc.core.compression.h2o import HeavyHitters
from inference_svc.core.compression.policy import CompressionPolicy
from inference_svc.core.compression.sinks_recent import SinksRecent
from inference_svc.core.compression.snapkv import SnapKV
from inference_svc.core.errors import InvalidCompressionError

NONE = "none"
_POLICIES: dict[str, Callable[[float], CompressionPolicy]] = {
    SinksRecent.name: SinksRecent,
    SnapKV.name: SnapKV,
    HeavyHitters.name: HeavyHitters,
}
POLICY_NAMES = (NONE, *_POLICIES)
# Modes in which a model attends by its own code, which shows no queries.
_MODES_WITHOUT_QUERIES = frozenset({"masked", "single"})


def make_compression(name: str, keep_ratio: float) -> CompressionPolicy | None:
    """Make the policy of that name; None for "none".

    Args:
        name: of POLICY_NAMES.
        keep_ratio: part of the context's unprotected tokens that is kept, in (0, 1].

    Raises:
        InvalidCompressionError: if there is none of that name, or the ratio is out of range.
    """
    if name == NONE:
        return None
    make = _POLICIES.get(name)
    if make is None:
        raise InvalidCompressionError(
            f"there is no compression policy {name!r}", f"name one of {', '.join(POLICY_NAMES)}"
        )
    if not 0 < keep_ratio <= 1:
        raise InvalidCompressionError(
            f"keep_ratio {keep_ratio:g} is not in (0, 1]", "send the part of the tokens to keep"
        )
    return make(keep_ratio)


def check_compression(policy: CompressionPolicy, mode: str) -> None:
    """Refuse a policy that needs attention scores of a model that shows no queries.

    Args:
        policy: chosen for a turn, or for all.
        mode: the model's calibration mode.

    Raises:
        InvalidCompressionError: if they do not go together.
    """
    if policy.needs != "nothing" and mode in _MODES_WITHOUT_QUERIES:
        raise InvalidCompressionError(
            f"compression policy {policy.name!r} needs attention scores, which this model's "
            f"{mode} mode does not show",
            f"use {SinksRecent.name!r} or {NONE!r}",
        )
