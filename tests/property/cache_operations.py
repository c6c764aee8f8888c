"""Operations on a random cache machine: discards, grafts, operators, erasing, scrubs."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvd.core.records.actions import VerifyExtent
from kvd.core.records.entries import TTL_NEVER_NS, Pin
from kvd.core.records.errors import ErasingError, InvalidRequestError, ScrubError
from kvd.core.records.records import LeaseState
from shared.types.graft_source import GraftSource
from shared.types.lineage import WHOLE
from tests.property.cache_turns import ENGINE_IDS, KEYS, TOKENS, Load, TurnsMachine
from tests.property.cache_world import compute, to_bytes


class OperationsMachine(TurnsMachine):
    """Forks, cuts, pins, flushes, erases and scrubs sessions between their turns."""

    @rule(source=st.sampled_from(KEYS), fork=st.sampled_from(KEYS), at=st.integers(0, 30))
    def fork(self, source, fork, at) -> None:
        """Start a session over with the first tokens of another one."""
        if self.loads or self.stores:
            return
        if self._stored(fork):
            self.world.engine.sessions.flush(fork, dry_run=False)
        tokens = self.conversations[source].tokens[:at]
        self.conversations[fork].replace(tokens, compute([], tokens))
        self.conversations[fork].lineage = WHOLE
        self.world.pump()

    @rule(
        key=st.sampled_from(KEYS),
        start=st.integers(0, 20),
        length=st.integers(1, 9),
        is_heard=st.booleans(),
    )
    def discard(self, key, start, length, is_heard) -> None:
        if start + length <= len(self.conversations[key].tokens):
            self._discard(key, [(start, start + length)], is_heard=is_heard)

    @rule(key=st.sampled_from(KEYS), start=st.integers(0, 5), step=st.integers(2, 4))
    def discard_scattered(self, key, start, step) -> None:
        num_tokens = len(self.conversations[key].tokens)
        ranges = [(at, at + 1) for at in range(start, num_tokens, step)]
        if ranges:
            self._discard(key, ranges, is_heard=True)

    @rule(
        key=st.sampled_from(KEYS),
        engine_id=st.sampled_from(ENGINE_IDS),
        phrases=st.lists(TOKENS, min_size=1, max_size=3),
        start=st.integers(0, 9),
    )
    def thin_out(self, key, engine_id, phrases, start) -> None:
        """Grow a session, discard every other token, and leave it alone for a while."""
        for phrase in phrases:
            self.turn(key, phrase, engine_id, is_quiet=True)
        self.discard_scattered(key, start, 2)
        self.world.quiesce()
        self.wait(20)

    def _discard(self, key, ranges, *, is_heard) -> None:
        """Report a discard to kvd if it runs; one that it missed it must detect by the lineage."""
        if self.stores and not self.names_lineage:
            return
        conversation = self.conversations[key]
        self._recompute_lost(key)
        token_ids = to_bytes(conversation.tokens)
        if is_heard or not self.names_lineage:
            self.world.engine.sessions.discard(
                key, token_ids, ranges, lineage=self._named(conversation)
            )
        conversation.discarded = True
        if self.names_lineage:
            conversation.lineage = conversation.lineage.after(token_ids, ranges)
        dropped = {position for start, end in ranges for position in range(start, end)}
        kept = [at for at in range(len(conversation.tokens)) if at not in dropped]
        conversation.replace(
            [conversation.tokens[at] for at in kept], [conversation.rows[at] for at in kept]
        )
        self._recompute_lost(key)
        self.world.pump()

    @precondition(lambda self: self.names_lineage)
    @rule(
        key=st.sampled_from(KEYS),
        source=st.sampled_from(KEYS),
        engine_id=st.sampled_from(ENGINE_IDS),
        new_tokens=TOKENS,
        seam=st.integers(1, 20),
        start=st.integers(0, 20),
        length=st.integers(1, 12),
    )
    def graft(self, key, source, engine_id, new_tokens, seam, start, length) -> None:
        """Continue behind some tokens with new ones, then with another session's."""
        conversation, given = self.conversations[key], self.conversations[source]
        end = min(start + length, len(given.tokens))
        if start >= end or engine_id in self.detached:
            return
        origin = GraftSource(source, to_bytes(given.tokens), given.lineage, start, end)
        if key == source or key.tenant != source.tenant:
            with pytest.raises(InvalidRequestError):
                self.world.engine.sessions.graft(key, to_bytes([0]), WHOLE, origin)
            return
        self.regenerate(key, seam)
        self.turn(key, new_tokens, engine_id, is_quiet=False)
        before = to_bytes(conversation.tokens)
        num_found = self.world.engine.sessions.graft(key, before, conversation.lineage, origin)
        seam = len(conversation.tokens)
        assert not num_found or self._num_stored(key) == seam + num_found
        conversation.lineage = origin.lineage_after(before, conversation.lineage)
        conversation.discarded = True
        conversation.known.update(given.known)
        conversation.replace(
            conversation.tokens + given.tokens[start:end], conversation.rows + given.rows[start:end]
        )
        self.world.pump()

    @rule(
        key=st.sampled_from(KEYS),
        what=st.sampled_from(
            [*Pin, "end", "ttl", "never", "retain", "leave", "await", "supersede"]
        ),
    )
    def change(self, key, what) -> None:
        engine = self.world.engine
        if not self._stored(key):
            assert not engine.sessions.end(key)
            assert not engine.retention.retain(key, 30)
            assert not engine.expectations.expect(key, ("bash",), superseded=False)
        elif what in ("await", "supersede"):
            tools = ("bash",) if what == "await" else ()
            assert engine.expectations.expect(key, tools, superseded=not tools)
        elif what in ("retain", "leave"):
            is_kept = not engine.inspection.info(key).ended
            granted_ns = engine.retention.retain(key, 30 if what == "retain" else 0)
            assert (granted_ns > 0) == (is_kept and what == "retain")
        elif what is Pin.NONE:
            engine.sessions.pin(key, Pin.NONE)
        elif isinstance(what, Pin):
            engine.sessions.pin(key, what)
        elif what == "end":
            assert engine.sessions.end(key)
        else:
            engine.sessions.set_ttl(key, 30 if what == "ttl" else TTL_NEVER_NS)
        self.world.pump()

    @rule(key=st.sampled_from([None, *KEYS]), dry_run=st.sampled_from([True, True, False]))
    def flush(self, key, dry_run) -> None:
        engine = self.world.engine
        if key is None or self._stored(key):
            before = engine.inspection.stats()
            answer = engine.sessions.flush(key, dry_run=dry_run)
            assert (engine.inspection.stats() == before) or not dry_run, "a dry run changes nothing"
            assert answer.num_sessions + len(answer.skipped_leased) <= max(1, before.num_sessions)
        self.world.pump()

    @precondition(lambda self: len(self.world.index.sessions) > 1)
    @rule(
        tenant=st.sampled_from("ab"),
        at_once=st.integers(1, 3),
        newest_first=st.booleans(),
        other=st.sampled_from(KEYS),
    )
    def erase(self, tenant, at_once, newest_first, other) -> None:
        """Erase a tenant: nothing of it is left; its engines' leases are lost or worthless."""
        world, engine = self.world, self.world.engine
        engine.erasing.begin(lambda name: name == tenant)
        self.loads = [load for load in self.loads if not self._is_lost(load)]
        if other.tenant == tenant:
            with pytest.raises(ErasingError):
                engine.loads.prepare(other, b"", 0, self.ids[1])
        else:
            self.turn(other, [0, 1], 1, is_quiet=True)
        while not engine.erasing.is_gone():
            engine.erasing.step(at_once)
            world.pump()
            world.quiesce(newest_first=newest_first)
        assert not any(
            usage.num_sessions for usage in engine.inspection.tenants if usage.tenant == tenant
        )
        world.quiesce()  # the keys are dropped behind these rows
        assert not any(key.tenant == tenant for key in world.index.sessions)
        assert tenant not in world.tenants_on_ssd()
        engine.erasing.wipe()
        world.pump()
        if other.tenant != tenant:
            self.turn(other, [1], 1, is_quiet=True)
        world.quiesce(newest_first=newest_first)
        assert not engine.erasing.is_wiping()
        assert engine.erasing.is_wiped()
        engine.erasing.end()
        world.pump()

    def _is_lost(self, load: Load) -> bool:
        return self.world.engine.loads.state_of(load.answer.lease_id) is LeaseState.LOST

    @rule(repair=st.booleans(), at_once=st.booleans())
    def scrub(self, repair, at_once) -> None:
        """Begin a scrub, or continue the running one."""
        engine = self.world.engine
        if self.scrub_id:
            with pytest.raises(ScrubError):
                engine.scrubs.begin(repair=repair)
        else:
            self.scrub_id = engine.scrubs.begin(repair=repair)
        step = engine.scrubs.step(self.scrub_id, 1 << 30 if at_once else 1)
        self.world.pump()
        if step.done:
            assert not self.world.io_of(VerifyExtent)
            self.scrub_id = 0

    @precondition(lambda self: self.scrub_id)
    @rule()
    def scrub_end(self) -> None:
        self.world.engine.scrubs.end(self.scrub_id)
        self.world.checked.clear()  # its active verifications find no block any more
        self.scrub_id = 0
        self.world.pump()
