"""TurnLog: which calls make a turn, and what is recorded of it."""

from itertools import product

import pytest

from kvd.core.records.tier import Tier
from kvd.core.state.turn_log import RecordedTurn, TurnLog
from shared.types.queue_delta import QueueChange, QueuedRequest, RunningRequest
from shared.types.session_key import SessionKey
from tests.kvd.core.turns import ENGINE_ID, ONES, THREES, TWOS, load, new_world, store
from tests.property.cache_world import to_bytes
from tests.queue_changes import queue_change

ENGINE = 7
A, B = (SessionKey("default", "ab" * 16, name) for name in "ab")


def _waiting(key: SessionKey, number: int, history_tokens: int = 0) -> QueueChange:
    return queue_change(waiting=[QueuedRequest((0, 0.0, number), key, history_tokens)])


def _turn(log: TurnLog, key: SessionKey, prompt: int, size: int, now_ns: int) -> None:
    """Run a turn of an engine that reports no queue."""
    log.on_request(key, prompt, now_ns, is_running=False)
    log.on_store(key, size, now_ns + 5)


def test_turns_of_an_engine_without_a_queue() -> None:
    """A load after the stores of a turn begins the next; its history is the stored part."""
    log = TurnLog(10)
    _turn(log, A, 20, 50, 100)
    log.on_request(A, 70, 200, is_running=False)
    log.on_load(A, Tier.DRAM, 30)
    log.on_load(A, Tier.SSD, 16)
    log.on_store(A, 80, 210)
    log.on_store(A, 90, 220)
    first, second = log
    assert first == RecordedTurn(1, 1, 100, 100, 105, 0, 0, 0, 50, is_asked=True)
    assert second == RecordedTurn(1, 2, 200, 200, 220, 50, 30, 16, 90, is_asked=True)
    log.check()


def test_a_turn_begins_when_its_request_runs() -> None:
    """It arrived when its request began to wait; the queue has the length of its history."""
    log = TurnLog(10)
    log.on_queue_change(ENGINE, _waiting(A, 1, 33), 100)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(1, A)]), 150)
    log.on_request(A, 40, 160, is_running=True)
    log.on_store(A, 60, 170)
    assert list(log) == [RecordedTurn(1, 1, 100, 150, 170, 33, 0, 0, 60, is_asked=True)]


def test_a_load_before_its_request_is_reported_to_run() -> None:
    """The request takes over the turn that the load has begun, whatever the order of the two."""
    log = TurnLog(10)
    _turn(log, A, 20, 50, 10)
    log.on_queue_change(ENGINE, _waiting(A, 1, 50), 100)
    log.on_request(A, 60, 140, is_running=False)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(1, A)]), 150)
    log.on_store(A, 80, 170)
    _, turn = log
    assert (turn.turn, turn.arrived_ns, turn.wanted_tokens) == (2, 100, 50)


def test_a_preempted_turn_is_still_one_turn() -> None:
    """It waits, runs and loads again under the same number."""
    log = TurnLog(10)
    running = queue_change(running=[RunningRequest(1, A)])
    log.on_queue_change(ENGINE, running, 10)
    log.on_request(A, 20, 10, is_running=True)
    log.on_store(A, 30, 20)
    log.on_queue_change(ENGINE, _waiting(A, 1), 30)
    log.on_queue_change(ENGINE, running, 40)
    log.on_request(A, 30, 40, is_running=True)
    log.on_store(A, 50, 60)
    (turn,) = log
    assert (turn.started_ns, turn.ended_ns, turn.stored_tokens) == (10, 60, 50)


def test_a_turn_that_is_reported_late() -> None:
    """Its load wants more than the turn before has computed, which is still reported as running."""
    log = TurnLog(10)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(1, A)]), 10)
    log.on_request(A, 20, 10, is_running=True)
    log.on_store(A, 30, 20)
    log.on_request(A, 36, 40, is_running=True)
    log.on_store(A, 45, 50)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(2, A)], left=[1]), 55)
    log.on_store(A, 50, 60)
    assert [(turn.started_ns, turn.ended_ns, turn.stored_tokens) for turn in log] == [
        (10, 20, 30),
        (40, 60, 50),
    ]


