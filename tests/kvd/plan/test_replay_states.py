"""Replays of a model with states or windows: small ones by hand, and the effect of their size."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.eviction.policies import POLICIES
from kvd.plan.hardware import EngineConstants, Hardware, ReplayOptions
from kvd.plan.kept import MOST_KEPT
from kvd.plan.replay import Replay, replay
from kvd.plan.trace import Session, Turn
from tests.kvd.plan.small_machine import FIRST, LRU, MACHINE, SECOND, SSD_ONLY, at
from tests.kvd.plan.test_replay import HARDWARE, OPTIONS, sessions_of_any_kind
from tests.sampled import examples

STATE = 4000  # as much as four tokens
WITH_STATES = replace(LRU, state_bytes=STATE)
THIRD = Turn(new_tokens=2, output_tokens=3, history_tokens=22, think_s=8.0)
ABOUT_THE_ANSWER = replace(THIRD, history_tokens=20)  # of 22, preceded by a state at 18


def test_a_history_is_loaded_with_its_state():
    """At 4000 bytes a second 16 tokens take 4 s, and a state one more."""
    outcome = replay([at(0.0, FIRST, SECOND)], replace(MACHINE, pcie_bytes_per_s=4000), WITH_STATES)
    assert (outcome.hits_fu, outcome.hits_tok) == (1.0, 1.0)
    assert outcome.ttft_mean_s == (10.5 + 5.0) / 2


def test_states_are_written_and_one_is_read():
    """A first turn leaves two, the next two more, which supersede the first one's end."""
    outcome = replay([at(0.0, FIRST, SECOND)], SSD_ONLY, WITH_STATES)
    assert outcome.ssd_bytes_read == 16_000 + STATE
    assert outcome.ssd_bytes_written == (16_000 + 2 * STATE) + (22_000 + 3 * STATE)
    assert outcome.ttft_mean_s == (10.5 + (8 + 2) + 2.5) / 2
    inclusive = replay([at(0.0, FIRST, SECOND)], SSD_ONLY, replace(WITH_STATES, tiers="inclusive"))
    assert inclusive.ssd_bytes_written == (16_000 + 2 * STATE) + (6_000 + 2 * STATE)


def test_a_turns_stored_bytes_are_counted():
    """Its tokens, and two states; their share is shown beside that in the tiers."""
    outcome = replay([at(0.0, FIRST, SECOND)], MACHINE, WITH_STATES)
    assert outcome.stored_bytes_per_turn == (16_000 + 6_000 + 4 * STATE) / 2
    assert outcome.parts_of_stored == 4 * STATE / (22_000 + 4 * STATE)
    assert outcome.parts_of_dram == 2 * STATE / (16_000 + 2 * STATE)  # when the second one starts
    assert outcome.parts_of_ssd == 0.0
    on_ssd = replay([at(0.0, FIRST, SECOND)], SSD_ONLY, WITH_STATES)
    assert (on_ssd.parts_of_dram, on_ssd.parts_of_ssd) == (0.0, outcome.parts_of_dram)
    plain = replay([at(0.0, FIRST, SECOND)], MACHINE, LRU)
    assert (plain.stored_bytes_per_turn, plain.parts_of_stored) == (11_000, 0.0)


def test_a_history_between_two_states_is_computed_from_the_earlier_one():
    """Of 20 tokens 18 are loaded; without states all 20 would be."""
    sessions = [at(0.0, FIRST, SECOND, ABOUT_THE_ANSWER)]
    assert replay(sessions, MACHINE, LRU).recomputed_per_turn == 0
    outcome = replay(sessions, MACHINE, WITH_STATES)
    assert outcome.recomputed_per_turn == pytest.approx(2 / 3)
    assert (outcome.num_hits, outcome.num_partless) == (2, 0)


def test_tokens_without_a_state_are_recomputed_and_stored_once():
    """The rest of the session lies before its first state: it is stored, but useless."""
    sessions = [at(0.0, FIRST, SECOND, replace(THIRD, history_tokens=8))]
    outcome = replay(sessions, SSD_ONLY, replace(WITH_STATES, tiers="inclusive"))
    assert (outcome.num_hits, outcome.num_partless, outcome.num_guarded) == (1, 1, 0)
    assert outcome.partless_fu == 0.5
    third_bytes = (13 - 8) * 1000 + 2 * STATE
    assert outcome.ssd_bytes_written == 16_000 + 6_000 + 4 * STATE + third_bytes


