"""Key rotation kernel: rotates keys by their positions while writing them to their token slots.

    keys            [tokens, heads, DIM], loaded keys before RoPE
    cosines, sines  [tokens, WIDTH], of the tokens' positions
    region          [slots, heads, DIM]; token t goes to slot slots[t]
    program         ROWS keys, each of one head of one token

The arithmetic is that of `positions/rotation.py`, to the bit: two products and one sum, each
rounded to the tables' dtype. A fused multiply-add would round once less, so the caller has to
launch this with `enable_fp_fusion=False`.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def embed_keys(
    region,
    slots,
    keys,
    cosines,
    sines,
    source,
    partner,
    num_rows,
    num_heads,
    region_strides_slot,
    region_strides_head,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate the first WIDTH elements of ROWS keys, and copy the elements behind them."""
    dtype = cosines.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    tokens = rows // num_heads
    dims = tl.arange(0, BLOCK_DIM)
    turns = is_row[:, None] & (dims[None, :] < WIDTH)
    places = (
        region
        + tl.load(slots + tokens, mask=is_row, other=0).to(tl.int64)[:, None] * region_strides_slot
        + (rows % num_heads)[:, None] * region_strides_head
        + dims[None, :]
    )
    from_keys = keys + rows.to(tl.int64)[:, None] * DIM
    from_tables = tokens.to(tl.int64)[:, None] * WIDTH + dims[None, :]

    sources = tl.load(source + dims, mask=dims < WIDTH, other=0)
    key = tl.load(from_keys + sources[None, :], mask=turns, other=0.0)
    table = tl.load(cosines + from_tables, mask=turns, other=0.0)
    turned = (key.to(dtype).to(tl.float32) * table.to(tl.float32)).to(dtype)

    partners = tl.load(partner + dims, mask=dims < WIDTH, other=0)
    key = tl.load(from_keys + partners[None, :], mask=turns, other=0.0)
    table = tl.load(sines + from_tables, mask=turns, other=0.0)
    product = (key.to(dtype).to(tl.float32) * table.to(tl.float32)).to(dtype)

    turned = (turned.to(tl.float32) + product.to(tl.float32)).to(dtype)
    tl.store(places, turned.to(region.dtype.element_ty), mask=turns)
    if WIDTH < DIM:
        stays = is_row[:, None] & (dims[None, :] >= WIDTH) & (dims[None, :] < DIM)
        tl.store(places, tl.load(from_keys + dims[None, :], mask=stays, other=0.0), mask=stays)
