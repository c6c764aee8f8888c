"""The predictive policy: what it learns of sessions, and how it ranks them."""

from string import ascii_lowercase, ascii_uppercase

import pytest

from kvd.core.eviction import idle_sessions, policies
from kvd.core.eviction.return_hazards import EDGES_NS, bucket_at, observe
from kvd.core.eviction.session_order import Guard
from kvd.core.records.tier import Tier
from shared.types.units import NS_PER_S
from tests.kvd.core.eviction.sessions import ENGINE_ID, Sessions, key_of


class Chats(Sessions):
    """Sessions whose turns take no time, one at a time."""

    def __init__(self, policy: str = "predictive") -> None:
        super().__init__(policy)
        self.num_tokens: dict[str, int] = {}

    def turn(self, name: str, new_tokens: int = 100) -> None:
        self.queue([name])
        self.queue([], [name])
        self.num_tokens[name] = self.num_tokens.get(name, 0) + new_tokens
        self.use(name)
        self.policy.on_resize(key_of(name), self.num_tokens[name])
        self.queue([])

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS_PER_S)
        self.victims()  # the order is read now and then

    def teach(self, num_sessions: int = 200) -> None:
        """Teach the policy: small sessions return once, a minute later; large ones never."""
        for number in range(num_sessions):
            self.turn(f"little {number}", 10)
            self.turn(f"a lot {number}", 10_000)
            self.wait(60)
            self.turn(f"little {number}", 10)
            self.policy.on_remove(key_of(f"little {number}"))
            self.policy.on_remove(key_of(f"a lot {number}"))
        self.wait(4 * 60 * 60)


def test_before_it_has_learned_it_equals_lookahead_queue():
    """The orders are equal while sessions come and none has returned yet."""
    learning, plain = Chats(), Chats("lookahead_queue")
    for sessions in learning, plain:
        for name in "abcdefgh":
            sessions.turn(name, 10 * ord(name))
            sessions.wait(7)
        sessions.use("c")
        sessions.policy.guard(key_of("d"), Guard.PINNED)
        sessions.policy.on_end(key_of("e"))
        sessions.queue("fb", "h")
    for tier in (None, *Tier):
        assert learning.victims(tier) == plain.victims(tier)
    assert learning.victims(Tier.DRAM) == "ehagcbfd"
    assert not list(learning.policy.returning(learning.now_ns))


def test_sessions_that_are_likely_to_return_stay_longer():
    """They stay even if they were used earlier."""
    sessions = Chats()
    sessions.teach()
    sessions.turn("x", 10)
    sessions.wait(1)
    sessions.turn("y", 10_000)
    assert sessions.victims() == "yx"
    sessions.wait(20)
    assert sessions.victims() == "yx"


def calling(name: str, *tools: str, sessions: Chats) -> None:
    """Run a turn whose answer calls tools, which is known before the turn's end."""
    sessions.turn(name)
    sessions.policy.on_await(key_of(name), tools, sessions.now_ns)


def test_a_session_that_waits_for_a_tool_stays_until_nine_of_ten_calls_have_returned():
    """It stays longer than people's sessions, which return within half a minute.

    Then it goes first.
    """
    sessions = Chats()
    for number in range(400):
        name = f"learner {number}"
        calling(name, "shell", sessions=sessions)
        if number % 10:  # the tenth never returns
            sessions.wait(5)
            sessions.turn(name)
            sessions.wait(20)
            sessions.turn(name)
            sessions.policy.on_end(key_of(name))
    sessions.wait(4 * 60 * 60)
    for number in range(400):
        sessions.policy.on_remove(key_of(f"learner {number}"))
    calling("x", "shell", sessions=sessions)
    sessions.turn("y")
    for elapsed_s, order in ((0, "yx"), (3, "yx"), (1.9, "yx"), (6, "xy"), (7, "xy")):
        sessions.wait(elapsed_s)
        assert sessions.victims() == order


def test_sessions_that_wait_for_an_unknown_tool_stay_too():
    """Before anything is learned, they go last."""
    sessions = Chats()
    calling("x", "new", sessions=sessions)
    sessions.turn("y")
    assert sessions.victims() == "yx"


def test_awaited_tools_are_forgotten_at_the_next_turn():
    """A hint that comes when the next turn already waits has no effect."""
    sessions = Chats()
    calling("x", "shell", sessions=sessions)
    assert sessions.policy._idle.awaits(key_of("x"))
    sessions.queue("x")
    assert not sessions.policy._idle.awaits(key_of("x"))
    sessions.policy.on_await(key_of("x"), ["shell"], sessions.now_ns)
    assert not sessions.policy._idle.awaits(key_of("x"))


