"""Where an imported session is to go, and the name that it has until all of it is there. Pure."""

import re
import secrets
from dataclasses import dataclass

from kvd.core.records.records import SessionInfo
from kvd.errors import SessionExistsError


@dataclass(frozen=True)
class Target:
    """Where a session is to go.

    Attributes:
        tenant: "": the file's.
        session_id: "": the file's.
        replaces: a session of this key gives way.
        may_add_layout: even if kvd does not know the layout.
        allowed: tenants that whoever imports may name; None: all.
        replaces_up_to: a session of this key becomes this one if it has at most so many tokens, and
            fewer than the file, and nobody uses it.
        grow_bytes: the session has what has come whenever so many bytes more are stored; 0: it has
            all of it in the end, or nothing.
    """

    tenant: str
    session_id: str
    replaces: bool
    may_add_layout: bool
    allowed: frozenset[str] | None = None
    replaces_up_to: int = 0
    grow_bytes: int = 0

    def check(self, there: SessionInfo | None) -> None:
        """Raise SessionExistsError if there is a session that does not give way."""
        if there is None or self.replaces or there.num_tokens <= self.replaces_up_to:
            return
        raise SessionExistsError(
            f"session {there.key} is stored, with {there.num_tokens} tokens",
            "say --replace, or give it another name with --session",
        )


_NAME = re.compile(r"import-[0-9a-f]{32}")


def unfinished_name() -> str:
    """Return a name that no other session has."""
    return f"import-{secrets.token_hex(16)}"


def is_unfinished(session_id: str) -> bool:
    """Whether a name is such a one."""
    return _NAME.fullmatch(session_id) is not None
