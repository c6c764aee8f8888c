"""Room for KV: what is asked for, what is free, and the window that it makes."""

import pytest

from inference_svc.core.errors import KvRoomError
from inference_svc.core.kv_room import asked_slots, least_slots, slots_of_free_memory, window_of

TOKEN_BYTES = 1024


def test_what_is_asked_for_is_there_to_the_last_token():
    """One more than the machine could ever hold is refused, with the number that it could."""
    assert asked_slots(50, TOKEN_BYTES, 51 * 1024 - 1) == 50
    with pytest.raises(KvRoomError, match=r"kv_tokens = 51 is 51\.0 KB .*, 1\.0 KB a token") as no:
        asked_slots(51, TOKEN_BYTES, 51 * 1024 - 1)
    assert "50" in no.value.remedy
    assert no.value.exit_code == 78


@pytest.mark.parametrize(("saves", "least"), [(True, 32), (False, 16)])
def test_without_a_setting_a_quarter_of_what_is_free(saves, least):
    """At least the shortest window, at most what could be used."""
    assert least_slots(saves=saves) == least
    free_bytes = 4 * TOKEN_BYTES * least
    assert slots_of_free_memory(free_bytes, TOKEN_BYTES, 0, saves=saves) == least
    assert slots_of_free_memory(100 * free_bytes, TOKEN_BYTES, 77, saves=saves) == 77
    assert slots_of_free_memory(100 * free_bytes, TOKEN_BYTES, 0, saves=saves) == 100 * least
    with pytest.raises(KvRoomError, match=f"{least - 1} tokens .* takes {least}: free memory"):
        slots_of_free_memory(free_bytes - 1, TOKEN_BYTES, 77, saves=saves)


@pytest.mark.parametrize(
    ("num_slots", "kv_tokens", "saves", "window", "bound"),
    [
        (2000, 2000, True, 1000, "the model's"),
        (1998, 1998, True, 999, "half of scheduler.kv_tokens = 1,998"),
        (1998, 0, True, 999, "half of the memory for KV"),
        (1000, 1000, False, 1000, "the model's"),
        (999, 999, False, 999, "scheduler.kv_tokens = 999"),
    ],
)
def test_the_window_is_the_models_or_what_the_slots_hold(
    num_slots, kv_tokens, saves, window, bound
):
    """And says which."""
    assert window_of(num_slots, 1000, kv_tokens, saves=saves) == (window, bound)
    assert window_of(num_slots, 0, kv_tokens, saves=saves)[0] == num_slots // (2 if saves else 1)