def test_a_superseded_session_goes_first_until_it_is_used():
    """It goes before earlier ended sessions, and is not counted as one that does not return."""
    sessions = Chats()
    calling("x", "shell", sessions=sessions)
    sessions.turn("y")
    sessions.policy.on_supersede(key_of("x"))
    assert sessions.victims() == "xy"
    sessions.wait(1000)
    assert not sum(sessions.policy._idle._tools._count_call(("t", "shell")).seen)
    sessions.turn("x")
    assert sessions.victims() == "yx"


def test_nothing_is_read_ahead_while_turns_with_tool_results_run():
    """Their sessions need the room soon; also if the engine that ran them is lost."""
    sessions = Chats()
    sessions.teach()
    sessions.turn("a", 10)
    sessions.policy.on_evict(key_of("a"), Tier.DRAM)
    calling("x", "shell", sessions=sessions)

    def likely() -> list[str]:
        return [key.session_id for key in sessions.policy.returning(sessions.now_ns)]

    for waiting, running in (("x", ""), ("", "x")):
        assert likely() == ["a"]
        sessions.queue(waiting, running)
        assert not likely()
        sessions.queue([])
        assert likely() == ["a"]
        sessions.policy.on_await(key_of("x"), ["shell"], sessions.now_ns)
    sessions.queue([], ["x"])
    sessions.placement.forget_engine(ENGINE_ID, sessions.now_ns)
    assert likely() == ["a"]


def test_returns_of_dropped_sessions_are_learned_too():
    """Otherwise sessions that are dropped early would seem never to return."""
    sessions = Chats()
    for number in range(200):
        for name in f"little {number}", f"a lot {number}":
            sessions.turn(name, 10 if name[0] == "l" else 10_000)
            sessions.policy.on_remove(key_of(name))
        sessions.wait(60)
        sessions.turn(f"little {number}", 10)
        sessions.policy.on_remove(key_of(f"little {number}"))
    sessions.wait(4 * 60 * 60)
    sessions.turn("x", 10)
    sessions.turn("y", 10_000)
    assert sessions.victims() == "yx"


def test_ended_sessions_are_no_evidence():
    """Ends reported for some sessions must not change the estimate for the others."""
    sessions = Chats()
    for number in range(200):
        sessions.turn(f"returns {number}", 10)
        sessions.turn(f"ends {number}", 10)
        sessions.policy.on_end(key_of(f"ends {number}"))
        sessions.policy.on_remove(key_of(f"ends {number}"))
        sessions.wait(60)
        sessions.turn(f"returns {number}", 10)
        sessions.policy.on_end(key_of(f"returns {number}"))
        sessions.policy.on_remove(key_of(f"returns {number}"))
    sessions.wait(1)
    hazards = sessions.policy._idle._hazards
    survival = 1.0
    for hazard in hazards.hazards(hazards.class_of((1,))):
        survival *= 1 - hazard
    assert survival < 0.1


def test_idle_sessions_on_ssd_are_read_ahead_likeliest_first():
    """Sessions in DRAM, with a queued turn, or ended are not read."""
    sessions = Chats()
    sessions.teach()
    for name in "abcde":
        sessions.turn(name, 10)
        sessions.wait(5)
    sessions.turn("f", 10_000)
    for name in "abcdf":
        sessions.policy.on_evict(key_of(name), Tier.DRAM)
    sessions.policy.on_end(key_of("b"))
    sessions.queue("c")
    sessions.wait(15)
    returning = [key.session_id for key in sessions.policy.returning(sessions.now_ns)]
    assert returning[:2] == ["a", "d"]
    assert set(returning) <= {"a", "d", "f"}


def test_guarded_idle_sessions_are_read_ahead_first():
    """However likely the others are; each session once."""
    sessions = Chats()
    sessions.teach()
    for name in "abc":
        sessions.turn(name, 10)
        sessions.policy.on_evict(key_of(name), Tier.DRAM)
        sessions.wait(5)
    sessions.policy.guard(key_of("b"), Guard.PINNED)
    returning = [key.session_id for key in sessions.policy.returning(sessions.now_ns)]
    assert returning[0] == "b"
    assert sorted(returning) == ["a", "b", "c"]


def test_the_number_of_remembered_unstored_sessions_is_bounded(monkeypatch):
    """The oldest one is forgotten; stored sessions are always remembered."""
    monkeypatch.setattr(idle_sessions, "MOST_GHOSTS", 10)
    sessions = Chats()
    sessions.turn("stays")
    for number in range(50):
        sessions.turn(f"dropped {number}")
        sessions.policy.on_remove(key_of(f"dropped {number}"))
        sessions.queue([f"new {number}"])
        sessions.queue([])
    histories = sessions.policy._idle._histories
    assert key_of("stays") in histories
    assert key_of("new 49") in histories
    assert len(histories) == 1 + 10


