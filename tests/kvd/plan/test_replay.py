"""Replays small enough to be computed by hand, and properties of every replay."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.eviction.policies import POLICIES
from kvd.plan.hardware import EngineConstants, Hardware, ReplayOptions
from kvd.plan.outcome import Outcome
from kvd.plan.replay import Replay, replay
from kvd.plan.trace import Session, Turn
from tests.kvd.plan.small_machine import ENGINE, FIRST, LRU, MACHINE, SECOND, SSD_ONLY, at
from tests.sampled import examples

SPANS = (0.0, 0.5, 3.0, 20.0)


def shares(outcome: Outcome) -> tuple[float, float, float, float]:
    return outcome.hits_all, outcome.hits_fu, outcome.hits_tok, outcome.dram_share


def test_a_history_in_dram_is_loaded_while_its_turn_is_prefilled():
    """The first token comes when both are done: 2.5 s of prefill, and 2 s of loading meanwhile."""
    outcome = replay([at(5.0, FIRST, SECOND)], MACHINE, LRU)
    assert shares(outcome) == (0.5, 1.0, 1.0, 1.0)
    assert outcome.ttft_mean_s == outcome.start_ttft_mean_s == (10.5 + 2.5) / 2
    assert outcome.gpu_hours * 3600 == pytest.approx(10.5 + 1.5 + 2.5 + 1.0)
    assert outcome.prefill_hours * 3600 == pytest.approx(13)
    assert outcome.prefill_tokens_per_s == pytest.approx((10 + 18) / 13)
    assert outcome.span_s == 12 + 8 + 3.5
    assert (outcome.ssd_bytes_written, outcome.ssd_bytes_read) == (0, 0)


def test_a_load_longer_than_the_prefill_is_waited_for():
    """At 4000 bytes a second 16 tokens take 4 s; the prefill of two, 2.5 s."""
    outcome = replay([at(0.0, FIRST, SECOND)], replace(MACHINE, pcie_bytes_per_s=4000), LRU)
    assert outcome.ttft_mean_s == (10.5 + 4.0) / 2


def test_a_history_on_ssd_is_read_before_its_turn_is_prefilled():
    """8 s to read 16 tokens, then 2.5 s; with exclusive tiers all of it is written again."""
    outcome = replay([at(0.0, FIRST, SECOND)], SSD_ONLY, LRU)
    assert shares(outcome) == (0.5, 1.0, 1.0, 0.0)
    assert outcome.ttft_mean_s == (10.5 + 8 + 2.5) / 2
    assert outcome.ssd_bytes_read == 16_000
    assert outcome.ssd_bytes_written == 16_000 + 22_000


def test_inclusive_tiers_write_only_new_bytes():
    """What was written stays: the second turn adds its 2 + 4 tokens."""
    for machine in (SSD_ONLY, replace(MACHINE, ssd_bytes=1_000_000)):
        outcome = replay([at(0.0, FIRST, SECOND)], machine, replace(LRU, tiers="inclusive"))
        assert outcome.hits_fu == 1.0
        assert outcome.ssd_bytes_written == 16_000 + 6_000


def test_recompute_stores_nothing():
    """Load policy "never" is RE: every turn prefills its whole prompt."""
    outcome = replay([at(0.0, FIRST, SECOND)], MACHINE, replace(LRU, load_policy="never"))
    assert shares(outcome) == (0.0, 0.0, 0.0, 0.0)
    assert outcome.ttft_mean_s == (10.5 + 18.5) / 2


def test_the_guard_computes_where_loading_is_slower():
    """A read of 32 s loses to 16 s of computing; one of 8 s does not, even with a wait as long."""
    auto, slow = replace(LRU, load_policy="auto"), replace(SSD_ONLY, ssd_bytes_per_s=500)
    outcome = replay([at(0.0, FIRST, SECOND)], slow, auto)
    assert (outcome.num_guarded, outcome.hits_fu, outcome.ssd_bytes_read) == (1, 0.0, 0)
    assert outcome.ttft_mean_s == (10.5 + 18.5) / 2
    assert replay([at(0.0, FIRST, SECOND)], SSD_ONLY, auto).hits_fu == 1.0
    # Both first turns end at 22.5 s, and both second ones come at 30.5 s. The one that comes second
    # waits for 16 s: its 16 s of computing would delay the other, too, which needs only 8 s.
    two = replace(SSD_ONLY, engine=replace(ENGINE, slots=2))
    outcome = replay([at(0.0, FIRST, SECOND), at(0.0, FIRST, SECOND)], two, auto)
    assert (outcome.num_hits, outcome.num_guarded) == (2, 0)


def test_turns_wait_for_a_slot_in_order_of_arrival():
    """The second waits 12 s for the first, the third 24 s for both; the queue is 0, 0 and 1."""
    outcome = replay([at(0.0, FIRST), at(0.0, FIRST), at(0.0, FIRST)], MACHINE, LRU)
    assert outcome.start_ttft_mean_s == 10.5
    assert outcome.ttft_mean_s == (10.5 + 22.5 + 34.5) / 3
    assert outcome.ttft_p99_s == 34.5
    assert (outcome.queue_mean, outcome.queue_p99) == (1 / 3, 1)


def test_a_prefill_stalls_decodes():
    """With two slots the first decode, begun at 10.5 s, stands still until 21 s; both end then."""
    two = replace(MACHINE, engine=replace(ENGINE, slots=2))
    outcome = replay([at(0.0, FIRST), at(0.0, FIRST)], two, LRU)
    assert outcome.start_ttft_mean_s == (10.5 + 21) / 2
    assert outcome.span_s == 22.5


def test_hbm_limits_the_running_turns():
    """Two turns of 16 tokens do not fit into the bytes of 31; one does, however small HBM is."""
    two = replace(MACHINE, engine=replace(ENGINE, slots=2))
    for hbm_bytes, span_s in ((32_000, 22.5), (31_999, 24.0), (1, 24.0)):
        outcome = replay([at(0.0, FIRST), at(0.0, FIRST)], replace(two, hbm_bytes=hbm_bytes), LRU)
        assert outcome.span_s == span_s


def test_the_least_recently_used_session_goes_first():
    """DRAM for two sessions: the first of three is lost, though it is not the last to return."""
    sessions = [
        at(0.0, FIRST, replace(SECOND, think_s=1000.0)),
        at(100.0, FIRST, replace(SECOND, think_s=300.0)),
        at(200.0, FIRST, replace(SECOND, think_s=300.0)),
    ]
    outcome = replay(sessions, replace(MACHINE, dram_bytes=38_000), LRU)
    assert outcome.hits_fu == pytest.approx(2 / 3)
    # With room on SSD none is lost: it is demoted, and read when needed.
    outcome = replay(sessions, replace(MACHINE, dram_bytes=38_000, ssd_bytes=38_000), LRU)
    assert (outcome.hits_fu, outcome.dram_share) == (1.0, pytest.approx(2 / 3))
    assert outcome.ssd_bytes_read == 16_000


def test_a_window_is_charged_completely():
    """Two sessions of 16 tokens fit packed; as windows of 20 tokens only one does."""
    sessions = [
        at(0.0, FIRST, replace(SECOND, think_s=1000.0)),
        at(12.0, FIRST, replace(SECOND, think_s=100.0)),
    ]
    machine = replace(MACHINE, dram_bytes=39_000)
    assert replay(sessions, machine, LRU).num_hits == 2
    window = replace(LRU, charge="window", window_tokens=20)
    assert replay(sessions, machine, window).num_hits == 1


def test_contexts_are_truncated_to_the_window():
    """Of 22 tokens a window of 20 keeps 12; a trace with longer contexts is another model's."""
    third = Turn(new_tokens=1, output_tokens=1, history_tokens=12, think_s=1.0)
    sessions = [at(0.0, FIRST, SECOND, third)]
    options = replace(LRU, window_tokens=20)
    outcome = replay(sessions, SSD_ONLY, options)
    assert outcome.ssd_bytes_written == 16_000 + 12_000 + 14_000
    assert outcome.hits_tok == 1.0
    outcome = replay(sessions, SSD_ONLY, replace(options, window_tokens=17))
    assert outcome.ssd_bytes_written == 16_000 + 22_000 + 14_000


