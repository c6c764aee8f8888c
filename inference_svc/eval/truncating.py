"""Which tokens an overflow drops. Pure."""

from dataclasses import replace

from inference_svc.core.discards import Range
from inference_svc.eval.options import Truncation
from shared.types.errors import InvalidInputError


def with_sinks(truncation: Truncation, model_sinks: int) -> Truncation:
    """Return a truncation that says how many sinks stay: if it does not, those of the model."""
    if truncation.sink_tokens is not None:
        return truncation
    return replace(truncation, sink_tokens=model_sinks)


def dropped(truncation: Truncation, num_tokens: int) -> tuple[Range, ...]:
    """Return the oldest part of a context of `num_tokens`, after what stays in any case."""
    sinks = truncation.sink_tokens or 0
    return ((sinks, sinks + int(truncation.ratio * num_tokens)),)


def check_truncation(truncation: Truncation, window_tokens: int) -> None:
    """Refuse a truncation that drops nothing, or leaves nothing.

    Raises:
        InvalidInputError: with the offending value.
    """
    if not 0 < truncation.ratio < 1:
        raise InvalidInputError(
            f"a truncation of {truncation.ratio:g} of the window is none",
            "give --ratio between 0 and 1",
        )
    (start, end) = dropped(truncation, window_tokens)[0]
    if end >= window_tokens or start >= end:
        raise InvalidInputError(
            f"{start} sink tokens and a ratio of {truncation.ratio:g} leave a window of "
            f"{window_tokens} tokens nothing to drop or nothing to keep",
            "give a larger --window, fewer --sinks or another --ratio",
        )
