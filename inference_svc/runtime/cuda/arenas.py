"""Arena choice: whether the CPU, the device itself, or kvd's copier copies slots."""

from functools import partial

import torch

from inference_svc.core.counters import Counters
from inference_svc.runtime.cuda.copier_arena import CopierArena
from inference_svc.runtime.cuda.copier_link import CopierLink
from inference_svc.runtime.cuda.device_arena import DeviceArena
from inference_svc.runtime.cuda.driver import CudaDriver
from inference_svc.runtime.kv.arena_kv import ArenaKv, OpenArena
from shared.cuda.driver_calls import DriverError
from shared.kvd_client.client import KvdClient
from shared.process.log import get_logger

log = get_logger(__name__)


def open_arena_for(device: torch.device) -> OpenArena:
    """Return a function that opens arenas for copies to and from a device by shared memory."""
    driver = _driver_of(device)
    return ArenaKv if driver is None else partial(DeviceArena, driver=driver, device=device)


def open_arena_by_copier(device: torch.device, client: KvdClient, counters: Counters) -> OpenArena:
    """Return a function that opens arenas for copies by kvd's copier, while `client` has one."""
    driver = _driver_of(device)
    if driver is None:
        return ArenaKv
    link = CopierLink(driver, driver.uuid, counters)
    client.run_while_attached.append(link.run)
    return partial(CopierArena, driver=driver, device=device, link=link)


def _driver_of(device: torch.device) -> CudaDriver | None:
    """Return a GPU's driver; None: the CPU makes the copies."""
    if device.type != "cuda":
        return None
    try:
        return CudaDriver(device)
    except (ImportError, DriverError) as error:  # copies by the CPU are slower, but correct
        log.warning(
            "arena_not_registered",
            reason=str(error),
            remedy="pip install 'cachedattention[cuda]'",
        )
        return None
