"""Turns of edited conversations: KV that cannot be kept is recomputed, and no more."""

from contextlib import asynccontextmanager
from functools import partial

import pytest

from inference_svc.core.edits import edit_policy
from inference_svc.core.misses import Resembled
from inference_svc.core.truncation import FrameTokens
from inference_svc.core.turn_record import Finished
from tests.memory_engine import BLOCK_TOKENS, loaded_model
from tests.turn_service import KEY, LIMITS, failure_of, make_turn, serving, token_ids_of, until

OPENING = 9
EDITED = KEY._replace(session_id="edited")
PLAIN = KEY._replace(session_id="plain")
BEFORE = Resembled(KEY.session_id, 1, was_known=True)


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


def make_conversation(*messages):
    """Make a conversation of these messages."""
    return tuple(token for said in messages for token in (OPENING, *said))


START, GONE, RESULT = [20] * 10, [30] * 20, [40, 41, 42] * 10
OLD = make_conversation(START, GONE, RESULT, [70])  # an answer's message has begun
NEW = make_conversation(START, [50, 51], RESULT, [60])
SEAM = 14  # tokens of NEW before RESULT
NUM_KEPT = 1 + len(RESULT)


@asynccontextmanager
async def editing(model, directory, edits="keep", **options):
    """Run a service with an answered conversation that is about to be edited."""
    async with serving(model, directory, block_tokens=BLOCK_TOKENS, **options) as service:
        service.text.frame_tokens = FrameTokens(frozenset({OPENING}), frozenset())
        service.edits.policy = edit_policy(edits)
        service.engine.store.offers_grafts = True
        await service.run(OLD)
        yield service


def again(service, key=EDITED, **fields):
    return service.run(NEW, key=key, resembles=BEFORE, **fields)


async def recompute(service):
    """Return the tokens of the same answer without kept KV."""
    return token_ids_of(await service.run(NEW, key=PLAIN))


def usage_of(events):
    assert isinstance(events[-1], Finished)
    return events[-1].usage


@pytest.mark.parametrize(("edits", "healed"), [("keep", 0), ("heal:3", 3), ("heal:999", 0)])
async def test_tokens_behind_an_edit_are_kept_or_healed(model, tmp_path, edits, healed):
    """The turn loads; if everything is healed it computes."""
    async with editing(model, tmp_path, edits) as service:
        usage = usage_of(await again(service))
        record = (await service.turns.sessions.get(EDITED))[0].turns[0]
        kept = NUM_KEPT - healed if edits != "heal:999" else 0
        assert (usage.kept_tokens, usage.healed_tokens) == (kept, healed)
        assert await service.counts("kept_tokens", "healed_tokens") == (kept, healed)
        assert usage.new_tokens + usage.history_tokens == len(NEW)
        assert usage.reused_tokens == sum(usage.tier_tokens.values()) >= kept
        seams = [(graft.seam, graft.num_tokens) for graft in record.grafts]
        assert seams == ([(SEAM + healed, kept)] if kept else [])
        assert usage.queue_s >= 0


async def test_the_next_turn_continues_with_the_kept_lineage(model, tmp_path):
    """It is in the transcript, and is read from there."""
    async with editing(model, tmp_path) as service:
        first = usage_of(await again(service))
        following = usage_of(await service.run([OPENING, 70], key=EDITED))
        context = (await service.turns.sessions.get(EDITED))[0].context
        assert context.lineage == service.engine.store.lineages[EDITED]
        assert following.recomputed_tokens == following.kept_tokens == 0
        assert following.reused_tokens == len(NEW) + first.output_tokens - 1


def pays(trouble, _start, _end):
    """Return the check before a run is kept; the trouble has happened by then."""
    if trouble == "raises":
        raise ValueError(trouble)
    return trouble != "does not pay"


@pytest.mark.parametrize(
    "trouble", ["away", "gone", "exact", "no grafts", "does not pay", "raises"]
)
async def test_if_nothing_can_be_kept_everything_is_computed(model, tmp_path, trouble):
    """The answer equals recomputation."""
    edits = "exact" if trouble == "exact" else "keep"
    async with editing(model, tmp_path, edits) as service:
        store = service.engine.store
        store.is_away = trouble == "away"
        store.offers_grafts = trouble != "no grafts"
        service.edits._pays = partial(pays, trouble)
        if trouble == "gone":
            await service.turns.sessions.delete(KEY)
        events = await again(service)
        assert usage_of(events).kept_tokens == 0
        assert token_ids_of(events) == await recompute(service)
        assert ("graft" in store.order) == (trouble == "away")