def test_an_idle_session_expires_after_its_ttl():
    """A think time of 8 s outlives a TTL of 7.5 s, but not one of 8.5 s."""
    sessions = [at(0.0, FIRST, SECOND)]
    assert replay(sessions, MACHINE, replace(LRU, ttl_s=7.5)).num_hits == 0
    assert replay(sessions, MACHINE, replace(LRU, ttl_s=8.5)).num_hits == 1


def test_a_session_with_a_waiting_turn_does_not_expire():
    """Its second turn comes at 20 s and starts at 31 s, long after 12 s + 10 s."""
    sessions = [at(0.0, FIRST, SECOND), at(19.0, FIRST)]
    outcome = replay(sessions, MACHINE, replace(LRU, ttl_s=10.0))
    assert (outcome.num_hits, outcome.queue_mean) == (1, 0.0)
    assert outcome.ttft_mean_s == (10.5 + 10.5 + 11 + 2.5) / 3


def test_the_watermark_is_kept_free():
    """A session of 16 tokens fits into DRAM for 20, but not into 75 % of it."""
    machine = replace(MACHINE, dram_bytes=20_000)
    assert replay([at(0.0, FIRST, SECOND)], machine, LRU).num_hits == 1
    assert replay([at(0.0, FIRST, SECOND)], machine, replace(LRU, watermark=0.25)).num_hits == 0


