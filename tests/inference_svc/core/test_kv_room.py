"""Room for KV: the configured, the free, and the resulting window."""

import pytest

from inference_svc.core.errors import KvRoomError
from inference_svc.core.kv_room import (
    configured_slots,
    least_slots,
    requests_with_states,
    residents_with_states,
    slots_of_free_memory,
    states_of_requests,
    window_of,
)

TOKEN_BYTES = 1024


def test_a_configured_size_is_granted_exactly():
    """One token more than the machine can hold is refused, with the possible number."""
    assert configured_slots(50, TOKEN_BYTES, 51 * 1024 - 1) == 50
    with pytest.raises(
        KvRoomError, match=r"kv_tokens = 51 takes 51\.0 KB .1\.0 KB for each token"
    ) as no:
        configured_slots(51, TOKEN_BYTES, 51 * 1024 - 1)
    assert "50" in no.value.remedy
    assert no.value.exit_code == 78


@pytest.mark.parametrize(("saves", "least"), [(True, 32), (False, 16)])
def test_without_a_setting_a_quarter_of_free_memory_is_used(saves, least):
    """At least the shortest window, and the smallest write ring if tokens are saved."""
    assert least_slots(saves=saves) == least
    free_bytes = 4 * TOKEN_BYTES * least
    assert slots_of_free_memory(free_bytes, TOKEN_BYTES, saves=saves) == least
    assert slots_of_free_memory(100 * free_bytes, TOKEN_BYTES, saves=saves) == 100 * least
    with pytest.raises(KvRoomError, match=f"{least - 1} tokens .* takes {least}: free memory"):
        slots_of_free_memory(free_bytes - 1, TOKEN_BYTES, saves=saves)


@pytest.mark.parametrize(
    ("kv_slots", "write_slots", "kv_tokens", "window", "bound"),
    [
        (1000, 200, 1200, 1000, "the model's"),
        (999, 201, 1200, 999, "scheduler.kv_tokens = 1,200 less the write ring's 201"),
        (999, 201, 0, 999, "the memory for KV less the write ring's 201"),
        (1000, 0, 1000, 1000, "the model's"),
        (999, 0, 999, 999, "scheduler.kv_tokens = 999"),
    ],
)
def test_the_window_is_the_models_or_limited_by_slots(
    kv_slots, write_slots, kv_tokens, window, bound
):
    """The result says which."""
    assert window_of(kv_slots, write_slots, 1000, kv_tokens) == (window, bound)
    assert window_of(kv_slots, write_slots, 0, kv_tokens)[0] == kv_slots


def test_states_take_a_quarter_of_free_memory_requests_first():
    """Sessions get the rest of it, up to a number."""
    assert states_of_requests(3) == 15  # its own, and four that wait to be stored
    free_bytes = 4 * 15 * TOKEN_BYTES
    assert residents_with_states(free_bytes, TOKEN_BYTES, 3, most=128) == 0
    assert residents_with_states(free_bytes, TOKEN_BYTES, 2, most=128) == 5
    assert residents_with_states(free_bytes, TOKEN_BYTES, 2, most=3) == 3
    with pytest.raises(KvRoomError, match=r"these have 20 states of 1\.0 KB each"):
        residents_with_states(free_bytes, TOKEN_BYTES, 4, most=128)


def test_half_of_the_room_for_states_is_for_requests():
    """So that sessions have as much beside those that are admitted."""
    free_bytes = 4 * 30 * TOKEN_BYTES
    assert requests_with_states(free_bytes, TOKEN_BYTES) == 3
    assert residents_with_states(free_bytes, TOKEN_BYTES, 3, most=128) == states_of_requests(3)
    assert requests_with_states(free_bytes - 1, TOKEN_BYTES) == 2