def test_a_restored_session_is_remembered_once_a_turn_asks_for_it(monkeypatch):
    """It is stored, though it was not used since the start, and stays like the others."""
    monkeypatch.setattr(idle_sessions, "MOST_GHOSTS", 10)
    sessions = Chats()
    sessions.policy.on_restore([key_of("stays")])
    sessions.queue(["stays"])
    sessions.queue([])
    for number in range(50):
        sessions.turn(f"dropped {number}")
        sessions.policy.on_remove(key_of(f"dropped {number}"))
    assert key_of("stays") in sessions.policy._idle._histories


def test_a_session_is_scheduled_to_age_once(monkeypatch):
    """However often it is used without a look; one that is forgotten is not scheduled any more."""
    monkeypatch.setattr(idle_sessions, "MOST_GHOSTS", 10)
    sessions = Chats()
    for _ in range(30):
        for name in "abc":
            sessions.turn(name)
            sessions.now_ns += NS_PER_S
    ageing = sessions.policy._idle._ageing
    assert len(ageing) == 3
    for number in range(50):
        sessions.turn(f"dropped {number}")
        sessions.policy.on_remove(key_of(f"dropped {number}"))
    assert len(ageing) == 3 + 10


def test_a_session_ages_from_its_last_use_on():
    """An earlier use may have scheduled it; it still enters no bucket too early."""
    sessions = Chats()
    sessions.turn("a")
    sessions.now_ns += EDGES_NS[1] - 1
    sessions.use("a")
    history = sessions.policy._idle._histories[key_of("a")]
    for elapsed_ns, bucket in ((1, 0), (EDGES_NS[1] - 2, 0), (1, 1), (EDGES_NS[9], 9)):
        sessions.now_ns += elapsed_ns
        sessions.victims()
        assert history.bucket == bucket


def test_unknown_sessions_that_never_start_take_bounded_room(monkeypatch):
    """They are only counted."""
    monkeypatch.setattr(idle_sessions, "MOST_GHOSTS", 10)
    sessions = Chats()
    sessions.queue([f"new {number}" for number in range(50)])
    assert len(sessions.policy._idle._new) == 10
    assert not sessions.policy._idle._histories


@pytest.mark.parametrize("seconds", [0.0, 0.01, 3.0, 10_000.0])
def test_any_idle_time_can_be_learned(seconds):
    """Most sessions stay idle until that time, and few longer, be it a program's or a person's."""
    survival = survival_after_turns(seconds)
    bucket = bucket_at(round(seconds * NS_PER_S))
    assert survival[bucket] > 0.7
    assert survival[bucket + 1] < 0.2


def test_a_return_after_days_counts_as_none():
    assert survival_after_turns(10_000_000.0)[-1] == 1


def survival_after_turns(seconds: float) -> list[float]:
    """Return the survival at the start of each bucket, for sessions that return after this time."""
    sessions = Chats()
    for _ in range(400):
        sessions.turn("x", 10)
        sessions.wait(seconds)
    hazards = sessions.policy._idle._hazards
    hazards.learn()
    survival = [1.0]
    for hazard in hazards.hazards(hazards.class_of(())):
        survival.append(survival[-1] * (1 - hazard))
    return survival


def test_many_sessions_are_ranked_again_in_steps(monkeypatch):
    """One call ranks a few, and finally all are ranked."""
    monkeypatch.setattr(policies, "ALL_AT_ONCE", 4)
    monkeypatch.setattr(policies, "SOME_AT_ONCE", 3)
    sessions = Chats()
    lots, littles = ascii_lowercase, ascii_uppercase
    for name in littles:
        sessions.turn(name, 10)
    for name in lots:
        sessions.turn(name, 10_000)
    sessions.wait(40)
    for name in littles + lots:  # one idle period, from before anything is learned
        sessions.use(name)
    assert sessions.victims() == littles + lots
    for session_class, has_returned in (("A", True), ("a", False)):
        history = sessions.policy._idle._histories[key_of(session_class)]
        for _ in range(500):
            observe(history.session_class, 12, has_returned=has_returned)
    sessions.policy._idle._num_seen += 1000
    orders = []
    for _ in range(18):
        orders.append(sessions.victims())
        assert sorted(orders[-1]) == sorted(littles + lots)
    assert orders[0] != orders[8] != orders[-1] == lots + littles


def test_after_a_pause_sessions_age_in_steps(monkeypatch):
    """However many are due; each then has its right age at once."""
    monkeypatch.setattr(idle_sessions, "MOST_AGED", 10)
    sessions = Chats()
    for letter in ascii_lowercase:
        sessions.turn(letter)
    sessions.now_ns += 3600 * NS_PER_S
    histories = sessions.policy._idle._histories
    num_aged = []
    for _ in range(4):
        assert sorted(sessions.victims()) == list(ascii_lowercase)
        ages = [history.bucket for history in histories.values()]
        num_aged.append(ages.count(bucket_at(3600 * NS_PER_S)))
    assert num_aged == [10, 20, 26, 26]