def test_a_full_queue_keeps_known_arrivals() -> None:
    """A snapshot that repeats a request is no new arrival; an omitted one is gone."""
    log = TurnLog(10)
    for number, now_ns in ((1, 10), (2, 11)):
        log.on_queue_change(ENGINE, _waiting((A, B)[number - 1], number), now_ns)
    log.on_queue_replace(ENGINE, _waiting(A, 1), 50)
    for key, number in ((A, 1), (B, 2)):
        log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(number, key)]), 60)
        log.on_request(key, 5, 60, is_running=True)
    assert [turn.arrived_ns for turn in log] == [10, 60]


def test_a_queue_is_forgotten_with_its_engine() -> None:
    """Another engine's request of the same number is another request."""
    log = TurnLog(10)
    log.on_queue_change(ENGINE, _waiting(A, 1), 10)
    log.on_engine_gone(ENGINE)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(1, A)]), 60)
    log.on_request(A, 5, 60, is_running=True)
    log.on_queue_change(ENGINE + 1, queue_change(running=[RunningRequest(1, A)]), 70)
    log.on_store(A, 9, 80)
    assert [(turn.arrived_ns, turn.started_ns) for turn in log] == [(60, 60), (70, 70)]


def test_a_session_in_the_engines_memory_loads_nothing() -> None:
    """Its turn is known from its request and its stores."""
    log = TurnLog(10)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(0, A)]), 10)
    _turn(log, A, 20, 50, 10)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(1, A)], left=[0]), 60)
    log.on_store(A, 80, 90)
    _, turn = log
    assert turn == RecordedTurn(1, 2, 60, 60, 90, 50, 0, 0, 80, is_asked=False)


@pytest.mark.parametrize("is_full", [False, True])
def test_the_last_report_gives_the_length_of_the_history(is_full: bool) -> None:
    """A turn may drop some of it while it waits; its arrival does not change."""
    log = TurnLog(4)
    log.on_queue_change(ENGINE, _waiting(A, 1, 90), 10)
    take = log.on_queue_replace if is_full else log.on_queue_change
    take(ENGINE, _waiting(A, 1, 40), 20)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(1, A)]), 30)
    log.on_request(A, 100, 31, is_running=True)
    (turn,) = log
    assert (turn.arrived_ns, turn.wanted_tokens) == (10, 40)


def test_a_discard_shortens_the_history() -> None:
    """The next turn's history is the remaining tokens, and never more than it asks for."""
    log = TurnLog(10)
    _turn(log, A, 20, 50, 10)
    log.on_discard(A, 25)
    _turn(log, A, 40, 60, 20)
    _turn(log, A, 45, 80, 30)
    assert [turn.wanted_tokens for turn in log] == [0, 25, 45]


def test_an_end_is_recorded() -> None:
    """With the session's newest turn."""
    log = TurnLog(10)
    _turn(log, A, 20, 50, 10)
    _turn(log, A, 60, 70, 20)
    log.on_end(A)
    log.on_end(B)
    assert [turn.is_ended for turn in log] == [False, True]


def test_a_turn_that_only_waits_is_not_recorded() -> None:
    """Its request is withdrawn, or runs without loading or storing."""
    log = TurnLog(10)
    log.on_queue_change(ENGINE, _waiting(A, 1), 10)
    log.on_queue_change(ENGINE, queue_change(left=[1]), 20)
    log.on_queue_change(ENGINE, queue_change(running=[RunningRequest(2, B)]), 20)
    assert not list(log)


def test_old_turns_are_forgotten() -> None:
    """The log is bounded; a session that returns after all its turns are forgotten is new."""
    log = TurnLog(3)
    for index, key in enumerate((A, B, B, B, A)):
        _turn(log, key, 10, 20, 100 * index)
        log.check()
    assert [(turn.session, turn.turn) for turn in log] == [(2, 2), (2, 3), (3, 1)]
    assert [turn.wanted_tokens for turn in log] == [10, 10, 0]


