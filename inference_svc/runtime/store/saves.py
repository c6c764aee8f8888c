"""The saves and discards under way, one chain per session.

A turn's save follows that of the turn before it, and a discard follows the save of what it drops
some of; the session's next load waits for the end of the chain.
"""

import asyncio
from collections.abc import Sequence

from inference_svc.core.counters import Counters
from inference_svc.core.discards import Range
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.store.save_stream import SaveStream
from inference_svc.runtime.store.session_store import SessionStore
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


class DiscardLink:
    """A discard in the chain.

    Args:
        previous: set when what is before it in the chain is over.

    Attributes:
        over: set when the store has been told, or cannot be.
    """

    def __init__(self, previous: asyncio.Event | None) -> None:
        self.previous = previous
        self.over = asyncio.Event()

    async def caught_up(self) -> None:
        """Wait until it is over."""
        await self.over.wait()


class Saves:
    """See the module docstring.

    Args:
        group_tokens: see SaveStream.
    """

    def __init__(
        self, store: SessionStore, counters: Counters, *, block_tokens: int, group_tokens: int
    ) -> None:
        self._store = store
        self._counters = counters
        self._block_tokens = block_tokens
        self._group_tokens = group_tokens
        self._newest: dict[SessionKey, SaveStream | DiscardLink] = {}

    def open(
        self, key: SessionKey, buffer: WriteBuffer, lineage: Lineage | None = None
    ) -> SaveStream:
        """A stream for a buffer, at the end of the session's chain; the caller owes `run`.

        `lineage` is that of the tokens.
        """
        stream = self._newest[key] = SaveStream(
            self._store,
            key,
            buffer,
            previous=self._end(key),
            block_tokens=self._block_tokens,
            group_tokens=self._group_tokens,
            lineage=lineage,
        )
        return stream

    def open_discard(self, key: SessionKey) -> DiscardLink:
        """A link at the end of the session's chain; the caller owes `run_discard`."""
        link = self._newest[key] = DiscardLink(self._end(key))
        return link

    async def run_discard(
        self,
        key: SessionKey,
        link: DiscardLink,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None,
    ) -> None:
        """Tell the store of a discard when it is its turn; see SessionStore.discard."""
        try:
            if link.previous is not None:
                await link.previous.wait()
            await self._store.discard(key, token_ids, ranges, lineage)
        finally:
            link.over.set()
            if self._newest.get(key) is link:
                del self._newest[key]

    async def run(self, key: SessionKey, stream: SaveStream) -> None:
        """Run a stream to its end, then count it and let the session's next load go."""
        try:
            await stream.run()
            self._count(stream)
        finally:
            if self._newest.get(key) is stream:
                del self._newest[key]

    async def settled(self, key: SessionKey) -> None:
        """Wait for the end of the session's chain; the deadlines inside SessionStore bound it."""
        while (stream := self._newest.get(key)) is not None and not stream.over.is_set():
            await stream.over.wait()

    async def caught_up(self) -> None:
        """Wait until what was asked for is stored: what synchronous saving waits for."""
        for stream in list(self._newest.values()):
            await stream.caught_up()

    def _end(self, key: SessionKey) -> asyncio.Event | None:
        """Set when the session's chain, as it is now, is over; None: it has none."""
        newest = self._newest.get(key)
        return None if newest is None else newest.over

    def _count(self, stream: SaveStream) -> None:
        if not stream.is_finished:
            return
        if stream.refused_reason is None:
            self._counters.add("save_dropped")
        else:
            self._counters.add("saves_refused" if stream.refused_reason else "saves")
