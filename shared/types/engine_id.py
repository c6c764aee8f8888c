"""What others see of an engine's id. Pure.

The id itself is as good as a key: an Engine call names it, and is taken for that engine's. So only
the engine and kvd know it; logs, monitors and operators get another number, the same on both
sides.
"""

import hashlib

_PERSON = b"kvd shown id"
_BYTES = 8


def shown_id(engine_id: int) -> int:
    """Return the number of an engine, from which its id cannot be computed."""
    known = engine_id.to_bytes(_BYTES, "little")
    digest = hashlib.blake2b(known, digest_size=_BYTES, person=_PERSON).digest()
    return int.from_bytes(digest, "little") >> 1
