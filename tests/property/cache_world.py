"""The world around a cache engine, in memory: slots, extents and index rows that hold symbolic KV.

A row of KV is a digest of everything it was computed from: the rows before it and its token. Two
rows are equal exactly when the computations are, which is what block keys promise and what loads
are checked against.
"""

from dataclasses import dataclass, field

from kvd.core.actions import (
    Action,
    DropBlock,
    DropSession,
    IoOutcome,
    PutBlock,
    PutSession,
    ReadBlock,
    WriteBlock,
)
from kvd.core.engine import CacheEngine, Limits
from kvd.core.records import BlockRecord, SessionRecord
from shared.kv_layout import Component, KVLayout, Layer
from shared.session_key import SessionKey

BLOCK_TOKENS = 4
MODEL = "0f"
LAYOUT = KVLayout(MODEL, (Layer((Component("k", (1, 2), "float32"),)),), BLOCK_TOKENS)

Row = int  # symbolic KV of one token


def salt_of(tenant: str) -> bytes:
    return tenant.encode().ljust(32, b"\0")


def to_bytes(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def compute(rows: list[Row], tokens: list[int]) -> list[Row]:
    """Rows of `tokens` when computed after `rows`; returns all of them."""
    rows = list(rows)
    for token in tokens:
        rows.append(hash((rows[-1] if rows else 0, len(rows), token)))
    return rows


@dataclass
class Index:
    """The index as of its last commit, and the rows on their way to it."""

    blocks: dict[bytes, BlockRecord] = field(default_factory=dict)
    sessions: dict[SessionKey, SessionRecord] = field(default_factory=dict)
    uncommitted: list[Action] = field(default_factory=list)

    def commit(self, num_actions: int) -> list[int]:
        """Commit the oldest actions; returns the op ids of drops among them."""
        committed, self.uncommitted = self.uncommitted[:num_actions], self.uncommitted[num_actions:]
        dropped = []
        for action in committed:
            if isinstance(action, PutBlock):
                self.blocks[action.block.key] = action.block
            elif isinstance(action, PutSession):
                self.sessions[action.session.key] = action.session
            elif isinstance(action, DropSession):
                self.sessions.pop(action.key, None)
            elif isinstance(action, DropBlock):
                self.blocks.pop(action.key, None)
                dropped.append(action.op_id)
        return dropped


class CacheWorld:
    """A cache engine with its performer, whose operations end when and how the test says."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.index = Index()
        self.extents: dict[int, list[Row]] = {}
        self.now_ns = 1_000
        self.start()

    def start(self) -> None:
        """Start a daemon on what the index has committed: everything else is lost."""
        self.index.uncommitted = []
        self.slots: list[list[Row]] = [[] for _ in range(self.limits.num_slots)]
        self.io: dict[int, ReadBlock | WriteBlock] = {}
        self.written: dict[int, list[Row]] = {}
        self.events: list[Action] = []
        self.engine = CacheEngine(LAYOUT, self.limits, salt_of)
        rows = list(self.index.sessions.values()), list(self.index.blocks.values())
        self.engine.restore(*rows, now_ns=self.now_ns)
        self.pump()

    def pump(self) -> None:
        """Take the engine's actions."""
        self.engine.check()
        for action in self.engine.drain():
            if isinstance(action, ReadBlock):
                self.io[action.op_id] = action
            elif isinstance(action, WriteBlock):
                in_use = {block.extent for block in self.index.blocks.values()}
                assert action.extent not in in_use, "an extent is reused before its row is gone"
                self.io[action.op_id] = action
                self.written[action.op_id] = list(self.slots[action.slot_id])
            elif isinstance(action, PutBlock | PutSession | DropSession | DropBlock):
                self.index.uncommitted.append(action)
            else:
                self.events.append(action)

    def commit(self, num_actions: int) -> None:
        """Commit index rows and report the drops among them."""
        for op_id in self.index.commit(num_actions):
            self.engine.drop_done(op_id, self.now_ns)
        self.pump()

    def finish_io(self, op_id: int, outcome: IoOutcome) -> None:
        """End one read or write."""
        action = self.io.pop(op_id)
        if isinstance(action, WriteBlock):
            self._finish_write(action, outcome)
        else:
            self._finish_read(action, outcome)
        self.pump()

    def _finish_write(self, action: WriteBlock, outcome: IoOutcome) -> None:
        rows = self.written.pop(action.op_id)
        assert self.slots[action.slot_id] == rows, "a slot changed while it was written"
        assert len(rows) == action.num_tokens, "a block is written whole"
        checksums = ()
        self.extents[action.extent] = []
        if outcome is IoOutcome.OK:
            self.extents[action.extent] = rows
            checksums = (hash(tuple(rows)),)
        self.engine.write_done(action.op_id, outcome, checksums, self.now_ns)

    def _finish_read(self, action: ReadBlock, outcome: IoOutcome) -> None:
        rows = self.extents[action.extent]
        assert (hash(tuple(rows)),) == action.checksums, "an extent holds what was written to it"
        self.slots[action.slot_id] = list(rows) if outcome is IoOutcome.OK else [-1]
        self.engine.read_done(action.op_id, outcome, self.now_ns)

    def quiesce(self, *, newest_first: bool = False) -> None:
        """End everything under way, and well."""
        while self.io or self.index.uncommitted:
            for op_id in sorted(self.io, reverse=newest_first):
                self.finish_io(op_id, IoOutcome.OK)
            self.commit(len(self.index.uncommitted))
