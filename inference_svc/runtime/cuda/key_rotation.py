"""Key rotation on a GPU: embeds loaded keys by one Triton kernel while writing them to their slots.

With torch this takes five calls, each of which reads and writes all keys, and another call that
copies them to pages.
"""

import torch
import triton
from torch import Tensor

from inference_svc.runtime.cuda.kernels.key_rotation import embed_keys
from inference_svc.runtime.positions.rotation import Tables

PROGRAM_ITEMS = 2048  # elements per program: 16 for each of its threads
WARPS = 4


def embed_on_device(keys: Tensor, tables: Tables, region: Tensor, slots: Tensor) -> None:
    """Embed keys and write them to their slots; see `EmbedKernel`."""
    num_tokens, num_heads, dim = keys.shape
    num_rows, block_dim = num_tokens * num_heads, triton.next_power_of_2(dim)
    rows = rows_of_program(dim)
    # Triton launches kernels on the thread's current device, and on its current stream.
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
    """Return the number of keys of `dim` elements that a program rotates."""
    return max(1, PROGRAM_ITEMS // int(triton.next_power_of_2(dim)))
