"""Saves and discards under way, in one chain for each session.

A turn's save comes after that of the turn before it, and a discard after the save of the tokens
that it drops; the session's next load waits for the end of the chain. A write buffer is stored
piece by piece while its sequence is still being computed (`SaveStream`).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inference_svc.core.counters import Counters
from inference_svc.core.ranges import Range
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.store.session_store import SessionStore
from shared.serving.tracing import child_span
from shared.types.block_key import TOKEN_BYTES
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


def _ignore() -> None:
    """Do nothing when tokens are stored."""


@dataclass(frozen=True)
class _Piece:
    """Tokens to be stored, from the session's first one on.

    Attributes:
        token_ids: the tokens, little-endian uint32.
        clock: the clock of the step that computes their KV; None: it is computed.
        is_cut: whether the next block begins behind them, even if their last block is partial.
    """

    token_ids: bytes
    clock: StepClock | None
    is_cut: bool = False


class SaveStream:
    """Stores a write buffer while its sequence is still being computed (paper §3.2.2).

        follow: a step is about to compute more ─► if that makes a group of full blocks, they are
                leased and copied layer by layer, each layer as soon as the step has computed it
        cut_short: a request waits for room     ─► the partial last block is stored as it is, and
                stays so: the next block begins behind it
        finish: nothing more will be computed   ─► all other tokens are stored, those of the partial
                last block included

    Invariants:
        1. one piece at a time, in order; the first waits for the saves that it builds on;
        2. KV is read only behind the clock of the step that computes it;
        3. a piece that failed is tried again with the next one; nothing waits for it;
        4. the buffer begins with the first token that is not stored.

    Args:
        previous: events of the saves that this one builds on, each set when that is stored or
            never will be: the session's last save, and the save of a prefix that it shares with
            another session.
        block_tokens: tokens of a block of the layout.
        group_tokens: fewer unsaved tokens than this wait for more, or for the end.
        lineage: the tokens' lineage; None: not known.
        on_stored: callback when tokens are stored and the buffer has released them.

    Attributes:
        over: set when nothing is being stored any more and nothing will be.
        idle: set while every piece so far is stored or abandoned.
        refused_reason: slug, why the store refused the last piece; "": it is stored, None: the
            save failed.
        is_finished: whether `finish` was called, so that a turn's KV was to be stored to its end.
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
        on_stored: Callable[[], None] = _ignore,
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
        self._on_stored = on_stored
        self._queued_token = buffer.first_token  # end of the tokens that were given to `_put`
        self._next: _Piece | None = None
        self._awaited: list[tuple[int, asyncio.Event]] = []
        self._is_last = False
        self._changed = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_unsaved(self) -> int:
        """Number of tokens in the buffer that no piece has yet."""
        return self._buffer.end_token - self._queued_token

    def stored_event(self, num_tokens: int) -> asyncio.Event:
        """Return an event that is set once the first tokens are stored, or nothing more will be.

        It waits for tokens before the buffer, too: another save may still be storing them.
        """
        event = asyncio.Event()
        self._awaited.append((num_tokens, event))
        self._set_stored_events()
        return event

    def should_follow(self, end_token: int, *, is_tight: bool = False) -> bool:
        """Whether `follow` is due now that tokens [0, end_token) are computed, or will be.

        Args:
            end_token: the token after the last one.
            is_tight: whether there is little room for more tokens, so that a full block does not
                wait for its group.
        """
        group_tokens = self._block_tokens if is_tight else self._group_tokens
        return self._end_of_blocks(end_token) - self._queued_token >= group_tokens

    def follow(self, token_ids: bytes, clock: StepClock | None) -> None:
        """Store the full blocks of these tokens, whose KV a step computes behind `clock`.

        Call it only where `should_follow` says so, and never for KV that was computed over a
        history whose load is not confirmed: wrong bytes must not be published. A piece that has not
        begun yet is replaced.

        Args:
            token_ids: the session's tokens from the first one on, little-endian uint32.
            clock: the clock of the step; None: the KV is computed.
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
        """Store nothing more; `over` is set when a copy under way has ended."""
        self._is_last = True
        self._next = None
        self._changed.set()

    async def run(self) -> None:
        """Store until finished or abandoned."""
        try:
            for event in self._previous:
                await event.wait()
            self._set_stored_events()
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
            self._set_stored_events()

    def _put(self, piece: _Piece) -> None:
        self._next = piece
        self.idle.clear()
        self._changed.set()

    async def _store_piece(self, piece: _Piece) -> None:
        """Store a piece, and release its full blocks' tokens in the buffer."""
        num_tokens = len(piece.token_ids) // TOKEN_BYTES
        from_token, end_token = min(self._buffer.first_token, num_tokens), num_tokens
        # A state that is noted while these tokens are stored goes with the next piece.
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
            self._set_stored_events()
            self._on_stored()

    def _set_stored_events(self) -> None:
        """Set each event of `stored_event` whose tokens are stored."""
        beginning_is_stored = all(event.is_set() for event in self._previous)
        for num_tokens, event in self._awaited:
            if self.over.is_set() or (
                beginning_is_stored and self._buffer.first_token >= num_tokens
            ):
                event.set()

    def _end_of_blocks(self, end_token: int) -> int:
        """Return the end of the buffer's last full block at or before a token."""
        first = self._buffer.first_token
        return first + (end_token - first) // self._block_tokens * self._block_tokens


