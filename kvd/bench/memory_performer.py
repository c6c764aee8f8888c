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

    def settle(self, now_ns: int, token_ids: Mapping[bytes, bytes]) -> None:
        """Perform until the engine asks for nothing more.

        Args:
            now_ns: of the completions.
            token_ids: of the blocks that may be read, by key.
        """
        while actions := self._engine.drain():
            self.perform(actions, now_ns, token_ids)

    def perform(
        self, actions: Sequence[Action], now_ns: int, token_ids: Mapping[bytes, bytes]
    ) -> None:
        """Perform what was drained; what comes of it is to be drained again."""
        for action in actions:
            self._perform(action, now_ns, token_ids)

    def _perform(self, action: Action, now_ns: int, token_ids: Mapping[bytes, bytes]) -> None:
        engine = self._engine
        match action:
            case ReadBlock():
                stored = StoredBlock(token_ids[action.key], self._checksums)
                engine.read_done(action.op_id, IoOutcome.OK, stored, now_ns)
            case VerifySlot() | VerifyExtent():
                engine.verify_done(action.op_id, IoOutcome.OK, now_ns)
            case HashSlot():
                engine.hash_done(action.op_id, self._checksums, now_ns)
            case WriteBlock():
                engine.write_done(action.op_id, IoOutcome.OK, now_ns)
            case CompactRows():
                made = [self._checksums] * len(action.blocks)
                engine.compact_done(action.op_id, IoOutcome.OK, made, now_ns)
            case CommitRows():
                engine.rows_committed(action.op_id, now_ns)
            case DropBlock():
                engine.drop_done(action.op_id, now_ns)
            case _:
                pass
