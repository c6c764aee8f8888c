"""The store of sessions behind kvd."""

from collections.abc import Sequence

from inference_svc.core.counters import Counters
from inference_svc.core.discards import Range
from inference_svc.core.rates.rates import Rates
from inference_svc.runtime.kv.copy_stream import StepClock
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.store.kvd_loads import CopyThreads, KvdLoads
from inference_svc.runtime.store.kvd_saves import KvdSaves
from inference_svc.runtime.store.kvd_talk import KvdTalk
from inference_svc.runtime.store.session_store import BegunLoad, LoadRequest, StoreState
from shared.kvd_client.client import KvdClient
from shared.kvd_client.queue_feed import QueueFeed
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import ReportedError
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


class KvdSessionStore:
    """See SessionStore.

    Args:
        saves: whether anything is stored.
        deadline_s: how long one load, or one save, may wait for kvd.
    """

    def __init__(
        self,
        client: KvdClient,
        calibration: Calibration,
        threads: CopyThreads,
        counters: Counters,
        rates: Rates,
        *,
        saves: bool,
        deadline_s: float,
    ) -> None:
        self.saves = saves
        self._client = client
        self._talk = talk = KvdTalk(calibration.layout, counters)
        self._loads = KvdLoads(client, calibration, talk, threads, rates, deadline_s)
        self._saves = KvdSaves(client, calibration, talk, threads.store, deadline_s)

    @property
    def state(self) -> StoreState:
        """Whether kvd is there."""
        return "attached" if self._client.attached else "detached"

    async def begin_load(self, request: LoadRequest) -> BegunLoad:
        """See SessionStore."""
        return await self._loads.begin(request)

    async def finish_load(
        self,
        begun: BegunLoad,
        kv: SequenceKv,
        tail: WriteBuffer | None,
        gate: LayerGate,
        layers: range,
    ) -> None:
        """See SessionStore."""
        await self._loads.finish(begun, kv, tail, gate, layers)

    async def give_up(self, begun: BegunLoad) -> None:
        """See SessionStore."""
        await self._loads.give_up(begun)

    async def save(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        buffer: WriteBuffer,
        clock: StepClock | None = None,
        lineage: Lineage | None = None,
    ) -> str | None:
        """See SessionStore."""
        return await self._saves.save(key, token_ids, from_token, buffer, clock, lineage)

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """See SessionStore. Without kvd it keeps what no context matches any more."""
        try:
            await self._client.discard(key, token_ids, ranges, lineage=lineage)
        except Exception as error:  # noqa: BLE001  # whatever it is, a later load misses
            self._talk.counters.add("store_discards_failed")
            self._talk.note_problem("discard", error)
        else:
            self._talk.counters.add("store_discards")

    async def end_session(self, key: SessionKey) -> None:
        """See SessionStore. Without kvd it is told when kvd is back."""
        try:
            await self._client.end_session(key)
        except ReportedError as error:
            self._talk.note_problem("end_session", error)

    async def forget(self, key: SessionKey, token_ids: bytes) -> None:
        """See SessionStore. Without kvd the KV stays, of a session that kvd will hear has ended."""
        if not token_ids:
            return
        try:
            await self._client.discard(key, token_ids, [(0, len(token_ids) // TOKEN_BYTES)])
        except ReportedError as error:
            self._talk.note_problem("forget", error)
            await self.end_session(key)

    def follow_queue(self, feed: QueueFeed) -> None:
        """See SessionStore."""
        self._client.follow_queue(feed)
