"""Empties kvd's DRAM tier of a session, so that what it has left of it is on SSD only.

kvd has no command for that, and needs none: loading another session that fills the tier does it.
"""

import numpy as np

from inference_svc.bench.local_engine import LocalEngine
from shared.kvd_client.client import KvdClient
from shared.types.block_key import TOKEN_BYTES

CALL_S = 120.0


class Filler:
    """A session that fills the DRAM tier; its bytes are nobody's keys and values."""

    def __init__(self, engine: LocalEngine, num_blocks: int) -> None:
        assert engine.kvd is not None, "the SSD tier is kvd's"  # noqa: S101
        self._kvd = engine.kvd
        self._engine = engine
        self._key = engine.key("filler")
        self._ids = np.arange(num_blocks * engine.block_tokens, dtype="<u4").tobytes()

    @property
    def _client(self) -> KvdClient:
        client = self._engine.parts.client
        assert client is not None, "an engine with a kvd has its client"  # noqa: S101
        return client

    async def store(self) -> None:
        """Have it on SSD, block by block as far as kvd takes it."""
        end = 0
        while end < len(self._ids) // TOKEN_BYTES:
            grant = await self._client.prepare_store(self._key, self._ids, end, CALL_S)
            stored = await self._client.complete_store(grant, success=True)
            if stored <= end:
                break  # full: what is there has to do
            end = stored
            await self._kvd.until_clean()

    async def push_out(self) -> None:
        """Have it in DRAM, and nothing else."""
        await self._engine.settle()
        await self._kvd.until_clean()
        end, more = 0, True
        while more:
            grant = await self._client.prepare_load(self._key, self._ids, end, CALL_S)
            await self._client.complete_load(grant)
            end, more = grant.end_token, grant.more
        await self._engine.settle()
