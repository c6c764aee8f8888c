"""Which way slots are copied: by the CPU, or by a device's own engines."""

from functools import partial

import structlog
import torch

from inference_svc.runtime.cuda.device_arena import DeviceArena
from inference_svc.runtime.cuda.driver import CudaDriver
from inference_svc.runtime.kv.arena_kv import ArenaKv, OpenArena

log = structlog.get_logger()


def open_arena_for(device: torch.device) -> OpenArena:
    """Return what views arenas for copies to and from a device."""
    if device.type != "cuda":
        return ArenaKv
    try:
        driver = CudaDriver(device)
    except ImportError as error:
        # Slower, and right: the CPU gathers what the device is to have.
        log.warning(
            "arena_not_registered",
            reason=str(error),
            remedy="pip install 'cachedattention[cuda]'",
        )
        return ArenaKv
    return partial(DeviceArena, driver=driver, device=device)
