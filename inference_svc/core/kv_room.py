"""Room for KV: how many tokens fit in memory, and which context window follows. Pure.

If KV is saved, some token slots belong to the write ring, where computed KV waits until kvd has it.
The window is what the ring leaves.
"""

from inference_svc.core.errors import KvRoomError
from inference_svc.core.scheduling.write_slots import LEAST_WRITE_SLOTS
from shared.types.units import format_bytes

KV_SHARE = 4  # the working KV may take a quarter of the memory that is free at the start
MOST_UNSAVED_STATES = 4  # of a running turn: a state may be as large as thousands of tokens
LEAST_WINDOW_TOKENS = 16  # with less no turn would have room


def least_slots(*, saves: bool) -> int:
    """Return the slots of the shortest window, and of the smallest write ring if KV is saved."""
    return LEAST_WINDOW_TOKENS + (LEAST_WRITE_SLOTS if saves else 0)


def configured_slots(kv_tokens: int, token_bytes: int, all_bytes: int) -> int:
    """Check the setting scheduler.kv_tokens against the machine's memory, and return it.

    Args:
        kv_tokens: the setting.
        token_bytes: bytes of a token's KV, all layers.
        all_bytes: bytes of the memory for KV, used or not.

    Raises:
        KvRoomError: so many can never fit.
    """
    most = all_bytes // token_bytes
    if kv_tokens > most:
        raise KvRoomError(
            f"scheduler.kv_tokens = {kv_tokens:,} takes {format_bytes(kv_tokens * token_bytes)} "
            f"({format_bytes(token_bytes)} for each token of this model's KV), but the memory has "
            f"{format_bytes(all_bytes)}",
            f"write at most {most:,}, or 0 to have it chosen from the free memory",
        )
    return kv_tokens


def slots_of_free_memory(free_bytes: int, token_bytes: int, *, saves: bool) -> int:
    """Choose the number of token slots if no setting does.

    Args:
        free_bytes: free bytes of the memory for KV.
        token_bytes: bytes of a token's KV, all layers.
        saves: whether KV is saved.

    Raises:
        KvRoomError: the shortest window does not fit.
    """
    num_slots, least = free_bytes // KV_SHARE // token_bytes, least_slots(saves=saves)
    if num_slots < least:
        raise KvRoomError(
            f"a quarter of the {format_bytes(free_bytes)} of free memory holds {num_slots} "
            f"tokens of this model ({format_bytes(token_bytes)} each), but the shortest "
            f"window takes {least}",
            "free memory, serve a smaller model, or set scheduler.kv_tokens",
        )
    return num_slots


def residents_with_states(free_bytes: int, state_bytes: int, num_active: int, most: int) -> int:
    """Choose how many sessions may keep their states in memory, beside the active requests.

    Args:
        free_bytes: free bytes of the memory for states.
        state_bytes: bytes of one state.
        num_active: most requests that are admitted at once. Each has a state of its own, and up to
            `MOST_UNSAVED_STATES` that wait to be stored.
        most: most sessions, however much memory there is.

    Raises:
        KvRoomError: the states of all these requests do not fit.
    """
    num_states, num_needed = free_bytes // KV_SHARE // state_bytes, states_of_requests(num_active)
    if num_states < num_needed:
        raise KvRoomError(
            f"a quarter of the {format_bytes(free_bytes)} of free memory has to hold the "
            f"states of {num_active} requests, but these have {num_needed} states of "
            f"{format_bytes(state_bytes)} each",
            "free memory, serve a smaller model, or lower scheduler.max_running and "
            "scheduler.max_loading",
        )
    return min(num_states - num_needed, most)


def requests_with_states(free_bytes: int, state_bytes: int) -> int:
    """Return how many requests may be active so that their states take half of the room.

    The other half is for sessions that stay in memory (`residents_with_states`).
    """
    return free_bytes // KV_SHARE // state_bytes // 2 // states_of_requests(1)


def states_of_requests(num_active: int) -> int:
    """Return the most states that `num_active` requests have at once."""
    return num_active * (1 + MOST_UNSAVED_STATES)


def whole_pages(kv_slots: int, page_tokens: int, num_groups: int = 1) -> int:
    """Return the number of token slots in all whole pages that fit.

    Args:
        kv_slots: token slots; a token has one in each group of layers.
        page_tokens: number of tokens on a page, of one group.
        num_groups: number of groups of layers.

    Raises:
        KvRoomError: not even one page of each group fits.
    """
    if kv_slots < page_tokens * num_groups:
        raise KvRoomError(
            f"pages of scheduler.page_tokens = {page_tokens} do not fit into {kv_slots} token "
            "slots",
            "lower scheduler.page_tokens, or raise scheduler.kv_tokens",
        )
    return kv_slots // page_tokens * page_tokens


def window_of(
    room_tokens: int, write_slots: int, model_tokens: int, kv_tokens: int
) -> tuple[int, str]:
    """Choose the most tokens of a turn; return them, and what bounds them as text.

    Args:
        room_tokens: tokens of one sequence that the slots of turns and residents hold.
        write_slots: slots of the write ring; 0: nothing is saved.
        model_tokens: the model's own window; 0: it has none.
        kv_tokens: the setting scheduler.kv_tokens; 0: the slots follow from the free memory.
    """
    if 0 < model_tokens <= room_tokens:
        return model_tokens, "the model's"
    room = f"scheduler.kv_tokens = {kv_tokens:,}" if kv_tokens else "the memory for KV"
    return room_tokens, f"{room} less the write ring's {write_slots:,}" if write_slots else room
