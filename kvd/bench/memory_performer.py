"""Carries out a cache engine's actions in memory, at once: what is left is the engine's own cost.

Reads, hashes, writes and drops all succeed. Index and journal actions are taken and forgotten.
"""

from collections.abc import Mapping, Sequence

from kvd.core.engine import CacheEngine
from kvd.core.records.actions import (
    Action,
    CommitRows,
    CompactRows,
    DropBlock,
    HashSlot,
    IoOutcome,
    ReadBlock,
    VerifyExtent,
    VerifySlot,
    WriteBlock,
)
from kvd.core.records.extent_shape import CHECKSUM_BYTES
from kvd.core.records.rows import StoredBlock


class MemoryPerformer:
    """Performs for one engine."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine
        self._checksums = bytes(CHECKSUM_BYTES * len(engine.layout.layers))

    def settle(self, token_ids: Mapping[bytes, bytes]) -> None:
        """Perform until the engine asks for nothing more.

        Args:
            token_ids: of the blocks that may be read, by key.
        """
        while actions := self._engine.drain():
            self.perform(actions, token_ids)

    def perform(self, actions: Sequence[Action], token_ids: Mapping[bytes, bytes]) -> None:
        """Perform what was drained; what comes of it is to be drained again."""
        for action in actions:
            self._perform(action, token_ids)

    def _perform(self, action: Action, token_ids: Mapping[bytes, bytes]) -> None:
        engine = self._engine
        match action:
            case ReadBlock():
                stored = StoredBlock(token_ids[action.key], self._checksums)
                engine.arrivals.read_done(action.op_id, IoOutcome.OK, stored)
            case VerifySlot() | VerifyExtent():
                engine.arrivals.verify_done(action.op_id, IoOutcome.OK)
            case HashSlot():
                engine.hashes.hash_done(action.op_id, self._checksums)
            case WriteBlock():
                engine.writes.write_done(action.op_id, IoOutcome.OK)
            case CompactRows():
                made = [self._checksums] * len(action.blocks)
                engine.compactions.copied(action.op_id, IoOutcome.OK, made)
            case CommitRows():
                engine.compactions.committed(action.op_id)
            case DropBlock():
                engine.writes.drop_done(action.op_id)
            case _:
                pass
