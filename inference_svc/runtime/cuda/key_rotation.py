"""Loaded keys are embedded by a kernel of Triton's while they go to their token slots.

torch has no call for it: it turns what lies in some memory, in five calls, each of which reads and
writes all of it, and copies it to pages with another one.
"""

import torch
import triton
from torch import Tensor

from inference_svc.runtime.cuda.kernels.key_rotation import embed_keys
from inference_svc.runtime.positions.rotation import Tables

PROGRAM_ITEMS = 2048  # elements of a program: 16 of each of its threads
WARPS = 4


def embed_on_device(keys: Tensor, tables: Tables, region: Tensor, slots: Tensor) -> None:
    """Write keys, embedded, to their slots; see `EmbedKernel`."""
    num_tokens, num_heads, dim = keys.shape
    num_rows, block_dim = num_tokens * num_heads, triton.next_power_of_2(dim)
    rows = rows_of_program(dim)
    # Kernels are launched on the thread's current device, and go to its current stream.
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        embed_keys[(triton.cdiv(num_rows, rows),)](
            region,
            slots,
            keys,
            tables.cosines,
            tables.sines,
            tables.source.indices,
            tables.partner.indices,
            num_rows,
            num_heads,
            *region.stride()[:2],
            DIM=dim,
            BLOCK_DIM=block_dim,
            WIDTH=tables.width,
            ROWS=rows,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def rows_of_program(dim: int) -> int:
    """Return how many keys of `dim` elements a program turns."""
    return max(1, PROGRAM_ITEMS // int(triton.next_power_of_2(dim)))