class DiscardLink:
    """A discard in a session's chain.

    Args:
        previous: set when the save or discard before it in the chain is over; None: there is none.

    Attributes:
        over, idle: set when the store has been notified, or cannot be.
    """

    def __init__(self, previous: asyncio.Event | None) -> None:
        self.previous = previous
        self.idle = self.over = asyncio.Event()


class Saves:
    """The chains of saves and discards of all sessions.

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
        on_stored: Callable[[], None] = _ignore,
        *,
        shared_from: SessionKey | None = None,
    ) -> SaveStream:
        """Append a stream for a buffer to the session's chain; the caller owes `run`.

        Args:
            key: the session's key.
            buffer: the write buffer, which is going to be filled.
            lineage: the tokens' lineage; None: not known.
            on_stored: callback when tokens are stored; see SaveStream.
            shared_from: the session whose saves store the tokens before the buffer's, perhaps while
                its turn is still computed; None: this session's own saves do.
        """
        ends = [self._end_event(key)]
        if shared_from is not None:
            ends.append(self._stored_event(shared_from, buffer.first_token))
        stream = self._newest[key] = SaveStream(
            self._store,
            key,
            buffer,
            previous=[end for end in ends if end is not None],
            block_tokens=self._block_tokens,
            group_tokens=self._group_tokens,
            lineage=lineage,
            on_stored=on_stored,
        )
        return stream

    def open_discard(self, key: SessionKey) -> DiscardLink:
        """Append a link to the session's chain; the caller owes `run_discard`."""
        link = self._newest[key] = DiscardLink(self._end_event(key))
        return link

    async def run_discard(
        self,
        key: SessionKey,
        link: DiscardLink,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None,
    ) -> None:
        """Wait for the chain before a discard, then pass it to the store: SessionStore.discard."""
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

    async def wait_for_end(self, key: SessionKey) -> None:
        """Wait until the session's chain has ended, with all that is added to it meanwhile.

        The deadlines inside SessionStore bound the wait.
        """
        while (stream := self._newest.get(key)) is not None and not stream.over.is_set():
            await stream.over.wait()

    async def wait_for_newest(self, key: SessionKey) -> bool:
        """Wait for the chain's newest link; return whether nothing was added to it meanwhile."""
        newest = self._newest.get(key)
        if newest is not None:
            await newest.over.wait()
        return self._newest.get(key) in (None, newest)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being stored, so that waiting would make no room."""
        streams = [link for link in self._newest.values() if isinstance(link, SaveStream)]
        return all(stream.idle.is_set() for stream in streams)

    async def wait_until_idle(self) -> None:
        """Wait until every stream's pieces so far are stored; synchronous saving needs this."""
        for stream in list(self._newest.values()):
            await stream.idle.wait()

    def _end_event(self, key: SessionKey) -> asyncio.Event | None:
        """Return the event of the end of the session's chain as it is now; None: it has none."""
        newest = self._newest.get(key)
        return None if newest is None else newest.over

    def _stored_event(self, key: SessionKey, num_tokens: int) -> asyncio.Event | None:
        """Return the event that a session's first tokens are stored; None: it has no chain."""
        newest = self._newest.get(key)

        return (
            newest.stored_event(num_tokens)
            if isinstance(newest, SaveStream)
            else self._end_event(key)
        )

    def _count(self, stream: SaveStream) -> None:
        """Count the end of a finished stream: saved, refused by the store, or failed."""
        if not stream.is_finished:
            return
        if stream.refused_reason is None:
            self._counters.add("save_dropped")
        else:
            self._counters.add("saves_refused" if stream.refused_reason else "saves")
