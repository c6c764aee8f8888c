"""Which layers of an extent move together: one I/O is worth its start from about a mebibyte on.

Pure.
"""

from collections.abc import Sequence

LAYERED_IO_BYTES = 1 << 20


def layer_groups(layer_bytes: Sequence[int], least_bytes: float) -> tuple[range, ...]:
    """Split layers into runs of at least `least_bytes` each; what is left joins the last run."""
    groups: list[range] = []
    first, size = 0, 0
    for layer, num_bytes in enumerate(layer_bytes):
        size += num_bytes
        if size >= least_bytes:
            groups.append(range(first, layer + 1))
            first, size = layer + 1, 0
    if first < len(layer_bytes):
        start = groups.pop().start if groups else 0
        groups.append(range(start, len(layer_bytes)))
    return tuple(groups)