def test_a_log_of_one_turn() -> None:
    """It keeps the newest turn of all sessions."""
    log = TurnLog(1)
    for index, key in enumerate((A, A, B)):
        _turn(log, key, 10, 20, 100 * index)
        log.check()
        assert len(list(log)) == 1


def test_every_order_of_two_sessions_keeps_the_bounds() -> None:
    """In any order of calls the invariants hold, and no turn counts for another."""
    for calls in product("asQqg", repeat=5):
        log = TurnLog(2)
        for now_ns, (call, key) in enumerate(zip(calls, (A, B, A, A, B), strict=True)):
            number = now_ns // 2
            match call:
                case "a":
                    log.on_request(key, 10, now_ns, is_running=False)
                case "s":
                    log.on_store(key, 12, now_ns)
                case "Q":
                    log.on_queue_replace(ENGINE, _waiting(key, number, 5), now_ns)
                case "q":
                    change = queue_change(running=[RunningRequest(number, key)], left=[number + 1])
                    log.on_queue_change(ENGINE, change, now_ns)
                case _:
                    log.on_engine_gone(ENGINE)
            log.check()
        for turn in log:
            assert turn.arrived_ns <= turn.started_ns <= turn.ended_ns
            assert turn.wanted_tokens <= turn.stored_tokens


def test_the_engine_records_loads_stores_and_discards() -> None:
    """Loads by tier, stores and discards reach the log through the calls of an engine."""
    world = new_world(num_slots=2)
    store(world, A, ONES + TWOS)
    store(world, B, THREES * 2)  # A is on SSD only
    load(world, A, [*ONES, *TWOS, 9])
    store(world, A, [*ONES, *TWOS, 9, 9])
    world.engine.sessions.discard(A, to_bytes([*ONES, *TWOS, 9, 9]), [(8, 10)])
    load(world, A, [*ONES, *TWOS, 7])
    world.engine.sessions.end(A)
    turns = [turn for turn in world.engine.inspection.turns if turn.session == 1]
    assert [turn.is_ended for turn in turns] == [False, False, True]
    assert [(t.turn, t.wanted_tokens, t.dram_tokens, t.ssd_tokens) for t in turns] == [
        (1, 0, 0, 0),
        (2, 8, 0, 8),
        (3, 8, 4, 4),  # two slots cannot hold three blocks
    ]
    assert [t.stored_tokens for t in turns] == [8, 9, 9]
    world.engine.check()


def test_a_request_reaches_the_log_through_the_engine() -> None:
    """A full queue and its changes; when the engine ends, its queue is forgotten."""
    world = new_world()
    queued = queue_change([QueuedRequest((0, 0.0, 5), A, 3)])
    world.now_ns = 1000
    world.engine.engines.replace_queue(ENGINE_ID, queued)
    world.now_ns = 2000
    change = queue_change(running=[RunningRequest(5, A)])
    world.engine.engines.change_queue(ENGINE_ID, change)
    world.now_ns = 3000
    world.engine.loads.prepare(A, to_bytes(ONES), 0, ENGINE_ID)
    (turn,) = world.engine.inspection.turns
    assert (turn.arrived_ns, turn.started_ns, turn.wanted_tokens) == (1000, 2000, 3)
    world.now_ns = 4000
    world.engine.engines.replace_queue(ENGINE_ID, queue_change([QueuedRequest((0, 0.0, 6), B, 3)]))
    world.now_ns = 5000
    world.engine.engines.remove(ENGINE_ID)
    world.now_ns = 6000
    world.engine.engines.change_queue(ENGINE_ID, queue_change(running=[RunningRequest(6, B)]))
    world.engine.loads.prepare(B, to_bytes(ONES), 0, ENGINE_ID)
    assert [turn.arrived_ns for turn in world.engine.inspection.turns] == [1000, 6000]
