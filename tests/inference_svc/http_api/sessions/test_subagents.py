"""Which sessions of sub-agents are idle."""

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.http_api.sessions.subagents import IdleSubagents
from shared.types.session_key import SessionKey

IDLE_S, MOST = 10.0, 4
keys = st.builds(SessionKey, st.just("acme"), st.just("m"), st.sampled_from("abcdef"))


@given(st.lists(st.tuples(st.floats(0, 8), st.none() | keys), max_size=30))
def test_those_are_taken_that_nobody_has_used_for_long(steps):
    """Against a plain dict; of more than `most` those that were used last are watched."""
    idle, used, now_s = IdleSubagents(IDLE_S, MOST), {}, 0.0
    for turns, (passed_s, key) in enumerate(steps):
        now_s += passed_s
        if key is not None:
            idle.used(key, turns, now_s)
            used.pop(key, None)
            used[key] = now_s, turns
            if len(used) > MOST:
                del used[next(iter(used))]
            continue
        expected = [(one, turns) for one, (at_s, turns) in used.items() if now_s - at_s >= IDLE_S]
        assert idle.take_idle(now_s) == expected
        for one, _ in expected:
            del used[one]
    assert len(idle) == len(used)
