"""An engine without a model: it stores rows made from their tokens, and checks what it loads.

A real client of a real kvd: control over gRPC, bytes in the mapped arena. The row of token t at
position p in component c of layer l depends on all four, so that a row in a wrong place shows. The
state at a position depends on all tokens before it.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shared.kvd_client.arena_map import ArenaMap
from shared.kvd_client.client import KvdClient
from shared.kvd_client.grants import StoreGrant
from shared.types.granted_slots import GrantedState, GrantedWindow, LoadSpan, Lookup
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.queue_feed import QueueFeed
from shared.types.session_key import SessionKey

MODEL = "5e" * 16
ATTACH_S = 30.0
CALL_S = 20.0


def small_layout(num_layers: int = 2, model: str = MODEL) -> KVLayout:
    """Blocks of 16 tokens and 4 KiB per layer."""
    components = (Component("k", (2, 8), "float32", "rotary"), Component("v", (2, 8), "float32"))
    return KVLayout(model, (Layer(components),) * num_layers, 16)


def layout_with_states(num_layers: int = 2) -> KVLayout:
    """Return the same with states of two and a half slots; without layers, the states alone."""
    layout = small_layout(num_layers)
    return replace(
        layout,
        layers=layout.layers or (Layer(()),),
        position_mode="coupled",
        state_bytes=20_000 if num_layers else 1_500_000,
    )


def layout_with_windows(num_windowed: int = 3, window: int = 20) -> KVLayout:
    """Return a layout with a layer of full attention between layers with windows."""
    whole = small_layout(1)
    narrow = replace(whole.layers[0], window=window)
    first = num_windowed // 2
    layers = (*(narrow,) * first, *whole.layers, *(narrow,) * (num_windowed - first))
    return replace(whole, layers=layers)


def key_of(session_id: str, tenant: str = "default", model: str = MODEL) -> SessionKey:
    """Return the key of a session of the small layout's model."""
    return SessionKey(tenant, model, session_id)


def encode(token_ids: Sequence[int]) -> bytes:
    """Encode token ids for the wire."""
    return np.asarray(token_ids, "<u4").tobytes()


@dataclass(frozen=True)
class Loaded:
    """The result of a load: number of tokens, their tiers, the miss reason, and the state."""

    num_tokens: int
    tiers: frozenset[str]
    miss_reason: str
    position: int = 0