def test_an_end_hint_frees_room():
    """A session that has ended is not stored, so that no other is evicted."""
    sessions = [at(0.0, FIRST, replace(SECOND, think_s=100.0)), at(20.0, FIRST)]
    machine = replace(MACHINE, dram_bytes=30_000)
    assert replay(sessions, machine, LRU).num_hits == 0
    assert replay(sessions, machine, replace(LRU, end_hints=True)).num_hits == 1


def test_the_warm_up_is_not_measured():
    """Turns count from the third start, with all later events."""
    sessions = [at(0.0, FIRST, SECOND), at(100.0, FIRST, SECOND)]
    outcome = replay(sessions, SSD_ONLY, replace(LRU, warmup_turns=2))
    assert (outcome.num_turns, outcome.num_turns_measured, outcome.num_hits) == (4, 2, 1)
    assert outcome.ssd_bytes_written == 16_000 + 22_000
    assert outcome.span_s == 12 + 8 + 8 + 3.5


def test_without_thinking_a_turn_comes_at_once():
    """A think scale of zero leaves no gap between an answer and the next turn."""
    outcome = replay([at(0.0, FIRST, SECOND)], MACHINE, replace(LRU, think_scale=0.0))
    assert outcome.span_s == 12 + 3.5


def test_a_cleared_context_is_a_miss():
    """A session's stored tokens are dropped when its next turn has no history."""
    cleared = replace(SECOND, history_tokens=0)
    outcome = replay([at(0.0, FIRST, cleared)], MACHINE, LRU)
    assert shares(outcome) == (0.0, 0.0, 0.0, 0.0)


def test_history_beyond_the_kept_tokens_is_computed():
    """Of 20 history tokens 16 are stored: 4 + 2 are computed while those are loaded."""
    outcome = replay([at(0.0, FIRST, replace(SECOND, history_tokens=20))], MACHINE, LRU)
    assert (outcome.hits_fu, outcome.hits_tok) == (1.0, 0.8)
    assert outcome.ttft_mean_s == (10.5 + 6.5) / 2


@pytest.mark.parametrize("policy", ["lookahead", "lookahead_queue"])
def test_a_waiting_session_is_read_ahead(policy):
    """While a turn runs, the next one's history is read: it is in DRAM when the turn starts."""
    sessions = [
        at(0.0, FIRST, replace(SECOND, think_s=100.0)),  # on SSD after the others are stored
        at(20.0, FIRST),
        at(40.0, FIRST),
        at(111.0, Turn(20, 2, 0, 0.0)),  # runs from 111 s to 132 s; the read, from 112 s to 120 s
    ]
    machine = replace(MACHINE, dram_bytes=22_000, ssd_bytes=64_000)
    outcome = replay(sessions, machine, replace(LRU, policy=policy))
    assert (outcome.num_hits, outcome.dram_share) == (1, 1.0)
    assert outcome.ssd_bytes_read == 16_000
    outcome = replay(sessions, machine, LRU)
    assert (outcome.num_hits, outcome.dram_share) == (1, 0.0)
    # The sessions that never return go first: it stays in DRAM.
    outcome = replay(sessions, machine, replace(LRU, policy="belady"))
    assert (outcome.num_hits, outcome.dram_share, outcome.ssd_bytes_read) == (1, 1.0, 0)


