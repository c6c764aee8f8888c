"""How many tokens' KV fit in memory, and what that makes of the window. Pure.

What is going to be saved takes two token slots a token, one in a sequence's KV and one in a write
buffer until kvd has it: so the window is at most half of the slots while KV is saved.
"""

from inference_svc.core.errors import KvRoomError
from shared.types.units import format_bytes

KV_SHARE = 4  # the working KV may take one part in four of the memory that is free at the start
LEAST_WINDOW_TOKENS = 16  # with less no turn would have room


def slots_per_token(*, saves: bool) -> int:
    """Token slots that a token of a turn takes, while KV is saved and if nothing is."""
    return 2 if saves else 1


def least_slots(*, saves: bool) -> int:
    """Token slots of the shortest window."""
    return LEAST_WINDOW_TOKENS * slots_per_token(saves=saves)


def asked_slots(kv_tokens: int, token_bytes: int, all_bytes: int) -> int:
    """Check the setting scheduler.kv_tokens against the machine, now that the model is known.

    Args:
        kv_tokens: as it was set.
        token_bytes: of a token's KV, all layers.
        all_bytes: of memory where the KV is to be, used or not.

    Raises:
        KvRoomError: so much can never be there.
    """
    most = all_bytes // token_bytes
    if kv_tokens > most:
        raise KvRoomError(
            f"scheduler.kv_tokens = {kv_tokens:,} is {format_bytes(kv_tokens * token_bytes)} of "
            f"this model's KV, {format_bytes(token_bytes)} a token: the memory is "
            f"{format_bytes(all_bytes)}",
            f"write less than {most:,}, or 0 to have it from the memory that is free",
        )
    return kv_tokens


def slots_of_free_memory(free_bytes: int, token_bytes: int, most_slots: int, *, saves: bool) -> int:
    """Choose the token slots where no setting does.

    Args:
        free_bytes: of memory where the KV is to be.
        token_bytes: of a token's KV, all layers.
        most_slots: that could ever be used at once; 0: not known.
        saves: whether KV is saved.

    Raises:
        KvRoomError: the shortest window does not fit.
    """
    num_slots, least = free_bytes // KV_SHARE // token_bytes, least_slots(saves=saves)
    if num_slots < least:
        raise KvRoomError(
            f"of {format_bytes(free_bytes)} that are free KV may take a quarter, which is "
            f"{num_slots} tokens of this model ({format_bytes(token_bytes)} each): the shortest "
            f"window takes {least}",
            "free memory, serve a smaller model, or set scheduler.kv_tokens",
        )
    return min(num_slots, most_slots) if most_slots else num_slots


def window_of(num_slots: int, model_tokens: int, kv_tokens: int, *, saves: bool) -> tuple[int, str]:
    """Choose the most tokens of a turn, and say what bounds them: nobody expects half of kv_tokens.

    Args:
        num_slots: token slots there are.
        model_tokens: the model's own window; 0: it has none.
        kv_tokens: the setting; 0: the slots are of the free memory.
        saves: whether KV is saved.
    """
    most_tokens = num_slots // slots_per_token(saves=saves)
    if 0 < model_tokens <= most_tokens:
        return model_tokens, "the model's"
    room = f"scheduler.kv_tokens = {kv_tokens:,}" if kv_tokens else "the memory for KV"
    return most_tokens, f"half of {room}" if saves else room
