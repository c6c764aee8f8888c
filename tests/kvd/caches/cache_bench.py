"""Caches of a kvd inside one process, and sessions in them."""

from contextlib import asynccontextmanager

from kvd.caches.caches import Caches
from kvd.caches.layout_opening import VOLUMES
from kvd.config import DramSettings, EncryptionSettings, LimitSettings, Settings, SsdSettings
from kvd.engines.attached import Engines
from kvd.host.clock import resume_clock
from kvd.tiers.faults import NoFaults
from kvd.tiers.manifest import Manifest
from tests.synthetic_engine import encode, key_of, small_layout

LAYOUT = small_layout()


@asynccontextmanager
async def caches_in(directory, max_layouts=8, key_file=""):
    """Open the caches of a kvd in a directory; close them and check that no worker has failed."""
    directory.mkdir(exist_ok=True)
    settings = Settings(
        runtime_dir=directory,
        state_dir=directory,
        dram=DramSettings(bytes=20 * LAYOUT.block_bytes, keep="none", prefault=False),
        ssd=SsdSettings(bytes=1 << 20),
        limits=LimitSettings(max_layouts=max_layouts),
        encryption=EncryptionSettings(key_file=key_file),
    )
    manifest = Manifest(directory / "manifest.db", directory / VOLUMES, NoFaults())
    manifest.open()
    broken = []
    clock = resume_clock(None, "boot", 0)
    caches = Caches(
        settings, manifest, clock, Engines(4), NoFaults(), lambda _: None, broken.append
    )
    try:
        yield caches
    finally:
        await caches.close(keep_dram=False)
        manifest.close()
    assert not broken


def store(cache, name="a", first_token=0, *, tenant="default"):
    """Store one session in a cache; return its key."""
    key, tokens = key_of(name, tenant), encode(range(first_token, first_token + 16))
    answer = cache.act(lambda core: core.stores.prepare(key, tokens, 0, 1))
    cache.act(lambda core: core.stores.complete(answer.lease_id, 1, success=True))
    return key
