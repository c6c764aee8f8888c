"""What the usage of an answer says of the cache beside counts, in all APIs alike. Pure."""

from typing import Any

from inference_svc.core.turn_record import Usage


def shown_reuse(usage: Usage) -> dict[str, Any]:
    """Return the members beside those that the vendors know: what was missed, what was kept.

    Texts are not among them: the session that the conversation resembles may be another client's
    of the tenant. `inference-svc why` shows them.
    """
    miss = usage.miss
    reason = miss.cause if miss else usage.recompute_reason
    shown: dict[str, Any] = {"cache_miss_reason": reason} if reason else {}
    if usage.kept_tokens:
        shown |= {"kept_tokens": usage.kept_tokens, "healed_tokens": usage.healed_tokens}
    if miss is not None:
        shown["cache_miss"] = {
            "session_id": miss.session_id or None,
            "token_index": miss.token_index if miss.session_id else None,
            "message_index": miss.message_index,
            "lost_tokens": miss.lost_tokens,
            "lost_s": round(miss.lost_s, 6),
        }
    return shown
