"""The target of an import, and the temporary name of a session until all of it is stored. Pure."""

import re
import secrets
from dataclasses import dataclass

from kvd.core.records.records import SessionInfo
from kvd.errors import SessionExistsError


@dataclass(frozen=True)
class Target:
    """The name under which a session is imported, and what it may replace.

    Attributes:
        tenant: its tenant; "": as in the file.
        session_id: its id; "": as in the file.
        replaces: replace a session of this key.
        may_add_layout: import even if kvd does not know the layout.
        allowed: tenants that the caller may name; None: all.
        replaces_up_to: extend a session of this key if it has at most so many tokens, fewer than
            the file, and is not in use.
        grow_bytes: give the session what has arrived whenever so many more bytes are stored; 0:
            give it all at the end, or nothing.
    """

    tenant: str
    session_id: str
    replaces: bool
    may_add_layout: bool
    allowed: frozenset[str] | None = None
    replaces_up_to: int = 0
    grow_bytes: int = 0

    def check(self, existing: SessionInfo | None) -> None:
        """Raise SessionExistsError if `existing` is a session that may not be replaced."""
        if existing is None or self.replaces or existing.num_tokens <= self.replaces_up_to:
            return
        raise SessionExistsError(
            f"session {existing.key} is already stored, with {existing.num_tokens} tokens",
            "add --replace, or give it another name with --session",
        )


_NAME = re.compile(r"import-[0-9a-f]{32}")


def unfinished_name() -> str:
    """Return a temporary session id, unique."""
    return f"import-{secrets.token_hex(16)}"


def is_unfinished(session_id: str) -> bool:
    """Return whether a session id is a temporary one."""
    return _NAME.fullmatch(session_id) is not None