def test_a_turn_waits_for_the_rest_of_an_active_read():
    """Read ahead from 112 s on, its turn starts at 117 s, and waits 3 s of 8."""
    sessions = [
        at(0.0, FIRST, replace(SECOND, think_s=100.0)),
        at(20.0, FIRST),
        at(111.0, Turn(5, 2, 0, 0.0)),
    ]
    machine = replace(MACHINE, dram_bytes=18_000, ssd_bytes=64_000)
    outcome = replay(sessions, machine, replace(LRU, policy="lookahead_queue", warmup_turns=3))
    assert (outcome.num_hits, outcome.dram_share) == (1, 0.0)
    assert outcome.start_ttft_mean_s == 3 + 2.5
    assert outcome.ssd_bytes_read == 0  # it began in the warm-up
    options = replace(LRU, policy="lookahead_queue", load_policy="auto")
    assert replay(sessions, machine, options).num_guarded == 0  # 3 s and 2 s are less than 16 s
    slower = replace(machine, ssd_bytes_per_s=500)  # 27 s of 32 are left
    assert replay(sessions, slower, options).num_guarded == 1


def test_the_queue_determines_evictions():
    """Two sessions wait and one is idle: it goes; with LRU waiting ones go, in turn."""
    sessions = [
        at(0.0, FIRST, replace(SECOND, think_s=30.0)),  # back at 42 s
        at(12.0, FIRST, replace(SECOND, think_s=18.5)),  # back at 42.5 s
        at(24.0, FIRST, replace(SECOND, think_s=500.0)),
        at(40.0, FIRST),  # stored at 52 s, while the first two wait
    ]
    machine = replace(MACHINE, dram_bytes=54_000)
    kept = replay(sessions, machine, replace(LRU, policy="lookahead_queue"))
    lost = replay(sessions, machine, LRU)
    assert (kept.num_hits, lost.num_hits) == (2, 0)


def test_progress_is_reported_to_the_end():
    """The last report is the number of turns."""
    progress: list[int] = []
    replay([at(float(start), FIRST) for start in range(300)], MACHINE, LRU, progress.append)
    assert progress == [256, 300]


def test_an_unknown_policy_is_refused():
    """The CLI checks names first; here it is a KeyError."""
    with pytest.raises(KeyError):
        replay([at(0.0, FIRST)], MACHINE, replace(LRU, policy="clairvoyant"))


# -------------------------------------------------------------------------------- every replay


