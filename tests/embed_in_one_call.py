"""The kernel that embeds loaded keys, as a single call of torch, which is what a device sees.

Triton's interpreter makes many calls of it, on copies of all memory.
"""

from types import SimpleNamespace

import torch

from inference_svc.runtime.cuda.key_rotation import embed_on_device
from tests import simulated_device


@torch.library.custom_op("tests::embed_keys", mutates_args=("region",))
def embed_keys(
    region: torch.Tensor,
    dim: int,
    slots: torch.Tensor,
    keys: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    source: torch.Tensor,
    partner: torch.Tensor,
) -> None:
    """Launch the kernel; `dim` counts the slots of the region."""
    assert dim == 0
    source, partner = (SimpleNamespace(indices=indices) for indices in (source, partner))
    tables = SimpleNamespace(
        cosines=cosines, sines=sines, source=source, partner=partner, width=cosines.shape[-1]
    )
    embed_on_device(keys, tables, region, slots)


CALL = torch.ops.tests.embed_keys.default
simulated_device.ONLY_WRITING.add(CALL)
simulated_device.BY_ROWS.add(CALL)


def embed_in_one_call(keys, tables, region, slots):
    """See `EmbedKernel`."""
    sides = tables.source.indices, tables.partner.indices
    embed_keys(region, 0, slots, keys, tables.cosines, tables.sines, *sides)