def test_states_take_room():
    """DRAM for two sessions of 16 tokens has room for one with its two states."""
    sessions = [
        at(0.0, FIRST, replace(SECOND, think_s=1000.0)),
        at(100.0, FIRST, replace(SECOND, think_s=300.0)),
    ]
    machine = replace(MACHINE, dram_bytes=38_000)
    assert replay(sessions, machine, LRU).num_hits == 2
    assert replay(sessions, machine, WITH_STATES).num_hits == 1


def test_a_window_is_charged_with_as_many_states_as_a_session_keeps():
    """Two windows of 20 tokens and three states."""
    sessions = [
        at(0.0, FIRST, replace(SECOND, think_s=1000.0)),
        at(12.0, FIRST, replace(SECOND, think_s=100.0)),
    ]
    window = replace(WITH_STATES, charge="window", window_tokens=20)
    for dram_bytes, num_hits in ((2 * (20_000 + MOST_KEPT * STATE), 2), (63_999, 1)):
        assert (
            replay(sessions, replace(MACHINE, dram_bytes=dram_bytes), window).num_hits == num_hits
        )


def test_a_running_turn_has_one_state_in_hbm():
    """Two of 16 tokens fit without it, and alternate with it."""
    two = replace(MACHINE, hbm_bytes=32_000, engine=replace(MACHINE.engine, slots=2))
    sessions = [at(0.0, FIRST), at(0.0, FIRST)]
    assert replay(sessions, two, LRU).span_s == 22.5
    assert replay(sessions, two, WITH_STATES).span_s == 24.0


def test_a_model_may_have_states_alone():
    """Tokens have no bytes then, and a load consists of a state."""
    mamba = replace(WITH_STATES, kv_bytes_per_token=0)
    outcome = replay([at(0.0, FIRST, SECOND)], SSD_ONLY, mamba)
    assert (outcome.hits_tok, outcome.ssd_bytes_read) == (1.0, STATE)
    assert (outcome.parts_of_stored, outcome.parts_of_ssd) == (1.0, 1.0)


def test_a_state_slower_to_load_than_its_history_to_compute_is_not_loaded():
    """It takes 20 s from DRAM, and its 16 tokens 16 s."""
    large = replace(WITH_STATES, state_bytes=160_000, load_policy="auto")
    outcome = replay([at(0.0, FIRST, SECOND)], MACHINE, large)
    assert (outcome.num_guarded, outcome.num_hits, outcome.num_partless) == (1, 0, 0)


BEFORE = {  # hits, bytes written and read, mean TTFT in seconds: as before there were states
    "fifo": (10, 542_000, 150_000, 84.58333333333333),
    "lru": (2, 542_000, 16_000, 103.27777777777777),
    "lookahead": (16, 325_000, 244_000, 49.94444444444444),
    "lookahead_queue": (16, 325_000, 244_000, 49.94444444444444),
    "predictive": (15, 407_000, 240_000, 49.675925925925924),
    "belady": (15, 407_000, 240_000, 49.675925925925924),
}


@pytest.mark.parametrize("policy", [*POLICIES, "belady"])
def test_a_model_without_states_is_planned_as_before(policy):
    """The same figures, to the last digit."""
    sessions = [at(float(start), FIRST, SECOND, THIRD) for start in range(0, 60, 7)]
    machine = replace(MACHINE, dram_bytes=50_000, ssd_bytes=90_000)
    found = replay(sessions, machine, replace(LRU, policy=policy))
    moved = found.ssd_bytes_written, found.ssd_bytes_read
    assert (found.num_hits, *moved, found.ttft_mean_s) == BEFORE[policy]


# ------------------------------------------------------------------------------------- windows

WITH_WINDOWS = replace(LRU, windowed_bytes_per_token=500, attention_window=4)


def test_windows_are_written_and_one_is_read():
    """Of a first turn three, separate from each other; of the next one's two one is new."""
    outcome = replay([at(0.0, FIRST, SECOND)], SSD_ONLY, WITH_WINDOWS)
    assert outcome.ssd_bytes_read == 16_000 + 4 * 500
    assert outcome.ssd_bytes_written == (16_000 + 12 * 500) + (22_000 + 12 * 500)
    assert outcome.parts_of_stored == (12 + 8) * 500 / (22_000 + 20 * 500)
    assert (outcome.hits_fu, outcome.hits_tok) == (1.0, 1.0)


def test_a_window_as_long_as_the_context_is_kv_of_all_tokens():
    """The figures are those of a model with full attention; three quarters are parts."""
    sessions = [at(float(start), FIRST, SECOND, THIRD) for start in range(0, 60, 7)]
    machine = replace(MACHINE, dram_bytes=50_000, ssd_bytes=90_000)
    whole = asdict(replay(sessions, machine, LRU))
    split = replace(
        LRU, kv_bytes_per_token=250, windowed_bytes_per_token=750, attention_window=1000
    )
    found = asdict(replay(sessions, machine, split))
    shares = {name for name in found if name.startswith("parts_of")}
    assert all(found[name] == 0.75 for name in shares if found[name])
    assert {name: found[name] for name in found.keys() - shares} == {
        name: whole[name] for name in whole.keys() - shares
    }


