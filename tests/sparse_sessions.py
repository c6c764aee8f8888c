"""Sessions with discarded tokens on a real kvd: what remains of them, row by row."""

from dataclasses import dataclass

import numpy as np

from shared.kvd_client.arena_map import ArenaMap
from shared.types.granted_slots import LoadSpan, Lookup
from shared.types.lineage import WHOLE, Lineage
from tests.synthetic_engine import CALL_S, SyntheticEngine, encode, key_of


@dataclass(frozen=True)
class Sparse:
    """A session as its engine has it.

    Attributes:
        tokens: the remaining ones.
        lineage: of these tokens.
        rows: what kvd has stored for each of them, all layers and components.
    """

    name: str
    tokens: list[int]
    lineage: Lineage
    rows: list[bytes]


async def make_sparse(engine: SyntheticEngine, name: str, tokens: list[int], step: int) -> Sparse:
    """Store a session, and discard all but every `step`th token."""
    await engine.store(key_of(name), tokens)
    rows = await read_rows(engine, name, tokens)
    ranges = [(at + 1, min(at + step, len(tokens))) for at in range(0, len(tokens) - 1, step)]
    num_kept = await engine.client.discard(key_of(name), encode(tokens), ranges)
    kept = tokens[::step]
    assert num_kept == len(kept)
    return Sparse(name, kept, WHOLE.after(encode(tokens), ranges), rows[::step])


async def read_rows(
    engine: SyntheticEngine, name: str, tokens: list[int], lineage: Lineage | None = None
) -> list[bytes]:
    """Load the stored rows of a session; return the bytes of each token."""
    rows: list[bytes] = []
    while True:
        grant = await engine.client.prepare_load(
            key_of(name), encode(tokens), len(rows), CALL_S, lineage=lineage
        )
        if grant.lookup is Lookup.MISS:
            return rows
        for span in grant.spans:
            rows += _rows_of(engine, grant.arena, span)
        await engine.client.complete_load(grant)
        if not grant.more:
            return rows


def _rows_of(engine: SyntheticEngine, arena: ArenaMap, span: LoadSpan) -> list[bytes]:
    layout = engine.layout
    slot = np.frombuffer(arena.slot(span.slot_id), np.uint8)
    pieces = []
    for layer_index, layer in enumerate(layout.layers):
        for component_index, component in enumerate(layer.components):
            start = layout.component_offset(layer_index, component_index)
            size = component.token_bytes
            component_rows = slot[start : start + size * layout.block_tokens].reshape(-1, size)
            pieces.append(component_rows[span.start : span.start + span.num_tokens])
    return [row.tobytes() for row in np.concatenate(pieces, axis=1)]
