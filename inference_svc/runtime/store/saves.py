"""The saves under way, one chain per session: a turn's save follows that of the turn before it."""

from inference_svc.core.counters import Counters
from inference_svc.runtime.kv.kv_slab import WriteBuffer
from inference_svc.runtime.store.save_stream import SaveStream
from inference_svc.runtime.store.session_store import SessionStore
from shared.session_key import SessionKey


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
        self._newest: dict[SessionKey, SaveStream] = {}

    def open(self, key: SessionKey, buffer: WriteBuffer) -> SaveStream:
        """A stream for a buffer, behind the session's other saves; the caller owes `run`."""
        before = self._newest.get(key)
        stream = self._newest[key] = SaveStream(
            self._store,
            key,
            buffer,
            previous=None if before is None else before.over,
            block_tokens=self._block_tokens,
            group_tokens=self._group_tokens,
        )
        return stream

    async def run(self, key: SessionKey, stream: SaveStream) -> None:
        """Run a stream to its end, then count it and let the session's next load go."""
        try:
            await stream.run()
            self._count(stream)
        finally:
            if self._newest.get(key) is stream:
                del self._newest[key]

    async def settled(self, key: SessionKey) -> None:
        """Wait for the session's saves; the deadlines inside SessionStore.save bound it."""
        while (stream := self._newest.get(key)) is not None and not stream.over.is_set():
            await stream.over.wait()

    async def caught_up(self) -> None:
        """Wait until what was asked for is stored: what synchronous saving waits for."""
        for stream in list(self._newest.values()):
            await stream.caught_up()

    def _count(self, stream: SaveStream) -> None:
        if not stream.is_finished:
            return
        if stream.refused_reason is None:
            self._counters.add("save_dropped")
        else:
            self._counters.add("saves_refused" if stream.refused_reason else "saves")
