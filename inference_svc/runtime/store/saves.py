"""The saves and discards under way, one chain per session.

A turn's save follows that of the turn before it, and a discard follows the save of what it drops
some of; the session's next load waits for the end of the chain. A write buffer is stored piece by
piece while its sequence is still being computed (`SaveStream`).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inference_svc.core.counters import Counters
from inference_svc.core.discards import Range
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.store.session_store import SessionStore
from shared.serving.tracing import child_span
from shared.types.block_key import TOKEN_BYTES
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


def _nobody_waits() -> None:
    """What is stored makes room for nobody."""


@dataclass(frozen=True)
class _Piece:
    """Tokens to be stored, from the first one on, and the clock they wait for."""

    token_ids: bytes
    clock: StepClock | None
    is_cut: bool = False


class SaveStream:
    """Stores a write buffer while its sequence is still being computed (paper §3.2.2).

        follow: a step is about to compute more ─► if that makes a group of full blocks, they are
                leased and copied layer by layer, each layer as soon as the step has computed it
        cut_short: somebody waits for room      ─► the partial last block is stored as it is, and
                stays so: the next block begins behind it
        finish: nothing more will be computed   ─► the rest is stored, the partial last block
                included

    Invariants:
        1. one piece at a time, in order; the first waits for the saves that it builds on;
        2. KV is read only behind the clock of the step that computes it;
        3. a piece that failed is tried again with the next one; nobody waits for it;
        4. the buffer begins with the first token that is not stored.

    Args:
        previous: each set when what this one builds on is stored, or never will be: the session's
            last save, and the prefix that it shares with another session.
        block_tokens: of the layout.
        group_tokens: fewer unsaved tokens than this wait for more, or for the end.
        lineage: the tokens' lineage; None: not named.
        stored: called when tokens are stored, which the buffer has forgotten.

    Attributes:
        over: set when nothing is being stored any more and nothing will be.
        idle: set while everything asked for so far is stored, or given up.
        refused_reason: of the last piece: "" stored, None failed.
        is_finished: `finish` was called: a turn's KV was to be stored to the end.
    """

    def __init__(
        self,
        store: SessionStore,
        key: SessionKey,
        buffer: WriteBuffer,
        *,
        previous: Sequence[asyncio.Event],
        block_tokens: int,
        group_tokens: int,
        lineage: Lineage | None = None,
        stored: Callable[[], None] = _nobody_waits,
    ) -> None:
        self.over = asyncio.Event()
        self.refused_reason: str | None = ""
        self.is_finished = False
        self._store = store
        self._key = key
        self._buffer = buffer
        self._previous = previous
        self._block_tokens = block_tokens
        self._group_tokens = max(group_tokens, block_tokens)
        self._lineage = lineage
        self._stored = stored
        self._queued_token = buffer.first_token  # end of what has been given to `_put`
        self._next: _Piece | None = None
        self._awaited: list[tuple[int, asyncio.Event]] = []
        self._is_last = False
        self._changed = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_unsaved(self) -> int:
        """Number of tokens in the buffer that `_put` has not been given."""
        return self._buffer.end_token - self._queued_token

    def stored(self, num_tokens: int) -> asyncio.Event:
        """Return what is set once the first `num_tokens` are stored, or nothing more will be.

        Those before the buffer, too: others may be storing them still.
        """
        event = asyncio.Event()
        self._awaited.append((num_tokens, event))
        self._note_stored()
        return event

    def wants(self, end_token: int, *, is_tight: bool = False) -> bool:
        """Whether `follow` is to be called now that tokens [0, end_token) are computed, or will be.

        `is_tight`: there is little room for more tokens, so a block is not to wait for its group.
        """
        group_tokens = self._block_tokens if is_tight else self._group_tokens
        return self._end_of_blocks(end_token) - self._queued_token >= group_tokens

    def follow(self, token_ids: bytes, clock: StepClock | None) -> None:
        """Store the full blocks of these tokens, whose KV a step computes behind `clock`.

        Call it only where `wants` says so, and never for KV that was computed over history
        whose load is not confirmed: wrong bytes must not be published. A piece that is not begun
        yet is replaced.
        """
        self._queued_token = self._end_of_blocks(len(token_ids) // TOKEN_BYTES)
        self._put(_Piece(token_ids[: self._queued_token * TOKEN_BYTES], clock))

    def cut_short(self, token_ids: bytes) -> None:
        """Store all of these tokens, which are computed; the next block begins behind them."""
        self._queued_token = len(token_ids) // TOKEN_BYTES
        self._put(_Piece(token_ids, None, is_cut=True))

    def finish(self, token_ids: bytes) -> None:
        """Store all of these tokens, which are computed; `over` is set after that."""
        self._is_last = self.is_finished = True
        self._put(_Piece(token_ids, None))

    def abandon(self) -> None:
        """Store nothing more; `over` is set when what is being copied is through."""
        self._is_last = True
        self._next = None
        self._changed.set()

    async def run(self) -> None:
        """Store until finished or abandoned."""
        try:
            for event in self._previous:
                await event.wait()
            self._note_stored()
            while True:
                await self._changed.wait()
                self._changed.clear()
                piece, self._next = self._next, None
                if piece is not None:
                    await self._store_piece(piece)
                if self._next is None:
                    self.idle.set()
                    if self._is_last:
                        return
        finally:
            self.idle.set()
            self.over.set()
            self._note_stored()

    def _put(self, piece: _Piece) -> None:
        self._next = piece
        self.idle.clear()
        self._changed.set()

    async def _store_piece(self, piece: _Piece) -> None:
        num_tokens = len(piece.token_ids) // TOKEN_BYTES
        from_token, end_token = min(self._buffer.first_token, num_tokens), num_tokens
        # A state that comes while these are stored is stored with the next piece.
        states = [position for position in self._buffer.states if position <= end_token]
        if end_token == from_token and not states:  # no more is kept than is stored
            return
        with child_span("save", {"kv.from_token": from_token}):
            reason = await self._store.save(
                key=self._key,
                token_ids=piece.token_ids,
                from_token=from_token,
                buffer=self._buffer,
                clock=piece.clock,
                lineage=self._lineage,
            )
        self.refused_reason = reason
        if reason == "":
            self._buffer.forget_states(states)
            if not piece.is_cut:
                end_token = self._end_of_blocks(end_token)
            if end_token > self._buffer.first_token:
                self._buffer.forget_before(end_token)
            self._note_stored()
            self._stored()

    def _note_stored(self) -> None:
        """Set the events of those who have waited for what is stored."""
        beginning_is_stored = all(event.is_set() for event in self._previous)
        for num_tokens, event in self._awaited:
            if self.over.is_set() or (
                beginning_is_stored and self._buffer.first_token >= num_tokens
            ):
                event.set()

    def _end_of_blocks(self, end_token: int) -> int:
        """End of the last full block of the buffer at or before a token."""
        first = self._buffer.first_token
        return first + (end_token - first) // self._block_tokens * self._block_tokens


class DiscardLink:
    """A discard in the chain.

    Args:
        previous: set when the save or discard before it in the chain is over.

    Attributes:
        over, idle: set when the store has been told, or cannot be.
    """

    def __init__(self, previous: asyncio.Event | None) -> None:
        self.previous = previous
        self.idle = self.over = asyncio.Event()


class Saves:
    """The chains of all sessions; see the module docstring.

    Args:
        block_tokens: tokens of a block of the layout.
        group_tokens: least number of unsaved tokens that a stream stores; see SaveStream.
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
        self,
        key: SessionKey,
        buffer: WriteBuffer,
        lineage: Lineage | None = None,
        stored: Callable[[], None] = _nobody_waits,
        *,
        shared_from: SessionKey | None = None,
    ) -> SaveStream:
        """Append a stream for a buffer to the session's chain; the caller owes `run`.

        Args:
            key: of the session.
            buffer: that is going to be filled.
            lineage: of the tokens.
            stored: see SaveStream.
            shared_from: whose tokens are before the buffer's; that session's saves store them, if
                need be while its turn is still computed.
        """
        ends = [self._end(key)]
        if shared_from is not None:
            ends.append(self._stored(shared_from, buffer.first_token))
        stream = self._newest[key] = SaveStream(
            self._store,
            key,
            buffer,
            previous=[end for end in ends if end is not None],
            block_tokens=self._block_tokens,
            group_tokens=self._group_tokens,
            lineage=lineage,
            stored=stored,
        )
        return stream

    def open_discard(self, key: SessionKey) -> DiscardLink:
        """Append a link to the session's chain; the caller owes `run_discard`."""
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
        """Pass a discard to the store when it is its turn; see SessionStore.discard."""
        try:
            if link.previous is not None:
                await link.previous.wait()
            await self._store.discard(key, token_ids, ranges, lineage)
        finally:
            link.over.set()
            if self._newest.get(key) is link:
                del self._newest[key]

    async def run(self, key: SessionKey, stream: SaveStream) -> None:
        """Run a stream to its end, then count it and release the session's next load."""
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

    async def ended(self, key: SessionKey) -> bool:
        """Wait for the end of the chain as it is; return whether nothing has been added to it."""
        newest = self._newest.get(key)
        if newest is not None:
            await newest.over.wait()
        return self._newest.get(key) in (None, newest)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being stored, so that waiting makes no room."""
        streams = [link for link in self._newest.values() if isinstance(link, SaveStream)]
        return all(stream.idle.is_set() for stream in streams)

    async def caught_up(self) -> None:
        """Wait until every stream's pieces so far are stored: synchronous saving waits for this."""
        for stream in list(self._newest.values()):
            await stream.idle.wait()

    def _end(self, key: SessionKey) -> asyncio.Event | None:
        """Return the event that the session's chain, as it is now, is over; None: it has none."""
        newest = self._newest.get(key)
        return None if newest is None else newest.over

    def _stored(self, key: SessionKey, num_tokens: int) -> asyncio.Event | None:
        """Return the event that a session's first tokens are stored; None: nothing is going on."""
        newest = self._newest.get(key)
        return newest.stored(num_tokens) if isinstance(newest, SaveStream) else self._end(key)

    def _count(self, stream: SaveStream) -> None:
        if not stream.is_finished:
            return
        if stream.refused_reason is None:
            self._counters.add("save_dropped")
        else:
            self._counters.add("saves_refused" if stream.refused_reason else "saves")