async def test_less_is_stored_than_expected(model, tmp_path):
    """The rest is computed; usage has the kept tokens."""
    async with editing(model, tmp_path) as service:
        store = service.engine.store
        await service.engine.saves.wait_for_end(KEY)
        stored, *rows = store.rows[KEY]
        few = len(make_conversation(START, GONE, RESULT)) - 10
        store.rows[KEY] = (stored[: 4 * few], *([one[:few] for one in part] for part in rows))
        usage = usage_of(await again(service))
        assert usage.kept_tokens == NUM_KEPT - 10


async def test_failed_loads_are_computed(model, tmp_path):
    """The granted rows do not arrive: the turn computes them, and keeps its lineage."""
    async with editing(model, tmp_path) as service:
        store = service.engine.store
        store.may_graft.clear()
        turn = await service.turns.submit(make_turn(NEW, key=EDITED, resembles=BEFORE))
        await store.is_grafting.wait()
        store.num_failing_loads = 99
        store.may_graft.set()
        events = [event async for event in turn.follow()]
        assert usage_of(events).kept_tokens == 0
        store.num_failing_loads = 0
        assert token_ids_of(events) == await recompute(service)
        assert usage_of(await service.run([OPENING, 70], key=EDITED)).recomputed_tokens == 0


@pytest.mark.parametrize("moment", ["leading", "grafting"])
async def test_a_turn_cancelled_meanwhile_leaves_nothing(model, tmp_path, moment):
    """Its memory is freed; its retry keeps the same tokens."""
    async with editing(model, tmp_path) as service:
        store = service.engine.store
        await service.engine.saves.wait_for_end(KEY)
        gate = store.may_begin if moment == "leading" else store.may_graft
        gate.clear()
        store.is_asked.clear()
        turn = await service.turns.submit(make_turn(NEW, key=EDITED, resembles=BEFORE))
        await (store.is_asked if moment == "leading" else store.is_grafting).wait()
        assert turn.cancel()
        gate.set()
        await until(lambda: turn.is_answered)
        assert await service.store.find(EDITED) is None
        assert usage_of(await again(service)).kept_tokens == NUM_KEPT


async def test_a_turn_that_drops_tokens_keeps_none_behind_an_edit(model, tmp_path):
    """A fork overflows, so that the kept tokens would move."""
    async with editing(model, tmp_path) as service:
        await service.turns.sessions.fork(KEY, None, EDITED.session_id)
        more = make_conversation([80] * 125)
        usage = usage_of(await service.run(more, key=EDITED, resembles=BEFORE))
        assert usage.dropped_tokens > 0
        assert usage.kept_tokens == 0


async def test_a_window_that_fills_later_drops_kept_tokens(model, tmp_path):
    """During the answer, and again in the next turn: lineages follow."""
    async with editing(model, tmp_path) as service:
        usage = usage_of(await again(service, max_tokens=170))
        assert usage.kept_tokens == NUM_KEPT
        assert usage.dropped_tokens > 0
        following = usage_of(await service.run([OPENING, 70], key=EDITED))
        assert following.recomputed_tokens == 0
        context = (await service.turns.sessions.get(EDITED))[0].context
        await service.engine.saves.wait_for_end(EDITED)
        assert context.lineage == service.engine.store.lineages[EDITED]


async def test_a_fork_has_the_lineage_of_kept_tokens(model, tmp_path):
    """Its blocks have that lineage; the original session continues as before."""
    async with editing(model, tmp_path) as service:
        await again(service)
        fork = KEY._replace(session_id="fork")
        await service.turns.sessions.fork(EDITED, None, fork.session_id)
        forked = await service.run([OPENING, 70], key=fork)
        other = await service.run([OPENING, 70], key=EDITED)
        lineages = service.engine.store.lineages
        await service.engine.saves.wait_for_end(fork)
        await service.engine.saves.wait_for_end(EDITED)
        assert lineages[fork] == lineages[EDITED]
        assert usage_of(forked).history_tokens == usage_of(other).history_tokens
        assert usage_of(other).recomputed_tokens == 0


async def test_a_passed_deadline_is_the_turns_own_error(model, tmp_path):
    """It passed while the part before a seam waited."""
    async with editing(model, tmp_path) as service:
        turn = await service.turns.submit(
            make_turn(NEW, key=EDITED, resembles=BEFORE, deadline_ns=1, arrived_ns=0)
        )
        assert (await failure_of(turn)).reason == "deadline_exceeded"


assert LIMITS.window_tokens == 200  # sizes above are chosen for it