@st.composite
def sessions_of_any_kind(draw: st.DrawFn) -> list[Session]:
    sessions: list[Session] = []
    free: list[int | None] = [None]  # what a session may supersede
    for number in range(draw(st.integers(1, 8))):
        turns: list[Turn] = []
        kept = 0
        for _ in range(draw(st.integers(1, 5))):
            history = draw(st.sampled_from([kept, kept, kept // 2, 0]))
            new, output = draw(st.integers(0, 12)), draw(st.integers(0, 8))
            tools = draw(st.sampled_from([(), ("read",), ("test", "read")]))
            turns.append(Turn(new, output, history, draw(st.sampled_from(SPANS)), tools))
            kept = history + new + output
        supersedes = draw(st.sampled_from(free))
        if supersedes is not None:
            free.remove(supersedes)
        free.append(number)
        sessions.append(Session(draw(st.integers(0, 60)) / 2, tuple(turns), supersedes))
    return sessions


OPTIONS = st.builds(
    ReplayOptions,
    policy=st.sampled_from([*POLICIES, "belady"]),
    kv_bytes_per_token=st.sampled_from([1.0, 1000.5]),
    charge=st.sampled_from(["packed", "window"]),
    window_tokens=st.sampled_from([20, 40]),
    tiers=st.sampled_from(["exclusive", "inclusive"]),
    ttl_s=st.sampled_from([None, 1.0, 30.0]),
    watermark=st.sampled_from([0.0, 0.25]),
    load_policy=st.sampled_from(["always", "auto", "never"]),
    end_hints=st.booleans(),
    tool_hints=st.booleans(),
    think_scale=st.sampled_from([0.0, 1.0]),
)
HARDWARE = st.builds(
    Hardware,
    dram_bytes=st.sampled_from([0, 30, 30_000, 70_000]),
    ssd_bytes=st.sampled_from([0, 60, 60_000, 200_000]),
    hbm_bytes=st.sampled_from([0, 40_000]),
    ssd_bytes_per_s=st.sampled_from([100.0, 5e3, 1e9]),
    pcie_bytes_per_s=st.just(8e3),
    engine=st.builds(
        EngineConstants,
        slots=st.integers(1, 3),
        prefill_s_per_token=st.just(0.1),
        decode_step_s=st.sampled_from([0.0, 0.5]),
        fixed_s=st.just(0.0),
    ),
)


@settings(max_examples=examples(300), deadline=None)
@given(sessions=sessions_of_any_kind(), hardware=HARDWARE, options=OPTIONS)
def test_every_replay_ends_and_keeps_its_invariants(sessions, hardware, options):
    """No tier is ever above its capacity, every turn completes once, and hits are of history."""
    run = Replay(sessions, hardware, options)
    num_turns = sum(len(session.turns) for session in sessions)
    run.begin()
    num_done = 0
    for _ in range(200 * num_turns):
        num_done += run.step()
        run.check()
        if num_done == num_turns:
            break
    outcome = run.outcome()
    assert num_done == outcome.num_turns_measured == num_turns
    assert outcome.num_hits <= sum(
        turn.history_tokens > 0 for session in sessions for turn in session.turns[1:]
    )
    if options.load_policy == "never" or not hardware.dram_bytes + hardware.ssd_bytes:
        assert outcome.num_hits == outcome.ssd_bytes_written == outcome.ssd_bytes_read == 0


@settings(max_examples=examples(50), deadline=None)
@given(sessions=sessions_of_any_kind(), hardware=HARDWARE, options=OPTIONS)
def test_a_replay_is_deterministic(sessions, hardware, options):
    """The same inputs give the same outcome, to the last digit."""
    assert replay(sessions, hardware, options) == replay(sessions, hardware, options)


@settings(max_examples=examples(100), deadline=None)
@given(sessions=sessions_of_any_kind(), num_slots=st.integers(1, 6))
def test_no_policy_beats_belady_at_equal_sizes(sessions, num_slots):
    """Computing takes no time, so that turns come in one order, whatever hits."""
    apart = [
        replace(session, start_s=session.start_s + index / 1024)
        for index, session in enumerate(sessions)
    ]
    engine = EngineConstants(slots=1, prefill_s_per_token=0, decode_step_s=0, fixed_s=0)
    hardware = Hardware(num_slots * 40, 0, pcie_bytes_per_s=1e30, engine=engine)
    options = ReplayOptions("belady", 1, "window", 40, "exclusive", load_policy="always")
    best = replay(apart, hardware, options).num_hits
    for policy in POLICIES:
        assert replay(apart, hardware, replace(options, policy=policy)).num_hits <= best


@settings(max_examples=examples(100), deadline=None)
@given(sessions=sessions_of_any_kind(), options=OPTIONS)
def test_enough_room_loses_nothing(sessions, options):
    """With DRAM above the footprint every turn with stored history hits, under any policy."""
    hardware = Hardware(10**9, 0)
    always = replace(options, load_policy="always", ttl_s=None)
    outcome = replay(sessions, hardware, always)
    with_history = [
        turn
        for session in sessions
        for before, turn in pairwise(session.turns)
        if turn.history_tokens and before.kept_tokens
    ]
    assert outcome.num_hits == len(with_history)
    assert outcome.dram_share == (1.0 if with_history else 0.0)