class SyntheticEngine:
    """Stores and loads whole sessions.

    Attributes:
        queue: its waiting turns, reported to kvd.
    """

    def __init__(self, client: KvdClient, layout: KVLayout) -> None:
        self.queue = QueueFeed()
        client.queue.follow(self.queue)
        self.client = client
        self.layout = layout

    async def store(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        from_token: int = 0,
        states: Sequence[int] = (),
    ) -> int:
        """Store the rows of token_ids[from_token:]; return how many tokens are stored afterwards.

        `states` lists the token counts at which later loads may end; so do windows.
        """
        while True:
            grant = await self.client.prepare_store(
                key, encode(token_ids), from_token, CALL_S, load_ends=states
            )
            self.fill(grant, token_ids)
            stored = await self.client.complete_store(grant, success=True)
            if not grant.more or grant.refused_reason:
                return stored
            from_token = grant.end_token

    def fill(self, grant: StoreGrant, token_ids: Sequence[int]) -> None:
        """Write the rows of a grant without completing it."""
        for block in grant.blocks:
            places = range(block.token_offset, block.token_offset + block.num_tokens)
            tokens = [token_ids[place] for place in places]
            for layer in self._layers_of(0):
                for view, expected in self._rows(
                    grant.arena, block.slot_id, 0, places, tokens, layer
                ):
                    view[:] = expected
        for window in grant.windows:
            for slot_id in window.slot_ids:
                grant.arena.slot(slot_id)[:] = bytes(self.layout.block_bytes)
            places = range(window.token_offset, window.token_offset + window.num_tokens)
            tokens = [token_ids[place] for place in places]
            for view, expected in self.window_rows(grant.arena, window, 0, places, tokens):
                view[:] = expected
        for state in grant.states:
            contents = self._state_parts(token_ids[: state.position])
            for slot_id, part in zip(state.slot_ids, contents, strict=True):
                grant.arena.slot(slot_id)[:] = part

    async def load(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        from_token: int = 0,
        *,
        accept_pending: bool = False,
        dram_only: bool = False,
    ) -> Loaded:
        """Load the stored part of token_ids[from_token:] and check every byte of it.

        With accept_pending each layer is checked as soon as it is reported complete.
        """
        tiers: set[str] = set()
        end = from_token
        while True:
            grant = await self.client.prepare_load(
                key,
                encode(token_ids),
                end,
                CALL_S,
                accept_pending=accept_pending,
                dram_only=dram_only,
            )
            tiers |= {span.tier for span in grant.spans}
            for layer_index in range(len(self.layout.layers)):
                if grant.progress is not None:
                    await asyncio.to_thread(grant.progress.wait_layer, layer_index, CALL_S)
                for span in grant.spans if self.layout.part_of(layer_index) == 0 else ():
                    self._check(grant.arena, span, token_ids, layer_index)
            if grant.lookup is Lookup.MISS:
                return Loaded(end, frozenset(tiers), grant.miss_reason)
            end, state = grant.end_token, grant.state
            if state is not None:
                self._check_state(grant.arena, state, token_ids)
            self._check_windows(grant.arena, grant.windows, token_ids)
            await self.client.complete_load(grant)
            if not grant.more:
                position = state.position if state else 0
                return Loaded(end, frozenset(tiers), "", position)

    def _layers_of(self, part: int) -> list[int]:
        """Layers whose rows are in blocks of tokens (0), or in a part of their windows (1 …)."""
        layers = range(len(self.layout.layers))
        return [layer for layer in layers if self.layout.part_of(layer) == part]

    def window_rows(
        self,
        arena: ArenaMap,
        window: GrantedWindow,
        first_row: int,
        positions: Sequence[int],
        tokens: Sequence[int],
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (memory, expected bytes), as `_rows` does, of a window in each of its parts."""
        return [
            rows
            for part, slot_id in enumerate(window.slot_ids, 1)
            for layer in self._layers_of(part)
            for rows in self._rows(arena, slot_id, first_row, positions, tokens, layer)
        ]

    def _check_windows(
        self, arena: ArenaMap, windows: Sequence[GrantedWindow], token_ids: Sequence[int]
    ) -> None:
        for window in windows:
            places = range(window.token_offset, window.token_offset + window.num_tokens)
            tokens = [token_ids[place] for place in places]
            for view, expected in self.window_rows(arena, window, window.start, places, tokens):
                assert np.array_equal(view, expected), f"a wrong window at {window.token_offset}"

    def _check(
        self, arena: ArenaMap, span: LoadSpan, token_ids: Sequence[int], layer_index: int
    ) -> None:
        places = range(span.token_offset, span.token_offset + span.num_tokens)
        tokens = [token_ids[place] for place in places]
        for view, expected in self._rows(
            arena, span.slot_id, span.start, places, tokens, layer_index
        ):
            wrong = (view != expected).any(axis=1).nonzero()[0]
            assert not len(wrong), f"wrong bytes at token {places[wrong[0]]}"

    def _check_state(self, arena: ArenaMap, state: GrantedState, token_ids: Sequence[int]) -> None:
        contents = self._state_parts(token_ids[: state.position])
        for slot_id, part in zip(state.slot_ids, contents, strict=True):
            assert arena.slot(slot_id) == part, f"a wrong state at {state.position}"

    def _state_parts(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the contents of a state's slots after these tokens, padded with zeros."""
        seed = hashlib.blake2b(encode(token_ids)).digest()
        state = (seed * (self.layout.state_bytes // len(seed) + 1))[: self.layout.state_bytes]
        size = self.layout.block_bytes
        padded = state.ljust(self.layout.state_slots * size, b"\0")
        return [padded[start : start + size] for start in range(0, len(padded), size)]

    def _rows(
        self,
        arena: ArenaMap,
        slot_id: int,
        first_row: int,
        positions: Sequence[int],
        tokens: Sequence[int],
        layer_index: int,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Yield (memory, expected bytes) of consecutive rows in every component of a layer.

        Both are [tokens, bytes of one].
        """
        slot, num_tokens = np.frombuffer(arena.slot(slot_id), np.uint8), len(tokens)
        seeds = np.zeros((num_tokens, 4), "<u4")
        seeds[:, 0] = tokens
        seeds[:, 1] = positions
        seeds[:, 2] = layer_index
        rows = []
        for component_index, component in enumerate(self.layout.layers[layer_index].components):
            seeds[:, 3] = component_index
            size, seed = component.token_bytes, seeds.view(np.uint8)
            start = self.layout.component_offset(layer_index, component_index) + first_row * size
            memory = slot[start : start + num_tokens * size].reshape(num_tokens, size)
            rows.append((memory, np.tile(seed, -(-size // seed.shape[1]))[:, :size]))
        return rows


@asynccontextmanager
async def attached_engine(
    runtime_dir: Path,
    layout: KVLayout | None = None,
    name: str = "synthetic",
    attach_s: float = ATTACH_S,
) -> AsyncIterator[SyntheticEngine]:
    """Run an engine that is attached."""
    layout = layout or small_layout()
    client = KvdClient(runtime_dir, layout, name, reconnect_delay_s=0.02)
    engine = SyntheticEngine(client, layout)
    running = asyncio.create_task(client.run())
    try:
        await client.wait_attached(attach_s)
        yield engine
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