# -------------------------------------------------------------------------------- every replay

NO_PARTS: dict[str, int] = {}
PARTS = st.one_of(
    st.just(NO_PARTS),
    st.fixed_dictionaries({"state_bytes": st.sampled_from([1, 4_000, 20_000])}),
    st.fixed_dictionaries(
        {
            "windowed_bytes_per_token": st.sampled_from([1, 1000]),
            "attention_window": st.integers(1, 30),
        }
    ),
)


@settings(max_examples=examples(150), deadline=None)
@given(sessions_of_any_kind(), HARDWARE, OPTIONS, PARTS)
def test_every_replay_with_parts_ends_and_keeps_its_invariants(sessions, hardware, options, parts):
    """And stored tokens without a state or window are no hit."""
    run = Replay(sessions, hardware, replace(options, **parts))
    num_turns = sum(len(session.turns) for session in sessions)
    run.begin()
    num_done = 0
    for _ in range(200 * num_turns):
        num_done += run.step()
        run.check()
        if num_done == num_turns:
            break
    outcome = run.outcome()
    assert num_done == num_turns
    with_history = sum(turn.history_tokens > 0 for each in sessions for turn in each.turns)
    assert outcome.num_hits + outcome.num_partless + outcome.num_guarded <= with_history
    for share in (outcome.parts_of_stored, outcome.parts_of_dram, outcome.parts_of_ssd):
        assert 0 <= share <= (1 if parts else 0)
    assert outcome.num_partless == 0 or "state_bytes" in parts  # of windows the first one stays


@settings(max_examples=examples(100), deadline=None)
@given(sessions_of_any_kind(), HARDWARE, OPTIONS)
def test_states_cost_only_their_size(sessions, hardware, options):
    """Where each turn continues at the end of the one before, states of no size would be free.

    A byte beside tokens of 2**20 bytes is as near as possible: rates are those without states.
    """
    whole = [_going_on(session) for session in sessions]
    plain = replace(options, kv_bytes_per_token=1 << 20, charge="packed")
    room = replace(hardware, dram_bytes=1 << 40, ssd_bytes=1 << 40, pcie_bytes_per_s=1e30)
    room = replace(room, ssd_bytes_per_s=1e30)
    without, found = (
        asdict(replay(whole, room, replace(plain, state_bytes=size))) for size in (0, 1)
    )
    in_bytes = ("ssd_bytes_", "stored_bytes", "parts_of")
    for name in without:
        if not name.startswith(in_bytes):
            assert found[name] == without[name], name


@settings(max_examples=examples(150), deadline=None)
@given(
    sessions=sessions_of_any_kind(),
    sizes=st.lists(st.integers(0, 30), min_size=2, max_size=2).map(sorted),
    num_slots=st.integers(1, 4),
    is_ssd=st.booleans(),
)
def test_more_bytes_of_a_state_never_give_more_hits(sessions, sizes, num_slots, is_ssd):
    """Under lru, with equal room, which any one session fits into.

    With computing and loading that take no time: otherwise a hit ends sooner, others come in
    another order, and another session is evicted. A session too large for a tier evicts nothing
    there, which may help others.
    """
    apart = [
        replace(session, start_s=session.start_s + index / 1024)
        for index, session in enumerate(sessions)
    ]
    largest = max(turn.kept_tokens for each in apart for turn in each.turns)
    room = largest + MOST_KEPT * sizes[1]
    tiers = (0, room) if is_ssd else (room, 0)
    engine = EngineConstants(slots=num_slots, prefill_s_per_token=0, decode_step_s=0, fixed_s=0)
    hardware = Hardware(*tiers, ssd_bytes_per_s=1e30, pcie_bytes_per_s=1e30, engine=engine)
    options = ReplayOptions("lru", 1, tiers="exclusive", load_policy="always")
    smaller, larger = (
        replay(apart, hardware, replace(options, state_bytes=size)) for size in sizes
    )
    assert larger.num_hits <= smaller.num_hits
    assert larger.hits_tok <= smaller.hits_tok


def _going_on(session: Session) -> Session:
    """Return a session each of whose turns has all of the one before as its history."""
    turns, kept = [], 0
    for turn in session.turns:
        turns.append(replace(turn, history_tokens=kept))
        kept = turns[-1].kept_tokens
    return replace(session, turns=tuple(turns))
