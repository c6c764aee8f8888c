"""Names that sessions have while they are being imported: until all of one is there. Pure."""

import re
import secrets

_NAME = re.compile(r"import-[0-9a-f]{32}")


def unfinished_name() -> str:
    """Return a name that no other session has."""
    return f"import-{secrets.token_hex(16)}"


def is_unfinished(session_id: str) -> bool:
    """Whether a name is such a one."""
    return _NAME.fullmatch(session_id) is not None
